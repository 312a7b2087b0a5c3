"""Figures for papers, one function each: 8-point type, colours that the colour-blind can tell apart, PNG and SVG."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec
from warnings import catch_warnings, filterwarnings

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from aidgn.adaptation.methods import ORDER
from aidgn.analysis.features import Features
from aidgn.errors import AidgnError
from aidgn.files import atomic_write
from aidgn.report.fonts import fit_fonts

# Okabe and Ito's colours for domains, the unseen ones in the warm ones; Tol's muted scheme and grey for classes.
TARGET_COLOURS = ("#D55E00", "#E69F00")
SOURCE_COLOURS = ("#0072B2", "#009E73", "#333333", "#CC79A7", "#56B4E9")
CLASS_COLOURS = (
    "#332288",
    "#CC6677",
    "#117733",
    "#DDCC77",
    "#88CCEE",
    "#882255",
    "#44AA99",
    "#999933",
    "#AA4499",
    "#777777",
)
METHOD_COLOURS = {"none": "#888888", "T3A": "#D55E00", "Tent-BN": "#0072B2", "Tent-C": "#56B4E9", "Tent": "#E69F00"}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
SIDE_BY_SIDE = 3  # algorithms whose bars two columns of a paper hold beside each other
LISTED, LINES = 40, 14  # classes that a legend lists at most, and lines of its column
WIDTH, PAGE = 7.0, 9.0  # inches, two columns of a paper and their height
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "svg.hashsalt": "aidgn",
    "savefig.dpi": 250,
    "text.parse_math": False,
}  # a class may be called US$

P = ParamSpec("P")
Space = tuple[Features, NDArray[np.integer], NDArray[np.floating]]  # features, which images, their positions


def styled(function: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(function)
    def draw(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with rc_context(STYLE):
            return function(*args, **kwargs)

    return draw


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write FOLDER/<name>.png and .svg; of a name that anyone may have chosen, what cannot lead elsewhere."""
    name = re.sub(r"[^\w.+-]", "_", name)
    written = []
    with rc_context(STYLE), catch_warnings():
        filterwarnings("ignore", "Glyph .* missing")  # fit_fonts says it once
        fit_fonts(figure)
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            target = folder / f"{name}.{kind}"
            with atomic_write(target) as temporary:
                figure.savefig(temporary, format=kind, metadata=metadata)
            written.append(target)
    return written


# The paper's figures --------------------------------------------------------------------------------------------------


