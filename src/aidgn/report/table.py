"""Tables of results: mean and spread over trials, per target and per data set."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from aidgn.data.registry import DATASETS
from aidgn.errors import AidgnError, did_you_mean, some
from aidgn.report.paper import dataset_order, paper_notes, paper_order, paper_rows
from aidgn.report.table_formats import Cell, Row, Table
from aidgn.runs.differences import check_same_images, differences, search_differences
from aidgn.runs.label import Label
from aidgn.runs.records import Record, Records, RunRecords, as_records
from aidgn.selection import domain_names, select

METHOD_TITLES = {
    "training": "training-domain validation",
    "leave-one-out": "leave-one-domain-out validation",
    "oracle": "test-domain validation (oracle)",
}
SPREADS = {"sd": "standard deviation (n - 1) over trials", "se": "standard error, standard deviation (n) / sqrt(n)"}

Results = Mapping[tuple[str, str], Mapping[int, Mapping[int, float]]]  # data set, algorithm -> target -> trial


def tables(records: Iterable[Record], method: str = "training", spread: str = "sd", paper: bool = False) -> list[Table]:
    """One table per data set (algorithms x targets) and, of several data sets, one over them (algorithms x data sets).

    Unfinished runs are left out. `spread` is what stands after the plus-minus, "sd" or "se"; `paper` puts the paper's
    numbers and the difference below ours.
    """
    if spread not in SPREADS:
        raise AidgnError(f"There is no spread {spread}.{did_you_mean(spread, SPREADS)} Choose sd or se.")
    loaded = as_records(records)
    finished = loaded.finished()
    rows = select(finished, method)
    if not rows:
        needs = " It needs runs with each pair of domains as targets." if method == "leave-one-out" else ""
        if finished.runs and not any(run.targets for run in finished.runs):
            needs = " They were trained on all domains, which leaves none unseen: give `aidgn train` a --target."
        if not finished.runs:
            raise AidgnError(f"There is nothing to tabulate yet: 0 of {len(loaded.unfinished)} runs are finished.")
        raise AidgnError(
            f"There is nothing to tabulate: {len(finished.runs)} of {len(loaded.runs)} runs are finished, "
            f"none of them can be selected by {METHOD_TITLES[method]}.{needs}"
        )
    results: dict[tuple[str, str], dict[int, dict[int, float]]] = {}  # data set, algorithm -> target -> trial
    for row in rows:
        of_target = results.setdefault((row["dataset"], row["algorithm"]), {}).setdefault(row["target"], {})
        of_target[row["trial"]] = row["accuracy"]
    datasets = in_order({run.args["dataset"] for run in finished.runs}, dataset_order())
    algorithms = in_order({run.args["algorithm"] for run in finished.runs}, paper_order())
    made = []
    mixtures: dict[str, None] = {}  # of all data sets
    for dataset in datasets:
        runs = [run for run in finished.runs if run.args["dataset"] == dataset]
        for name in algorithms:  # a cell is a mean over trials and Avg one over targets: all of the same images
            check_same_images(run for run in runs if run.args["algorithm"] == name)
        ran = [name for name in algorithms if name in {run.args["algorithm"] for run in runs}]
        heads, notes = column_names(
            dataset,
            [domain_names(run.args) for run in runs],
            1 + max(i for run in runs for i in [*run.domains, *run.targets]),
        )
        made.append(dataset_table(f"{dataset}, {METHOD_TITLES[method]}", dataset, heads, ran, results, spread, paper))
        mixed = _mixture_notes(runs)
        mixtures.update(dict.fromkeys(mixed))
        made[-1].notes += [*notes, *missing_runs(runs), *mixed]
    if len(datasets) > 1:
        title = f"All data sets, {METHOD_TITLES[method]}"
        made.append(benchmark_table(title, datasets, algorithms, results, spread, paper))
        made[-1].notes += mixtures
    about = _reading_notes(loaded)
    for table in made:
        theirs = paper_notes(table.rows, method) if paper else []
        table.notes = [caption(table, spread), *table.notes, *theirs, *about]
    return made


def dataset_table(
    title: str, dataset: str, heads: Sequence[str], names: Sequence[str], results: Results, spread: str, paper: bool
) -> Table:
    """Algorithms x targets. Avg is the mean of the target means, its spread that of the trials' averages."""
    rows, uneven = [], []
    for name in names:
        of = results.get((dataset, name), {})
        cells = [_cell(list(of.get(target, {}).values()), spread) for target in range(len(heads))]
        known = [cell for cell in cells if cell is not None]
        average = None
        if len(known) == len(cells):
            complete = set.intersection(*(set(trials) for trials in of.values()))
            averages = [float(np.mean([of[target][trial] for target in sorted(of)])) for trial in sorted(complete)]
            average = Cell(sum(cell.mean for cell in known) / len(known), _spread(averages, spread), len(complete))
            uneven += [name] * any(set(trials) != complete for trials in of.values())
        rows += [Row(name, [*cells, average]), *(paper_rows(name, dataset, heads, [*cells, average]) if paper else [])]
    notes = (
        [
            "Avg is the mean of the targets' means; where these are of different trials, its ± and its number in "
            f"brackets are of the trials that have every target: {', '.join(uneven)}."
        ]
        if uneven
        else []
    )
    return Table(title, [*heads, "Avg"], rows, notes)


