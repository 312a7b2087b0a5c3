"""Find the image files that a command or a call names."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from aidgn.data.folders import walk_images
from aidgn.data.images import IMAGE_SUFFIXES


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
