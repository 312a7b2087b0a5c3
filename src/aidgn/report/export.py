"""All records in one file, for whatever else is to be made of them."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aidgn.errors import AidgnError
from aidgn.files import atomic_write
from aidgn.runs.records import Record, as_records
from aidgn.selection import domain_names


def all_records_csv(records: Iterable[Record], path: str | Path) -> None:
    """Every record as one line: what was run, step, accuracies and loss terms, hyper-parameters. CSV, or Parquet where
    the name of the file ends in .parquet."""
    path, loaded = Path(path), as_records(records)
    keys = dict.fromkeys(key for record in loaded for key in record if key not in ("args", "hparams", "step"))
    hparams = dict.fromkeys(key for run in loaded.runs for key in run.hparams)
    first = ["dataset", "algorithm", "target", "trial", "hparams_seed", "step"]
    with atomic_write(path) as temporary:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*first, *keys, *(f"hparams.{key}" for key in hparams)])
            for run in loaded.runs:
                names = domain_names(run.args)
                targets = "+".join(names[i] if i < len(names) else str(i) for i in run.targets)
                front = [
                    run.args["dataset"],
                    run.args["algorithm"],
                    targets,
                    run.args["trial_seed"],
                    run.args["hparams_seed"],
                ]
                back = [_plain(run.hparams.get(key)) for key in hparams]
                writer.writerows(
                    [*front, record["step"], *(_plain(record.get(key)) for key in keys), *back]
                    for record in run.records()
                )
        if path.suffix == ".parquet":
            to_parquet(temporary)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def to_parquet(path: Path) -> None:
    """Turn a CSV file into a Parquet file of the same name."""
    try:
        import pyarrow
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet
    except ImportError:
        raise AidgnError(
            "Parquet needs pyarrow, which is not installed: pip install 'aidgn[parquet]', or write CSV with --csv FILE."
        ) from None
    texts = {name: pyarrow.string() for name in ("dataset", "algorithm", "target")}
    table = arrow_csv.read_csv(path, convert_options=arrow_csv.ConvertOptions(column_types=texts))
    parquet.write_table(table, path)
