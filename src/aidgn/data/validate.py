"""What is in a data set: counts, against the published ones; files that are broken, or the same image twice."""

import hashlib
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from aidgn.data.cache import DecodedDataset
from aidgn.data.dataset import Dataset
from aidgn.data.images import read_image
from aidgn.data.registry import DATASETS, DatasetInfo
from aidgn.data.splits import split
from aidgn.errors import AidgnError


@dataclass(frozen=True, eq=False)
class Check:
    """What `check` found."""

    counts: np.ndarray  # images [domains, classes]
    expected: str | None  # what it was compared with; None where no counts are known
    differences: list[str]  # from the expected counts, one sentence each
    broken: list[tuple[str, str]]  # (file, what is wrong with it)
    duplicates: list[list[str]]  # files of the same pixels in different domains: a target image among the sources
    copies: list[list[str]] = field(default_factory=list)  # ... in one domain, on both sides of its split in trial 0
    contradictions: list[list[str]] = field(default_factory=list)  # ... in different classes

    @property
    def fine(self) -> bool:
        return not (self.differences or self.broken or self.duplicates)


def check(dataset: Dataset, on_progress: Callable[[int, int], None] | None = None) -> Check:
    """Decode every file, count images, compare with what is published, look for copies across domains."""

    def examine(index: int) -> tuple[bytes, str]:
        if dataset.pixels is not None:
            return hashlib.sha256(dataset.pixels[index].tobytes()).digest(), ""
        try:
            image, size = read_image(Path(dataset.root or "") / dataset.files[index])
            return hashlib.sha256(image.tobytes()).digest() + str(size).encode(), ""
        except AidgnError as error:
            return b"", str(error)

    broken, digests = [], [b""] * len(dataset)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # threads: decoders and hashes release the interpreter lock
        for index, (digest, reason) in enumerate(pool.map(examine, range(len(dataset)))):
            if reason:
                broken.append((dataset.files[index], reason))
            else:
                digests[index] = digest
            if on_progress:
                on_progress(index + 1, len(dataset))
    counts = count(dataset)
    return Check(counts, *compare(dataset, counts, DATASETS.get(dataset.name)), broken, *same_images(dataset, digests))


def count(dataset: Dataset) -> np.ndarray:
    """Images by domain and class."""
    counts = np.zeros((len(dataset.domains), len(dataset.classes)), dtype=np.int64)
    np.add.at(counts, (dataset.domain_of, dataset.labels), 1)
    return counts


def same_images(dataset: Dataset, digests: Sequence[bytes | str]) -> tuple[list[list[str]], ...]:
    """Groups of files of the same pixels (digests; an empty one is of no image): in different domains; in one domain
    but on both sides of its split in trial 0, so that validation sees training images; in different classes."""
    same: dict[bytes | str, list[int]] = defaultdict(list)
    for index, digest in enumerate(digests):
        if digest:
            same[digest].append(index)
    side = 2 * dataset.domain_of  # even in a domain's `in` split, odd in its `out` split
    for domain in range(len(dataset.domains)):
        indices = dataset.indices(domain)
        side[indices[split(len(indices), 0, domain)[1]]] += 1
    groups = [group for group in same.values() if len(group) > 1]
    domains, sides, labels = (
        [len(np.unique(of[group])) for group in groups] for of in (dataset.domain_of, side, dataset.labels)
    )
    files = [[dataset.files[index] for index in group] for group in groups]
    return tuple(
        [names for names, chosen in zip(files, kind, strict=True) if chosen]
        for kind in (np.greater(domains, 1), np.greater(sides, domains), np.greater(labels, 1))
    )


def pixel_digests(prepared: DecodedDataset) -> list[str]:
    """Of each image the digest of the first one of the same pixels, whatever the format of their files.

    Images that are alike so far are compared by more and more: size, middle row, every 16th row, all rows. So of most
    of them no more than a page of the pixel file is read.
    """
    first: dict[str, int] = {}
    for index, digest in enumerate(prepared.digests):
        first.setdefault(digest, index)
    sizes = list(map(tuple, prepared.geometry.tolist()))
    groups = alike(first.values(), sizes.__getitem__)
    read_ahead(prepared, list(chain.from_iterable(groups)))
    for step in (prepared.slot, 16, 1):
        groups = [closer for group in groups for closer in alike(group, partial(rows_digest, prepared, step))]
    same = {prepared.digests[index]: prepared.digests[group[0]] for group in groups for index in group}
    return [same.get(digest, digest) for digest in prepared.digests]


def alike(indices: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Groups of two or more of the same key."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index in indices:
        groups[key(index)].append(index)
    return [group for group in groups.values() if len(group) > 1]


def rows_digest(prepared: DecodedDataset, step: int, index: int) -> bytes:
    """Of the middle row of an image and each `step` rows from it."""
    height, width = prepared.geometry[index, :2].tolist()
    image = prepared.pixels[prepared.rows[index], :height, :width]
    return hashlib.blake2b(image[height // 2 % step :: step].tobytes(), digest_size=16).digest()


def read_ahead(prepared: DecodedDataset, indices: list[int]) -> None:
    """Have the middle rows of images read from the disk all at once. Otherwise they are waited for one by one, and with
    each come 128 kB around it."""
    mapped = getattr(prepared.pixels.base, "_mmap", None)
    if mapped is None:
        return
    with suppress(OSError):  # a file system that cannot
        for row, height in zip(prepared.rows[indices].tolist(), prepared.geometry[indices, 0].tolist(), strict=True):
            start = (row * prepared.slot + height // 2) * prepared.slot * 3
            page = start - start % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, page, start + prepared.slot * 3 - page)


def compare(dataset: Dataset, counts: np.ndarray, entry: DatasetInfo | None) -> tuple[str | None, list[str]]:
    """The counts against the catalogue's: which published copy this is compared with, and where it differs."""
    if entry is None:
        return None, []
    totals = dict(zip(dataset.domains, counts.sum(1).tolist(), strict=True))
    copies = [(entry.counts, "published"), (entry.other_counts or entry.counts, "downloadable today")]
    expected, label = min(copies, key=lambda copy: sum(abs(totals[name] - number) for name, number in copy[0].items()))
    differences = []
    if len(dataset.classes) != entry.number_of_classes:
        differences.append(f"{len(dataset.classes)} classes, expected {entry.number_of_classes}")
    elif entry.classes and tuple(dataset.classes) != entry.classes:
        differences.append(f"classes {', '.join(dataset.classes)}, expected {', '.join(entry.classes)}")
    same_classes = not differences
    for domain, name in enumerate(dataset.domains):
        if totals[name] != expected[name]:
            differences.append(f"{name}: {totals[name]} images, expected {expected[name]}")
        if same_classes and name in entry.class_counts:
            differences += [
                f"{name}/{class_name}: {found} images, expected {wanted}"
                for class_name, found, wanted in zip(
                    entry.classes, counts[domain].tolist(), entry.class_counts[name], strict=True
                )
                if found != wanted
            ]
    return f"the copy of {entry.name} {label} ({sum(expected.values())} images)", differences
