"""Load a data set by its name, from a folder or from a table."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.data.benchmarks import is_unpacked, load_benchmark
from aidgn.data.dataset import Dataset, check_problems, describe_custom, find_name_clashes
from aidgn.data.digits import load_digits
from aidgn.data.folders import list_class_folders, list_folders, walk_images
from aidgn.data.images import IMAGE_SUFFIXES
from aidgn.data.layout import DEFAULT, load_layout
from aidgn.data.registry import DATASETS, DatasetInfo, get_info, lookup, normalize_name
from aidgn.data.source import DataSource
from aidgn.data.table import load_table
from aidgn.data.table_reader import convert_frame, hint_at_table, is_frame
from aidgn.errors import AidgnError

LAYOUT = "A data set is a folder with one folder per domain, in each of them one folder per class with its images."


def load_dataset(
    name_or_folder: Any,
    data_dir: str | Path | None = None,
    *,
    file: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    group: str | None = None,
    layout: str | None = None,
    tolerant: bool = False,
) -> Dataset:
    """Load a data set by its name, from its folder or from a table.

    Args:
        name_or_folder: A name in `DATASETS`, in any case, a folder ROOT/<domain>/<class>/<image>, a table (CSV, TSV,
            JSON Lines, Parquet), or a table of pandas, polars or pyarrow.
        data_dir: Folder of data sets; a named one is looked for there, in $AIDGN_DATA and in ./data.
        file: Column of a table with the image files, by default `file` or `file_name`.
        label: Column with the classes, by default `label`.
        domain: Column with the domains, by default `domain`.
        group: Column with groups, such as patients, whose images stay on one side of splits.
        layout: Levels of a folder, if they are not {domain}/{class}, such as {domain}/{group}/{class}.
        tolerant: Keep problems in `Dataset.problems` as long as the images can be listed. By default they raise one
            error that lists all of them.
    """
    options = {"file": file, "label": label, "domain": domain, "group": group, "layout": layout}
    if is_frame(name_or_folder):
        return load_table(DataSource.parse("pictures.csv", **options), convert_frame(name_or_folder), tolerant=tolerant)
    parsed = isinstance(name_or_folder, DataSource)
    source = name_or_folder if parsed else DataSource.parse(name_or_folder, **options)
    if source.is_table:
        return load_table(source, tolerant=tolerant)
    if source.layout not in (None, DEFAULT):
        return load_layout(source, tolerant)
    name = source.path
    is_path = isinstance(name_or_folder, Path) or source.layout or "/" in name or os.sep in name
    if is_path or (lookup(name) is None and Path(name).exists()):
        return load_folder(Path(name), tolerant=tolerant)
    info = get_info(name)
    if info.name == "digits":
        return load_digits()
    parents = [Path(parent) for parent in (data_dir, os.environ.get("AIDGN_DATA"), "data") if parent]
    for parent in parents:
        for folder in list_folders(parent, "", []) if parent.is_dir() else ():
            if normalize_name(folder) in (normalize_name(info.name), normalize_name(info.folder)):
                return load_folder(parent / folder, info, tolerant)
    if Path(name).is_dir():
        return load_folder(Path(name), info, tolerant)
    way = f"from {info.page}" if info.page else f"with `aidgn data download {info.name}`"
    raise AidgnError(
        f"{info.name} is not on this disk; looked for {' and '.join(str(parent / info.folder) for parent in parents)}. "
        f"Get it {way}, or say where it is with --data-dir or $AIDGN_DATA."
    )


def load_folder(root: Path, info: DatasetInfo | None = None, tolerant: bool = False) -> Dataset:
    """Load the data set in ROOT/<domain>/<class>/<image>.

    Args:
        root: The folder.
        info: The data set that the folder must hold. By default the data set in `DATASETS` whose name and domains the
            folder has, else a data set with the folder's own name and domains.
        tolerant: See `load_dataset`.
    """
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise AidgnError(f"{root} {problem}. {LAYOUT}")
    info = info or recognize(root)
    if info and is_unpacked(root, info):
        return load_benchmark(root, info, tolerant)
    ignored: list[str] = []
    folders = list_folders(root, "", ignored)
    if not folders:
        raise AidgnError(f"{root} has no folders, so no domains. {LAYOUT}{hint_at_table(root)}")
    if info:
        ordered = info.order_folders(folders)
        if ordered is None:
            raise AidgnError(
                f"{root} should have the domains {', '.join(info.domains)} of {info.name}, but has "
                f"{', '.join(folders)}. Download it again with `aidgn data download {info.name}`, or give the "
                "folder's path to use it as your own data set."
            )
        folders = ordered

    class_folders = {folder: list_class_folders(root, folder, ignored) for folder in folders}
    classes = sorted(set().union(*class_folders.values()))
    problems = [describe_classes(root, folders, classes, ignored)] if len(classes) < 2 else []
    if not classes:
        raise AidgnError(problems[0] + hint_at_table(root))
    problems += find_name_clashes(root, class_folders)
    files: list[str] = []
    counts = np.zeros((len(folders), len(classes)), dtype=np.int64)
    for domain, folder in enumerate(folders):
        above = (os.path.realpath(root), os.path.realpath(root / folder))
        for label, name in enumerate(classes):
            parents = [f"{folder}/{below}" for below in class_folders[folder].get(name, [])]
            images = sorted(image for parent in parents for image in walk_images(root, parent, ignored, above))
            counts[domain, label] = len(images)
            files += [f"{parent}/{image}" for parent, image in images]
    dataset = Dataset(
        info or describe_custom(root.resolve().name, folders, len(classes)),
        classes,
        files,
        labels=np.tile(np.arange(len(classes)), len(folders)).repeat(counts.ravel()),
        domain_of=np.arange(len(folders)).repeat(counts.sum(1)),
        root=root,
        ignored=sorted(ignored),
    )
    return check_problems(dataset, problems, tolerant)


def recognize(root: Path) -> DatasetInfo | None:
    """Return the data set in `DATASETS` with the name and the content of a folder; None if there is none."""
    name = normalize_name(root.resolve().name)
    named = [info for info in DATASETS.values() if name in (normalize_name(info.name), normalize_name(info.folder))]
    return next((info for info in named if info.matches(root) or (not info.marker and is_unpacked(root, info))), None)


def describe_classes(root: Path, folders: Sequence[str], classes: Sequence[str], ignored: Sequence[str]) -> str:
    """Say that there are fewer than two classes, and name a domain whose images lie outside class folders."""
    present = f"only the class {classes[0]}" if classes else "no class folders"
    message = f"{root} has {present} in its domains {', '.join(folders)}; two classes are needed. {LAYOUT}"
    loose = [file for file in ignored if file.count("/") == 1 and Path(file).suffix.lower() in IMAGE_SUFFIXES]
    if loose and not classes:
        message += (
            f" Images lie directly in {loose[0].partition('/')[0]}: if that is a class, put the class folders into "
            "one folder for each domain."
        )
    return message
