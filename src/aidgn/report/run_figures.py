"""Draw figures of runs: training curves, accuracies under test-time adaptation, and the figures of a diagnosis."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aidgn.adaptation.methods import ORDER
from aidgn.analysis.embedding import KEPT, choose_images, tsne
from aidgn.analysis.features import Features
from aidgn.errors import AidgnError
from aidgn.report.adaptation import keep_comparable
from aidgn.report.feature_figures import (
    Space,
    angle_distributions,
    confusion_matrix,
    latent_space,
    norm_distributions,
)
from aidgn.report.figures import (
    CLASS_COLOURS,
    PAGE,
    WIDTH,
    colours_of,
    domain_label,
    grid,
    save,
    shorten,
    styled,
)
from aidgn.runs.accuracy_key import accuracy_key, parse_accuracy_key
from aidgn.runs.folder import RunFolder
from aidgn.runs.reader import read_adaptation

METHOD_COLOURS = ("#888888", "#D55E00", "#0072B2", "#56B4E9", "#E69F00", *CLASS_COLOURS)  # in the order of `ORDER`
MAX_POINTS = 10_000  # images that t-SNE shows


@styled
def training_curves(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the records of a run: terms of the loss, feature norms and margins if recorded, accuracies per domain."""
    if not records:
        raise AidgnError("The run has no records yet, so there are no curves to draw.")
    steps = [record["step"] for record in records]
    args, first = records[0]["args"], records[0]
    domains = args.get("domains") or [
        f"domain {i}" for i in sorted({domain for domain, _ in filter(None, map(parse_accuracy_key, first))})
    ]
    targets = set(args["test_envs"])
    sources = [name for number, name in enumerate(domains) if number not in targets]
    unseen = [name for number, name in enumerate(domains) if number in targets]
    colours = colours_of(sources, unseen)
    numbers = [
        key
        for key, value in first.items()
        if isinstance(value, int | float)
        and not re.fullmatch(r"step|epoch|.*_time|env\d+_.*|norm.*|margin.*|mem_gb|version", key)
    ]

    def by_source(key: str) -> list[tuple[str, str, str, str]]:
        whole = [(key, "mean", "black", ":")] if key in first else []
        return whole + [
            (f"{key}_{i}", shorten(name), colours[name], "-") for i, name in enumerate(sources) if f"{key}_{i}" in first
        ]

    accuracies = [
        (
            accuracy_key(i, "in" if i in targets else "out"),
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


@styled
def adaptation_bars(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the paper's figure 3: accuracy on unseen domains under each adaptation method, from selected settings.

    Targets are averaged within a trial and data set, then data sets. A bar is the mean over trials, its whisker their
    standard deviation. Algorithms are one below the other; bars have numbers if they are high enough.
    """
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
    means = {key: float(np.mean(trials)) for key, trials in values.items()}
    spreads = {key: float(np.std(trials, ddof=1)) if len(trials) > 1 else 0.0 for key, trials in values.items()}
    lowest = min(means[key] - spreads[key] for key in means)
    base = max(0.0, 5 * np.floor((lowest - 5) / 5))
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
            color=METHOD_COLOURS[ORDER.index(method)],
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
    axis.set_xlabel("accuracy on unseen domains (%)" + (f", axis from {base:.0f}" if base else ""))
    axis.margins(x=0.08)
    axis.grid(axis="x", linewidth=0.3, alpha=0.6)
    axis.set_axisbelow(True)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


# The figure files of a diagnosis --------------------------------------------------------------------------------------


def embed_ahead(runs: Sequence[Features], seed: int = 0) -> threading.Thread:
    """Start a thread that computes t-SNE for `draw_diagnosed`, and return the thread.

    `tsne` keeps the positions. If the thread fails, the main thread computes them again and reports the error.
    """

    def embed() -> None:
        for features in runs[:KEPT]:
            with suppress(Exception):
                images = choose_images(features.domains, features.labels, MAX_POINTS, seed)
                tsne(features.features[images], seed=seed)

    thread = threading.Thread(target=embed, daemon=True)
    thread.start()
    return thread


def draw_diagnosed(
    runs: Sequence[tuple[Path, Features]], seed: int = 0, on_message: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Draw the figures of each run into FOLDER/figures.

    The first folder also gets the latent spaces side by side, if all runs have the same unseen domain, and the
    accuracies under adaptation, if the runs were adapted.

    Args:
        runs: Folders and the features of their runs.
        seed: Seed of samples and of t-SNE.
        on_message: Called with a text before work that takes long.

    Returns:
        The PNG files.
    """
    written: list[Path] = []
    spaces: list[Space] = []
    adapted = []
    for folder, features in runs:
        place = RunFolder(folder).figures
        written += [
            save(norm_distributions(features), place, "norms")[0],
            save(angle_distributions(features), place, "angles")[0],
            save(confusion_matrix(features), place, "confusion")[0],
            *draw_curves(folder),
        ]
        adapted += read_adaptation(folder, features.model)
    for folder, features in runs:  # last, because another thread may still compute t-SNE
        images = choose_images(features.domains, features.labels, MAX_POINTS, seed)
        on_message(f"t-SNE of {len(images)} images")
        spaces.append((features, images, tsne(features.features[images], seed=seed)))
        written.append(save(latent_space(spaces[-1:]), RunFolder(folder).figures, "latent-space")[0])
    first = RunFolder(runs[0][0]).figures
    alike = len({(features.dataset, *features.targets, *features.domain_names) for _, features in runs}) == 1
    if len(spaces) > 1 and alike:
        name = "latent-space-" + "-".join(features.algorithm for _, features in runs)
        written.append(save(latent_space(spaces), first, name)[0])
    if compared := keep_comparable(adapted):
        written.append(save(adaptation_bars(compared), first, "adaptation")[0])
    return written


def draw_curves(folder: Path) -> list[Path]:
    """Draw the training curves of a run, finished or not, if it has records."""
    run = RunFolder(folder)
    return [save(training_curves(run.records), run.figures, "curves")[0]] if run.records else []
