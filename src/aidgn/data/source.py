"""Say in one text where images are: a name, a folder, a table with its columns, or a folder with its layout.

Runs, plans, worker processes and run.json carry the text, such as `pictures.csv?label=diagnosis&domain=hospital` or
`photos?layout={class}/{domain}`.
"""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode

from aidgn.errors import AidgnError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
METADATA_NAMES = tuple(f"metadata{suffix}" for suffix in TABLE_SUFFIXES)  # tables in image folders of Hugging Face
OPTIONS = ("file", "label", "domain", "group", "layout")
WITH_OPTIONS = re.compile(rf"(.+?)\?((?:{'|'.join(OPTIONS)})=[^?]*)", re.DOTALL)


@dataclass(frozen=True)
class DataSource:
    """A name, folder or table, and how to read it.

    Args:
        path: Name of a data set, folder or table.
        file: Column with the image files.
        label: Column with the classes.
        domain: Column with the domains.
        group: Column with the groups, such as patients, whose images stay on one side of splits.
        layout: Levels of folders, such as {domain}/{group}/{class}.
    """

    path: str
    file: str | None = None
    label: str | None = None
    domain: str | None = None
    group: str | None = None
    layout: str | None = None

    @classmethod
    def parse(cls, text: str | Path, **options: str | None) -> "DataSource":
        """Read the text of a source; `options` replace those in the text."""
        match = WITH_OPTIONS.fullmatch(str(text))
        chosen = {name: value for name, value in options.items() if value is not None}
        if match is None or Path(text).exists():  # a folder may have a question mark in its name
            source = cls(str(text), **chosen)
        else:
            in_text = dict(parse_qsl(match[2], encoding="utf-8", errors="surrogateescape"))
            source = cls(match[1], **{**in_text, **chosen})
        columns = [f"{name}={value}" for name, value in source.options.items() if name != "layout"]
        if source.layout is not None and (columns or Path(source.path).suffix.lower() in TABLE_SUFFIXES):
            raise AidgnError(f"layout={source.layout} is for folders, {', '.join(columns) or source.path} for a table.")
        return source

    def __str__(self) -> str:
        if not self.options:
            return self.path
        return f"{self.path}?{urlencode(self.options, safe='/{}*', quote_via=quote, errors='surrogateescape')}"

    @property
    def options(self) -> dict[str, str]:
        """The columns and the layout that are named."""
        return {name: value for name, value in asdict(self).items() if name != "path" and value is not None}

    @property
    def is_table(self) -> bool:
        """Whether the source is a table; a folder is one if columns are named."""
        columns = self.options.keys() - {"layout"}
        return bool(columns) or (Path(self.path).suffix.lower() in TABLE_SUFFIXES and not Path(self.path).is_dir())

    @property
    def exists(self) -> bool:
        return Path(self.path).exists()

    @property
    def name(self) -> str:
        """Name of the folder, or of the table without its suffix."""
        path = Path(self.path).resolve()
        if path.name in METADATA_NAMES:
            return path.parent.name
        return path.stem if path.suffix.lower() in TABLE_SUFFIXES and not path.is_dir() else path.name

    def absolute(self) -> "DataSource":
        return replace(self, path=str(Path(self.path).resolve()))

    def moved(self, path: str | Path) -> "DataSource":
        """Return the source at another path, with the same columns or layout unless the path names others."""
        other = DataSource.parse(path)
        return other if other.options else replace(self, path=other.path)
