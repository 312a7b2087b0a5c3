"""Read tables with a row per image: CSV, TSV, JSON Lines, Parquet, Hugging Face's folders, data frames."""

import csv
import io
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from aidgn.data.source import METADATA_NAMES
from aidgn.errors import AidgnError, did_you_mean, plural, some
from aidgn.files import parse_json

DEFAULTS = {"file": ("file", "file_name"), "label": ("label",), "domain": ("domain",)}  # names of columns
SEPARATORS = {".csv": ",;\t|", ".tsv": "\t,;|"}  # the first of those that give most columns
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|data:")
FORMATS = "CSV, TSV, JSON Lines, Parquet, or a folder of Hugging Face with metadata.csv or saved by `datasets`"


class ImageBytes:
    """Placeholder for an image that the table itself holds."""


@dataclass(frozen=True)
class Table:
    """The columns of a table."""

    place: str  # the file, for messages
    folder: Path  # folder that files are relative to
    columns: dict[str, list[Any]]  # values of each row by name of the column; None where the table has no value
    first_line: int = 1  # number of the first row in the file, as an editor shows it

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def texts(self, role: str, name: str | None, required: bool = True) -> list[str]:
        """Return a column as texts.

        Args:
            role: What the column holds: file, label, domain or group.
            name: Name of the column; None stands for the usual one.
            required: Whether every row needs a value.
        """
        name = self.find_column(role, name)
        texts = [as_text(value) for value in self.columns[name]]
        empty = [number for number, text in enumerate(texts) if not text]
        if empty and required:
            rows = "row" if len(empty) == 1 else f"{len(empty)} rows:"
            lines = some((number + self.first_line for number in empty), 5)
            raise AidgnError(f"{self.place} has no value in the column {name} of {rows} {lines}.")
        return texts

    def find_column(self, role: str, name: str | None) -> str:
        """Return the column for this role, or raise an error that names the nearest one."""
        if absent := self.describe_absent({role: name}):
            raise AidgnError(absent)
        return next(column for column in candidates(role, name) if column in self.columns)

    def describe_absent(self, names: Mapping[str, str | None]) -> str | None:
        """Say which columns the table lacks, in a sentence or two; None if it has all.

        Args:
            names: Names of the columns by role; None stands for the usual name.
        """
        missing = {
            role: candidates(role, name)[0]
            for role, name in names.items()
            if not any(column in self.columns for column in candidates(role, name))
        }
        if not missing:
            return None
        noun = "column" if len(missing) == 1 else "columns"
        hints = "".join(did_you_mean(column, self.columns) for column in missing.values())
        *others, last = (f"the {MEANINGS[role]}" for role in missing)
        meanings = f"{', '.join(others)} and {last}" if others else last
        options = " ".join(f"--{role} NAME" for role in missing)
        arguments = ", ".join(f"{role}=NAME" for role in missing)
        message = (
            f"{self.place} has no {noun} {some(missing.values(), 4)}.{hints} Its columns: {some(self.columns, 20)}. "
            f"Name the {noun} with {meanings}: {options}, in Python {arguments}."
        )
        if len(self.columns) == 1 and Path(self.place).suffix.lower() in SEPARATORS:
            message += " If the table has more columns, separate them by commas, semicolons, tabs or |."
        return message

    def files(self, name: str | None) -> list[str]:
        """Return the paths of the images, relative ones from the table's folder."""
        column = self.find_column("file", name)
        if any(isinstance(value, ImageBytes) for value in self.columns[column]):
            raise AidgnError(
                f"The column {column} of {self.place} holds the images themselves. Write them to files, and name a "
                "column with their paths."
            )
        files = self.texts("file", name)
        urls = [file for file in files if URL.match(file)]
        if urls:
            raise AidgnError(
                f"The column {column} of {self.place} holds addresses such as {urls[0][:80]}. Download the images, and "
                "name a column with their paths."
            )
        return [locate(self.folder, file) for file in files]


