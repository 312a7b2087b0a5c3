"""Tables of results, accuracies or another metric: mean and spread over trials, per target and per data set."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aidgn.data.registry import DATASETS, choose_metric
from aidgn.errors import AidgnError, UnknownNameError, plural, some
from aidgn.metrics import METRICS, are_uneven
from aidgn.report.paper import dataset_order, paper_notes, paper_order, paper_rows
from aidgn.report.table_formats import SPREADS, Cell, Row, RowName, Table
from aidgn.runs.differences import check_same_images, differences, search_differences
from aidgn.runs.label import Label
from aidgn.runs.records import Record, Records, RunRecords, as_records, domain_names
from aidgn.selection import find_method, select

Trials = dict[Any, dict[int, float]]  # target -> trial -> accuracy from 0 to 1, or another metric
Results = Mapping[str, Mapping[RowName, Trials]]  # data set -> row


class Columns(NamedTuple):
    """Names of the target columns of a data set's table, and a note that explains them."""

    names: list[str]
    notes: list[str]


def tables(
    records: Iterable[Record],
    method: str = "training",
    spread: str = "sd",
    paper: bool = False,
    metric: str | None = None,
) -> list[Table]:
    """Tabulate the results that a selection method selects. Selection is by accuracy, whatever the metric.

    Args:
        records: Records of runs. Unfinished runs are left out.
        method: Selection method, a name in `aidgn.selection.METHODS`.
        spread: Number after the plus-minus: "sd" (standard deviation) or "se" (standard error).
        paper: Add the paper's numbers, which are accuracies, and the difference below each row.
        metric: A key of `aidgn.metrics.METRICS`; by default that of each data set (`choose_metric`).

    Returns:
        One table per data set (algorithms x targets) and, if there are several data sets, one over all of them
        (algorithms x data sets).
    """
    loaded = as_records(records)
    if metric is None:
        by_metric = {"accuracy": loaded} if paper else group_by_metric(loaded)
        if len(by_metric) > 1:
            return [made for name, some in by_metric.items() for made in tables(some, method, spread, paper, name)]
        metric = next(iter(by_metric), "accuracy")
    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    if paper and metric != "accuracy":
        raise AidgnError(f"The paper prints accuracies, so it has no {METRICS[metric].noun} to compare with.")
    finished = loaded.finished()
    results: dict[str, dict[RowName, Trials]] = {}
    selected = select(finished, method)
    measured = [row for row in selected if not np.isnan(row.get(metric, np.nan))]
    for row in measured:
        trials = results.setdefault(row["dataset"], {}).setdefault(RowName(row["algorithm"]), {})
        trials.setdefault(row["target"], {})[row["trial"]] = row[metric]
    if selected and not measured:
        raise AidgnError(
            f"None of the {plural(len(selected), 'selected run')} recorded the {METRICS[metric].noun}, which "
            "aidgn 0.1.0 and DomainBed do not. Tabulate the accuracy, or train the runs again in another folder."
        )
    if not results:
        raise AidgnError(_explain_empty(loaded, finished, method))
    names = in_order({run.args["algorithm"] for run in finished.runs}, paper_order())
    columns: dict[str, Columns] = {}
    rows: dict[str, list[RowName]] = {}
    notes: dict[str, list[str]] = {}
    for dataset in in_order({run.args["dataset"] for run in finished.runs}, dataset_order()):
        runs = [run for run in finished.runs if run.args["dataset"] == dataset]
        for name in names:  # a cell averages over trials and Avg over targets: all must be of the same images
            check_same_images(run for run in runs if run.args["algorithm"] == name)
        present = {run.args["algorithm"] for run in runs}
        rows[dataset] = [RowName(name) for name in names if name in present]
        count = 1 + max(domain for run in runs for domain in [*run.domains, *run.targets])
        columns[dataset] = column_names(dataset, [domain_names(run.args) for run in runs], count)
        notes[dataset] = _mixture_notes(runs)
    made = make_tables(find_method(method).title, results, columns, rows, spread, paper, metric)
    sizes = finished.class_images
    reading_notes = _reading_notes(loaded)
    for table in made:
        if table.dataset is None:
            table.notes += dict.fromkeys(note for mixture in notes.values() for note in mixture)
        else:
            table.notes += missing_runs(run for run in finished.runs if run.args["dataset"] == table.dataset)
            table.notes += notes[table.dataset]
            table.notes += [] if paper else _metric_notes(table.dataset, metric, sizes.get(table.dataset, []))
        if len(measured) < len(selected):
            lacking = plural(len(selected) - len(measured), "selected run")
            table.notes.append(f"Left out, because an earlier version or DomainBed did not record it: {lacking}.")
        table.notes += reading_notes
        table.paper_notes = paper_notes(table.rows, method) if paper else []
    return made


