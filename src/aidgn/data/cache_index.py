"""The index of a data set's decoded images and the file of pixels that the index describes.

The pixel file has one slot of S x S x 3 bytes for each image. Pixels are only appended, and the index names them once
they are on the disk. So an interruption loses little, and a map of the pixel file never changes. Features of images are
kept in the same way, with rows of another shape.
"""

import json
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from secrets import randbits
from typing import IO, ClassVar, NamedTuple, Self

import numpy as np
import PIL

from aidgn.files import atomic_write, open_no_link

VERSION = 2
VERIFIED_TOGETHER = 64  # images whose checksums a thread verifies at a time
RACY_NS = 2_000_000_000  # a file that changed so recently may change again within the clock tick of its ctime
BROKEN = -1  # in place of a row: the file cannot be decoded
LARGER = -2  # in place of a row: the image is larger than a slot that can still grow


class CacheEntry(NamedTuple):
    """A line of the index: one image file and its row in the pixel file."""

    file: str  # path below the data set's root
    stamp: Sequence[int]  # see `stamp_of`; empty if the content must be compared next time
    digest: str  # digest of the content; empty if the file could not be read
    row: int = BROKEN  # slot in the pixel file
    geometry: Sequence[int] = (0, 0, 0, 0)  # stored height and width, original height and width
    checksum: int = 0  # CRC-32 of the slot
    reason: str = ""  # why the file is broken


def stamp_of(path: str) -> list[int]:
    """Return numbers that change whenever the file does: every write sets the ctime, and no program can reset it.

    One case is missed: a program that keeps the file mapped for writing may change it again without a new ctime.
    """
    stat = os.stat(path)  # noqa: PTH116, for half a million files
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def reliable(stamp: list[int]) -> list[int]:
    """Return the stamp just taken, or an empty one if the file may still change under the same stamp."""
    return stamp if abs(time.time_ns() - stamp[2]) > RACY_NS else []


def slot_bytes(slot: int) -> int:
    return slot * slot * 3


