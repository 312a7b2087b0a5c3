"""Draw accuracy against each hyper-parameter that a sweep varied, like the paper's search of kappa, gamma, mu_star."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure

from aidgn.errors import AidgnError, plural
from aidgn.report.figures import SOURCE_COLOURS, TARGET_COLOURS, WIDTH, grid, save, styled
from aidgn.report.table import Trials, average_over_targets
from aidgn.runs.differences import check_same_images, differences
from aidgn.runs.reader import read_runs
from aidgn.runs.records import Record, Records, as_records
from aidgn.selection import select
from aidgn.terminal import log

Curves = dict[str, dict[Any, Trials]]  # name -> value -> accuracies


def collect_curves(records: Iterable[Record]) -> tuple[Curves, dict[str, Any]]:
    """Collect accuracies of the runs of one algorithm on one data set, at the steps that validation selects.

    Returns:
        Accuracies by hyper-parameter, value, target and trial; and the value of each hyper-parameter while others vary.
    """
    runs = [run for run in as_records(records).runs if run.args["hparams_seed"] == 0 and len(run.targets) == 1]
    subjects = {(run.args["dataset"], run.args["algorithm"]) for run in runs}
    if len(subjects) != 1:
        raise AidgnError(
            "Sensitivity is of one algorithm on one data set; the records are of "
            f"{', '.join(' '.join(subject) for subject in sorted(subjects)) or 'none with one unseen domain'}."
        )
    check_same_images(runs)
    for difference in differences(runs):
        if not difference.hyper_parameter:
            log.warning("%s", difference)
    counts = {name: Counter(run.hparams.get(name) for run in runs) for name in runs[0].hparams}
    base = {name: counted.most_common(1)[0][0] for name, counted in counts.items()}
    curves: Curves = {}
    for name, counted in counts.items():
        if len(counted) == 1:
            continue
        others = {other: value for other, value in base.items() if other != name}
        by_value = defaultdict(list)
        for run in runs:
            if all(run.hparams.get(other) == value for other, value in others.items()):
                by_value[run.hparams[name]].append(run)
        curves[name] = {}
        for value in sorted(by_value, key=lambda value: (isinstance(value, str), value)):
            accuracies: Trials = defaultdict(dict)
            for row in select(Records(by_value[value]), "training"):
                accuracies[row.get("target_name", str(row["target"]))][row["trial"]] = row["accuracy"]
            curves[name][value] = dict(accuracies)
    return curves, base


@styled
def sensitivity(records: Iterable[Record]) -> Figure:
    """Draw a panel for each hyper-parameter.

    Thin lines are targets, the thick one is their average with its standard deviation over trials. With several
    hyper-parameters, a dotted line marks the value that each has while others vary.
    """
    records = as_records(records)
    curves, base = collect_curves(records)
    if not curves:
        raise AidgnError(
            "No hyper-parameter takes several values in these runs. Give a list of values in the plan, for "
            "example hyper_parameters: {kappa: [50, 110, 200]}."
        )
    targets = sorted({target for values in curves.values() for by_target in values.values() for target in by_target})
    colours = dict(zip(targets, (SOURCE_COLOURS + TARGET_COLOURS) * (1 + len(targets) // 7), strict=False))
    figure, axes = grid(1, len(curves), max(WIDTH * min(len(curves), 3) / 3, 4.6), 2.6)
    for number, (axis, (name, values)) in enumerate(zip(axes[0], curves.items(), strict=True)):
        for target in targets:
            line = [
                (value, 100 * mean(by_target[target].values()))
                for value, by_target in values.items()
                if target in by_target
            ]
            axis.plot(
                *zip(*line, strict=True), color=colours[target], linewidth=0.8, marker=".", markersize=3, label=target
            )
        average = [
            (value, [100 * average for average in average_over_targets(by_target, targets).values()])
            for value, by_target in values.items()
        ]
        average = [(value, trials) for value, trials in average if trials]
        if average:
            axis.errorbar(
                [value for value, _ in average],
                [mean(trials) for _, trials in average],
                [stdev(trials) if len(trials) > 1 else 0 for _, trials in average],
                color="black",
                linewidth=1.8,
                marker="o",
                markersize=3.5,
                capsize=2,
                label="average",
            )
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            if min(numbers) > 0 and max(numbers) >= 8 * min(numbers):
                axis.set_xscale("log")
            axis.set_xticks(numbers, [f"{value:g}" for value in numbers])
            axis.minorticks_off()
            if len(curves) > 1:
                axis.axvline(base[name], color="0.6", linestyle=":", linewidth=0.8, zorder=0)
        axis.set_xlabel(name)
        axis.grid(axis="y", color="0.92")
        if number == 0:
            axis.set_ylabel("accuracy, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    run = records.runs[0]
    trials = len({run.args["trial_seed"] for run in records.runs})
    figure.suptitle(
        f"{run.args['algorithm']} on {run.args['dataset']}, training-domain validation, "
        f"{plural(trials, 'trial')}, ± standard deviation",
        fontsize=8,
    )
    return figure


def write_sensitivity(folder: str | Path) -> list[Path]:
    """Write FOLDER/sensitivity.png and .svg; if there are several, their names say data set and algorithm."""
    by_subject = defaultdict(list)
    for run in read_runs(folder).finished().runs:
        by_subject[run.args["dataset"], run.args["algorithm"]].append(run)
    varied = {
        subject: Records(runs)
        for subject, runs in by_subject.items()
        if len({tuple(sorted(run.hparams.items(), key=repr)) for run in runs if run.args["hparams_seed"] == 0}) > 1
    }
    paths = []
    for subject, records in varied.items():
        suffix = "" if len(varied) == 1 else "-" + "-".join(subject)
        paths += save(sensitivity(records), Path(folder), f"sensitivity{suffix}")
    return paths
