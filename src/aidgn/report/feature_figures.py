"""Figures of the features of a run: latent space, norms, angles and confusions."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aidgn.analysis.features import Features
from aidgn.errors import AidgnError
from aidgn.metrics import count_confusions
from aidgn.report.figures import (
    CLASS_COLOURS,
    LEGEND_LINES,
    MARKERS,
    PAGE,
    WIDTH,
    colours_of,
    domain_label,
    grid,
    legend,
    shorten,
    styled,
)

MAX_LISTED = 40  # classes that a legend lists at most

Space = tuple[Features, NDArray[np.integer], NDArray[np.floating]]  # features, indices of images, their positions


@styled
def latent_space(spaces: Sequence[Space]) -> Figure:
    """Draw the paper's figures 1 and 2: t-SNE of each run in a column, by domain above and by class below.

    Images of the unseen domain have a dark edge.
    """
    listed = len(spaces[-1][0].class_names) + 1
    longest = max(len(shorten(name)) for features, _, _ in spaces for name in features.domain_names)
    room = max(1.3, 0.7 + 0.06 * longest)  # for the legends
    room += 0.85 * (-(-listed // LEGEND_LINES) - 1 if listed <= MAX_LISTED + 1 else 0)
    figure, axes = grid(2, len(spaces) + 1, 2.9 * len(spaces) + room, 5.8, [2.9] * len(spaces) + [room])
    for column, (features, where, positions) in enumerate(spaces):
        colours = domain_colours(features)
        unseen = features.unseen[where]
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
    if len(features.class_names) <= MAX_LISTED:
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
def norm_distributions(features: Features) -> Figure:
    """Draw the density of feature norms per domain: validation images of a source, all images of the unseen domain."""
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
    """Draw the angle between an image's features and its class's mean direction over the sources, per domain and class.

    Bars reach from quartile to quartile with the median, lines from the 5 to the 95 % quantile. The figure has as many
    classes as a page holds, those with most images.
    """
    shown_images = features.representative()
    colours = domain_colours(features)
    angles = angles_to_class(features, np.concatenate([shown_images[name] for name in features.source_names]))
    counts = np.bincount(features.labels, minlength=len(features.class_names))
    number_of_domains = len(features.domain_names)
    classes = np.sort(np.argsort(-counts, kind="stable")[: max(int((PAGE - 0.9) / (0.13 * number_of_domains)), 1)])
    height = 0.8 / number_of_domains
    figure, axes = grid(1, 1, WIDTH, max(2.4, 0.9 + 0.13 * len(classes) * number_of_domains))
    axis = axes[0, 0]
    for number, (name, where) in enumerate(shown_images.items()):
        known = where[~np.isnan(angles[where])]  # without images of a source, a class has no direction
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
    count = "" if len(classes) == all_classes else f", {len(classes)} of {all_classes} classes"
    axis.set(
        xlabel="angle to the class's direction over the sources (degrees)",
        title=f"{features.algorithm}: angles per domain and class{count}",
    )
    axis.set_xlim(0)
    axis.grid(axis="x", linewidth=0.3, alpha=0.6)
    legend(axis, domain_entries(features, "s"))
    return figure


@styled
def confusion_matrix(features: Features) -> Figure:
    """Draw the confusion matrix on the unseen domain: the share of a class (row) that was predicted as each class."""
    where = features.unseen
    if not where.any():
        raise AidgnError(f"{features.algorithm} on {features.dataset} has no unseen domain for a confusion matrix.")
    number = len(features.class_names)
    counts = count_confusions(features.labels[where], features.logits[where].argmax(1), number)
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
        title=f"{features.algorithm} on {' and '.join(map(shorten, features.targets))}: accuracy {accuracy:.1%}",
    )
    figure.colorbar(image, ax=axis, shrink=0.7, label="share of the class's images")
    return figure


def domain_entries(features: Features, marker: str) -> list[tuple[str, str, str, bool]]:
    """Make a legend's entries for the domains."""
    return [
        (domain_label(name, name in features.targets), domain_colours(features)[name], marker, name in features.targets)
        for name in features.domain_names
    ]


def domain_colours(features: Features) -> dict[str, str]:
    return colours_of(features.source_names, features.targets)


def angles_to_class(features: Features, sources: NDArray[np.intp]) -> NDArray[np.floating]:
    """Measure degrees between each image's features and the mean direction of its class over the images `sources`.

    The mean leaves out the image itself, which would otherwise be nearer than a new image. NaN without a direction.
    """
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
    """Return points and a Gaussian density estimate there (Scott's bandwidth); a spike if all values are the same."""
    from scipy.stats import gaussian_kde

    spread = max(float(np.std(r)), 1e-3 * max(abs(float(np.mean(r))), 1e-6))
    x = np.linspace(max(r.min() - spread, 0), r.max() + spread, 300)
    if len(r) < 2 or np.ptp(r) < 1e-9 * abs(r).max():
        return x, np.exp(-((x - r.mean()) ** 2) / (2 * spread**2)) / (spread * np.sqrt(2 * np.pi))
    return x, gaussian_kde(r)(x)