@dataclass(eq=False)
class CacheIndex:
    """A file of lines `CRC-32 JSON`: a header, then batches of entries. The last entry of a file counts.

    Lines from the first wrong checksum on are ignored: an interrupted write leaves such lines.
    """

    path: Path  # the index file
    number: int  # number of the pixel file
    slot: int  # side of a slot
    entries: dict[str, CacheEntry]  # the last entry of each file
    end: int  # bytes of the valid lines
    map: np.ndarray  # the pixels, uint8 [rows, slot, slot, 3], read-only

    index_name: ClassVar[str] = "index"  # these begin the names of the files
    lock_name: ClassVar[str] = "lock"
    rows_name: ClassVar[str] = "pixels"
    suffix: ClassVar[str] = "u8"
    dtype: ClassVar[type[np.generic]] = np.uint8

    @staticmethod
    def row_shape(slot: int) -> tuple[int, ...]:
        """Return the shape of a row."""
        return slot, slot, 3

    @classmethod
    def row_bytes(cls, slot: int) -> int:
        return int(np.prod(cls.row_shape(slot))) * np.dtype(cls.dtype).itemsize

    @classmethod
    def rows_path(cls, path: Path, number: int) -> Path:
        return path.with_name(f"{cls.rows_name}-{path.stem.rpartition('-')[2]}-{number:08x}.{cls.suffix}")

    @classmethod
    def map_rows(cls, path: Path, slot: int) -> np.ndarray:
        with open_no_link(path, "rb") as file:
            shape = (os.fstat(file.fileno()).st_size // cls.row_bytes(slot), *cls.row_shape(slot))
            if not shape[0]:
                return np.zeros(shape, cls.dtype)
            return np.memmap(file, cls.dtype, "r", shape=shape).view(np.ndarray)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read an index; None if there is none that can be used. No lock is needed."""
        try:
            with open_no_link(path, "rb") as file:
                header = read_header(file)
                if header is None:
                    return None
                entries: dict[str, CacheEntry] = {}
                end = file.tell()
                for line in file:
                    if (batch := parse_line(line)) is None:
                        break
                    end += len(line)
                    same_decoder = batch["pillow"] == PIL.__version__  # another Pillow may read what is broken here
                    for entry in (CacheEntry(*fields) for fields in batch["entries"]):
                        if same_decoder or entry.row != BROKEN:
                            entries[entry.file] = entry
            number, slot = header["pixels"], header["slot"]
            return cls(path, number, slot, entries, end, cls.map_rows(cls.rows_path(path, number), slot))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @classmethod
    def write(cls, path: Path, number: int, slot: int, entries: Iterable[CacheEntry] = ()) -> Self:
        """Replace the index file; the pixel file must exist."""
        header = format_line({"version": VERSION, "slot": slot, "pixels": number})
        with atomic_write(path) as temporary:
            temporary.write_bytes(header + format_batch(entries))
        index = cls.load(path)
        assert index is not None
        return index

    @classmethod
    def create(cls, path: Path, slot: int = 1) -> Self:
        """Write an empty index and pixel file."""
        number = randbits(32)
        cls.rows_path(path, number).touch(exist_ok=False)
        return cls.write(path, number, slot)

    @classmethod
    def count_stored(cls, path: Path) -> int | None:
        """Count the slots of the pixel file while another process writes it; None if there is no index yet."""
        with open_no_link(path, "rb") as file:
            header = read_header(file)
        if header is None:
            return None
        return cls.rows_path(path, header["pixels"]).stat().st_size // cls.row_bytes(header["slot"])

    @property
    def pixels(self) -> Path:
        return self.rows_path(self.path, self.number)

    @property
    def stored(self) -> int:
        """Number of entries with pixels."""
        return sum(entry.row != BROKEN for entry in self.entries.values())

    def append(self, entries: list[CacheEntry]) -> None:
        """Commit entries, after their pixels have reached the disk."""
        if not entries:
            return
        with open_no_link(self.pixels, "rb") as pixels:
            os.fsync(pixels.fileno())
        with open_no_link(self.path, "r+b") as file:
            file.seek(self.end)
            file.truncate()
            file.write(format_batch(entries))
            file.flush()
            os.fsync(file.fileno())
            self.end = file.tell()
        self.entries.update((entry.file, entry) for entry in entries)

    def is_intact(self, entry: CacheEntry) -> bool:
        """Return whether the pixels have the checksum of their entry."""
        return entry.row == BROKEN or (entry.row < len(self.map) and zlib.crc32(self.map[entry.row]) == entry.checksum)

    def find_damaged(self, files: Iterable[str], threads: int) -> list[str]:
        """List files whose pixels are missing or have another checksum."""
        by_row = sorted(files, key=lambda file: self.entries[file].row if file in self.entries else BROKEN)

        def verify(start: int) -> list[str]:
            some = by_row[start : start + VERIFIED_TOGETHER]
            return [file for file in some if file not in self.entries or not self.is_intact(self.entries[file])]

        with ThreadPoolExecutor(threads) as pool:  # threads: checksums release the interpreter lock
            return [*chain.from_iterable(pool.map(verify, range(0, len(by_row), VERIFIED_TOGETHER)))]

    def rewrite(self, slot: int, kept: Iterable[CacheEntry]) -> Self:
        """Copy the intact pixels of some entries to a new pixel file, whose slots may be larger.

        Slots grow only while they hold every image exactly, so nothing needs to be decoded again. The old pixel file is
        removed; existing maps of it stay valid.
        """
        self.map = self.map_rows(self.pixels, self.slot)  # with rows appended since the index was loaded
        number = randbits(32)
        entries = []
        pixels = np.zeros((slot, slot, 3), dtype=np.uint8)
        with self.rows_path(self.path, number).open("xb") as file:
            for entry in sorted(kept, key=lambda entry: entry.row):
                if not self.is_intact(entry):
                    continue
                if entry.row != BROKEN:
                    pixels[: self.slot, : self.slot] = self.map[entry.row]
                    row = file.tell() // slot_bytes(slot)
                    entry = entry._replace(row=row, checksum=zlib.crc32(pixels.data))
                    file.write(pixels.data)
                entries.append(entry)
            file.flush()
            os.fsync(file.fileno())
        index = self.write(self.path, number, slot, entries)
        self.pixels.unlink()
        return index


def read_header(file: IO[bytes]) -> dict | None:
    """Read the first line of an index; None if it is damaged or of another version."""
    header = parse_line(file.readline())
    return header if header and header["version"] == VERSION else None


def format_line(content: dict[str, object]) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def format_batch(entries: Iterable[CacheEntry]) -> bytes:
    return format_line({"pillow": PIL.__version__, "entries": list(entries)})


def parse_line(line: bytes) -> dict | None:
    """Return the content of a line; None if it is damaged."""
    sound = line.endswith(b"\n") and line[:9] == b"%08x " % zlib.crc32(line[9:-1])
    return json.loads(line[9:]) if sound else None