def locate(folder: Path, file: str) -> str:
    """Return the path of a file of a table, also if the table was written on Windows and is read elsewhere."""
    path = os.path.normpath(folder / file)
    if "\\" in file and not os.path.exists(path):  # noqa: PTH110, for many names
        path = os.path.normpath(folder / file.replace("\\", "/"))
    return path


def candidates(role: str, name: str | None) -> tuple[str, ...]:
    """Return the names that the column for a role may have."""
    return DEFAULTS.get(role, (role,)) if name is None else (name,)


MEANINGS = {"file": "image files", "label": "classes", "domain": "domains", "group": "groups"}


def as_text(value: Any) -> str:
    """Return a cell as text, "" for none. A whole number has no point, though pandas may hold it as a fraction."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    return "" if text in ("<NA>", "NaT") else text


# Reading --------------------------------------------------------------------------------------------------------------


def read_table(path: str | Path) -> Table:
    """Read a table by its suffix, or from a folder of Hugging Face."""
    path = Path(path)
    if path.is_dir():
        return read_folder(path)
    if not path.exists():
        raise AidgnError(f"{path} does not exist.")
    readers = {
        ".csv": read_csv,
        ".tsv": read_csv,
        ".jsonl": read_lines,
        ".ndjson": read_lines,
        ".parquet": read_parquet,
    }
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise AidgnError(f"{path} is not a table that can be read: expected {FORMATS}.")
    try:
        return readers[suffix](path)
    except OSError as error:
        raise AidgnError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise AidgnError(f"{path} is not text in UTF-8: {error}. Save it as UTF-8, in Excel as CSV UTF-8.") from None


def read_csv(path: Path) -> Table:
    text = path.read_text(encoding="utf-8-sig")

    def read(delimiter: str) -> Any:
        return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)

    separators = SEPARATORS[path.suffix.lower()]
    reader = read(separators[0])
    try:
        reader = read(max(separators, key=lambda separator: len(next(read(separator), []))))
        names = [name.strip() for name in next(reader, [])]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if not names or repeated:
            reason = f": {some(repeated)} is there several times" if repeated else ""
            raise AidgnError(f"{path} needs a first line with a name for each column{reason}.")
        rows = [row for row in reader if row]
    except csv.Error as error:
        raise AidgnError(f"{path} is not a table: {error} in line {reader.line_num}.") from None
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise AidgnError(f"{path} has {len(row)} values in row {number}, but {plural(len(names), 'column')}.")
    return Table(str(path), path.parent, {name: [row[i] for row in rows] for i, name in enumerate(names)}, 2)


def read_lines(path: Path) -> Table:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise AidgnError(f"{path} has no JSON in line {number}: {error}.") from None
        if not isinstance(row, dict):
            raise AidgnError(f'{path} has no object in line {number}: each line is one, such as {{"file": ...}}.')
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Table(str(path), path.parent, {name: [row.get(name) for row in rows] for name in names})


def read_parquet(path: Path) -> Table:
    pyarrow = import_pyarrow(path, "pyarrow.parquet")
    try:
        return convert_arrow(pyarrow.parquet.read_table(path), str(path), path.parent)
    except pyarrow.ArrowException as error:
        raise AidgnError(f"{path} cannot be read as Parquet: {error}.") from None


def hint_at_table(folder: Path) -> str:
    """Say how to read a folder that holds a table; nothing for other folders."""
    if not any((folder / name).is_file() for name in (*METADATA_NAMES, "dataset_info.json", "dataset_dict.json")):
        return ""
    return " To read it as a folder of Hugging Face, name a column, such as --label label or --domain site."


def read_folder(path: Path) -> Table:
    """Read the metadata file of an image folder, or a data set saved by Hugging Face's `datasets`."""
    for name in METADATA_NAMES:
        if (path / name).is_file():
            return read_table(path / name)
    shards = sorted(path.glob("*.arrow"))
    if not shards or not (path / "dataset_info.json").is_file():
        splits = [entry.parent.name for entry in sorted(path.glob("*/dataset_info.json"))]
        hint = f" It holds the splits {some(splits)}: give one, such as {path / splits[0]}." if splits else ""
        raise AidgnError(f"{path} is a folder without a table: expected {FORMATS}.{hint}")
    pyarrow = import_pyarrow(path, "pyarrow.ipc")
    try:
        parts = []
        for shard in shards:
            with pyarrow.memory_map(str(shard)) as file, pyarrow.ipc.open_stream(file) as stream:
                parts.append(stream.read_all())
        return convert_arrow(pyarrow.concat_tables(parts), str(path), path)
    except (pyarrow.ArrowException, OSError) as error:
        raise AidgnError(f"{path} cannot be read: {error}.") from None


