"""A data set from a table with a row per image."""

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.data.dataset import Dataset, check_problems, describe_custom, find_name_clashes
from aidgn.data.registry import DatasetInfo, normalize_unicode
from aidgn.data.source import DataSource
from aidgn.data.table_reader import Table, convert_frame, is_frame, read_table
from aidgn.errors import AidgnError, plural, some
from aidgn.files import write_text


def load_table(source: DataSource, table: Table | None = None, tolerant: bool = False) -> Dataset:
    """Load the data set that a table lists."""
    table = table or read_table(source.path)
    names = {"file": source.file, "label": source.label, "domain": source.domain}
    names |= {"group": source.group} if source.group else {}
    problems = list(filter(None, [table.describe_absent(names)]))

    def read_column(role: str) -> list[str]:
        if table.describe_absent({role: names[role]}):
            return []
        try:
            return table.files(names[role]) if role == "file" else table.texts(role, names[role])
        except AidgnError as error:
            problems.append(str(error))
            return []

    files = read_column("file")
    labels = read_column("label")
    domains = read_column("domain")
    groups = read_column("group") if source.group else None
    if not problems and not files:
        problems.append(f"{table.place} has no rows.")
    if files and not any(Path(file).exists() for file in files):
        problems.append(
            f"None of the {len(files)} files of {table.place} exists; the first is {files[0]}. Relative paths start "
            f"at {table.folder.resolve()}."
        )
    unreadable = bool(problems)
    problems += find_repeated(table, files)
    if unreadable or (problems and not tolerant):
        raise AidgnError("\n".join(problems))
    labels, domains = ([normalize_unicode(text) for text in texts] for texts in (labels, domains))
    return arrange(source, Path(table.place), files, labels, domains, groups, problems=problems, tolerant=tolerant)


def arrange(
    source: DataSource,
    place: Path,
    files: Sequence[str],
    labels: Sequence[str],
    domains: Sequence[str],
    groups: Sequence[str] | None,
    ignored: Iterable[str] = (),
    problems: Sequence[str] = (),
    tolerant: bool = False,
    info: DatasetInfo | None = None,
    held_out: Sequence[bool | None] | None = None,
) -> Dataset:
    """Make a data set of files with their classes, domains and groups, sorted by domain, class and file.

    The root is the folder that all files share, so that the data set does not depend on where it lies.

    Args:
        source: The table or folder, and how it is read.
        place: Where it is, for messages.
        files: Paths.
        labels: Class of each file.
        domains: Domain of each file.
        groups: Group of each file; None if there are no groups.
        ignored: Other files.
        problems: What is wrong so far.
        tolerant: See `load_dataset`.
        info: Name and domains of the data set. By default the source's name and the domains, sorted.
        held_out: Whether each file is for validation, None for those that do not train either; None if not known.
    """
    names = list(info.domains) if info else sorted(set(domains))
    classes = sorted(set(labels))
    members = {
        domain: sorted({label for label, where in zip(labels, domains, strict=True) if where == domain})
        for domain in names
    }
    problems = [*problems, *find_name_clashes(place, members)]
    if len(classes) < 2:
        problems.append(f"{place} has only the class {classes[0]}; two are needed.")
    absolute = [os.path.abspath(file) for file in files]  # noqa: PTH100, for many names
    root = os.path.commonpath({os.path.dirname(file) for file in absolute})  # noqa: PTH120
    below = [os.path.relpath(file, root) for file in absolute]
    rows = sorted(zip(map(names.index, domains), map(classes.index, labels), below, range(len(below)), strict=True))
    group_of = None
    if groups is not None:
        numbers = {name: number for number, name in enumerate(sorted(set(groups)))}
        group_of = np.array([numbers[groups[row]] for *_, row in rows], np.int64)
    marks = None
    if held_out is not None:
        marks = np.array([-1 if held_out[row] is None else int(bool(held_out[row])) for *_, row in rows], np.int8)
    dataset = Dataset(
        info or describe_custom(source.name, names, len(classes)),
        classes,
        [file for _, _, file, _ in rows],
        labels=np.array([label for _, label, _, _ in rows], np.int64),
        domain_of=np.array([domain for domain, _, _, _ in rows], np.int64),
        root=Path(root),
        ignored=sorted(ignored),
        groups=group_of,
        source=source,
        held_out=marks,
    )
    return check_problems(dataset, problems, tolerant)


def find_repeated(table: Table, files: Sequence[str]) -> list[str]:
    """Describe the files that a table names several times, even if one path is relative and another absolute."""
    lines: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        lines.setdefault(os.path.abspath(file), []).append(number + table.first_line)  # noqa: PTH100, for many names
    repeated = [rows for rows in lines.values() if len(rows) > 1]
    if not repeated:
        return []
    shown = some((f"{files[rows[0] - table.first_line]} (rows {some(rows)})" for rows in repeated), 5)
    return [f"{table.place} names {plural(len(repeated), 'file')} several times: {shown}. Keep one row of each."]


def find_source(data: Any, out: str | Path, **options: str | None) -> DataSource:
    """Return the source of a data set that worker processes and later commands can load.

    Args:
        data: A name, folder or table, or a table in memory, which is saved below `out`.
        out: Folder of results.
        options: Columns and layout by name.
    """
    if is_frame(data):
        if options.pop("layout", None) is not None:
            raise AidgnError("layout is for folders, not for tables.")
        return save_frame(data, options, out)
    return DataSource.parse(data, **options)


def save_frame(frame: Any, columns: Mapping[str, str | None], folder: str | Path) -> DataSource:
    """Write the columns of a table in memory to a file below `folder`, for worker processes and later commands.

    Args:
        frame: The table.
        columns: Names of the columns by role: file, label, domain and group.
        folder: Where to write. Tables of other content have other names.
    """
    table = convert_frame(frame)
    names = {role: columns.get(role) for role in ("file", "label", "domain")}
    if absent := table.describe_absent(names):
        raise AidgnError(absent)
    files = table.files(columns.get("file"))
    by_role = {"file": [os.path.abspath(file) for file in files]}  # noqa: PTH100, for many names
    for role in ("label", "domain", "group"):
        if role != "group" or columns.get(role):
            by_role[role] = table.texts(role, columns.get(role))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(by_role)
    writer.writerows(zip(*by_role.values(), strict=True))
    content = text.getvalue()
    digest = hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    path = Path(folder, "tables", digest, "pictures.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_text(path, content)
    return DataSource(str(path), *by_role)
