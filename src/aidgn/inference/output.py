"""Format predictions as lines of JSON, CSV or text."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aidgn.escape import for_csv
from aidgn.files import for_json
from aidgn.inference.prediction import Prediction


class PredictionRow(NamedTuple):
    """The prediction for one file."""

    file: str
    top: list[tuple[str, float]]  # the most probable classes with their probabilities
    warning: str | None  # '' without a warning; None if the model cannot warn
    chance: float | None = None  # chance that the label is right at an unseen site; None if the model does not know
    abstained: bool = False  # whether the chance is too low for a label
    table_row: Mapping[str, Any] | None = None  # the row of the table that named the file
    unread: bool = False  # whether the file could not be read, so that there is no prediction


@dataclass
class TableRows:
    """Rows of a table in their order, each with its prediction, or with empty cells if its file cannot be read."""

    columns: Mapping[str, Sequence[Any]]
    files: Sequence[str]
    number: int = 0  # index of the next row

    def merge(self, rows: Sequence[PredictionRow], last: bool = False) -> list[PredictionRow]:
        """Return the rows of the table since the last call, up to the last of `rows` or to the end of the table.

        Args:
            rows: Predictions in the order of the table, without those of files that cannot be read; at least one.
            last: Whether to return the remaining rows of the table, which have no prediction, instead of `rows`.
        """
        merged = []
        for row in [] if last else rows:
            while self.files[self.number] != row.file:
                merged.append(self._next(rows[0], unread=True))
            merged.append(self._next(row, unread=False))
        while last and self.number < len(self.files):
            merged.append(self._next(rows[0], unread=True))
        return merged

    def _next(self, row: PredictionRow, unread: bool) -> PredictionRow:
        table_row = {name: values[self.number] for name, values in self.columns.items()}
        self.number += 1
        if not unread:
            return row._replace(table_row=table_row)
        return PredictionRow(
            self.files[self.number - 1],
            [("", math.nan)] * len(row.top),
            None if row.warning is None else "",
            None if row.chance is None else math.nan,
            table_row=table_row,
            unread=True,
        )


def prediction_columns(names: Sequence[str], table_row: Mapping[str, Any] | None) -> list[str]:
    """Name the columns of predictions; one that the table has too becomes predicted_NAME."""
    return [f"predicted_{name}" if table_row and name in table_row else name for name in names]


def make_rows(
    files: Sequence[object], prediction: Prediction, top: int, abstain_below: float | None = None
) -> list[PredictionRow]:
    """Combine the names of files with the `top` most probable classes and the warning of each.

    Args:
        files: Names of the files.
        prediction: Their predictions.
        top: Number of classes to keep.
        abstain_below: Give no label if the chance that it is right is lower.
    """
    warnings: list[str | None] = [None] * len(files)
    if prediction.warnings is not None:
        warnings = [warning or "" for warning in prediction.warnings]
    chances = [None] * len(files) if prediction.chances is None else prediction.chances.tolist()
    return [
        PredictionRow(file, classes, warning, chance, abstain_below is not None and chance < abstain_below)
        for file, classes, warning, chance in zip(map(str, files), prediction.top(top), warnings, chances, strict=True)
    ]


def format_json(rows: Sequence[PredictionRow], header: bool) -> str:
    """Format rows as JSON, one object per line. JSON has no header."""
    lines = []
    for row in rows:
        top = [{"label": label, "probability": round(probability, 6)} for label, probability in row.top]
        entry: dict[str, object] = {"file": row.file, **top[0]}
        if row.unread:
            entry |= {"label": None, "probability": None}
            top = []
        if row.abstained:
            entry["label"] = None
        if row.chance is not None:
            entry["chance"] = None if row.unread else round(row.chance, 6)
        if row.warning is not None:
            entry["warning"] = row.warning or None
        if len(top) > 1:
            entry["top"] = top
        if row.table_row is not None:
            del entry["file"]
            names = prediction_columns(list(entry), row.table_row)
            entry = {**row.table_row, **dict(zip(names, entry.values(), strict=True))}
        lines.append(json.dumps(for_json(entry), allow_nan=False, default=str) + "\n")
    return "".join(lines)


def format_csv(rows: Sequence[PredictionRow], header: bool) -> str:
    """Format rows as CSV, with a line of column names if `header` is set."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if header:
        ranks = ["", *(f"_{rank}" for rank in range(2, len(rows[0].top) + 1))]
        columns = ["file", *(f"{column}{rank}" for rank in ranks for column in ("label", "probability"))]
        columns += [] if rows[0].warning is None else ["warning"]
        columns += [] if rows[0].chance is None else ["chance"]
        if rows[0].table_row is not None:
            columns = [*rows[0].table_row, *prediction_columns(columns[1:], rows[0].table_row)]
        table.writerow(columns)
    for row in rows:
        # A spreadsheet would run a name like =... as a formula; ./=... is the same file.
        cells = [row.file if for_csv(row.file) == row.file else f"./{row.file}"]
        for label, probability in row.top:
            cells += [for_csv(label), "" if row.unread else f"{probability:.6f}"]
        cells[1] = "" if row.abstained else cells[1]
        cells += [] if row.warning is None else [row.warning]
        if row.chance is not None:
            cells.append("" if row.unread else f"{row.chance:.6f}")
        table.writerow(cells if row.table_row is None else [*row.table_row.values(), *cells[1:]])
    return text.getvalue()


def format_text(rows: Sequence[PredictionRow], header: bool, file_width: int, label_width: int) -> str:
    """Format rows as a table with columns of these widths in terminal cells; some letters take two."""
    from rich.cells import cell_len

    def pad(text: str, width: int) -> str:
        return text + " " * (width - cell_len(text))

    lines = [f"{'file':<{file_width}}  {'label':<{label_width}}  probability"] if header else []
    for row in (row for row in rows if not row.unread):
        cells = [pad(row.file, file_width)]
        for rank, (label, probability) in enumerate(row.top):
            label = "?" if row.abstained and not rank else label
            cells += [pad(label, label_width), f"{probability:>6.1%}"]
        lines.append("  ".join([*cells, row.warning] if row.warning else cells))
    return "".join(f"{line}\n" for line in lines)
