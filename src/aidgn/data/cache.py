"""Decoded images: each is decoded once, by all cores, into a file that every run maps.

Pixels are only ever appended, and the index names them only after they have reached the disk. So an interruption loses
half a second of work at most, and a run that has mapped the file never sees it change. The index has a checksum of each
image's pixels, which every run verifies, and what shows whether the image file has changed.

The files lie in a folder of the user's alone, never beside the data, which may be anybody's.
"""

import json
import logging
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from secrets import randbits
from typing import IO

import numpy as np
import PIL

from aidgn.data.dataset import Dataset
from aidgn.data.decode_pool import (
    BROKEN,
    LARGER,
    CacheEntry,
    content_digest,
    decode_all,
    largest_slot,
    longest_side,
    settled,
    slot_bytes,
    stamp_of,
)
from aidgn.errors import AidgnError, amount, plural
from aidgn.files import atomic_write, lock, open_no_link, storage_error

VERSION = 2
SAMPLE = 128  # images whose headers tell the slot size at first
COMMIT_SECONDS = 0.5
VERIFIED_TOGETHER = 64  # images
log = logging.getLogger("aidgn")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class DecodedDataset:
    """A data set with its pixels: image i lies in the top left corner of the slot `pixels[rows[i]]`, the rest is 0."""

    dataset: Dataset  # without the broken files
    pixels: np.ndarray  # uint8 [rows, S, S, 3], read-only
    rows: np.ndarray  # int64 [N]
    geometry: np.ndarray  # int32 [N, 4]: stored height and width, original height and width, all upright
    skipped: list[str]  # broken files left out
    content: str  # digest of the content of all images, in order
    decoded: int = 0  # images decoded by this call
    digests: Sequence[str] = ()  # of the content of each image
    reasons: Sequence[str] = ()  # what is wrong with each broken file

    @property
    def slot(self) -> int:
        return self.pixels.shape[1]


def prepare(
    dataset: Dataset,
    *,
    cache_dir: Path | None = None,
    workers: int | None = None,
    skip_broken: bool = False,
    on_progress: Progress | None = None,
) -> DecodedDataset:
    """Decode what is new or changed, and map the pixels.

    Slots are S x S, S = min(limit, longest side of all images), limit = image size * 256 / 224. Each side of an image
    beyond S is shrunk to S, none is enlarged: an image of at most S x S is stored exactly.
    """
    if dataset.pixels is not None:
        count, height, width = dataset.pixels.shape[:3]
        geometry = np.tile(np.array([height, width] * 2, dtype=np.int32), (count, 1))
        content = blake2b(dataset.pixels.tobytes(), digest_size=16).hexdigest()
        digests = [blake2b(image.tobytes(), digest_size=16).hexdigest() for image in dataset.pixels]
        return DecodedDataset(dataset, dataset.pixels, np.arange(count), geometry, [], content, digests=digests)
    if workers is not None and workers < 1:
        raise AidgnError(f"--workers {workers}: at least one process is needed to decode images.")
    limit = largest_slot(dataset.image_size)
    on_progress = on_progress or (lambda done, total: None)
    path = cache_folder(dataset, cache_dir) / f"index-{limit}.jsonl"
    make_private(path.parent)

    def update(suspects: Sequence[str] = ()) -> tuple[Index, set[str]]:
        return bring_up_to_date(dataset, path, limit, workers or usable_cores(), on_progress, suspects)

    decoded = set[str]()
    index = Index.load(path)
    if index is None or any(outdated(dataset, index.entries)):
        index, decoded = update()
    damaged = index.damaged(file for file in dataset.files if file not in decoded)
    if damaged:
        log.warning(
            "%s of %s in %s were damaged and are decoded again.",
            plural(len(damaged), "decoded image"),
            dataset.name,
            path.parent,
        )
        index, mended = update(damaged)
        decoded |= mended
    return finish(dataset, index, skip_broken, len(decoded))


def cache_folder(dataset: Dataset, cache_dir: Path | None = None) -> Path:
    """Where the decoded images lie: below `cache_dir`, else $AIDGN_CACHE, else the user's cache directory."""
    place = cache_dir or os.environ.get("AIDGN_CACHE")
    if not place:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aidgn"
    root = Path(dataset.root or "").resolve()
    return Path(place) / f"{dataset.name[:50]}-{blake2b(os.fsencode(root), digest_size=6).hexdigest()}"