def import_pyarrow(path: Path, module: str) -> Any:
    """Import pyarrow and a module of it, or raise an error that says how to install pyarrow."""
    try:
        import_module(module)
        return import_module("pyarrow")
    except ImportError:
        raise AidgnError(f'{path} needs pyarrow, which is not installed: pip install "aidgn[parquet]".') from None


def read_class_names(schema: Any) -> dict[str, dict[int, str]]:
    """Return the class names of each column by number, from Hugging Face's metadata; {} if these are malformed."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        named = [(column, feature.get("names")) for column, feature in features.items()]
        return {column: dict(enumerate(map(str, names))) for column, names in named if names}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def convert_arrow(table: Any, place: str, folder: Path) -> Table:
    """Convert a table of pyarrow. Names of classes replace their numbers where Hugging Face's metadata have them."""
    class_names = read_class_names(table.schema)
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        values: list[Any] = [ImageBytes()] * len(table)
        if not holds_bytes(table, name):
            values = table.column(name).to_pylist()
        if name in class_names:
            values = [class_names[name].get(value) if isinstance(value, int) else value for value in values]
        columns[name] = [
            value.get("path") if isinstance(value, dict) and "bytes" in value else value for value in values
        ]
    return Table(place, folder, columns)


def holds_bytes(table: Any, name: str) -> bool:
    """Return whether a column holds the images themselves: bytes, or Hugging Face's {bytes, path} with bytes."""
    import pyarrow

    column = table.column(name)
    if pyarrow.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = pyarrow.chunked_array(
            [chunk.field("bytes") for chunk in column.chunks], type=column.type.field("bytes").type
        )
    elif not (pyarrow.types.is_binary(column.type) or pyarrow.types.is_large_binary(column.type)):
        return False
    return len(column) > column.null_count


# Data frames ----------------------------------------------------------------------------------------------------------


def is_frame(value: Any) -> bool:
    """Return whether a value is a table of pandas, polars, pyarrow or `datasets`, or a mapping of columns."""
    has_columns = hasattr(value, "column_names") or hasattr(value, "columns")
    return isinstance(value, Mapping) or (has_columns and hasattr(value, "__len__"))


def convert_frame(frame: Any) -> Table:
    """Convert a table in memory. Relative paths start at the working directory."""
    place = f"the {type(frame).__name__}"
    data = getattr(frame, "data", None)  # `datasets` keeps a table of pyarrow with a list of the rows in use
    if hasattr(data, "table") and hasattr(frame, "with_format"):
        frame = frame.with_format("arrow")[:]
    if hasattr(frame, "schema") and hasattr(frame, "column_names"):
        return convert_arrow(frame, place, Path.cwd())
    names = list(frame) if isinstance(frame, Mapping) else list(frame.columns)
    columns = {str(name): [ImageBytes() if isinstance(v, bytes) else v for v in list(frame[name])] for name in names}
    if len({len(values) for values in columns.values()}) > 1:
        raise AidgnError(f"The columns of {place} have different lengths.")
    return Table(place, Path.cwd(), columns)
