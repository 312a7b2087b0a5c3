"""Inspect a data set: images per domain and class, unreadable files, the same image twice."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aidgn.data.cache import DecodedDataset
from aidgn.data.dataset import Dataset
from aidgn.data.images import PAGED_SUFFIXES, count_pages, read_image
from aidgn.data.registry import DATASETS, DatasetInfo
from aidgn.errors import AidgnError, plural, some

MAX_LISTED = 20  # lines shown of each type of finding

Groups = list[list[str]]  # files with the same pixels


@dataclass(frozen=True, eq=False)
class Inspection:
    """The content of a data set and its problems."""

    dataset: Dataset
    counts: np.ndarray  # images of each domain and class
    broken: list[tuple[str, str]]  # unreadable files, each with the reason
    # Groups of files with the same pixels
    across_domains: Groups  # in several domains: target images among the sources
    across_split: Groups  # in one domain, in training and in validation (trial 0)
    across_classes: Groups  # in several classes
    within_domains: Groups  # in one domain and class, on one side of the split
    published: str | None = None  # the published copy that `counts` were compared with; None if no counts are published
    differences: Sequence[str] = ()  # differences from the published copy
    refusals: Sequence[str] = ()  # reasons why `fit` would not train on the data set
    paged: Sequence[str] = ()  # files with several pages, of which the first is used

    @property
    def fine(self) -> bool:
        """Whether the data set needs no change. Copies within a domain do not affect accuracy on an unseen domain."""
        return not (self.refusals or self.differences or self.broken or self.across_domains)

    def findings(self) -> list[str]:
        """Compose a sentence for each finding."""
        sentences = [f"`fit` would stop: {refusal}" for refusal in self.refusals]
        for title, lines in (
            ("", self.differences),
            ("broken: ", [reason if file in reason else f"{file}: {reason}" for file, reason in self.broken]),
            ("the same image in several domains: ", (some(group, 5) for group in self.across_domains)),
            ("the same image in several classes: ", (some(group, 5) for group in self.across_classes)),
        ):
            sentences += [line for line in some((title + line for line in lines), MAX_LISTED, "\n").split("\n") if line]
        if self.within_domains:
            groups = some((some(group, 5) for group in self.within_domains), 5, "; ")
            sentences.append(f"{plural(len(self.within_domains), 'image')} several times in one domain: {groups}")
        if self.across_split:
            groups = some((some(group, 5) for group in self.across_split), 5, "; ")
            sentences.append(
                f"{plural(len(self.across_split), 'image')} with a copy in the same domain on the other side of the "
                f"split (trial 0), so that training images are among the validation images: {groups}"
            )
        empty = [
            f"{name} of {class_name}"
            for name, row in zip(self.dataset.domains, self.counts, strict=True)
            for class_name, count, total in zip(self.dataset.classes, row, self.counts.sum(0), strict=True)
            if not count and row.any() and total
        ]
        if empty:
            sentences.append(f"no images in {some(empty, 10)}: if that is intended, there is nothing to do")
        if self.paged:
            sentences.append(
                f"{plural(len(self.paged), 'file')} with several pages, of which the first is used (`aidgn data pages` "
                f"makes a picture of each): {some(self.paged, 5)}"
            )
        if self.dataset.ignored:
            ignored = some(self.dataset.ignored, 5)
            sentences.append(f"{plural(len(self.dataset.ignored), 'other file')} ignored: {ignored}")
        return sentences

    def verdict(self) -> str:
        """Compose the conclusion, or raise it as an error if the data set is not fine."""
        if self.fine:
            return f"Every image can be read{f', the counts match {self.published}' if self.published else ''}."
        problems: list[tuple[Sequence[object], str, str]] = [
            (self.broken, "broken file", ""),
            (self.across_domains, "image", " in several domains"),
            (self.across_classes, "image", " in several classes"),
            (self.differences, "difference", " from the published counts"),
            (self.refusals, "reason", " why `fit` would stop"),
        ]
        words = [plural(len(items), noun) + rest for items, noun, rest in problems if items]
        error = AidgnError(f"{self.dataset.name} is not in order: {', '.join(words)}.")
        error.exit_code = 2 if self.refusals else 1
        raise error


def inspect_dataset(dataset: Dataset, on_progress: Callable[[int, int], None] | None = None) -> Inspection:
    """Decode every file, count the images and compare the counts with the published ones, find copies.

    Args:
        dataset: The data set; nothing is cached.
        on_progress: Called with the number of files read and of all files.
    """

    def read(index: int) -> tuple[bytes, str]:
        """Return a digest of the pixels, or the problem with the file."""
        if dataset.pixels is not None:
            return hashlib.sha256(dataset.pixels[index].tobytes()).digest(), ""
        try:
            image, size = read_image(Path(dataset.root or "", dataset.files[index]))
            return hashlib.sha256(image.tobytes()).digest() + str(size).encode(), ""
        except AidgnError as error:
            return b"", str(error)

    broken, unreadable, digests = [], [], []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # threads: decoders and hashes release the interpreter lock
        for index, (digest, reason) in enumerate(pool.map(read, range(len(dataset)))):
            digests.append(digest)
            if reason:
                broken.append((dataset.files[index], reason))
                unreadable.append(index)
            if on_progress:
                on_progress(index + 1, len(dataset))
    published, differences = compare_counts(dataset, DATASETS.get(dataset.name))
    copies = group_copies(dataset, digests)
    refusals = [*dataset.problems, *dataset.without(unreadable).find_shortages()]
    paged = [file for file in dataset.files if file.lower().endswith(PAGED_SUFFIXES)]
    paged = [file for file in paged if count_pages(Path(dataset.root or "", file)) > 1]
    return Inspection(dataset, dataset.count_images(), broken, *copies, published, differences, refusals, paged)


def inspect_decoded(decoded: DecodedDataset) -> Inspection:
    """Inspect a data set by its decoded images: as `inspect_dataset`, but without reading the files again."""
    dataset = decoded.dataset
    broken = list(zip(decoded.skipped, decoded.reasons, strict=True))
    copies = group_copies(dataset, pixel_digests(decoded))
    return Inspection(dataset, dataset.count_images(), broken, *copies, refusals=dataset.find_shortages())


def compare_counts(dataset: Dataset, info: DatasetInfo | None) -> tuple[str | None, list[str]]:
    """Name the published copy that the data set resembles most, and its differences from that copy."""
    if info is None or not info.counts:
        return None, []
    counts = dataset.count_images()
    totals = dict(zip(dataset.domains, counts.sum(1).tolist(), strict=True))
    copies = [("published", info.counts), ("downloadable today", info.other_counts or info.counts)]
    title, expected = min(copies, key=lambda copy: sum(abs(totals[name] - count) for name, count in copy[1].items()))
    differences = []
    if len(dataset.classes) != info.num_classes:
        differences.append(f"{len(dataset.classes)} classes, expected {info.num_classes}")
    elif info.classes and tuple(dataset.classes) != info.classes:
        differences.append(f"classes {', '.join(dataset.classes)}, expected {', '.join(info.classes)}")
    same_classes = not differences
    for name, row in zip(dataset.domains, counts.tolist(), strict=True):
        if totals[name] != expected[name]:
            differences.append(f"{name}: {totals[name]} images, expected {expected[name]}")
        if same_classes and name in info.class_counts:
            differences += [
                f"{name}/{class_name}: {count} images, expected {wanted}"
                for class_name, count, wanted in zip(info.classes, row, info.class_counts[name], strict=True)
                if count != wanted
            ]
    return f"the copy of {info.name} {title} ({sum(expected.values())} images)", differences


# Copies -------------------------------------------------------------------------------------------------------------


def group_copies(dataset: Dataset, digests: Sequence[bytes | str]) -> tuple[Groups, Groups, Groups, Groups]:
    """Group files of the same digest: across domains, across the split of a domain in trial 0, across classes, others.

    Args:
        dataset: The data set.
        digests: A digest of each image's pixels; an empty one belongs to no image.
    """
    part = 2 * dataset.domain_of  # even for a domain's training images, odd for its validation images
    for domain in range(len(dataset.domains)):
        _, validation = dataset.split(domain, trial=0)
        part[validation] += 1
    groups = group_by((index for index, digest in enumerate(digests) if digest), digests.__getitem__)
    across_domains: Groups = []
    across_split: Groups = []
    across_classes: Groups = []
    within: Groups = []
    for group in groups:
        files = [dataset.files[index] for index in group]
        domains = len(np.unique(dataset.domain_of[group]))
        if domains > 1:
            across_domains.append(files)
        classes = len(np.unique(dataset.labels[group]))
        if classes > 1:
            across_classes.append(files)
        if len(np.unique(part[group])) > domains:
            across_split.append(files)
        elif domains == classes == 1:
            within.append(files)
    return across_domains, across_split, across_classes, within


def pixel_digests(decoded: DecodedDataset) -> list[str]:
    """Return a digest of each image's content that is the same for all files with the same pixels.

    Only the pixels of images with the same size and checksum are read.
    """
    first: dict[str, int] = {}
    for index, digest in enumerate(decoded.digests):
        first.setdefault(digest, index)
    keys = list(zip(map(tuple, decoded.geometry.tolist()), decoded.checksums, strict=True))
    same: dict[str, str] = {}
    for group in group_by(first.values(), keys.__getitem__):
        for equal in group_by(group, lambda index: decoded.pixels[decoded.rows[index]].tobytes()):
            same |= {decoded.digests[index]: decoded.digests[equal[0]] for index in equal}
    return [same.get(digest, digest) for digest in decoded.digests]


def group_by(indices: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Return groups of two or more indices with the same key."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index in indices:
        groups[key(index)].append(index)
    return [group for group in groups.values() if len(group) > 1]
