"""The cache of decoded images: each image is decoded once, by all cores, into a file that every run maps.

Every run verifies the checksums of the pixels, and notices image files that have changed.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from aidgn.data.cache_index import BROKEN, LARGER, CacheEntry, CacheIndex, reliable, slot_bytes, stamp_of
from aidgn.data.dataset import Dataset
from aidgn.data.decode_pool import content_digest, decode_all
from aidgn.data.images import largest_slot, longest_side
from aidgn.data.row_cache import Progress, RowCache, usable_cores
from aidgn.errors import AidgnError, ParameterError
from aidgn.terminal import log

SAMPLED_HEADERS = 128  # images whose headers are read to choose the first slot size


@dataclass(frozen=True, eq=False)
class DecodedDataset:
    """A data set with its pixels: image i is in the top left corner of the slot `pixels[rows[i]]`, the rest is 0."""

    dataset: Dataset  # without broken files
    pixels: np.ndarray  # slots, uint8 [rows, S, S, 3], read-only
    rows: np.ndarray  # slot of each image, int64 [N]
    geometry: np.ndarray  # stored height and width, upright original height and width of each image, int32 [N, 4]
    content: str  # digest of the content of all images, in order
    digests: Sequence[str]  # digest of the content of each image
    checksums: Sequence[int] = ()  # CRC-32 of the slot of each image
    skipped: Sequence[str] = ()  # broken files that were left out
    reasons: Sequence[str] = ()  # what is wrong with each of these files
    decoded: int = 0  # number of images that this call decoded

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
    """Decode new and changed images, and map the pixels of all.

    Slots are S x S, with S the longest side of all images but at most the image size * 256 / 224. Each side of an image
    beyond S is shrunk to S and none is enlarged, so an image of at most S x S is stored exactly.

    Args:
        dataset: The data set.
        cache_dir: Folder of the cache. By default $AIDGN_CACHE, else the user's cache directory.
        workers: Processes that decode. By default one per core.
        skip_broken: Leave out images that cannot be decoded. By default they are an error.
        on_progress: Called with the number of images ready and of all images.
    """
    if dataset.pixels is not None:
        return wrap_pixels(dataset, dataset.pixels)
    if workers is not None and workers < 1:
        raise ParameterError("workers", workers, "a whole number of at least 1")
    cache = ImageCache(dataset, cache_dir, workers or usable_cores(), on_progress or (lambda done, total: None))
    index, decoded = cache.open()
    entries = [index.entries[file] for file in dataset.files]
    broken = [number for number, entry in enumerate(entries) if entry.row == BROKEN]
    if broken and (not skip_broken or len(broken) == len(dataset)):
        raise broken_images(dataset, [entries[number] for number in broken], skip_broken)
    usable = [entry for entry in entries if entry.row != BROKEN]
    return DecodedDataset(
        dataset.without(broken) if broken else dataset,
        index.map,
        rows=np.array([entry.row for entry in usable], dtype=np.int64),
        geometry=np.array([entry.geometry for entry in usable], dtype=np.int32),
        content=blake2b("".join(entry.digest for entry in usable).encode(), digest_size=16).hexdigest(),
        digests=[entry.digest for entry in usable],
        checksums=[entry.checksum for entry in usable],
        skipped=[entries[number].file for number in broken],
        reasons=[entries[number].reason for number in broken],
        decoded=len(decoded),
    )


def wrap_pixels(dataset: Dataset, pixels: np.ndarray) -> DecodedDataset:
    """Return images in memory in the form of decoded ones; nothing is decoded or stored."""
    count, height, width = pixels.shape[:3]
    geometry = np.tile(np.array([height, width] * 2, dtype=np.int32), (count, 1))
    content = blake2b(pixels.tobytes(), digest_size=16).hexdigest()
    digests = [blake2b(image.tobytes(), digest_size=16).hexdigest() for image in pixels]
    checksums = [zlib.crc32(image.tobytes()) for image in pixels]
    return DecodedDataset(dataset, pixels, np.arange(count), geometry, content, digests, checksums)


def content_of(dataset: Dataset, on_progress: Progress | None = None) -> str:
    """Return the digest of the content of all images, as `DecodedDataset.content`; nothing is decoded or stored.

    Files that did not change since they were decoded are not read.

    Args:
        dataset: The data set, without files that cannot be decoded.
        on_progress: Called with the number of images compared and of all images.
    """
    if dataset.pixels is not None:
        return wrap_pixels(dataset, dataset.pixels).content
    cache = ImageCache(dataset, None, usable_cores(), lambda *_: None)
    index = cache.load()
    entries = index.entries if index else {}

    def digest(file: str) -> str:
        entry, path = entries.get(file), cache.root + file
        try:
            return entry.digest if entry and entry.stamp == stamp_of(path) else content_digest(path)
        except OSError:
            return "unreadable"

    content = blake2b(digest_size=16)
    with ThreadPoolExecutor(cache.workers) as pool:
        for done, text in enumerate(pool.map(digest, dataset.files), 1):
            content.update(text.encode())
            if on_progress and (done % 100 == 0 or done == len(dataset)):
                on_progress(done, len(dataset))
    return content.hexdigest()


def broken_images(dataset: Dataset, broken: Sequence[CacheEntry], skip_broken: bool) -> AidgnError:
    """Compose the error that names up to ten broken images."""
    lines = [f"{len(broken)} of {len(dataset)} images in {dataset.root} cannot be used:"]
    lines += [f"  {entry.file} {entry.reason}" for entry in broken[:10]]
    if len(broken) > 10:
        lines.append(f"  and {len(broken) - 10} more")
    lines.append("Mend or remove them" + ("." if skip_broken else ", or leave them out with --skip-broken."))
    return AidgnError("\n".join(lines))


def cache_folder(dataset: Dataset, cache_dir: Path | None = None) -> Path:
    """Return the folder of a data set's decoded images, whether it exists or not."""
    parent = cache_dir or os.environ.get("AIDGN_CACHE")
    if not parent:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "aidgn")
    root = Path(dataset.root or "").resolve()
    return Path(parent) / f"{dataset.name[:50]}-{blake2b(os.fsencode(root), digest_size=6).hexdigest()}"