def group_by_metric(records: Records) -> dict[str, Records]:
    """Group runs by the metric of their data sets."""
    sizes = records.class_images
    groups: dict[str, list[RunRecords]] = {}
    for run in records.runs:
        name = run.args["dataset"]
        groups.setdefault(choose_metric(name, sizes.get(name, [])), []).append(run)
    return {metric: Records(runs, records.cut, records.twice, records.empty) for metric, runs in sorted(groups.items())}


def keep_algorithms(records: Records, algorithms: Collection[str]) -> Records:
    """Keep the runs of these algorithms, given by their labels in tables; all runs if none is given."""
    if not algorithms:
        return records
    known = {run.args["algorithm"] for run in records.runs}
    for name in algorithms:
        if name not in known:
            raise UnknownNameError("run of", name, known, f"There are {some(sorted(known), 30)}.")
    runs = [run for run in records.runs if run.args["algorithm"] in algorithms]
    return Records(runs, records.cut, records.twice, records.empty)


def make_tables(
    title: str,
    results: Results,
    columns: Mapping[str, Columns],
    rows: Mapping[str, Sequence[RowName]],
    spread: str,
    paper: bool,
    metric: str = "accuracy",
) -> list[Table]:
    """Make a table per data set and, if there are several data sets, one over all of them."""
    if spread not in SPREADS:
        raise UnknownNameError("spread", spread, SPREADS, "Choose sd or se.")
    if metric != "accuracy":
        title = f"{METRICS[metric].noun}, {title}"
    made = []
    for dataset, names in rows.items():
        by_row = {name: results.get(dataset, {}).get(name, {}) for name in names}
        empty = Table(f"{dataset}, {title}", columns[dataset].names, [], [], dataset, spread, metric)
        made.append(_fill(empty, by_row, paper))
        averaged = [name for row, name in zip(made[-1].ours, names, strict=True) if row.cells[-1]]
        uneven = [str(name) for name in averaged if not have_same_trials(by_row[name])]
        if uneven:
            made[-1].notes.append(
                "Avg is the mean of the target means. If these are of different trials, the ± of Avg and its number in "
                f"brackets are of the trials that have every target: {', '.join(uneven)}."
            )
        made[-1].notes += columns[dataset].notes
    if len(rows) > 1:
        everyone = dict.fromkeys(name for names in rows.values() for name in names)
        order = in_order({name.algorithm for name in everyone}, paper_order())
        names = sorted(everyone, key=lambda name: order.index(name.algorithm))
        made.append(_benchmark_table(f"All data sets, {title}", list(rows), names, results, spread, paper, metric))
    return made