def benchmark_table(
    title: str, datasets: Sequence[str], names: Sequence[str], results: Results, spread: str, paper: bool
) -> Table:
    """Algorithms x data sets: the targets are averaged within a trial first, as DomainBed does."""
    rows, partial = [], []
    for name in names:
        cells = []
        for dataset in datasets:
            of = results.get((dataset, name), {})
            trials = sorted({trial for accuracies in of.values() for trial in accuracies})
            averages = [
                float(np.mean([of[target][trial] for target in sorted(of) if trial in of[target]])) for trial in trials
            ]
            cells.append(_cell(averages, spread))
            targets = {target for other in names for target in results.get((dataset, other), {})}
            if any(trial not in of.get(target, {}) for trial in trials for target in targets):
                partial.append(f"{name} on {dataset}")
        known = [cell.mean for cell in cells if cell is not None]
        average = Cell(sum(known) / len(known)) if len(known) == len(cells) else None
        rows += [
            Row(name, [*cells, average]),
            *(paper_rows(name, "benchmark", datasets, [*cells, average]) if paper else []),
        ]
    notes = [f"Some trials lack a target and average the others: {', '.join(partial)}."] if partial else []
    return Table(title, [*datasets, "Avg"], rows, notes)


def _cell(accuracies: Sequence[float], spread: str) -> Cell | None:
    return Cell(100 * float(np.mean(accuracies)), _spread(accuracies, spread), len(accuracies)) if accuracies else None


def _spread(accuracies: Sequence[float], spread: str) -> float | None:
    """sd: sqrt(sum (a - mean)^2 / (n - 1)); se: sqrt(sum (a - mean)^2 / n) / sqrt(n), as DomainBed prints it."""
    if len(accuracies) < 2:
        return None
    if spread == "sd":
        return 100 * float(np.std(accuracies, ddof=1))
    return 100 * float(np.std(np.array(accuracies) / np.sqrt(len(accuracies))))


def column_names(dataset: str, domains: Iterable[Sequence[str]], count: int) -> tuple[list[str], list[str]]:
    """Heads of the target columns: letters of the catalogue, else names, else numbers; and a note on the letters.
    `domains` are the names of the domains as each run knows them, if it does."""
    entry = DATASETS.get(dataset)
    known = {tuple(names) for names in domains if names}
    if entry:  # the same domains may have been spelt differently on disk
        known = {entry.domains if entry.order_folders(names) == list(names) else names for names in known}
    if len(known) > 1:
        raise AidgnError(
            f"The runs of {dataset} are of different domains ({' / '.join(', '.join(n) for n in known)}). "
            "Tabulate their folders one by one."
        )
    if not known:
        return [str(i) for i in range(count)], []
    names = known.pop()
    if entry is None or names != entry.domains or names == entry.letters:
        return list(names), []
    pairs = [f"{letter} {name}" for letter, name in zip(entry.letters, names, strict=True)]
    return list(entry.letters), [f"Targets: {', '.join(pairs)}."]


