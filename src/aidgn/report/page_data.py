"""The numbers behind the report's tables and charts, as plain values."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from aidgn.errors import AidgnError
from aidgn.report.adaptation import adaptation_tables, read_lines
from aidgn.report.table import Trials, average_over_targets, have_same_trials
from aidgn.report.table_formats import RowName, Table
from aidgn.runs.accuracy_key import accuracy_key, parse_accuracy_key
from aidgn.runs.differences import differences
from aidgn.runs.folder import RunFolder
from aidgn.runs.records import Record, Records, RunRecords
from aidgn.selection import choose, domain_names, select

MANY_RUNS = 300  # of more, only the curves of selected runs are shown
CURVE_POINTS = 120
NO_TERMS = {"step", "epoch", "step_time", "eval_time", "args", "hparams", "version", "mem_gb"}


def names_of(run: RunRecords) -> list[str]:
    """Names of the domains; numbers where nothing says more."""
    return domain_names(run.args) or [str(i) for i in range(1 + max([*run.domains, *run.targets]))]


def datasets_of(records: Records) -> list[dict[str, Any]]:
    """Name, domains and algorithms of every data set."""
    datasets: dict[str, dict[str, Any]] = {}
    for run in records.runs:
        entry = datasets.setdefault(
            run.args["dataset"], {"name": run.args["dataset"], "domains": names_of(run), "algorithms": []}
        )
        if run.args["algorithm"] not in entry["algorithms"]:
            entry["algorithms"].append(run.args["algorithm"])
    return list(datasets.values())


def drop_untargeted(table: Table, records: Records) -> None:
    """Drop the columns of domains that no run targets, as in a report of one run."""
    tried = targets_of(records, table.dataset) if table.dataset else []
    if tried and len(tried) < len(table.columns) - 1:
        table.keep_columns(tried)


def with_paper(make: Callable[[bool], list[Table]]) -> tuple[list[Table], list[list[str]]]:
    """Tables with the paper's numbers where it has some, and per table the notes about these, [] where it has none."""
    shown, notes = [], []
    for plain, beside in zip(make(False), make(True), strict=True):
        known = any(row.kind == "paper" for row in beside.rows)
        notes.append([note for note in beside.notes if note not in plain.notes] if known else [])
        beside.notes = [note for note in beside.notes if note not in notes[-1]]
        shown.append(beside if known else plain)
    return shown, notes


def targets_of(records: Records, dataset: str) -> list[int]:
    return sorted({target for run in records.runs if run.args["dataset"] == dataset for target in run.targets})


def bars(table: Table, records: Records, results: Mapping[RowName, Trials]) -> dict[str, Any]:
    """Turn a table into numbers for the bars: mean, spread and the trials' values of every cell, in percent.

    `text` is the cell as the table prints it: Python rounds 41.25 to 41.2, a browser to 41.3. An average over targets
    with different trials is no mean of trials, so it has no values.
    """
    targets = targets_of(records, table.dataset) if table.dataset else []
    rows = []
    for row in table.ours:
        assert row.name is not None
        trials = results.get(row.name, {})
        values = [list(trials.get(target, {}).values()) for target in targets]
        if len(table.columns) > len(targets):
            averages = average_over_targets(trials, targets) if have_same_trials(trials) else {}
            values.append(list(averages.values()))
        values += [[]] * (len(table.columns) - len(values))  # a table of all data sets
        cells = [
            cell
            and {
                "mean": cell.mean,
                "spread": cell.spread,
                "values": [100 * value for value in of_trials],
                "text": str(table.cell_text(row, cell._replace(trials=0))),
            }
            for cell, of_trials in zip(row.cells, values, strict=True)
        ]
        rows.append({"head": row.head, "algorithm": row.name.algorithm, "cells": cells})
    return {"dataset": table.dataset, "columns": table.columns, "rows": rows}


# Runs -----------------------------------------------------------------------------------------------------------------


def place(row: Record) -> tuple[Any, ...]:
    return row["dataset"], row["algorithm"], row["target"], row["trial"], row["hparams_seed"]


def key_of(run: RunRecords) -> tuple[Any, ...]:
    target = run.targets[0] if len(run.targets) == 1 else None
    return run.args["dataset"], run.args["algorithm"], target, run.args["trial_seed"], run.args["hparams_seed"]


def representatives(finished: Records) -> list[RunRecords]:
    """The run to look inside, per data set, algorithm and target: of the first trial, the selected draw."""
    groups: dict[tuple[Any, ...], list[RunRecords]] = {}
    for run in finished.runs:
        if len(run.targets) == 1:
            groups.setdefault((run.args["dataset"], run.args["algorithm"], run.targets[0]), []).append(run)
    chosen = []
    for (_, _, target), runs in groups.items():
        first = min(run.args["trial_seed"] for run in runs)
        best = choose(target, [run for run in runs if run.args["trial_seed"] == first])
        chosen += [best.run] if best else []
    return chosen or [run for run in finished.runs if not run.targets]