@styled
def latent_space(spaces: Sequence[Space]) -> Figure:
    """Figures 1 and 2: t-SNE of each run in a column, coloured by domain above and by class below; images of the unseen
    domain have a dark edge."""
    listed = len(spaces[-1][0].class_names) + 1
    longest = max(len(shorten(name)) for features, _, _ in spaces for name in features.domain_names)
    room = max(1.3, 0.7 + 0.06 * longest)  # for the legends
    room += 0.85 * (-(-listed // LINES) - 1 if listed <= LISTED + 1 else 0)
    figure, axes = grid(2, len(spaces) + 1, 2.9 * len(spaces) + room, 5.8, [2.9] * len(spaces) + [room])
    for column, (features, where, positions) in enumerate(spaces):
        colours = domain_colours(features)
        unseen = np.isin(features.domains[where], [features.domain_names.index(name) for name in features.targets])
        by_domain = np.array([colours[name] for name in features.domain_names])[features.domains[where]]
        by_class = np.array(CLASS_COLOURS)[features.labels[where] % 10]
        marker = features.labels[where] // 10 % len(MARKERS)
        order = np.random.default_rng(0).permutation(len(where))  # so that no group covers another
        order = order[np.argsort(unseen[order], kind="stable")]  # and the unseen domain is above the others
        titles = "domains", f"{len(features.class_names)} classes"
        for axis, colour, shapes, title in zip(
            axes[:, column], (by_domain, by_class), (0 * marker, marker), titles, strict=True
        ):
            for shape in np.unique(shapes):
                chosen = order[shapes[order] == shape]
                edge = unseen[chosen]
                axis.scatter(
                    *positions[chosen].T,
                    c=colour[chosen],
                    marker=MARKERS[shape],
                    rasterized=True,
                    s=np.where(edge, 9, 6),
                    alpha=np.where(edge, 0.9, 0.55),
                    linewidths=np.where(edge, 0.35, 0),
                    edgecolors=np.where(edge, "black", colour[chosen]),
                )
            axis.set(xticks=[], yticks=[])
            axis.set_aspect("equal", adjustable="datalim")
            axis.spines[["top", "right"]].set_visible(True)
            axis.set_title(f"{features.algorithm}: {title}")
    for axis in axes[:, -1]:
        axis.axis("off")
    features = spaces[-1][0]
    legend(axes[0, -1], domain_entries(features, "o"), inside=True)
    if len(features.class_names) <= LISTED:
        legend(
            axes[1, -1],
            [
                *(
                    (shorten(name), CLASS_COLOURS[c % 10], MARKERS[c // 10], False)
                    for c, name in enumerate(features.class_names)
                ),
                ("unseen: edge", "white", "o", True),
            ],
            inside=True,
        )
    return figure


@styled
def adaptation_bars(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Figure 3: average accuracy on unseen domains under each adaptation method, per algorithm, from the rows of
    `aidgn adapt` whose setting was selected. Targets are averaged within a trial and data set, then data sets; the
    bar is the mean over trials, its whisker their standard deviation. Many algorithms stand one below the other."""
    chosen: dict[tuple[str, str], dict[int, dict[str, list[float]]]] = {}
    for row in rows:
        if row["selected"]:
            trials = chosen.setdefault((row["algorithm"], row["method"]), {})
            trials.setdefault(row["trial"], {}).setdefault(row["dataset"], []).append(100 * row["target_accuracy"])
    if not chosen:
        raise AidgnError("There is no adaptation with a selected setting to draw. `aidgn adapt RUN` makes some.")
    values = {
        key: [float(np.mean([np.mean(targets) for targets in datasets.values()])) for datasets in trials.values()]
        for key, trials in chosen.items()
    }
    algorithms = sorted({algorithm for algorithm, _ in values}, key=lambda name: (name != "ERM", name))
    methods = [method for method in ORDER if any(key[1] == method for key in values)]
    means = {key: float(np.mean(each)) for key, each in values.items()}
    spreads = {key: float(np.std(each, ddof=1)) if len(each) > 1 else 0.0 for key, each in values.items()}
    lowest = min(means[key] - spreads[key] for key in means)
    base = max(0.0, 5 * np.floor((lowest - 5) / 5))
    unit = "accuracy on unseen domains (%)"
    if len(algorithms) > SIDE_BY_SIDE:
        return _many_bars(algorithms, methods, means, spreads, base, unit)
    width = 0.8 / len(algorithms)
    figure, axes = grid(1, 1, max(3.4, 1.2 + 0.42 * len(methods) * len(algorithms)), 2.4)
    axis = axes[0, 0]
    for number, algorithm in enumerate(algorithms):
        here = [(x, (algorithm, method)) for x, method in enumerate(methods) if (algorithm, method) in means]
        places = [x + (number - (len(algorithms) - 1) / 2) * width for x, _ in here]
        heights, errors = [means[key] for _, key in here], [spreads[key] for _, key in here]
        colour = "#888888" if algorithm == "ERM" else (TARGET_COLOURS[0], *SOURCE_COLOURS)[number % 6]
        axis.bar(
            places,
            [height - base for height in heights],
            width * 0.92,
            bottom=base,
            color=colour,
            label=algorithm,
            yerr=errors if any(errors) else None,
            error_kw={"linewidth": 0.8},
            capsize=2,
        )
        for x, height, error in zip(places, heights, errors, strict=True):
            axis.annotate(
                f"{height:.1f}",
                (x, height + error),
                (0, 1.5),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=6,
            )
    axis.set_xticks(range(len(methods)), ["no\nadaptation" if method == "none" else method for method in methods])
    axis.set_ylabel(unit + (f",\naxis from {base:.0f}" if base else ""))
    axis.margins(y=0.12)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _many_bars(
    algorithms: Sequence[str],
    methods: Sequence[str],
    means: Mapping[tuple[str, str], float],
    spreads: Mapping[tuple[str, str], float],
    base: float,
    unit: str,
) -> Figure:
    """The same for more algorithms: one below the other, with a colour per method; numbers at bars that are high enough
    for them."""
    room = min(0.13 * (len(methods) + 1), (PAGE - 0.8) / len(algorithms))  # inches for an algorithm
    figure, axes = grid(1, 1, WIDTH, 0.8 + room * len(algorithms))
    axis, height = axes[0, 0], 1 / (len(methods) + 1)
    for number, method in enumerate(methods):
        here = [(y, (algorithm, method)) for y, algorithm in enumerate(algorithms) if (algorithm, method) in means]
        places = [y + (number - (len(methods) - 1) / 2) * height for y, _ in here]
        lengths, errors = [means[key] for _, key in here], [spreads[key] for _, key in here]
        axis.barh(
            places,
            [length - base for length in lengths],
            height * 0.9,
            left=base,
            color=METHOD_COLOURS[method],
            label="no adaptation" if method == "none" else method,
            xerr=errors if any(errors) else None,
            error_kw={"linewidth": 0.6},
            capsize=1,
        )
        for y, length, error in zip(places, lengths, errors, strict=True) if room * height > 0.1 else ():
            axis.annotate(
                f"{length:.1f}", (length + error, y), (2, 0), textcoords="offset points", va="center", fontsize=6
            )
    axis.set_yticks(range(len(algorithms)), [shorten(name) for name in algorithms])
    axis.set_ylim(len(algorithms) - 0.5, -0.5)
    axis.set_xlabel(unit + (f", axis from {base:.0f}" if base else ""))
    axis.margins(x=0.08)
    axis.grid(axis="x", linewidth=0.3, alpha=0.6)
    axis.set_axisbelow(True)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


# Norms and angles -----------------------------------------------------------------------------------------------------


@styled
def norm_distributions(features: Features) -> Figure:
    """Density of feature norms per domain: images that were set aside, and all of the unseen domain."""
    figure, axes = grid(1, 1, 5.2, 2.4)
    axis = axes[0, 0]
    norms = np.linalg.norm(features.features, axis=1)
    for name, where in features.representative().items():
        r, unseen = norms[where], name in features.targets
        x, density = kernel_density(r)
        label = f"{domain_label(name, unseen)}, mean {r.mean():.3g}"
        axis.plot(x, density, color=domain_colours(features)[name], linestyle="--" if unseen else "-", label=label)
        if unseen:
            axis.fill_between(x, density, color=domain_colours(features)[name], alpha=0.18, linewidth=0)
    axis.set(xlabel="norm of the features", ylabel="density", title=f"{features.algorithm}: norms per domain")
    axis.set_ylim(0)
    axis.set_xlim(0)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


@styled
def angle_distributions(features: Features) -> Figure:
    """Angle between an image's features and its class's mean direction over the sources, per domain and class: bars
    from quartile to quartile with the median, lines from the 5 to the 95 % quantile. As many classes as a page holds,
    those with most images."""
    shown_images, colours = features.representative(), domain_colours(features)
    angles = angles_to_class(
        features, np.concatenate([shown_images[name] for name in features.domain_names if name not in features.targets])
    )
    counts = np.bincount(features.labels, minlength=len(features.class_names))
    number_of_domains = len(features.domain_names)
    classes = np.sort(np.argsort(-counts, kind="stable")[: max(int((PAGE - 0.9) / (0.13 * number_of_domains)), 1)])
    height = 0.8 / number_of_domains
    figure, axes = grid(1, 1, WIDTH, max(2.4, 0.9 + 0.13 * len(classes) * number_of_domains))
    axis = axes[0, 0]
    for number, (name, where) in enumerate(shown_images.items()):
        known = where[~np.isnan(angles[where])]  # a class that no source has, has no direction
        samples = [angles[known[features.labels[known] == c]] for c in classes]
        quantiles = np.array(
            [np.quantile(sample, (0.05, 0.25, 0.5, 0.75, 0.95)) if len(sample) else [np.nan] * 5 for sample in samples]
        )
        places = np.arange(len(classes)) + (number - (number_of_domains - 1) / 2) * height
        low, first, median, third, high = quantiles.T
        unseen = name in features.targets
        axis.hlines(places, low, high, color=colours[name], linewidth=0.8)
        axis.barh(
            places,
            third - first,
            0.8 * height,
            left=first,
            color=colours[name],
            edgecolor="black",
            linewidth=0.6 if unseen else 0,
        )
        axis.vlines(median, places - 0.4 * height, places + 0.4 * height, color="white", linewidth=1.4)
    axis.set_yticks(range(len(classes)), [shorten(features.class_names[c]) for c in classes])
    axis.set_ylim(len(classes) - 0.5, -0.5)
    all_classes = len(features.class_names)
    some = "" if len(classes) == all_classes else f", {len(classes)} of {all_classes} classes"
    axis.set(
        xlabel="angle to the class's direction over the sources (degrees)",
        title=f"{features.algorithm}: angles per domain and class{some}",
    )
    axis.set_xlim(0)
    axis.grid(axis="x", linewidth=0.3, alpha=0.6)
    legend(axis, domain_entries(features, "s"))
    return figure


@styled
def confusion_matrix(features: Features) -> Figure:
    """Of the unseen domain: the share of the images of a class (row) that were given each class (column)."""
    where = np.isin(features.domains, [features.domain_names.index(name) for name in features.targets])
    if not where.any():
        raise AidgnError(f"{features.algorithm} on {features.dataset} has no unseen domain, whose confusions to draw.")
    number = len(features.class_names)
    counts = np.zeros((number, number))
    np.add.at(counts, (features.labels[where], features.logits[where].argmax(1)), 1)
    totals = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    side = float(np.clip(1.6 + 0.3 * number, 3.0, 11.0))
    figure, axes = grid(1, 1, side + 0.9, side)
    axis = axes[0, 0]
    image = axis.imshow(shares, cmap="cividis", vmin=0, vmax=1)
    if number <= 20:
        for row, column in np.ndindex(number, number):
            if totals[row] and shares[row, column] >= 0.005:
                axis.text(
                    column,
                    row,
                    f"{100 * shares[row, column]:.0f}",
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white" if shares[row, column] < 0.5 else "black",
                )
    step = max(1, number // 60)
    names = [shorten(name) for name in features.class_names[::step]]
    size = 7 if number <= 30 else 5
    axis.set_xticks(range(0, number, step), names, rotation=90 if max(map(len, names)) > 3 else 0, fontsize=size)
    axis.set_yticks(range(0, number, step), names, fontsize=size)
    axis.spines[:].set_visible(False)
    accuracy = np.trace(counts) / counts.sum()
    axis.set(
        xlabel="predicted",
        ylabel="class",
        title=f"{features.algorithm} on {' and '.join(map(shorten, features.targets))}: {accuracy:.1%} right",
    )
    figure.colorbar(image, ax=axis, shrink=0.7, label="share of the class's images")
    return figure


# Training -------------------------------------------------------------------------------------------------------------


@styled
def training_curves(records: Sequence[Mapping[str, Any]]) -> Figure:
    """The records of a run: terms of the loss, feature norms and margins where recorded, accuracies per domain."""
    if not records:
        raise AidgnError("The run has no records yet, so there are no curves to draw.")
    steps = [record["step"] for record in records]
    args, first = records[0]["args"], records[0]
    domains = args.get("domains") or [
        f"domain {i}" for i in sorted(int(key[3:-8]) for key in first if re.fullmatch(r"env\d+_out_acc", key))
    ]
    targets = set(args["test_envs"])
    sources = [name for number, name in enumerate(domains) if number not in targets]
    unseen = [name for number, name in enumerate(domains) if number in targets]
    colours = colours_of(sources, unseen)
    numbers = [
        key
        for key, value in first.items()
        if isinstance(value, int | float)
        and not re.fullmatch(r"step|epoch|.*_time|env\d+_(in|out)_(acc|loss)|norm.*|margin.*|mem_gb|version", key)
    ]

    def by_source(key: str) -> list[tuple[str, str, str, str]]:
        whole = [(key, "mean", "black", ":")] if key in first else []
        return whole + [
            (f"{key}_{i}", shorten(name), colours[name], "-") for i, name in enumerate(sources) if f"{key}_{i}" in first
        ]

    accuracies = [
        (
            f"env{i}_{'in' if i in targets else 'out'}_acc",
            domain_label(name, i in targets),
            colours[name],
            "--" if i in targets else "-",
        )
        for i, name in enumerate(domains)
    ]
    panels = [
        ("terms of the loss", [(key, key, CLASS_COLOURS[i % 10], "-") for i, key in enumerate(numbers)], 1),
        ("feature norm in training batches", by_source("norm"), 1),
        ("margin (degrees)", by_source("margin"), 180 / np.pi),
        ("accuracy (%)", [line for line in accuracies if line[0] in first], 100),
    ]
    panels = [panel for panel in panels if panel[1]]
    columns = 2 if len(panels) > 1 else 1
    figure, axes = grid(
        -(-len(panels) // columns), columns, WIDTH if columns > 1 else 4.6, 2.1 * -(-len(panels) // columns)
    )
    for axis, (title, lines, factor) in zip(axes.flat, panels, strict=False):
        for key, label, colour, style in lines:
            values = [factor * record[key] if record.get(key) is not None else np.nan for record in records]
            axis.plot(
                steps,
                values,
                color=colour,
                linestyle=style,
                label=label,
                marker="o" if len(steps) == 1 else None,
                markersize=3,
            )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.4)
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    figure.suptitle(f"{args['algorithm']} on {args['dataset']}, trial {args['trial_seed']}", fontsize=8)
    return figure


# What several figures need --------------------------------------------------------------------------------------------


def grid(
    rows: int, columns: int, width: float, height: float, widths: Sequence[float] | None = None
) -> tuple[Figure, NDArray[Any]]:
    """A figure of its own, without the global state that pyplot keeps."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, width_ratios=widths)


def legend(axis: Axes, entries: Sequence[tuple[str, str, str, bool]], inside: bool = False) -> None:
    """To the right of the axis, or in it: label, colour, marker, whether it has a dark edge."""
    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            marker=marker,
            color=colour,
            label=label,
            markersize=5,
            markeredgecolor="black" if edge else colour,
            markeredgewidth=0.6,
        )
        for label, colour, marker, edge in entries
    ]
    axis.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0 if inside else 1.01, 0.5),
        handletextpad=0.1,
        ncols=-(-len(entries) // LINES),
        columnspacing=0.8,
    )


def domain_entries(features: Features, marker: str) -> list[tuple[str, str, str, bool]]:
    """What a legend says of the domains."""
    return [
        (domain_label(name, name in features.targets), domain_colours(features)[name], marker, name in features.targets)
        for name in features.domain_names
    ]


def domain_label(name: str, unseen: bool) -> str:
    return f"{shorten(name)} (unseen)" if unseen else shorten(name)


def domain_colours(features: Features) -> dict[str, str]:
    return colours_of([name for name in features.domain_names if name not in features.targets], features.targets)


def colours_of(sources: Sequence[str], targets: Sequence[str]) -> dict[str, str]:
    many = (*SOURCE_COLOURS, *CLASS_COLOURS)
    return {
        **{name: many[i % len(many)] for i, name in enumerate(sources)},
        **{name: TARGET_COLOURS[i % len(TARGET_COLOURS)] for i, name in enumerate(targets)},
    }


def angles_to_class(features: Features, sources: NDArray[np.intp]) -> NDArray[np.floating]:
    """Degrees between each image's features and the mean direction of its class over the images `sources`, of which it
    is not counted itself, as it would be nearer than any new image; NaN where there is no direction."""
    norms = np.linalg.norm(features.features, axis=1, keepdims=True)
    units = features.features / np.where(norms > 0, norms, np.nan)
    counted = sources[norms[sources, 0] > 0]
    sums = np.zeros((len(features.class_names), units.shape[1]))
    np.add.at(sums, features.labels[counted], units[counted])
    means = sums[features.labels]
    means[counted] -= units[counted]
    lengths = np.linalg.norm(means, axis=1)
    cosines = (units * means).sum(1) / np.where(lengths > 1e-6, lengths, np.nan)
    return np.degrees(np.arccos(np.clip(cosines, -1, 1)))


def kernel_density(r: NDArray[np.floating]) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Points and a Gaussian density estimate there (Scott's bandwidth); a spike where all values are the same."""
    from scipy.stats import gaussian_kde

    spread = max(float(np.std(r)), 1e-3 * max(abs(float(np.mean(r))), 1e-6))
    x = np.linspace(max(r.min() - spread, 0), r.max() + spread, 300)
    if len(r) < 2 or np.ptp(r) < 1e-9 * abs(r).max():
        return x, np.exp(-((x - r.mean()) ** 2) / (2 * spread**2)) / (spread * np.sqrt(2 * np.pi))
    return x, gaussian_kde(r)(x)


def shorten(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 7]}…{name[-6:]}"