def in_order(names: Iterable[str], first: Sequence[str]) -> list[str]:
    """`names` in the order of `first`, then the others by name; ERM+SMA comes right behind ERM."""

    def place(name: str) -> tuple[int, str]:
        plain = Label.parse(name).name
        return (first.index(plain) if plain in first else len(first)), name

    return sorted(names, key=place)


# Notes ----------------------------------------------------------------------------------------------------------------


def caption(table: Table, spread: str) -> str:
    trials = sorted(table.trials)
    text = "Accuracy in percent on the target's in split"
    if trials == [1]:
        text += ", one trial; without ± for that reason."
    elif len(trials) == 1:
        text += f", mean over {trials[0]} trials; ± {SPREADS[spread]}."
    else:
        text += f", mean over trials, their number in brackets; ± {SPREADS[spread]}."
    missing = any(cell is None for row in table.rows if row.kind == "ours" for cell in row.cells)
    return text + (" X: no result yet; nor is there an average with an X in it." if missing else "")


def missing_runs(runs: Iterable[RunRecords]) -> list[str]:
    """Places of the tables (algorithms x targets x trials of a data set) that no finished run fills."""
    found: dict[str, dict[tuple[str, int, int], RunRecords]] = {}
    for run in runs:
        if len(run.targets) == 1:
            key = run.args["algorithm"], run.targets[0], run.args["trial_seed"]
            found.setdefault(run.args["dataset"], {})[key] = run
    notes = []
    for dataset, of in found.items():
        names = domain_names(next(iter(of.values())).args)
        algorithms, targets, trials = (sorted(set(each)) for each in zip(*of, strict=True))
        missing = [
            f"{algorithm}, {names[target] if target < len(names) else target}, trial {trial}"
            for algorithm, target, trial in product(algorithms, targets, trials)
            if (algorithm, target, trial) not in of
        ]
        if missing:
            notes.append(
                f"{dataset} has no finished run for {len(missing)} of its places: {some(missing, separator='; ')}."
            )
    return notes


def _reading_notes(records: Records) -> list[str]:
    notes = []
    left_out = records.unfinished
    if left_out:
        notes.append(f"Unfinished runs left out: {len(left_out)} ({some(left_out, 5)}).")
    # DomainBed's records do not say where a run ends, and it counts all of them: the furthest shows where they end.
    theirs = [(run, (run.args["dataset"], run.args.get("steps"))) for run in records.runs if run.steps is None]
    ends: dict[tuple[str, Any], float] = {}
    for run, alike in theirs:
        ends[alike] = max(run.last_step, ends.get(alike, 0))
    early = [str(run) for run, alike in theirs if run.last_step < ends[alike]]
    if early:
        notes.append(
            f"Runs that stopped before the others, counted as DomainBed does: {len(early)} ({some(early, 5)})."
        )
    if records.cut:
        notes.append(f"Records cut in half by a crash, ignored: {records.cut}.")
    if records.twice:
        notes.append(f"Runs found twice, counted once: {records.twice}.")
    return notes


def _mixture_notes(runs: Sequence[RunRecords]) -> list[str]:
    """Say in which settings runs differ that compete for one place, share a row or stand in rows to be compared."""
    tabulated = [run for run in runs if run.targets]
    notes = [str(difference) for difference in (*differences(tabulated), *search_differences(tabulated))]
    versions = {str(run.label) for run in runs if run.label.version}
    if versions:
        notes.append(
            f"{', '.join(sorted(versions))}: what stands behind @ is the beginning of `source` in run.json, a "
            "digest of the algorithm's file, which was changed between the runs."
        )
    return notes
