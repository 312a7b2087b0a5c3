"""A data set: images of classes in several domains, from folders ROOT/<domain>/<class>/<image> or held in memory."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from aidgn.data.images import IMAGE_SUFFIXES
from aidgn.data.registry import (
    SMALL_SIDE,
    DatasetInfo,
    get_info,
    lookup,
    normalize_name,
    normalize_unicode,
    short_names,
)
from aidgn.errors import AidgnError, UnknownNameError

LAYOUT = "A data set is a folder with one folder per domain, in each of them one folder per class with its images."


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
    """

    info: DatasetInfo
    classes: list[str]
    files: list[str]
    labels: np.ndarray
    domain_of: np.ndarray
    root: Path | None = None
    pixels: np.ndarray | None = None
    ignored: list[str] = field(default_factory=list)

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
    def small(self) -> bool:
        """Whether a small network trained from scratch suits the images."""
        return self.image_size <= SMALL_SIDE

    def indices(self, domain: int) -> np.ndarray:
        """Return the indices of a domain's images, in order."""
        return np.flatnonzero(self.domain_of == domain)

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
        )

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
        """SHA-256 of domains, classes and file names, independent of the folder's place and name."""
        digest = hashlib.sha256()
        for part in (*self.domains, "", *self.classes, ""):
            digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
        for domain, file in zip(self.domain_of.tolist(), self.files, strict=True):
            _, _, below = file.partition("/")  # the domain's folder may have another of its names
            digest.update(f"{domain}/{below}".encode("utf-8", "surrogateescape") + b"\0")
        return digest.hexdigest()


# Loading ------------------------------------------------------------------------------------------------------------


def load_dataset(name_or_folder: str | Path, data_dir: str | Path | None = None) -> Dataset:
    """Load a data set by its name or from its folder.

    Args:
        name_or_folder: A name in `DATASETS`, in any case, or a folder ROOT/<domain>/<class>/<image>.
        data_dir: Folder of data sets; a named one is looked for there, in $AIDGN_DATA and in ./data.
    """
    given = str(name_or_folder)
    if isinstance(name_or_folder, Path) or "/" in given or os.sep in given:
        return load_folder(Path(name_or_folder))
    if lookup(given) is None and Path(given).exists():
        return load_folder(Path(given))
    info = get_info(given)
    if info.name == "digits":
        from aidgn.data.digits import load_digits

        return load_digits()
    parents = [Path(parent) for parent in (data_dir, os.environ.get("AIDGN_DATA"), "data") if parent]
    for parent in parents:
        for folder in list_folders(parent, "", []) if parent.is_dir() else ():
            if normalize_name(folder) == normalize_name(info.name):
                return load_folder(parent / folder, info)
    if Path(given).is_dir():
        return load_folder(Path(given), info)
    raise AidgnError(
        f"{info.name} is not on this disk; looked for {' and '.join(str(parent / info.folder) for parent in parents)}. "
        f"Get it with `aidgn data download {info.name}`, or say where it is with --data-dir or $AIDGN_DATA."
    )


def load_folder(root: Path, info: DatasetInfo | None = None) -> Dataset:
    """Load the data set in ROOT/<domain>/<class>/<image>.

    Args:
        root: The folder.
        info: What the folder must hold. By default the data set in `DATASETS` whose name and domains the folder has,
            else a data set with the folder's own name and domains.
    """
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise AidgnError(f"{root} {problem}. {LAYOUT}")
    ignored: list[str] = []
    folders = list_folders(root, "", ignored)
    if not folders:
        raise AidgnError(f"{root} has no folders, so no domains. {LAYOUT}")
    info = info or recognize(root, folders)
    if info:
        ordered = info.order_folders(folders)
        if ordered is None:
            raise AidgnError(
                f"{root} should have the domains {', '.join(info.domains)} of {info.name}, but has "
                f"{', '.join(folders)}. Download it again with `aidgn data download {info.name}`, or give the "
                "folder's path to use it as your own data set."
            )
        folders = ordered

    class_folders = {folder: list_class_folders(root, folder, ignored) for folder in folders}
    classes = sorted(set().union(*class_folders.values()))
    if len(classes) < 2:
        raise too_few_classes(root, folders, classes, ignored)
    check_class_names(root, class_folders)
    files: list[str] = []
    counts = np.zeros((len(folders), len(classes)), dtype=np.int64)
    for domain, folder in enumerate(folders):
        above = (os.path.realpath(root), os.path.realpath(root / folder))
        for label, name in enumerate(classes):
            parents = [f"{folder}/{below}" for below in class_folders[folder].get(name, [])]
            images = sorted(image for parent in parents for image in walk_images(root, parent, ignored, above))
            counts[domain, label] = len(images)
            files += [f"{parent}/{image}" for parent, image in images]
    for folder, total in zip(folders, counts.sum(1), strict=True):
        if not total:
            suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
            raise AidgnError(f"The domain {folder} in {root} has no images ({suffixes}). Add some, or move it away.")
    for name, total in zip(classes, counts.sum(0), strict=True):
        if not total:
            raise AidgnError(f"The class {name} in {root} has no images in any domain: remove its folders.")
    return Dataset(
        info or describe_folder(root, folders, len(classes)),
        classes,
        files,
        labels=np.tile(np.arange(len(classes)), len(folders)).repeat(counts.ravel()),
        domain_of=np.arange(len(folders)).repeat(counts.sum(1)),
        root=root,
        ignored=sorted(ignored),
    )


