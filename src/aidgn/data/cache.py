"""Decoded images: each is decoded once, by all cores, into a file that every run maps.

Pixels are only ever appended, and the index names them only after they have reached the disk. So an interruption loses
half a second of work at most, and a run that has mapped the file never sees it change.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import IO

import numpy as np
import PIL

from aidgn.data.dataset import Dataset
from aidgn.data.decoding import (
    BROKEN,
    LARGER,
    Entry,
    content_digest,
    decode_all,
    largest_slot,
    longest_side,
    settled,
    slot_bytes,
)
from aidgn.errors import UserError, amount
from aidgn.files import lock, storage_error, written_aside

VERSION = 1
SAMPLE = 128  # images whose headers tell the slot size at first
COMMIT_SECONDS = 0.5

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Prepared:
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


def prepare(dataset: Dataset, *, cache_dir: Path | None = None, workers: int | None = None, skip_broken: bool = False,
            on_progress: Progress | None = None) -> Prepared:
    """Decode what is new or changed, and map the pixels.

    Slots are S x S, S = min(limit, longest side of all images), limit = image size * 256 / 224. Each side of an image
    beyond S is shrunk to S, none is enlarged: an image of at most S x S is stored exactly.
    """
    if dataset.pixels is not None:
        count, height, width = dataset.pixels.shape[:3]
        geometry = np.tile(np.array([height, width] * 2, dtype=np.int32), (count, 1))
        content = blake2b(dataset.pixels.tobytes(), digest_size=16).hexdigest()
        digests = [blake2b(image.tobytes(), digest_size=16).hexdigest() for image in dataset.pixels]
        return Prepared(dataset, dataset.pixels, np.arange(count), geometry, [], content, digests=digests)
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: at least one process is needed to decode images.")
    limit = largest_slot(dataset.image_size)
    on_progress = on_progress or (lambda done, total: None)
    problems = []
    for folder in cache_folders(dataset, cache_dir):
        path = folder / f"index-{limit}.jsonl"
        index = Index.load(path)
        if index and not any(outdated(dataset, index.entries)):  # no lock: nothing to write
            return finish(dataset, index, skip_broken, 0)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = (folder / f"lock-{limit}").open("a")
        except OSError as error:
            problems.append(f"{folder} ({error.strerror})")
            continue
        with held:
            try:
                wait_for(held, path, len(dataset), on_progress)
                decoded = bring_up_to_date(dataset, path, limit, workers or usable_cores(), on_progress)
            except OSError as error:
                raise storage_error(folder, error) from error
            index = Index.load(path)
        if index is None:
            raise UserError(f"{folder} was changed by something else while images were stored there. Run the same "
                            "command again.")
        return finish(dataset, index, skip_broken, decoded)
    raise UserError(f"Decoded images cannot be stored: no writing to {' nor '.join(problems)}. Set AIDGN_CACHE to a "
                    "folder where they can.")


def cache_folders(dataset: Dataset, cache_dir: Path | None) -> list[Path]:
    """Where the decoded images may lie, best place first: beside the data, else in the home folder."""
    root = Path(dataset.root or "").resolve()
    own = f"{dataset.name}-{blake2b(os.fsencode(root), digest_size=6).hexdigest()}"
    given = cache_dir or os.environ.get("AIDGN_CACHE")
    return [Path(given) / own] if given else [root / ".aidgn-cache", Path.home() / ".cache" / "aidgn" / own]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def finish(dataset: Dataset, index: "Index", skip_broken: bool, decoded: int) -> Prepared:
    entries = [index.entries[file] for file in dataset.files]
    broken = [number for number, entry in enumerate(entries) if entry.row == BROKEN]
    if broken and (not skip_broken or len(broken) == len(dataset)):
        reasons = [f"  {entries[number].file} {entries[number].reason}" for number in broken[:10]]
        more = [f"  and {len(broken) - 10} more"] if len(broken) > 10 else []
        raise UserError("\n".join([
            f"{len(broken)} of {len(dataset)} images in {dataset.root} cannot be used:", *reasons, *more,
            "Mend or remove them" + ("." if skip_broken else ", or leave them out with --skip-broken.")]))
    table = np.array([(entry.row, *entry.geometry) for entry in entries if entry.row != BROKEN], dtype=np.int64)
    content = blake2b("".join(entry.digest for entry in entries if entry.row != BROKEN).encode(), digest_size=16)
    return Prepared(dataset.without(broken) if broken else dataset, index.map, table[:, 0].copy(),
                    table[:, 1:].astype(np.int32), [entries[number].file for number in broken], content.hexdigest(),
                    decoded, [entry.digest for entry in entries if entry.row != BROKEN],
                    [entries[number].reason for number in broken])


# The index ----------------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Index:
    """A file of lines `CRC-32 JSON`: the slot size and the pixel file, then batches of entries; the last one counts.

    Lines from the first on whose checksum is wrong, the torn end of an interrupted run, do not exist.
    """

    path: Path
    pixels: Path
    slot: int
    entries: dict[str, Entry]
    end: int  # of the valid lines, in bytes
    map: np.ndarray  # uint8 [rows, slot, slot, 3]

    @classmethod
    def load(cls, path: Path) -> "Index | None":
        """None if there is none or it does not fit the pixel file. Needs no lock."""
        try:
            with path.open("rb") as file:
                header = parse(file.readline())
                if not header or header["version"] != VERSION:
                    return None
                entries: dict[str, Entry] = {}
                end = file.tell()
                for line in file:
                    if (batch := parse(line)) is None:
                        break
                    end += len(line)
                    found = (Entry(*fields) for fields in batch["entries"])
                    same_decoder = batch["pillow"] == PIL.__version__  # another one may read what is broken for this
                    entries.update((entry.file, entry) for entry in found if same_decoder or entry.row != BROKEN)
            pixels, slot = path.with_name(header["pixels"]), header["slot"]
            shape = (pixels.stat().st_size // slot_bytes(slot), slot, slot, 3)
            if max((entry.row for entry in entries.values()), default=-1) >= shape[0]:
                return None
            mapped = np.memmap(pixels, np.uint8, "r", shape=shape) if shape[0] else np.zeros(shape, np.uint8)
        except (OSError, ValueError, KeyError, TypeError):  # it may have come with the data, from anyone
            return None
        return cls(path, pixels, slot, entries, end, mapped.view(np.ndarray))

    def append(self, entries: list[Entry]) -> None:
        """Commit: first the pixels reach the disk, then the entries that say so."""
        if not entries:
            return
        with self.pixels.open("rb") as pixels:
            os.fsync(pixels.fileno())
        with self.path.open("r+b") as file:
            file.seek(self.end)
            file.truncate()
            file.write(batch_line(entries))
            file.flush()
            os.fsync(file.fileno())
            self.end = file.tell()
        self.entries.update((entry.file, entry) for entry in entries)


def line_of(content: dict[str, object]) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def batch_line(entries: Iterable[Entry]) -> bytes:
    return line_of({"pillow": PIL.__version__, "entries": list(entries)})


def parse(line: bytes) -> dict | None:
    """The content of a line, None if it is damaged."""
    whole = line.endswith(b"\n") and line[:9] == b"%08x " % zlib.crc32(line[9:-1])
    return json.loads(line[9:]) if whole else None


def rewrite(path: Path, slot: int, kept: Iterable[Entry] | None = None) -> Index:
    """A new pixel file, with slots that may be larger, for the entries kept; then its index. The old file goes.

    Slots grow only while they hold every image exactly, so that nothing is to be decoded again.
    """
    old = Index.load(path)
    pixels = path.with_name(f"pixels-{path.stem.rpartition('-')[2]}-{token_hex(4)}.u8")
    if kept is None:
        kept = old.entries.values() if old else ()
    entries, wide = [], np.zeros((slot, slot, 3), dtype=np.uint8)
    with pixels.open("xb") as file:
        for entry in sorted(kept, key=lambda entry: entry.row):
            if old and entry.row != BROKEN:
                wide[:old.slot, :old.slot] = old.map[entry.row]
                entry = entry._replace(row=file.tell() // slot_bytes(slot))
                file.write(wide.data)
            entries.append(entry)
        file.flush()
        os.fsync(file.fileno())
    with written_aside(path) as temporary:
        temporary.write_bytes(line_of({"version": VERSION, "slot": slot, "pixels": pixels.name}) + batch_line(entries))
    if old:
        old.pixels.unlink()  # who has mapped it keeps it
    index = Index.load(path)
    assert index is not None
    return index


# Bringing it up to date ---------------------------------------------------------------------------------------------

def outdated(dataset: Dataset, entries: dict[str, Entry]) -> Iterator[tuple[str, os.stat_result | None]]:
    """Files that are not known with their present size and mtime, or as ones that are not there."""
    prefix = f"{dataset.root}{os.sep}"
    for file in dataset.files:
        entry = entries.get(file)
        try:
            stat = os.stat(prefix + file)  # noqa: PTH116, for half a million files
        except OSError:
            if entry is None or entry.size != -1:
                yield file, None
            continue
        if entry is None or entry.mtime != stat.st_mtime_ns or entry.size != stat.st_size:
            yield file, stat


def wait_for(held: IO[str], path: Path, total: int, on_progress: Progress) -> None:
    """Take the lock; while another run prepares, show how far it is."""
    while not lock(held, path.parent, wait=False):
        with suppress(OSError):
            with path.open("rb") as file:
                header = parse(file.readline())
            if header:
                stored = path.with_name(header["pixels"]).stat().st_size // slot_bytes(header["slot"])
                on_progress(min(stored, total), total)
        time.sleep(0.1)


def bring_up_to_date(dataset: Dataset, path: Path, limit: int, workers: int, on_progress: Progress) -> int:
    """Decode and store what is new or changed; the number of images decoded. The caller holds the lock."""
    index, root, total = Index.load(path), f"{dataset.root}{os.sep}", len(dataset)
    for left_over in chain(path.parent.glob(f"pixels-{limit}-*"), path.parent.glob(f".{path.name}.*.tmp")):
        if not index or left_over != index.pixels:
            left_over.unlink()
    todo, touched = [], []
    for file, stat in outdated(dataset, index.entries if index else {}):
        if index and file in index.entries and stat:
            touched.append((index.entries[file], stat))
        else:
            todo.append(file)
    done = total - len(todo) - len(touched)
    if index and touched:
        same = []
        with ThreadPoolExecutor(workers) as pool:  # threads: reading and hashing release the interpreter lock
            contents = pool.map(content_digest, [root + entry.file for entry, _ in touched])
            for (entry, stat), digest in zip(touched, contents, strict=True):
                if digest == entry.digest:
                    same.append(entry._replace(size=stat.st_size, mtime=settled(stat)))
                    on_progress(done + len(same), total)
                else:
                    todo.append(entry.file)
        index.append(same)
        done += len(same)

    on_progress(done, total)
    decoded = 0
    slot = min(limit, max((longest_side(root + file) for file in todo[::max(1, len(todo) // SAMPLE)]), default=1))
    while todo:
        readable = sum(os.access(root + file, os.R_OK) for file in todo)  # others, such as dead links, need no space
        if index is None or slot > index.slot:
            stored = sum(entry.row != BROKEN for entry in index.entries.values()) if index else 0
            check_space(dataset, path.parent, slot, readable + stored)
            index = rewrite(path, slot)
        check_space(dataset, path.parent, index.slot, readable)
        larger: list[str] = []
        pending: list[Entry] = []
        committed = time.monotonic()
        try:
            with closing(decode_all(root, index.pixels, index.slot, limit, todo, workers)) as entries:
                for entry in entries:
                    if entry.row == LARGER:
                        larger.append(entry.file)
                        slot = min(limit, max(slot, *entry.geometry))
                        continue
                    pending.append(entry)
                    decoded += 1
                    on_progress(done + decoded, total)
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
        raise UserError(f"The decoded images of {dataset.name} need {amount(needed)} in {folder}, where {amount(free)} "
                        "are free. Free some, or set AIDGN_CACHE to a folder on another disk.")
