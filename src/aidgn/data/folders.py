"""List the folders and image files of a data set, and the image files that a command or a call names."""

import glob
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from aidgn.data.images import IMAGE_SUFFIXES
from aidgn.data.registry import normalize_unicode
from aidgn.errors import AidgnError


def scan(root: Path, below: str) -> list[os.DirEntry[str]]:
    """List a folder without hidden files."""
    try:
        with os.scandir(root / below) as entries:
            return [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
    except PermissionError:
        raise AidgnError(f"The folder {root / below} cannot be read: permission denied.") from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_pipe(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a pipe, socket or device, which could be read for ever; a dead link is none."""
    try:
        return not entry.is_file() and Path(entry.path).exists()
    except OSError:  # a link to itself
        return False


def list_folders(root: Path, below: str, ignored: list[str]) -> list[str]:
    """List the names of the folders in a folder, sorted; add its files to `ignored`."""
    names = []
    for entry in scan(root, below):
        if is_folder(entry):
            names.append(entry.name)
        else:
            ignored.append(f"{below}/{entry.name}" if below else entry.name)
    return sorted(names)


def list_class_folders(root: Path, domain: str, ignored: list[str]) -> dict[str, list[str]]:
    """List the folders of each class in a domain; one class has several if its name is written in several forms."""
    folders: dict[str, list[str]] = defaultdict(list)
    for folder in list_folders(root, domain, ignored):
        folders[normalize_unicode(folder)].append(folder)
    return folders


def walk_images(root: Path, below: str, ignored: list[str], above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield (folder, name) of the images in a folder and all folders below it.

    Links are followed, except to a folder that they lie in.

    Args:
        root: The folder that yielded folders are relative to.
        below: Where to start, relative to `root`.
        ignored: Other files are added to this list.
        above: Real paths of the folders around `below`.
    """
    real = os.path.realpath(root / below)
    if real in above:
        return
    for entry in scan(root, below):
        if is_folder(entry):
            yield from walk_images(root, f"{below}/{entry.name}", ignored, (*above, real))
            continue
        suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122, for half a million names
        if suffix in IMAGE_SUFFIXES and not is_pipe(entry):
            yield below, entry.name
        else:
            ignored.append(f"{below}/{entry.name}")


def find_images(names: Iterable[str], ignored: list[str] | None = None) -> list[str]:
    """List image files.

    Args:
        names: Files, folders (searched at any depth) and patterns. A name that does not exist stays in the list, so
            that reading it reports the error.
        ignored: Receives the other files in the folders and among the matches.
    """
    files: list[str] = []
    ignored = [] if ignored is None else ignored
    for name in names:
        if os.path.isdir(name):  # noqa: PTH112, here and below for lists of 100,000 names
            others: list[str] = []
            files += sorted(str(Path(name, below, file)) for below, file in walk_images(Path(name), ".", others))
            ignored += sorted(str(Path(name, other)) for other in others)
        elif not glob.has_magic(name) or os.path.lexists(name):
            files.append(name)
        else:
            matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207
            images = [match for match in matches if Path(match).suffix.lower() in IMAGE_SUFFIXES]
            files += images if matches else [name]
            ignored += [match for match in sorted({*matches} - {*images}) if not os.path.isdir(match)]  # noqa: PTH112
    return files
