"""Collect the numbers of the report's tables and charts as plain values."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aidgn.errors import AidgnError
from aidgn.report.adaptation import adaptation_tables, read_lines
from aidgn.report.table import Trials, average_over_targets, have_same_trials
from aidgn.report.table_formats import RowName, Table
from aidgn.runs.accuracy_key import accuracy_key, parse_accuracy_key
from aidgn.runs.differences import differences
from aidgn.runs.folder import RunFolder
from aidgn.runs.records import Records, RunRecords, domain_names
from aidgn.selection import Selected, choose, select_runs

MANY_RUNS = 300  # with more, the page shows the curves of selected runs only
CURVE_POINTS = 120
NO_TERMS = {"step", "epoch", "step_time", "eval_time", "args", "hparams", "version", "mem_gb"}


def names_of(run: RunRecords) -> list[str]:
    """Return the names of the domains; numbers if neither the records nor the registry name them."""
    return domain_names(run.args) or [str(i) for i in range(1 + max([*run.domains, *run.targets]))]


def datasets_of(records: Records) -> list[dict[str, Any]]:
    """List every data set with its name, domains and algorithms."""
    datasets: dict[str, dict[str, Any]] = {}
    for run in records.runs:
        entry = datasets.setdefault(
            run.args["dataset"], {"name": run.args["dataset"], "domains": names_of(run), "algorithms": []}
        )
        if run.args["algorithm"] not in entry["algorithms"]:
            entry["algorithms"].append(run.args["algorithm"])
    return list(datasets.values())


def for_page(tables: list[Table], records: Records) -> list[Table]:
    """Prepare tables with the paper's numbers for the page.

    Drop columns of domains that no run targets, as in a report of one run, and the note that the paper has no numbers.
    """
    for table in tables:
        tried = targets_of(records, table.dataset) if table.dataset else []
        if tried and len(tried) < len(table.columns) - 1:
            table.keep_columns(tried)
        if len(table.ours) == len(table.rows):
            table.paper_notes = []
    return tables


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


def key_of(run: RunRecords) -> tuple[Any, ...]:
    target = run.targets[0] if len(run.targets) == 1 else None
    return run.args["dataset"], run.args["algorithm"], target, run.args["trial_seed"], run.args["hparams_seed"]


def representatives(finished: Records) -> list[RunRecords]:
    """Choose one run per data set, algorithm and target: the selected draw of the first trial."""
    chosen: dict[tuple[Any, ...], RunRecords] = {}
    for selected in select_runs(finished):  # sorted by trial
        chosen.setdefault(selected[:3], selected.best.run)
    runs = {id(run) for run in chosen.values()}
    return [run for run in finished.runs if id(run) in runs or not (chosen or run.targets)]


def curves(records: Records, chosen: Mapping[str, Sequence[Selected]]) -> list[dict[str, Any]]:
    """Collect accuracies per domain and loss terms of every run, or of selected runs only if there are many runs."""
    twins: dict[tuple[Any, ...], list[RunRecords]] = {}  # runs that differ only in settings
    for run in records.runs:
        twins.setdefault(key_of(run), []).append(run)
    places = {method: {entry.best.run: entry.best.record for entry in chosen[method]} for method in chosen}
    shown = []
    for run in records.runs:
        alike = twins[key_of(run)]
        steps = {method: run.record(place[run])["step"] for method, place in places.items() if run in place}
        if len(records.runs) > MANY_RUNS and not steps:
            continue
        all_records = run.records()
        positions = run.order[np.unique(np.linspace(0, len(run.order) - 1, CURVE_POINTS).astype(int))]
        shown_records = [all_records[position] for position in positions]
        accuracies, terms = {}, {}
        for key, value in all_records[0].items():
            if isinstance(value, int | float) and key not in NO_TERMS:
                values = [record.get(key) for record in shown_records]
                if parse_accuracy_key(key):
                    accuracies[key] = [_rounded(value, 4) for value in values]
                elif not key.startswith("env"):
                    terms[key] = [_rounded(value, None) for value in values]
        shown.append(
            {
                "dataset": run.args["dataset"],
                "algorithm": run.args["algorithm"],
                "targets": run.targets,
                "trial": run.args["trial_seed"],
                "draw": run.args["hparams_seed"],
                "finished": run.finished,
                "of": run.steps,
                "steps": [record["step"] for record in shown_records],
                "accuracies": accuracies,
                "terms": terms,
                "selected": steps,
                "set": _differing(run, alike),
            }
        )
    return sorted(shown, key=lambda curve: curve["set"] != "" and "training" not in curve["selected"])  # selected first


def _differing(run: RunRecords, alike: list[RunRecords]) -> str:
    """Name the settings and hyper-parameters in which a run differs from its twins; '' if it has none."""
    return ", ".join(
        f"{difference.name} {value}"
        for difference in differences(alike)
        for value, runs in difference.runs.items()
        if run in runs
    )


def _rounded(value: Any, digits: int | None) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return round(value, digits) if digits else float(f"{value:.7g}")  # digits of a float32


def list_search(finished: Records) -> list[dict[str, Any]]:
    """List hyper-parameters, validation and target accuracy of every run where more than one draw was tried."""
    groups: dict[tuple[str, str], list[RunRecords]] = {}
    for run in finished.runs:
        if len(run.targets) == 1:
            groups.setdefault((run.args["dataset"], run.args["algorithm"]), []).append(run)
    searches = []
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
        searches.append({"dataset": dataset, "algorithm": algorithm, "names": varied, "runs": rows})
    return searches


# Adaptation -----------------------------------------------------------------------------------------------------------


def adaptation(finished: Records) -> tuple[list[Table], list[str]]:
    """Tabulate the adaptation of the runs that training-domain validation selects.

    Returns:
        The tables, with the paper's numbers if it has some; and problems.
    """
    lines, notes = [], []
    for run in (selected.best.run for selected in select_runs(finished)):
        if run.path and RunFolder(run.path.parent).adaptation.is_file():
            try:
                members = read_lines(run.path.parent)
                lines += members
                if not members:
                    notes.append(
                        f"{run.path.parent.name} was adapted with other weights than it has now; `aidgn "
                        "adapt` measures it again."
                    )
            except AidgnError as error:
                notes.append(str(error).replace(str(run.path.parent), run.path.parent.name))
    return for_page(adaptation_tables(lines, paper=True), finished) if lines else [], notes