class ImageCache(RowCache):
    """The decoded images of one data set, for one limit of the slot size."""

    index_type = CacheIndex

    def __init__(self, dataset: Dataset, cache_dir: Path | None, workers: int, on_progress: Progress):
        self.dataset = dataset
        self.root = f"{dataset.root}{os.sep}"
        self.workers = workers
        self.limit = largest_slot(dataset.image_size)
        content = f"decoded images of {dataset.name}"
        super().__init__(cache_folder(dataset, cache_dir), self.limit, dataset.files, content, on_progress)

    def find_missing(self, index: CacheIndex) -> Iterator[tuple[str, list[int]]]:
        """Yield new and changed files with their present stamps."""
        for file in self.dataset.files:
            entry = index.entries.get(file)
            try:
                stamp = stamp_of(self.root + file)
            except OSError:
                if entry is None or entry.digest:
                    yield file, []
                continue
            if entry is None or entry.stamp != stamp:
                yield file, reliable(stamp)

    def add_missing(self, suspects: Sequence[str]) -> set[str]:
        """Decode new, changed and, among the suspects, damaged images."""
        former = Path(self.root, ".aidgn-cache")
        if not self.index_path.exists() and former.is_dir():
            log.warning("%s is no longer used and can be deleted: decoded images are in %s.", former, self.folder)
        index = CacheIndex.load(self.index_path) or CacheIndex.create(self.index_path)
        self.remove_left_overs(index)
        for file in index.find_damaged(suspects, usable_cores()):
            index.entries.pop(file, None)
        outdated = dict(self.find_missing(index))
        touched = {file: stamp for file, stamp in outdated.items() if file in index.entries}
        ready = len(self.dataset) - len(outdated)
        unchanged = self._compare_content(index, touched, ready)
        if unchanged:
            index = index.write(index.path, index.number, index.slot, (index.entries | unchanged).values())
        missing = [file for file in outdated if file not in unchanged]
        self.on_progress(ready + len(unchanged), len(self.dataset))
        sample = missing[:: max(1, len(missing) // SAMPLED_HEADERS)]
        slot = min(self.limit, max((longest_side(self.root + file) for file in sample), default=1))
        decoded: set[str] = set()
        while missing:
            readable = sum(os.access(self.root + file, os.R_OK) for file in missing)  # dead links need no space
            if slot > index.slot:
                self.check_space((readable + index.stored) * slot_bytes(slot))
                index = index.rewrite(slot, index.entries.values())
            self.check_space(readable * slot_bytes(index.slot))
            larger = []
            decoding = decode_all(self.root, index.pixels, index.slot, self.limit, missing, self.workers)
            with closing(decoding), closing(self.commit(index, decoding, lambda entry: entry.row != LARGER)) as entries:
                for entry in entries:
                    if entry.row == LARGER:
                        larger.append(entry.file)
                        slot = min(self.limit, max(slot, *entry.geometry))
                    else:
                        decoded.add(entry.file)
                        self.on_progress(ready + len(unchanged) + len(decoded), len(self.dataset))
            missing = larger
        if decoded:
            self._drop_removed(index)
        return decoded

    def _compare_content(self, index: CacheIndex, touched: dict[str, list[int]], ready: int) -> dict[str, CacheEntry]:
        """Return the entries, with new stamps, of files whose content is unchanged."""
        unchanged = {}
        with ThreadPoolExecutor(self.workers) as pool:  # threads: reading and hashing release the interpreter lock
            digests = pool.map(content_digest, [self.root + file for file in touched])
            for (file, stamp), digest in zip(touched.items(), digests, strict=True):
                if digest == index.entries[file].digest:
                    unchanged[file] = index.entries[file]._replace(stamp=stamp)
                    self.on_progress(ready + len(unchanged), len(self.dataset))
        return unchanged

    def _drop_removed(self, index: CacheIndex) -> None:
        """Rewrite the pixel file if more than half of it belongs to no image any more and there is room.

        Images that exist but are not in the data set stay: another run may use more of the folder.
        """
        members = set(self.dataset.files)
        kept = [
            entry for entry in index.entries.values() if entry.file in members or Path(self.root, entry.file).exists()
        ]
        stored = sum(entry.row != BROKEN for entry in kept)
        rows = index.pixels.stat().st_size // slot_bytes(index.slot)
        if rows > 2 * stored and self.free() > stored * slot_bytes(index.slot):
            index.rewrite(index.slot, kept)
