"""Pack the runs of an experiment into one file: a zip archive of their records, without weights.

Tables and pages read the file like a folder, without extracting it. Records of different runs resemble each other and
take a half to a seventh of the room when compressed together, so the archive holds one inner archive, which is not
compressed. Archives without an inner archive are read as well.
"""

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import cast

from aidgn.errors import AidgnError, amount
from aidgn.files import atomic_write, parse_json
from aidgn.runs import names
from aidgn.runs.folder import RunFolder

PACKED = (names.METADATA, names.RECORDS, names.ADAPTATION, names.DIAGNOSIS)
SUFFIX = ".zip"
INNER = "runs.zip"
MAX_BYTES = 1 << 30  # limit of all files, decompressed
DATE = (1980, 1, 1, 0, 0, 0)  # date of every file in the archive, so that equal runs give equal archives


def pack(folder: str | Path, file: str | Path) -> int:
    """Write the records of all runs below a folder into one file.

    Args:
        folder: Folder of a sweep, or of several.
        file: The zip archive to write. In the archive, the runs are in a folder named like the file.

    Returns:
        The number of runs.
    """
    folder, file = Path(folder), Path(file)
    if file.suffix != SUFFIX:
        raise AidgnError(f"{file} should end in {SUFFIX}.")
    runs = RunFolder.find(folder)
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        for run in runs:
            for path in (run.path / name for name in PACKED):
                if path.is_file():
                    archive.writestr(_member(f"{file.stem}/{path.relative_to(folder).as_posix()}"), _content(path))
    with atomic_write(file) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        archive.writestr(_member(INNER), inner.getvalue(), zipfile.ZIP_BZIP2)
    return len(runs)


def unpack(file: Path) -> list[RunFolder]:
    """Return the runs in a packed experiment.

    Their paths are `zipfile.Path`s, read without extracting anything. Each file is decompressed once to compare its
    checksum.
    """
    try:
        archive = _open(file, file)
        if archive.namelist() == [INNER]:
            archive = _open(file, io.BytesIO(archive.read(INNER)))
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise AidgnError(f"{file} cannot be read as a zip archive of runs ({error}). Copy it again.") from None
    members = [name.rpartition("/") for name in archive.namelist()]
    places = sorted(place for place, _, name in members if name == names.RECORDS)
    return [RunFolder(cast(Path, zipfile.Path(archive, f"{place}/" if place else ""))) for place in places]


def _open(file: Path, content: Path | io.BytesIO) -> zipfile.ZipFile:
    """Open an archive; an error if it is too large or its content does not match its checksums."""
    archive = zipfile.ZipFile(content)
    archive.filename = str(file)  # paths in an inner archive name the file on disk in messages
    size = sum(member.file_size for member in archive.infolist())
    if size > MAX_BYTES:
        raise AidgnError(f"{file} holds {amount(size)}; packed runs hold at most {amount(MAX_BYTES)}.")
    damaged = archive.testzip()
    if damaged is not None:
        raise AidgnError(f"{file} is damaged: the content of {damaged} does not match its checksum. Copy it again.")
    return archive


def _member(name: str) -> zipfile.ZipInfo:
    """Describe a file in an archive without its time and permissions on this machine."""
    member = zipfile.ZipInfo(name, DATE)
    member.external_attr = 0o644 << 16
    return member


def _content(path: Path) -> bytes:
    """Return the content of a file; leave out the folder of the images in run.json, which differs between machines."""
    content = path.read_bytes()
    if path.name == names.METADATA:
        values = parse_json(content)
        if values.pop("root", None) is not None:
            content = (json.dumps(values, indent=1) + "\n").encode()
    return content
