"""Write all records, or the metrics of all runs, to one CSV or Parquet file."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.data.table_reader import import_pyarrow
from aidgn.escape import for_csv
from aidgn.files import atomic_write
from aidgn.metrics import METRICS
from aidgn.runs.records import Record, Records, as_records, domain_names
from aidgn.selection import select_runs

TEXTS = ("dataset", "algorithm", "target", "run", "file", "site", "label", "predicted")  # columns that hold no numbers


def all_records_csv(records: Iterable[Record], path: str | Path) -> None:
    """Write a line per record: run, step, accuracies, loss terms and hyper-parameters.

    Args:
        records: Records of runs.
        path: File to write; Parquet if the name ends in .parquet, else CSV.
    """
    loaded = as_records(records)
    keys = dict.fromkeys(key for record in loaded for key in record if key not in ("args", "hparams", "step"))
    hparams = dict.fromkeys(key for run in loaded.runs for key in run.hparams)
    run_keys = ["dataset", "algorithm", "target", "trial", "hparams_seed"]

    def lines() -> Iterable[list[Any]]:
        for run in loaded.runs:
            names = domain_names(run.args)
            targets = "+".join(names[i] if i < len(names) else str(i) for i in run.targets)
            args = run.args
            front = [args["dataset"], args["algorithm"], targets, args["trial_seed"], args["hparams_seed"]]
            back = [run.hparams.get(key) for key in hparams]
            for record in run.records():
                yield [*front, record["step"], *(record.get(key) for key in keys), *back]

    write_rows(path, [*run_keys, "step", *keys, *(f"hparams.{key}" for key in hparams)], lines())


def write_tidy(records: Iterable[Record], method: str, path: str | Path) -> int:
    """Write a line per finished run and metric, with the value on the unseen domain at the selected step.

    Args:
        records: Records of runs.
        method: Selection method, a name in `aidgn.selection.METHODS`. The column `selected` says whether the method
            chose the run. Chosen runs have the step that the method chose, others the step of training-domain
            validation.
        path: File to write; Parquet if the name ends in .parquet, else CSV.

    Returns:
        The number of lines.
    """
    finished = as_records(records).finished()
    chosen = {(selected.best.run, selected.target): selected for selected in select_runs(finished, method)}
    header = ["dataset", "algorithm", "target", "trial", "draw", "run", "step", "selected", "metric", "value"]
    lines: list[list[Any]] = []
    for run in finished.runs:
        for at_best in select_runs(Records([run])):
            selected = chosen.get((run, at_best.target))
            row = (selected or at_best).to_row()
            front = [row["dataset"], row["algorithm"], row.get("target_name", row["target"]), row["trial"]]
            front += [row["hparams_seed"], str(run), row["step"], selected is not None]
            lines += [[*front, metric, row[metric]] for metric in METRICS if not np.isnan(row.get(metric, np.nan))]
    write_rows(path, header, lines)
    return len(lines)


def write_rows(path: str | Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write rows as Parquet if the name of the file ends in .parquet, else as CSV."""
    path = Path(path)
    pyarrow = import_pyarrow(path, "pyarrow.parquet") if path.suffix == ".parquet" else None
    with atomic_write(path) as temporary:
        with temporary.open("w", encoding="utf-8", errors="replace", newline="") as file:  # names may be no text
            writer = csv.writer(file)
            writer.writerow(map(for_csv, header))
            writer.writerows(
                [for_csv(json.dumps(value) if isinstance(value, dict | list) else value) for value in row]
                for row in rows
            )
        if pyarrow is not None:
            from pyarrow import csv as arrow_csv

            texts = dict.fromkeys(TEXTS, pyarrow.string())
            table = arrow_csv.read_csv(temporary, convert_options=arrow_csv.ConvertOptions(column_types=texts))
            pyarrow.parquet.write_table(table, temporary)
