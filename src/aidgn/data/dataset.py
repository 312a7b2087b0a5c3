"""A data set: images of classes in several domains, in files or held in memory."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from aidgn.data.registry import (
    SMALL_SIDE,
    DatasetInfo,
    choose_metric,
    lookup,
    normalize_name,
    normalize_unicode,
    short_names,
)
from aidgn.data.source import DataSource
from aidgn.data.splits import train_val_indices
from aidgn.errors import AidgnError, UnknownNameError, plural

MIN_DOMAIN_IMAGES = 5  # a fifth of a domain's images is set aside for validation


@dataclass(frozen=True, eq=False)
class Dataset:
    """Image files sorted by domain, class and name, which is DomainBed's order.

    Args:
        info: Name, domains and the settings of runs.
        classes: Names of the classes.
        files: Paths below `root`, with / between folders.
        labels: Class of each image, int64 [N].
        domain_of: Domain of each image, int64 [N].
        root: Folder of the files; None if the images are held in memory.
        pixels: Images held in memory, uint8 [N, S, S, 3].
        ignored: Files below `root` that are not part of the data set.
        groups: Group of each image, int64 [N]; images of one group, such as a patient, stay on one side of splits.
            None if there are no groups.
        source: The table, or the folder with its layout, that lists the images; None for folders
            ROOT/<domain>/<class>/<image>.
        held_out: The published split: 1 for images that validate, 0 for those that train and -1 for neither, int8 [N].
            A domain without images of both kinds is split like any other. None if no split is published.
        problems: What is wrong with the folder or table; empty unless it was loaded to be checked.
    """

    info: DatasetInfo
    classes: list[str]
    files: list[str]
    labels: np.ndarray
    domain_of: np.ndarray
    root: Path | None = None
    pixels: np.ndarray | None = None
    ignored: list[str] = field(default_factory=list)
    groups: np.ndarray | None = None
    source: DataSource | None = None
    held_out: np.ndarray | None = None
    problems: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.files)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def domains(self) -> list[str]:
        return list(self.info.domains)

    @property
    def image_size(self) -> int:
        return self.info.image_size

    @property
    def location(self) -> str | None:
        """What `load_dataset` takes to find the images again; None if they are held in memory."""
        if self.source is not None:
            return str(self.source.absolute())
        return None if self.root is None else str(self.root.resolve())

    @property
    def small(self) -> bool:
        """Whether a small network trained from scratch suits the images."""
        return self.image_size <= SMALL_SIDE

    def indices(self, domain: int) -> np.ndarray:
        """Return the indices of a domain's images, in order."""
        return np.flatnonzero(self.domain_of == domain)

    def split(self, domain: int, trial: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of a domain's training and validation images, in shuffled order.

        Images of one group stay together. A group with images in several domains is for training in all of them.
        """
        indices = self.indices(domain)
        groups = None if self.groups is None else np.where(self.in_several_domains, -1, self.groups)[indices]
        train, validation = train_val_indices(len(indices), trial, domain, groups)
        if self.held_out is not None:
            order = indices[np.concatenate([train, validation])]
            published = [order[self.held_out[order] == part] for part in (0, 1)]
            if all(map(len, published)):
                return published[0], published[1]
        return indices[train], indices[validation]

    def find_shortages(self, least: int = MIN_DOMAIN_IMAGES) -> list[str]:
        """Describe each domain without validation images, and each class without images.

        Args:
            least: Number of images that is enough for a domain.
        """
        sizes = self.count_images()
        domains = [number for number, size in enumerate(sizes.sum(1).tolist()) if size < least]
        if least >= MIN_DOMAIN_IMAGES:
            domains = [number for number in range(len(self.domains)) if not len(self.split(number, trial=0)[1])]
        return [
            *map(self.describe_unsplit, domains),
            *(
                f"The class {name} has no image that can be read in any domain: add some, or remove its folders."
                for name, size in zip(self.classes, sizes.sum(0), strict=True)
                if not size
            ),
        ]

    def describe_unsplit(self, domain: int) -> str:
        """Say why a domain has no validation images, for an error."""
        name, indices = self.domains[domain], self.indices(domain)
        if self.groups is None or len(indices) < MIN_DOMAIN_IMAGES:
            return (
                f"The domain {name} has {plural(len(indices), 'image') if len(indices) else 'no images'} that can be "
                f"read; at least {MIN_DOMAIN_IMAGES} are needed to set a fifth of them aside for validation. Add "
                "images, or move the domain away."
            )
        number = len(np.unique(self.groups[indices]))
        if not self.in_several_domains[indices].any():
            return f"Domain {name} has one group; at least 2 are needed to set one aside for validation."
        return (
            f"The groups of domain {name} ({number}) also have images in other domains, so none can be set aside for "
            "validation. If these are different patients, name them differently, such as site-1 and site-2."
        )

    @cached_property
    def in_several_domains(self) -> np.ndarray:
        """Mask of the images whose group has images in several domains, bool [N]."""
        if self.groups is None:
            return np.zeros(len(self), np.bool_)
        pairs = np.unique(np.stack([self.groups, self.domain_of]), axis=1)
        groups, domains = np.unique(pairs[0], return_counts=True)
        return np.isin(self.groups, groups[domains > 1])

    def find_domain(self, name: str) -> int:
        """Return the number of a domain, given its name or letter in any case; exact names go first."""
        name = normalize_unicode(name)
        for fold in (str, str.casefold):
            for names in (self.info.domains, self.info.letters):
                folded = [fold(known) for known in names]
                if fold(name) in folded:
                    return folded.index(fold(name))
        pairs = zip(self.info.domains, self.info.letters, strict=True)
        choices = [domain if letter == domain else f"{domain} ({letter})" for domain, letter in pairs]
        raise UnknownNameError("domain", name, self.domains, f"The domains of {self.name}: {', '.join(choices)}.")

    def without(self, indices: Iterable[int]) -> "Dataset":
        """Return the data set without these images."""
        kept = np.delete(np.arange(len(self)), list(indices))
        return replace(
            self,
            files=[self.files[index] for index in kept],
            labels=self.labels[kept],
            domain_of=self.domain_of[kept],
            pixels=None if self.pixels is None else self.pixels[kept],
            groups=None if self.groups is None else self.groups[kept],
            held_out=None if self.held_out is None else self.held_out[kept],
        )

    @property
    def metric(self) -> str:
        """The metric of its tables, see `choose_metric`."""
        return choose_metric(self.name, self.count_images().sum(0).tolist())

    def with_image_size(self, image_size: int) -> "Dataset":
        """Return the data set with another side of the network's input."""
        return replace(self, info=replace(self.info, image_size=image_size))

    def count_images(self) -> np.ndarray:
        """Count the images of each domain and class: int64 [domains, classes]."""
        counts = np.zeros((len(self.domains), len(self.classes)), dtype=np.int64)
        np.add.at(counts, (self.domain_of, self.labels), 1)
        return counts

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of domains, classes, groups and file names, independent of the folder's place and name."""
        digest = hashlib.sha256()
        for part in (*self.domains, "", *self.classes, ""):
            digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
        if self.source is not None:  # the file's name does not tell the class
            groups = self._first_members()
            for number, (domain, label) in enumerate(zip(self.domain_of.tolist(), self.labels.tolist(), strict=True)):
                digest.update(f"{domain}/{label}/{groups[number]}/".encode())
                digest.update(self.files[number].encode("utf-8", "surrogateescape") + b"\0")
            return digest.hexdigest()
        for domain, file in zip(self.domain_of.tolist(), self.files, strict=True):
            _, _, below = file.partition("/")  # the domain's folder may have another of its names
            digest.update(f"{domain}/{below}".encode("utf-8", "surrogateescape") + b"\0")
        return digest.hexdigest()

    def _first_members(self) -> list[int]:
        """Return the index of the first image of each image's group, which does not depend on the names of groups."""
        if self.groups is None:
            return [-1] * len(self)
        _, first, inverse = np.unique(self.groups, return_index=True, return_inverse=True)
        members: list[int] = first[inverse].tolist()
        return members


def describe_custom(name: str, domains: Sequence[str], num_classes: int) -> DatasetInfo:
    """Describe a folder or table that is no data set of the registry."""
    name = normalize_unicode(name)
    if lookup(name):
        name = f"own-{name}"  # nobody shall take its results for results on the published data set
    names = tuple(map(normalize_unicode, domains))
    return DatasetInfo(name, names, short_names(names), num_classes, eval_every=100)


def check_outside(dataset: Dataset, out: str | Path) -> None:
    """Raise an error if results would lie among the images, where their folder would count as a domain."""
    if dataset.root is None or (dataset.source is not None and dataset.source.is_table):
        return
    root, target = dataset.root.resolve(), Path(out).resolve()
    if target.is_relative_to(root) and not any(part.startswith(".") for part in target.relative_to(root).parts):
        raise AidgnError(
            f"The results in {out} would lie in {dataset.root}, among the images, and count as a domain. Choose a "
            "folder outside with --out."
        )


def check_problems(dataset: Dataset, problems: Sequence[str], tolerant: bool) -> Dataset:
    """Raise an error that lists all problems of a data set; if `tolerant`, return the data set with its problems."""
    if not tolerant and (problems := [*problems, *dataset.find_shortages(least=1)]):
        raise AidgnError("\n".join(problems))
    return replace(dataset, problems=problems)


def find_name_clashes(root: Path, class_folders: Mapping[str, Iterable[str]]) -> list[str]:
    """Describe names that are most likely one name, written in two ways.

    Classes must differ in more than case, spaces, _ and -, domains in more than case and spaces: one domain must not
    be both source and target.
    """
    problems = []
    classes: dict[str, tuple[str, str]] = {}
    for folder, names in class_folders.items():
        for name in names:
            other, other_folder = classes.setdefault(normalize_name(name), (name, folder))
            if other != name:
                problems.append(
                    f"{root} has the classes {other_folder}/{other} and {folder}/{name}: rename one, to the other's "
                    "name if they are one class, to a clearly different name if not."
                )
    domains: dict[str, str] = {}
    for name in map(normalize_unicode, class_folders):
        key = " ".join(name.split()).casefold()
        if key in domains:
            same = domains[key] == name
            clash = f"the domains '{domains[key]}' and '{name}', which differ only in case or spaces"
            if same:
                clash = f"two domains that read {name}, written differently in bytes"
            problems.append(f"{root} has {clash}: merge them if they are one domain, or rename one if not.")
        domains[key] = name
    return problems