def recognize(root: Path, folders: Sequence[str]) -> DatasetInfo | None:
    """Find the data set in `DATASETS` whose name and domains this folder has."""
    info = lookup(root.resolve().name)
    return info if info and info.order_folders(folders) else None


def describe_folder(root: Path, folders: Sequence[str], num_classes: int) -> DatasetInfo:
    """Make the description of a user's own folder."""
    name = normalize_unicode(root.resolve().name)
    if lookup(name):
        name = f"own-{name}"  # its results must not be taken for results on the published data set
    domains = tuple(map(normalize_unicode, folders))
    check_domain_names(root, domains)
    return DatasetInfo(name, domains, short_names(domains), num_classes, eval_every=100)


def check_outside(dataset: Dataset, out: str | Path) -> None:
    """Raise an error if results would lie among the images, where their folder would count as a domain."""
    if dataset.root is None:
        return
    root, target = dataset.root.resolve(), Path(out).resolve()
    if target.is_relative_to(root) and not any(part.startswith(".") for part in target.relative_to(root).parts):
        raise AidgnError(
            f"The results in {out} would lie in {dataset.root}, among the images, and count as a domain. Choose a "
            "folder outside with --out."
        )


def too_few_classes(root: Path, folders: Sequence[str], classes: Sequence[str], ignored: Sequence[str]) -> AidgnError:
    """Compose the error for fewer than two classes; it names a domain whose images lie outside class folders."""
    present = f"only the class {classes[0]}" if classes else "no class folders"
    message = f"{root} has {present} in its domains {', '.join(folders)}; two classes are needed. {LAYOUT}"
    loose = [file for file in ignored if file.count("/") == 1 and Path(file).suffix.lower() in IMAGE_SUFFIXES]
    if loose and not classes:
        message += (
            f" Images lie directly in {loose[0].partition('/')[0]}: if that is a class, put the class folders into "
            "one folder for each domain."
        )
    return AidgnError(message)


def check_class_names(root: Path, class_folders: Mapping[str, Iterable[str]]) -> None:
    """Refuse class names that differ only in case, spaces, _ and -: most likely one class was written in two ways."""
    seen: dict[str, tuple[str, str]] = {}
    for folder, names in class_folders.items():
        for name in names:
            other, other_folder = seen.setdefault(normalize_name(name), (name, folder))
            if other != name:
                raise AidgnError(
                    f"{root} has the class folders {other_folder}/{other} and {folder}/{name}: rename one, to "
                    "the other's name if they are one class, to a clearly different name if not."
                )


def check_domain_names(root: Path, names: Sequence[str]) -> None:
    """Refuse domain names that differ only in case and spaces: one domain must not be both source and target."""
    seen: dict[str, str] = {}
    for name in names:
        key = " ".join(name.split()).casefold()
        other = seen.get(key)
        if other == name:
            raise AidgnError(f"{root} has two folders that read {name}, written differently in bytes: merge them.")
        if other is not None:
            raise AidgnError(
                f"{root} has the domain folders '{other}' and '{name}', which differ only in case or spaces: merge "
                "them if they are one domain, or rename one if not."
            )
        seen[key] = name


# Folders ------------------------------------------------------------------------------------------------------------


def scan(root: Path, below: str) -> list[os.DirEntry[str]]:
    """List a folder without hidden files."""
    try:
        with os.scandir(root / below) as entries:
            return [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
    except PermissionError:
        raise AidgnError(f"The folder {root / below} cannot be read: permission denied.") from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_pipe(entry: os.DirEntry[str]) -> bool:
    """Whether it is a pipe, socket or device, which could be read for ever. A dead link is none of these."""
    try:
        return not entry.is_file() and Path(entry.path).exists()
    except OSError:  # a link to itself
        return False


def list_folders(root: Path, below: str, ignored: list[str]) -> list[str]:
    """List the names of the folders in a folder, sorted; add its files to `ignored`."""
    names = []
    for entry in scan(root, below):
        if is_folder(entry):
            names.append(entry.name)
        else:
            ignored.append(f"{below}/{entry.name}" if below else entry.name)
    return sorted(names)


def list_class_folders(root: Path, domain: str, ignored: list[str]) -> dict[str, list[str]]:
    """List the folders of each class in a domain; one class has several if its name is written in several forms."""
    folders: dict[str, list[str]] = defaultdict(list)
    for folder in list_folders(root, domain, ignored):
        folders[normalize_unicode(folder)].append(folder)
    return folders


def walk_images(root: Path, below: str, ignored: list[str], above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield (folder, name) of the images in a folder and all folders below it.

    Links are followed, except to a folder that they lie in.

    Args:
        root: The folder that yielded folders are relative to.
        below: Where to start, relative to `root`.
        ignored: Other files are added to this list.
        above: Real paths of the folders around `below`.
    """
    real = os.path.realpath(root / below)
    if real in above:
        return
    for entry in scan(root, below):
        if is_folder(entry):
            yield from walk_images(root, f"{below}/{entry.name}", ignored, (*above, real))
            continue
        suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122, for half a million names
        if suffix in IMAGE_SUFFIXES and not is_pipe(entry):
            yield below, entry.name
        else:
            ignored.append(f"{below}/{entry.name}")