def _fill(table: Table, results: Mapping[RowName, Trials], paper: bool) -> Table:
    """Add the rows of results by column, and the column Avg.

    Avg is the mean of the column means; in the table of a data set its spread is the spread of the trials' averages.
    """
    factor = METRICS[table.metric].factor
    for name, trials in results.items():
        cells = [_cell(trials.get(column, {}).values(), table) for column in range(len(table.columns))]
        known = [cell.mean for cell in cells if cell is not None]
        average = None
        if len(known) == len(cells):
            averages = average_over_targets(trials, sorted(trials)) if table.dataset else {}
            spread = _spread(factor * np.array(list(averages.values())), str(table.spread))
            average = Cell(sum(known) / len(known), spread, len(averages))
        table.rows.append(Row(str(name), [*cells, average], name=name))
        if paper:
            table.rows += paper_rows(name, table.dataset or "benchmark", table.columns, table.rows[-1].cells)
    table.columns = [*table.columns, "Avg"]
    return table


def _benchmark_table(
    title: str,
    datasets: Sequence[str],
    names: Sequence[RowName],
    results: Results,
    spread: str,
    paper: bool,
    metric: str,
) -> Table:
    """Make the table of algorithms x data sets; targets are averaged within a trial first, as DomainBed does."""
    averaged: dict[RowName, Trials] = {name: {} for name in names}
    partial: list[str] = []
    for name, (number, dataset) in product(names, enumerate(datasets)):
        by_row = results.get(dataset, {})
        by_trial: dict[int, list[float]] = {}
        for _, trials in sorted(by_row.get(name, {}).items()):
            for trial, value in trials.items():
                by_trial.setdefault(trial, []).append(value)
        averaged[name][number] = {trial: float(np.mean(by_trial[trial])) for trial in sorted(by_trial)}
        targets = {target for trials in by_row.values() for target in trials}
        if any(len(values) < len(targets) for values in by_trial.values()):
            partial.append(f"{name} on {dataset}")
    notes = [f"Some trials lack a target and average the others: {', '.join(partial)}."] if partial else []
    return _fill(Table(title, list(datasets), [], notes, None, spread, metric), averaged, paper)


def average_over_targets(trials: Trials, targets: Sequence[Any]) -> dict[int, float]:
    """Average the accuracies of these targets within each trial that has all of them."""
    common = set.intersection(*(set(trials.get(target, {})) for target in targets)) if targets else set()
    return {trial: float(np.mean([trials[target][trial] for target in targets])) for trial in sorted(common)}


def have_same_trials(*results: Trials) -> bool:
    """Return whether every target of every algorithm has the same trials."""
    return len({frozenset(trials) for targets in results for trials in targets.values()}) < 2


def _cell(values: Iterable[float], table: Table) -> Cell | None:
    shown = METRICS[table.metric].factor * np.array(list(values))
    return Cell(float(shown.mean()), _spread(shown, str(table.spread)), len(shown)) if len(shown) else None


def _spread(values: NDArray[np.float64], spread: str) -> float | None:
    """Return sd = sqrt(sum (a - mean)^2 / (n - 1)) or se = sqrt(sum (a - mean)^2 / n) / sqrt(n), as DomainBed does."""
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1) if spread == "sd" else np.std(values / np.sqrt(len(values))))


def column_names(dataset: str, domains: Iterable[Sequence[str]], count: int) -> Columns:
    """Name the target columns: by the data set's letters, else by domain names, else by numbers.

    Args:
        dataset: Name of the data set.
        domains: Names of the domains in each run; () if a run does not say.
        count: Number of domains if no run says their names.
    """
    info = DATASETS.get(dataset)
    known = {tuple(names) for names in domains if names}
    if info:  # the same domains may have been spelt differently on disk
        known = {info.domains if info.order_folders(names) == list(names) else names for names in known}
    if len(known) > 1:
        raise AidgnError(
            f"The runs of {dataset} are of different domains ({' / '.join(', '.join(n) for n in known)}). "
            "Tabulate their folders one by one."
        )
    if not known:
        return Columns([str(number) for number in range(count)], [])
    names = known.pop()
    if info is None or names != info.domains or names == info.letters:
        return Columns(list(names), [])
    pairs = [f"{letter} {name}" for letter, name in zip(info.letters, names, strict=True)]
    return Columns(list(info.letters), [f"Targets: {', '.join(pairs)}."])


