"""Read archives safely: no member leaves the folder or fills the disk, and damage never goes unnoticed."""

import gzip
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from aidgn.data.download.connection import MirrorError
from aidgn.data.download.http import CHUNK
from aidgn.errors import AidgnError
from aidgn.files import translate_os_errors

MAX_HEADER = 1 << 20  # bytes of a tar header: Python's tarfile reads each into memory
GZIP = b"\x1f\x8b"


class DamagedFile(MirrorError):
    """A downloaded file cannot be read, so it must not count as downloaded the next time."""

    def __init__(self, path: Path, problem: object) -> None:
        super().__init__(f"sent {path.name}, which is {problem}")
        self.path = path


@dataclass
class Limit:
    """Bytes and members that the archives of a data set may still contain."""

    size: int  # bytes
    members: int  # files and folders

    def spend(self, size: int, members: int = 0) -> None:
        """Subtract what was read; an error if the limit is exceeded."""
        self.size -= size
        self.members -= members
        if self.size < 0 or self.members < 0:
            raise MirrorError("holds far more than the data set, so it was not unpacked further")


class BoundedReader:
    """Limit the size of each read, so that memory cannot run out. `last` holds the bytes of the last read."""

    def __init__(self, file: Any):
        self.file = file
        self.last = b""
        self.seek = file.seek
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        if size > MAX_HEADER:
            raise tarfile.ReadError("a header is too large")
        self.last = self.file.read(size)
        return self.last


@contextmanager
def damage_named(archive: Path) -> Iterator[None]:
    """Turn the errors of damaged archives in this block into one that names the archive."""
    try:
        yield
    except (AidgnError, MirrorError):
        raise
    except Exception as error:  # zipfile, tarfile and the decompressors fail with exceptions of all kinds
        raise DamagedFile(archive, f"damaged or no archive ({error})") from error


def read_members(archive: Path, limit: Limit) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of the files in a zip, tar or tar.gz; refuse an archive with an unsafe member.

    Iterate and read the contents within `damage_named`. Checksums are verified once all is read.
    """
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                file_type = stat.S_IFMT(info.external_attr >> 16)
                is_encrypted = bool(info.flag_bits & 1)
                check_member(info.filename, file_type in (0, stat.S_IFREG, stat.S_IFDIR) and not is_encrypted)
                limit.spend(info.file_size, 1)
            for info in opened.infolist():
                if not info.is_dir():
                    with opened.open(info) as content:
                        yield info.filename, content
        return
    with archive.open("rb") as file:
        compressed = file.read(2) == GZIP
    with gzip.open(archive) if compressed else archive.open("rb") as file:
        reader = BoundedReader(file)
        with tarfile.open(fileobj=reader, mode="r:") as tar:  # type: ignore[call-overload]
            for member in tar:
                check_member(member.name, member.isreg() or member.isdir())
                if hasattr(tarfile, "data_filter"):  # Python's own check, where there is one
                    tarfile.data_filter(member, str(archive.parent))
                limit.spend(member.size, 1)
                if member.isreg() and (member_content := tar.extractfile(member)):
                    yield member.name, member_content
        if reader.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes a damaged or missing header for the end
            raise tarfile.ReadError("it ends without an end mark")
        while rest := file.read(CHUNK):  # gzip's checksum is at the end
            limit.spend(len(rest))


def check_member(name: str, plain: bool) -> None:
    """Refuse links, devices, encrypted files, and names that lead out of the folder."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not plain:
        raise MirrorError(f"sent an archive with {name!r}, which is a link, a device or encrypted; refused")
    if name.startswith(("/", "\\")) or ".." in parts or "\0" in name or any(":" in part for part in parts[:1]):
        raise MirrorError(f"sent an archive with {name!r}, which would land outside the folder; refused")


def unpack(archive: Path, folder: Path, place: Callable[[str], Iterable[str]], limit: Limit) -> None:
    """Unpack an archive into a folder.

    Args:
        archive: A zip, tar or tar.gz.
        folder: Where to put the files.
        place: Maps a member's name to its paths below the folder; members without a path are left out.
        limit: What the archive may contain.
    """
    written = Limit(limit.size, limit.members)  # counts the real bytes, whatever the archive's headers say
    with damage_named(archive):
        for name, content in read_members(archive, limit):
            targets = [folder / path for path in place(name)]
            if not targets:
                continue
            first, *others = targets
            with translate_os_errors(first):
                first.parent.mkdir(parents=True, exist_ok=True)
                output = first.open("wb")
            with output:
                while chunk := content.read(CHUNK):
                    written.spend(len(chunk))
                    with translate_os_errors(first):
                        output.write(chunk)
                with translate_os_errors(first):
                    output.flush()
            for other in others:  # copied: reading a member again would unpack a tar.gz from its start
                with translate_os_errors(other):
                    other.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(first, other)
