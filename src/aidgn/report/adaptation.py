"""Tables of test-time adaptation: every algorithm as trained and under each adaptation method."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aidgn.adaptation.methods import ORDER
from aidgn.errors import AidgnError, some
from aidgn.report.export import write_rows
from aidgn.report.paper import dataset_order, paper_notes, paper_order
from aidgn.report.table import Columns, Trials, column_names, in_order, make_tables, missing_runs
from aidgn.report.table_formats import RowName, Table
from aidgn.runs.differences import check_same_images, differences
from aidgn.runs.folder import RunFolder
from aidgn.runs.reader import ADAPTED, read_adaptation, read_runs
from aidgn.runs.records import Records, RunRecords
from aidgn.selection import select_runs

Line = dict[str, Any]  # a line of adaptation.jsonl, and "domains": the names of the data set's domains


def adaptation_tables(
    lines: Sequence[Line], spread: str = "sd", paper: bool = False, notes: Sequence[str] = ()
) -> list[Table]:
    """Tabulate the accuracies of the settings that source validation data selected.

    Args:
        lines: Lines from `load_adaptation`.
        spread: Number after the plus-minus: "sd" (standard deviation) or "se" (standard error).
        paper: Add the paper's numbers and the difference below each row.
        notes: Notes for every table.

    Returns:
        One table per data set (algorithms and methods x targets) and, if there are several data sets, one over all.
    """
    results: dict[str, dict[RowName, Trials]] = {}
    columns: dict[str, Columns] = {}
    rows: dict[str, list[RowName]] = {}
    selected = [line for line in lines if line["selected"] and len(line["target"]) == 1]
    algorithms = in_order({line["algorithm"] for line in selected}, paper_order())
    for dataset in in_order({line["dataset"] for line in selected}, dataset_order()):
        members = [line for line in selected if line["dataset"] == dataset]
        names = {tuple(line.get("domains") or ()) for line in members} - {()}
        domains = list(names.pop()) if len(names) == 1 else sorted({line["target"][0] for line in members})
        columns[dataset] = column_names(dataset, names or [domains], len(domains))
        by_row = results.setdefault(dataset, {})
        for line in members:
            trials = by_row.setdefault(RowName(line["algorithm"], line["method"]), {})
            trials.setdefault(domains.index(line["target"][0]), {})[line["trial"]] = line["target_accuracy"]
        possible = [RowName(algorithm, method) for algorithm in algorithms for method in ORDER]
        rows[dataset] = [name for name in possible if name in by_row]
    tables = make_tables("test-time adaptation", results, columns, rows, spread, paper)
    for table in tables:
        table.notes.append(
            "Runs selected by training-domain validation, settings of a method by accuracy on source validation data. "
            "The target's labels select nothing."
        )
        table.notes += notes
        table.paper_notes = paper_notes(table.rows, "training") if paper else []
    return tables


def keep_comparable(lines: Iterable[Line]) -> list[Line]:
    """Keep the selected settings of each (data set, target, trial) that every algorithm and method has.

    So averages of all algorithms and methods are over the same runs. [] if there is only one algorithm and method.
    """
    by_row: dict[RowName, dict[tuple[str, str, int], Line]] = {}
    for line in lines:
        if line["selected"] and len(line["target"]) == 1:
            place = line["dataset"], line["target"][0], line["trial"]
            by_row.setdefault(RowName(line["algorithm"], line["method"]), {})[place] = line
    if len(by_row) < 2:
        return []
    common = set.intersection(*(set(places) for places in by_row.values()))
    return [line for places in by_row.values() for place, line in places.items() if place in common]


# Reading --------------------------------------------------------------------------------------------------------------


def load_adaptation(folders: Sequence[str | Path]) -> tuple[list[Line], list[str]]:
    """Read the adaptation results of the runs from `choose_runs`; also return notes on missing results."""
    runs, notes = choose_runs(folders, adapted=True)
    results = {run: read_lines(run) for run in runs}
    lines = [line for members in results.values() for line in members]
    missing = [run for run, members in results.items() if not members]
    if not lines:
        raise AidgnError(
            f"None of the {len(runs)} runs in {', '.join(map(str, folders))} has been adapted. "
            f"`aidgn adapt {shlex.join(map(str, folders))}` does that."
        )
    if missing:
        notes.append(f"Not adapted yet: {len(missing)} runs ({some(missing)}). `aidgn adapt` does that.")
    return lines, notes


def read_lines(run: Path) -> list[Line]:
    """Read the adaptation results of a run that were measured with its present weights, or all if it has no weights."""
    folder = RunFolder(run)
    model = folder.model_digest if folder.model.is_file() else None
    if not folder.adaptation.is_file():
        return []
    return [{**line, "domains": folder.metadata.domains} for line in read_adaptation(run, model)]


def write_lines(lines: Sequence[Line], path: Path) -> None:
    """Write all lines as CSV, or as Parquet if the name of the file ends in .parquet."""
    settings = dict.fromkeys(key for line in lines for key in line["settings"])
    keys = [key for key in ADAPTED if key not in ("settings", "model")]
    rows = []
    for line in lines:
        values = {**line, "target": "+".join(line["target"])}
        rows.append([*(values[key] for key in keys), *(line["settings"].get(key) for key in settings)])
    write_rows(path, [*keys, *(f"settings.{key}" for key in settings)], rows)


def choose_runs(folders: Sequence[str | Path], adapted: bool = False) -> tuple[list[Path], list[str]]:
    """Choose the runs to adapt or to tabulate.

    Args:
        folders: Folders of runs and of sweeps. All runs are taken; in a sweep, training-domain validation selects a run
            for each (data set, algorithm, target, trial).
        adapted: Also take runs that have adaptation results but no model.

    Returns:
        Folders of runs, and notes on missing runs.
    """
    runs = [Path(folder) for folder in folders if RunFolder(folder).exists]
    sweeps = [folder for folder in folders if Path(folder) not in runs]
    notes: list[str] = []
    chosen = read_runs(*runs).runs if runs and len(folders) > 1 else []
    if sweeps:
        records = read_runs(*sweeps)
        selected, notes = _select_runs(records, adapted)
        chosen += selected
        runs += [run.path.parent for run in selected if run.path]
        if not runs:
            where = ", ".join(map(str, sweeps))
            first = f"There is no finished run with one unseen domain and its model in {where}."
            raise AidgnError("\n".join([first, *notes]))
    places: dict[tuple[str, str, str, int], RunRecords] = {}
    for run in chosen:
        name = str(replace(run.label, version=""))  # lines of different versions have one name
        other = places.setdefault((run.args["dataset"], name, str(run.targets), run.args["trial_seed"]), run)
        if str(other) != str(run):
            raise AidgnError(
                f"{other} and {run} are runs of the same algorithm, unseen domain and trial: tables have one place for "
                "both. Give one of them."
            )
    notes += map(str, differences(places.values()))
    return list(dict.fromkeys(runs)), notes


def _select_runs(records: Records, adapted: bool) -> tuple[list[RunRecords], list[str]]:
    """Select a run for each (data set, algorithm, target, trial) of a sweep; also return notes on missing runs."""
    notes = []
    if records.unfinished:
        notes.append(
            f"Unfinished runs left out: {len(records.unfinished)}. The command that started them continues them: "
            f"{some(records.unfinished)}."
        )
    finished = [run for run in records.finished().runs if len(run.targets) == 1]
    for row in {(run.args["dataset"], run.args["algorithm"]) for run in finished}:
        check_same_images(run for run in finished if (run.args["dataset"], run.args["algorithm"]) == row)
    selected: list[RunRecords] = []
    without_model: list[RunRecords] = []
    for entry in select_runs(Records(finished)):
        run = entry.best.run
        if run.path is not None:
            folder = RunFolder(run.path.parent)
            has_results = adapted and folder.adaptation.is_file()
            if folder.model.is_file() or has_results:
                selected.append(run)
            else:
                without_model.append(run)
    if without_model:
        notes.append(
            f"{len(without_model)} runs have records but no model, so they cannot be adapted: {some(without_model)}."
        )
    return selected, notes + missing_runs(finished)