def in_order(names: Iterable[str], first: Sequence[str]) -> list[str]:
    """Sort `names` in the order of `first`, then by name; ERM+SMA follows ERM."""

    def place(name: str) -> tuple[int, str]:
        plain = Label.parse(name).name
        return (first.index(plain) if plain in first else len(first)), name

    return sorted(names, key=place)


# Notes ----------------------------------------------------------------------------------------------------------------


def _explain_empty(records: Records, finished: Records, method: str) -> str:
    if not finished.runs:
        return f"There is nothing to tabulate yet: 0 of {len(records.unfinished)} runs are finished."
    text = (
        f"There is nothing to tabulate: {len(finished.runs)} of {len(records.runs)} runs are finished, none of them "
        f"can be selected by {find_method(method).title}."
    )
    if not any(run.targets for run in finished.runs):
        return f"{text} They were trained on all domains, so none is unseen: give `aidgn train` a --target."
    return f"{text} {find_method(method).needs}".rstrip()


def missing_runs(runs: Iterable[RunRecords]) -> list[str]:
    """List each (algorithm, target, trial) of a data set without a finished run."""
    places: dict[str, set[tuple[str, int, int]]] = {}
    names: dict[str, list[str]] = {}
    for run in runs:
        if len(run.targets) == 1:
            dataset = run.args["dataset"]
            places.setdefault(dataset, set()).add((run.args["algorithm"], run.targets[0], run.args["trial_seed"]))
            names.setdefault(dataset, domain_names(run.args))
    notes = []
    for dataset, filled in places.items():
        algorithms, targets, trials = (sorted(set(values)) for values in zip(*filled, strict=True))
        missing = [
            f"{algorithm}, {names[dataset][target] if target < len(names[dataset]) else target}, trial {trial}"
            for algorithm, target, trial in product(algorithms, targets, trials)
            if (algorithm, target, trial) not in filled
        ]
        if missing:
            notes.append(f"{dataset} lacks {len(missing)} finished runs: {some(missing, separator='; ')}.")
    return notes


def _metric_notes(dataset: str, metric: str, class_images: Sequence[int]) -> list[str]:
    """Explain why the table of a data set with uneven classes shows the accuracy or the macro-F1."""
    if not are_uneven(class_images):
        return []
    sizes = f"The largest class of {dataset} has {max(class_images)} images, the smallest {min(class_images)}"
    if metric == "macro_f1":
        return [f"{sizes}: the macro-F1 counts every class alike. --metric accuracy shows the accuracy."]
    if metric == "accuracy" and dataset in DATASETS:
        return [f"{sizes}. Its published tables show the accuracy; --metric macro_f1 counts every class alike."]
    return []


def _reading_notes(records: Records) -> list[str]:
    notes = []
    if records.unfinished:
        notes.append(f"Unfinished runs left out: {len(records.unfinished)} ({some(records.unfinished, 5)}).")
    # DomainBed's records do not say where a run ends, and its tables count all runs: the furthest shows where runs end.
    ends: dict[tuple[str, Any], float] = {}
    open_ended = [(run, (run.args["dataset"], run.args.get("steps"))) for run in records.runs if run.steps is None]
    for run, group in open_ended:
        ends[group] = max(run.last_step, ends.get(group, 0))
    early = [str(run) for run, group in open_ended if run.last_step < ends[group]]
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
    """Name the settings that differ between runs which a row averages or rows compare."""
    tabulated = [run for run in runs if run.targets]
    notes = [str(difference) for difference in (*differences(tabulated), *search_differences(tabulated))]
    versions = {str(run.label) for run in runs if run.label.version}
    if versions:
        notes.append(
            f"{', '.join(sorted(versions))}: the algorithm's file changed between the runs. The code after @ is the "
            "beginning of `source` in run.json, a digest of that file."
        )
    return notes
