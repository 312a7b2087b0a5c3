"""Labelled pictures of one site, in class folders or in a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.data.folders import list_folders, walk_images
from aidgn.data.registry import normalize_name
from aidgn.data.source import DataSource
from aidgn.data.table import find_repeated
from aidgn.data.table_reader import Table, convert_frame, is_frame, read_table
from aidgn.errors import AidgnError, did_you_mean, some


@dataclass(frozen=True, eq=False)
class LabelledPictures:
    """Pictures of one site with their labels."""

    name: str  # name of the site
    files: list[str]  # paths
    labels: np.ndarray  # index into the model's classes, int64 [N]
    ignored: list[str]  # other files that were found


def find_labelled(
    path: Any, classes: Sequence[str], file: str | None = None, label: str | None = None
) -> LabelledPictures:
    """Find labelled pictures.

    Args:
        path: Folder SITE/<class>/<picture>, or a table with a row per picture, whose paths are relative to the table.
        classes: Classes of the model. Names that differ in case, spaces, _ or - alone are the same.
        file: Column of a table with the files, by default `file` or `file_name`.
        label: Column of a table with the classes, by default `label`.
    """
    if is_frame(path):
        return _take_from_table(convert_frame(path), "table", classes, file, label)
    path = Path(path)
    source = DataSource.parse(path, file=file, label=label)
    if source.is_table:
        return _take_from_table(read_table(source.path), source.name, classes, source.file, source.label)
    if path.is_dir():
        return _find_in_folder(path, classes)
    problem = "is neither a folder nor a table" if path.exists() else "does not exist"
    raise AidgnError(f"{path} {problem}: expected SITE/<class>/<picture>, or a table with the columns file and label.")


def _find_in_folder(root: Path, classes: Sequence[str]) -> LabelledPictures:
    ignored: list[str] = []
    folders = list_folders(root, "", ignored)
    numbers = match_classes(
        folders, classes, f"The folder {root}", inner=lambda name: list_folders(root / name, "", [])
    )
    files: list[str] = []
    labels: list[int] = []
    for folder, number in zip(folders, numbers, strict=True):
        images = sorted(str(Path(root, below, file)) for below, file in walk_images(root, folder, ignored))
        files += images
        labels += [number] * len(images)
    if not files:
        raise AidgnError(f"{root} has no picture in its class folders {some(folders)}.")
    return LabelledPictures(root.resolve().name, files, np.array(labels, np.int64), ignored)


def _take_from_table(
    table: Table, name: str, classes: Sequence[str], file: str | None, label: str | None
) -> LabelledPictures:
    if absent := table.describe_absent({"file": file, "label": label}):
        raise AidgnError(absent)
    files, labels = table.files(file), table.texts("label", label)
    if not files:
        raise AidgnError(f"{table.place} has no rows.")
    if repeated := find_repeated(table, files):
        raise AidgnError(repeated[0])
    names = list(dict.fromkeys(labels))
    number_of = dict(zip(names, match_classes(names, classes, f"The table {table.place}"), strict=True))
    return LabelledPictures(name, files, np.array([number_of[text] for text in labels], np.int64), [])


def match_classes(
    names: Sequence[str], classes: Sequence[str], place: str, inner: Callable[[str], list[str]] = lambda _: []
) -> list[int]:
    """Return the class of each name.

    Args:
        names: Names of folders or labels.
        classes: Classes of the model.
        place: Where the names are, for the message.
        inner: Lists the folders in the folder of a name.
    """
    known = {normalize_name(name): number for number, name in enumerate(classes)}
    unknown = [name for name in names if normalize_name(name) not in known]
    if not names or unknown:
        listed = f"The model's classes: {some(classes, 20)}."
        if not names:
            raise AidgnError(f"{place} has no class folders; expected SITE/<class>/<picture>. {listed}")
        sites = [name for name in unknown if known.keys() & {normalize_name(folder) for folder in inner(name)}]
        if sites:
            raise AidgnError(f"{place} holds class folders one level deeper: give one site, such as {sites[0]}.")
        hints = (f"{name}.{did_you_mean(name, classes)}".rstrip(".") for name in unknown)
        noun = "a class that the model does not know" if len(unknown) == 1 else "classes that the model does not know"
        raise AidgnError(f"{place} has {noun}: {some(hints, 5, '; ')}. Rename them, or move them away. {listed}")
    return [known[normalize_name(name)] for name in names]