def make_private(folder: Path) -> None:
    """Make the folder for this user alone, or make sure that it is this user's."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise AidgnError(
            f"Decoded images cannot be stored in {folder} ({error.strerror}). Set AIDGN_CACHE to a folder "
            "where they can."
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise AidgnError(
            f"{folder} is a link or belongs to another user, who could change the decoded images in it. "
            "Set AIDGN_CACHE to a folder that is yours."
        )


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def finish(dataset: Dataset, index: "Index", skip_broken: bool, decoded: int) -> DecodedDataset:
    entries = [index.entries[file] for file in dataset.files]
    broken = [number for number, entry in enumerate(entries) if entry.row == BROKEN]
    if broken and (not skip_broken or len(broken) == len(dataset)):
        reasons = [f"  {entries[number].file} {entries[number].reason}" for number in broken[:10]]
        more = [f"  and {len(broken) - 10} more"] if len(broken) > 10 else []
        raise AidgnError(
            "\n".join(
                [
                    f"{len(broken)} of {len(dataset)} images in {dataset.root} cannot be used:",
                    *reasons,
                    *more,
                    "Mend or remove them" + ("." if skip_broken else ", or leave them out with --skip-broken."),
                ]
            )
        )
    table = np.array([(entry.row, *entry.geometry) for entry in entries if entry.row != BROKEN], dtype=np.int64)
    content = blake2b("".join(entry.digest for entry in entries if entry.row != BROKEN).encode(), digest_size=16)
    return DecodedDataset(
        dataset.without(broken) if broken else dataset,
        index.map,
        table[:, 0].copy(),
        table[:, 1:].astype(np.int32),
        [entries[number].file for number in broken],
        content.hexdigest(),
        decoded,
        [entry.digest for entry in entries if entry.row != BROKEN],
        [entries[number].reason for number in broken],
    )


# The index ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Index:
    """A file of lines `CRC-32 JSON`: the slot size and the pixel file, then batches of entries; the last one counts.

    Lines from the first on whose checksum is wrong, the torn end of an interrupted run, do not exist.
    """

    path: Path
    number: int  # of the pixel file
    slot: int
    entries: dict[str, CacheEntry]
    end: int  # of the valid lines, in bytes
    map: np.ndarray  # uint8 [rows, slot, slot, 3]

    @classmethod
    def load(cls, path: Path) -> "Index | None":
        """None if there is none that can be used. Needs no lock."""
        try:
            with open_no_link(path, "rb") as file:
                header = read_header(file)
                if header is None:
                    return None
                entries: dict[str, CacheEntry] = {}
                end = file.tell()
                for line in file:
                    if (batch := parse(line)) is None:
                        break
                    end += len(line)
                    found = (CacheEntry(*fields) for fields in batch["entries"])
                    same_decoder = batch["pillow"] == PIL.__version__  # another one may read what is broken for this
                    entries.update((entry.file, entry) for entry in found if same_decoder or entry.row != BROKEN)
            number, slot = header["pixels"], header["slot"]
            with open_no_link(pixel_file(path, number), "rb") as pixels:
                shape = (os.fstat(pixels.fileno()).st_size // slot_bytes(slot), slot, slot, 3)
                mapped = np.memmap(pixels, np.uint8, "r", shape=shape) if shape[0] else np.zeros(shape, np.uint8)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(path, number, slot, entries, end, mapped.view(np.ndarray))

    @property
    def pixels(self) -> Path:
        return pixel_file(self.path, self.number)

    def append(self, entries: list[CacheEntry]) -> None:
        """Commit: first the pixels reach the disk, then the entries that say so."""
        if not entries:
            return
        with open_no_link(self.pixels, "rb") as pixels:
            os.fsync(pixels.fileno())
        with open_no_link(self.path, "r+b") as file:
            file.seek(self.end)
            file.truncate()
            file.write(batch_line(entries))
            file.flush()
            os.fsync(file.fileno())
            self.end = file.tell()
        self.entries.update((entry.file, entry) for entry in entries)

    def intact(self, entry: CacheEntry) -> bool:
        """Whether the pixels are those that were written."""
        return entry.row == BROKEN or (entry.row < len(self.map) and zlib.crc32(self.map[entry.row]) == entry.checksum)

    def damaged(self, files: Iterable[str]) -> list[str]:
        """The files whose pixels are not those that were written, or are not there."""
        known = sorted(files, key=lambda file: self.entries[file].row if file in self.entries else BROKEN)

        def damaged_among(start: int) -> list[str]:
            return [
                file
                for file in known[start : start + VERIFIED_TOGETHER]
                if file not in self.entries or not self.intact(self.entries[file])
            ]

        with ThreadPoolExecutor(usable_cores()) as pool:  # threads: checksums release the interpreter lock
            return [*chain.from_iterable(pool.map(damaged_among, range(0, len(known), VERIFIED_TOGETHER)))]


def pixel_file(index: Path, number: int) -> Path:
    return index.with_name(f"pixels-{index.stem.rpartition('-')[2]}-{number:08x}.u8")


def read_header(file: IO[bytes]) -> dict | None:
    """The first line of an index, None if it is damaged or of another version."""
    header = parse(file.readline())
    return header if header and header["version"] == VERSION else None


def line_of(content: dict[str, object]) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def batch_line(entries: Iterable[CacheEntry]) -> bytes:
    return line_of({"pillow": PIL.__version__, "entries": list(entries)})


def parse(line: bytes) -> dict | None:
    """The content of a line, None if it is damaged."""
    whole = line.endswith(b"\n") and line[:9] == b"%08x " % zlib.crc32(line[9:-1])
    return json.loads(line[9:]) if whole else None


def write_index(path: Path, number: int, slot: int, entries: Iterable[CacheEntry]) -> Index:
    with atomic_write(path) as temporary:
        temporary.write_bytes(line_of({"version": VERSION, "slot": slot, "pixels": number}) + batch_line(entries))
    index = Index.load(path)
    assert index is not None
    return index


def rewrite(path: Path, slot: int, kept: Iterable[CacheEntry] | None = None) -> Index:
    """Write a new pixel file, with slots that may be larger, for the entries kept that are intact; then its index.
    Remove the old file: existing maps of it stay valid.

    Slots grow only while they hold every image exactly, so that nothing is to be decoded again.
    """
    old, number = Index.load(path), randbits(32)
    if kept is None:
        kept = old.entries.values() if old else ()
    entries, wide = [], np.zeros((slot, slot, 3), dtype=np.uint8)
    with pixel_file(path, number).open("xb") as file:
        for entry in sorted(kept, key=lambda entry: entry.row):
            if old and entry.row != BROKEN:
                if not old.intact(entry):
                    continue
                wide[: old.slot, : old.slot] = old.map[entry.row]
                entry = entry._replace(row=file.tell() // slot_bytes(slot), checksum=zlib.crc32(wide.data))
                file.write(wide.data)
            entries.append(entry)
        file.flush()
        os.fsync(file.fileno())
    index = write_index(path, number, slot, entries)
    if old:
        old.pixels.unlink()
    return index


# Bringing it up to date ---------------------------------------------------------------------------------------------


def outdated(dataset: Dataset, entries: dict[str, CacheEntry]) -> Iterator[tuple[str, list[int]]]:
    """Files that are not known with their present stamp, or as ones that are not there; and this stamp."""
    prefix = f"{dataset.root}{os.sep}"
    for file in dataset.files:
        entry = entries.get(file)
        try:
            stamp = stamp_of(prefix + file)
        except OSError:
            if entry is None or entry.digest:
                yield file, []
            continue
        if entry is None or entry.stamp != stamp:
            yield file, settled(stamp)


def bring_up_to_date(
    dataset: Dataset, path: Path, limit: int, workers: int, on_progress: Progress, suspects: Sequence[str]
) -> tuple[Index, set[str]]:
    """Decode and store what is new, changed or, among the suspects, damaged; the index, and the files decoded."""
    folder = path.parent
    old_place = Path(dataset.root or "") / ".aidgn-cache"
    if not path.exists() and old_place.is_dir():
        log.warning("%s is no longer used, as decoded images now lie in %s; it can be deleted.", old_place, folder)
    try:
        with open_no_link(folder / f"lock-{limit}", "a") as held:
            wait_for(held, path, len(dataset), on_progress)
            decoded = decode_missing(dataset, path, limit, workers, on_progress, suspects)
            index = Index.load(path)
    except OSError as error:
        raise storage_error(folder, error) from error
    if index is None:
        raise AidgnError(
            f"{folder} was changed by something else while images were stored there. Run the same command again."
        )
    return index, decoded


def wait_for(held: IO[str], path: Path, total: int, on_progress: Progress) -> None:
    """Take the lock; while another run prepares, show how far it is."""
    while not lock(held, path.parent, wait=False):
        with suppress(OSError):
            with open_no_link(path, "rb") as file:
                header = read_header(file)
            if header:
                stored = pixel_file(path, header["pixels"]).stat().st_size // slot_bytes(header["slot"])
                on_progress(min(stored, total), total)
        time.sleep(0.1)


def decode_missing(
    dataset: Dataset, path: Path, limit: int, workers: int, on_progress: Progress, suspects: Sequence[str]
) -> set[str]:
    """Do what `bring_up_to_date` says, while it holds the lock; the files decoded."""
    index, root, total = Index.load(path), f"{dataset.root}{os.sep}", len(dataset)
    for left_over in chain(path.parent.glob(f"pixels-{limit}-*"), path.parent.glob(f".{path.name}.*.tmp")):
        if not index or left_over != index.pixels:
            left_over.unlink()
    if index:
        for file in index.damaged(suspects):
            index.entries.pop(file, None)
    todo, touched = [], dict[str, list[int]]()
    for file, stamp in outdated(dataset, index.entries if index else {}):
        if index and file in index.entries:
            touched[file] = stamp
        else:
            todo.append(file)
    done = total - len(todo) - len(touched)
    if index and touched:
        same = []
        with ThreadPoolExecutor(workers) as pool:  # threads: reading and hashing release the interpreter lock
            contents = pool.map(content_digest, [root + file for file in touched])
            for (file, stamp), digest in zip(touched.items(), contents, strict=True):
                if digest == index.entries[file].digest:
                    same.append(index.entries[file]._replace(stamp=stamp))
                    on_progress(done + len(same), total)
                else:
                    todo.append(file)
        done += len(same)
        if same:
            index.entries.update((entry.file, entry) for entry in same)
            index = write_index(path, index.number, index.slot, index.entries.values())

    on_progress(done, total)
    decoded = set[str]()
    slot = min(limit, max((longest_side(root + file) for file in todo[:: max(1, len(todo) // SAMPLE)]), default=1))
    while todo:
        readable = sum(os.access(root + file, os.R_OK) for file in todo)  # others, such as dead links, need no space
        if index is None or slot > index.slot:
            stored = sum(entry.row != BROKEN for entry in index.entries.values()) if index else 0
            check_space(dataset, path.parent, slot, readable + stored)
            index = rewrite(path, slot)
        check_space(dataset, path.parent, index.slot, readable)
        larger: list[str] = []
        pending: list[CacheEntry] = []
        committed = time.monotonic()
        try:
            with closing(decode_all(root, index.pixels, index.slot, limit, todo, workers)) as entries:
                for entry in entries:
                    if entry.row == LARGER:
                        larger.append(entry.file)
                        slot = min(limit, max(slot, *entry.geometry))
                        continue
                    pending.append(entry)
                    decoded.add(entry.file)
                    on_progress(done + len(decoded), total)
                    if time.monotonic() - committed > COMMIT_SECONDS:
                        index.append(pending)
                        pending, committed = [], time.monotonic()
        except BaseException:
            with suppress(OSError):  # not to hide what went wrong first
                index.append(pending)
            raise
        index.append(pending)
        todo = larger
    if decoded:
        drop_removed(path, root, set(dataset.files))
    return decoded


def drop_removed(path: Path, root: str, members: set[str]) -> None:
    """Write the pixel file anew when more than half of it belongs to no image any more, if there is room for that.

    Images that exist but are not members stay: another run may use more of the folder than this one.
    """
    index = Index.load(path)
    assert index is not None
    kept = [entry for entry in index.entries.values() if entry.file in members or Path(root + entry.file).exists()]
    stored = sum(entry.row != BROKEN for entry in kept)
    if len(index.map) > 2 * stored and shutil.disk_usage(path.parent).free > stored * slot_bytes(index.slot):
        rewrite(path, index.slot, kept)


def check_space(dataset: Dataset, folder: Path, slot: int, count: int) -> None:
    needed, free = count * slot_bytes(slot), shutil.disk_usage(folder).free
    if needed > free:
        raise AidgnError(
            f"The decoded images of {dataset.name} need {amount(needed)} in {folder}, where {amount(free)} "
            "are free. Free some, or set AIDGN_CACHE to a folder on another disk."
        )