def curves(records: Records, chosen: Mapping[str, Mapping[tuple[Any, ...], Record]]) -> list[dict[str, Any]]:
    """Accuracies per domain and loss terms of every run, or of the selected ones where there are many."""
    twins: dict[tuple[Any, ...], list[RunRecords]] = {}  # runs that differ in settings alone
    for run in records.runs:
        twins.setdefault(key_of(run), []).append(run)
    shown = []
    for run in records.runs:
        alike = twins[key_of(run)]
        steps = {
            method: rows[key_of(run)]["step"]
            for method, rows in chosen.items()
            if key_of(run) in rows and (len(alike) == 1 or _selected(method, run, records))
        }
        if len(records.runs) > MANY_RUNS and not steps:
            continue
        some = run.records()
        places = run.order[np.unique(np.linspace(0, len(run.order) - 1, CURVE_POINTS).astype(int))]
        kept = [some[place] for place in places]
        names = {key: None for key, value in some[0].items() if isinstance(value, int | float) and key not in NO_TERMS}
        accuracies = {
            key: [_rounded(record.get(key), 4) for record in kept] for key in names if parse_accuracy_key(key)
        }
        terms = {
            key: [_rounded(record.get(key), None) for record in kept] for key in names if not key.startswith("env")
        }
        shown.append(
            {
                "dataset": run.args["dataset"],
                "algorithm": run.args["algorithm"],
                "targets": run.targets,
                "trial": run.args["trial_seed"],
                "draw": run.args["hparams_seed"],
                "finished": run.finished,
                "of": run.steps,
                "steps": [record["step"] for record in kept],
                "accuracies": accuracies,
                "terms": terms,
                "selected": steps,
                "set": _differing(run, alike),
            }
        )
    return sorted(shown, key=lambda one: one["set"] != "" and "training" not in one["selected"])  # selected twins first


def _selected(method: str, run: RunRecords, records: Records) -> bool:
    """Whether it is this run, of all of its data set, algorithm and trial, that the method takes."""
    some = [
        each
        for each in records.runs
        if each.finished and key_of(each)[:2] == key_of(run)[:2] and each.args["trial_seed"] == run.args["trial_seed"]
    ]
    best = choose(run.targets[0], some, method)
    return best is not None and best.run is run


def _differing(run: RunRecords, alike: list[RunRecords]) -> str:
    """Its settings and hyper-parameters that those alike do not share, in words; '' if it is alone."""
    return ", ".join(
        f"{difference.name} {value}"
        for difference in differences(alike)
        for value, runs in difference.runs.items()
        if run in runs
    )


def _rounded(value: Any, digits: int | None) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return round(value, digits) if digits else float(f"{value:.7g}")  # what a float32 holds


def search(finished: Records) -> list[dict[str, Any]]:
    """Where more than one draw was tried: hyper-parameters, validation and target accuracy of every run."""
    groups: dict[tuple[str, str], list[RunRecords]] = {}
    for run in finished.runs:
        if len(run.targets) == 1:
            groups.setdefault((run.args["dataset"], run.args["algorithm"]), []).append(run)
    found = []
    for (dataset, algorithm), runs in groups.items():
        varied = [name for name in runs[0].hparams if len({json.dumps(run.hparams.get(name)) for run in runs}) > 1]
        if len({run.args["hparams_seed"] for run in runs}) < 2 or not varied:
            continue
        rows = []
        for run in runs:
            best = choose(run.targets[0], [run])
            if best is not None:
                accuracy = run.number(run.record(best.record), accuracy_key(run.targets[0], "in"))
                rows.append(
                    [
                        run.targets[0],
                        run.args["trial_seed"],
                        run.args["hparams_seed"],
                        round(best.validation, 4),
                        _rounded(accuracy, 4),
                        *(run.hparams.get(name) for name in varied),
                    ]
                )
        found.append({"dataset": dataset, "algorithm": algorithm, "names": varied, "runs": rows})
    return found


# Adaptation -----------------------------------------------------------------------------------------------------------


def adaptation(finished: Records) -> tuple[list[Table], list[list[str]], list[str]]:
    """Tables of the runs that training-domain validation selects, from their adaptation.jsonl, with the paper's numbers
    where it has some, and what is to be said of these; and what is amiss."""
    selected = {place(row) for row in select(finished, "training")}
    lines, notes = [], []
    for run in finished.runs:
        if key_of(run) in selected and run.path and RunFolder(run.path.parent).adaptation.is_file():
            try:
                found = read_lines(run.path.parent)
                lines += found
                if not found:
                    notes.append(
                        f"{run.path.parent.name} was adapted with other weights than it has now; `aidgn "
                        "adapt` measures it again."
                    )
            except AidgnError as error:
                notes.append(str(error).replace(str(run.path.parent), run.path.parent.name))
    made, beside = with_paper(partial(adaptation_tables, lines, "sd")) if lines else ([], [])
    for table in made:
        drop_untargeted(table, finished)
    return made, beside, notes
