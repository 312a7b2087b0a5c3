"""A data set: images of classes in domains, from folders ROOT/<domain>/<class>/<image> or embedded."""

import hashlib
import os
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from aidgn.data.images import IMAGE_SUFFIXES
from aidgn.data.registry import DATASETS, SMALL_SIDE, DatasetInfo, find_entry, normalize_name
from aidgn.errors import AidgnError, did_you_mean

LAYOUT = "A data set is a folder with one folder per domain, in each one folder per class, in these the images."


@dataclass(frozen=True, eq=False)
class Dataset:
    """Files sorted by domain, class folder and file name (the order of DomainBed), with the settings of a run."""

    name: str
    root: Path | None  # None: embedded
    domains: list[str]
    classes: list[str]
    letters: list[str]  # the domains' short names in tables
    files: list[str]  # below root, with /
    labels: np.ndarray  # int64 [N]
    domain_of: np.ndarray  # int64 [N]
    image_size: int
    augment: bool
    eval_every: int
    steps: int
    lr_milestones: tuple[int, ...] = ()
    pixels: np.ndarray | None = None  # uint8 [N, S, S, 3], of embedded data
    ignored: list[str] = field(default_factory=list)  # files and folders that are not part of it

    def __len__(self) -> int:
        return len(self.files)

    def indices(self, domain: int) -> np.ndarray:
        """Where the images of a domain are, in order."""
        return np.flatnonzero(self.domain_of == domain)

    def find_domain(self, name: str) -> int:
        """The number of a domain given by its name or letter."""
        name = normalize_unicode(name)
        for same in (str, str.casefold):
            for known in (self.domains, self.letters):
                for number, candidate in enumerate(known):
                    if same(candidate) == same(name):
                        return number
        choices = ", ".join(
            domain if letter == domain else f"{domain} ({letter})"
            for domain, letter in zip(self.domains, self.letters, strict=True)
        )
        raise AidgnError(f"{self.name} has no domain {name}.{did_you_mean(name, self.domains)} Its domains: {choices}.")

    def without(self, indices: Iterable[int]) -> "Dataset":
        """The data set less these images."""
        removed = set(map(int, indices))
        kept = np.array([index for index in range(len(self)) if index not in removed], dtype=np.int64)
        return replace(
            self,
            files=[self.files[index] for index in kept],
            labels=self.labels[kept],
            domain_of=self.domain_of[kept],
            pixels=None if self.pixels is None else self.pixels[kept],
        )

    @property
    def small(self) -> bool:
        """Whether a small network trained from scratch suits the images."""
        return self.image_size <= SMALL_SIDE

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of domains, classes and file names: the same wherever the folder lies and whatever it is called."""
        digest = hashlib.sha256()
        for part in (*self.domains, "", *self.classes, ""):
            digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
        for domain, file in zip(self.domain_of.tolist(), self.files, strict=True):
            below = file.partition("/")[2]  # the domain's folder may bear another of its names
            digest.update(f"{domain}/{below}".encode("utf-8", "surrogateescape") + b"\0")
        return digest.hexdigest()


# Loading ------------------------------------------------------------------------------------------------------------


def load_dataset(name_or_folder: str | Path, data_dir: str | Path | None = None) -> Dataset:
    """The data set of a name in the catalogue, looked for below `data_dir`, $AIDGN_DATA and ./data, or of a folder."""
    given = str(name_or_folder)
    if isinstance(name_or_folder, Path) or "/" in given or os.sep in given:
        return load_folder(Path(name_or_folder))
    entry = next((entry for entry in DATASETS.values() if normalize_name(entry.name) == normalize_name(given)), None)
    if entry is None:
        if not Path(given).exists():
            find_entry(given)  # says that there is none
        return load_folder(Path(given))
    if entry.name == "digits":
        from aidgn.data.digits import load_digits

        return load_digits()
    places = [Path(place) for place in (data_dir, os.environ.get("AIDGN_DATA"), "data") if place]
    for place in places:
        for folder in subfolders(place, "", []) if place.is_dir() else ():
            if normalize_name(folder) == normalize_name(entry.name):
                return load_folder(place / folder, entry)
    if Path(given).is_dir():
        return load_folder(Path(given), entry)
    looked = " and ".join(str(place / entry.folder) for place in places)
    raise AidgnError(
        f"{entry.name} is not on this disk; looked for {looked}. Get it with "
        f"`aidgn data download {entry.name}`, or say where it is with --data-dir or $AIDGN_DATA."
    )


def load_folder(root: Path, entry: DatasetInfo | None = None) -> Dataset:
    """The data set in ROOT/<domain>/<class>/<image>.

    It gets the settings, domain order and letters of `entry`, or of the catalogue's entry if both its name and its
    domains are that entry's.
    """
    if not root.exists():
        raise AidgnError(f"The folder {root} does not exist. {LAYOUT}")
    if not root.is_dir():
        raise AidgnError(f"{root} is not a folder. {LAYOUT}")
    ignored: list[str] = []
    folders = subfolders(root, "", ignored)
    if not folders:
        raise AidgnError(f"{root} has no folders, so no domains. {LAYOUT}")
    entry = entry or next(
        (
            known
            for known in DATASETS.values()
            if normalize_name(known.name) == normalize_name(root.resolve().name) and known.order(folders)
        ),
        None,
    )
    if entry:
        found, folders = folders, entry.order(folders) or []
        if not folders:
            raise AidgnError(
                f"{root} should have the domains {', '.join(entry.domains)} of {entry.name}, but has "
                f"{', '.join(found)}. Get it anew with `aidgn data download {entry.name}`, or give the "
                "folder's path to take it as your own data set."
            )

    class_folders: dict[str, dict[str, list[str]]] = {folder: defaultdict(list) for folder in folders}
    for folder in folders:
        for name in subfolders(root, folder, ignored):  # a name may be written in two ways
            class_folders[folder][normalize_unicode(name)].append(name)
    classes = sorted(set().union(*class_folders.values()))
    if len(classes) < 2:
        what = f"only the class {classes[0]}" if classes else "no class folders"
        direct = [
            file.partition("/")[0]
            for file in ignored
            if file.count("/") == 1 and Path(file).suffix.lower() in IMAGE_SUFFIXES
        ]
        hint = (
            (
                f" Images lie directly in {direct[0]}: if that is a class, put the class folders into one for each "
                "domain."
            )
            if direct and not classes
            else ""
        )
        raise AidgnError(
            f"{root} has {what} in its domains {', '.join(folders)}; two classes are needed. {LAYOUT}{hint}"
        )
    check_names(root, class_folders)

    files: list[str] = []
    counts = np.zeros((len(folders), len(classes)), dtype=np.int64)
    for domain, folder in enumerate(folders):
        above = (os.path.realpath(root), os.path.realpath(root / folder))
        for label, name in enumerate(classes):
            images = sorted(
                image
                for below in class_folders[folder][name]
                for image in walk(root, f"{folder}/{below}", ignored, above)
            )
            counts[domain, label] = len(images)
            files += [f"{parent}/{image}" for parent, image in images]
    for domain, folder in enumerate(folders):
        if not counts[domain].any():
            raise AidgnError(
                f"The domain {folder} in {root} has no images ({', '.join(sorted(IMAGE_SUFFIXES))}). Add "
                "some, or move the folder away."
            )
    for label, name in enumerate(classes):
        if not counts[:, label].any():
            raise AidgnError(f"The class {name} in {root} has no images in any domain: remove its folders.")

    own_name = normalize_unicode(root.resolve().name)
    if any(normalize_name(known) == normalize_name(own_name) for known in DATASETS):
        own_name = f"own-{own_name}"  # its results must not be taken for those of the published data set
    names = list(map(normalize_unicode, folders))
    check_domains(root, names)
    settings = entry or DatasetInfo(own_name, "", tuple(names), short_names(names), len(classes), {}, eval_every=100)
    return Dataset(
        name=settings.name,
        root=root,
        domains=list(settings.domains),
        classes=classes,
        letters=list(settings.letters),
        files=files,
        labels=np.tile(np.arange(len(classes)), len(folders)).repeat(counts.ravel()),
        domain_of=np.arange(len(folders)).repeat(counts.sum(1)),
        image_size=settings.image_size,
        augment=settings.augment,
        eval_every=settings.eval_every,
        steps=settings.steps,
        lr_milestones=settings.lr_milestones,
        ignored=sorted(ignored),
    )


def check_outside(dataset: Dataset, out: str | Path) -> None:
    """An error if results would lie among the images, where their folder would be taken for a domain."""
    if dataset.root is None:
        return
    root, place = dataset.root.resolve(), Path(out).resolve()
    if place.is_relative_to(root) and not any(part.startswith(".") for part in place.relative_to(root).parts):
        raise AidgnError(
            f"The results in {out} would lie in {dataset.root}, among the images, and be taken for a "
            "domain. Choose a folder outside with --out."
        )


def normalize_unicode(name: str) -> str:
    """A folder's name in one form of Unicode; one that is not UTF-8 is taken for Latin-1, as old archives have it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        written = os.fsencode(name)
        name = written.decode("latin-1")
        with suppress(UnicodeDecodeError):  # where the locale is the one that is not UTF-8
            name = written.decode()
    return unicodedata.normalize("NFC", name)


def check_names(root: Path, class_folders: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """A domain may lack a class. But names that differ only in case, spaces, _ and - are taken for a slip."""
    seen: dict[str, tuple[str, str]] = {}
    for folder, names in class_folders.items():
        for name in names:
            other, where = seen.setdefault(normalize_name(name), (name, folder))
            if other != name:
                raise AidgnError(
                    f"{root} has the class folders {where}/{other} and {folder}/{name}: rename one, to the "
                    "same name if they are one class, or to one that differs by more if not."
                )


def check_domains(root: Path, names: Sequence[str]) -> None:
    """Names that differ only in case and white space are taken for one domain, which must not be seen and unseen."""
    seen: dict[str, str] = {}
    for name in names:
        key = " ".join(name.split()).casefold()
        other = seen.get(key)
        if other == name:
            raise AidgnError(f"{root} has two folders that read {name}, written differently in bytes: merge them.")
        if other is not None:
            raise AidgnError(
                f"{root} has the domain folders '{other}' and '{name}', which differ only in case or "
                "spaces: merge them if they are one domain, or rename one if not."
            )
        seen[key] = name


def scan(root: Path, below: str) -> list[os.DirEntry[str]]:
    """What lies in a folder and is not hidden."""
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
    """Or a socket or device: it is there, but reading it may never end. A link to nothing is none."""
    try:
        return not entry.is_file() and Path(entry.path).exists()
    except OSError:  # a link to itself
        return False


def subfolders(root: Path, below: str, ignored: list[str]) -> list[str]:
    """The names of the folders in a folder, sorted; its files are added to `ignored`."""
    names = []
    for entry in scan(root, below):
        if is_folder(entry):
            names.append(entry.name)
        else:
            ignored.append(f"{below}/{entry.name}" if below else entry.name)
    return sorted(names)


def walk(root: Path, below: str, ignored: list[str], above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(folder, name) of the images below a folder, in folders below it too. Links are followed, but not to a folder
    they lie in (`above`)."""
    real = os.path.realpath(root / below)
    if real in above:
        return
    for entry in scan(root, below):
        if is_folder(entry):
            yield from walk(root, f"{below}/{entry.name}", ignored, (*above, real))
        elif (
            os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122, for half a million names
            and not is_pipe(entry)
        ):
            yield below, entry.name
        else:
            ignored.append(f"{below}/{entry.name}")


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """The shortest beginnings that tell the names apart, in capitals; the whole name where that takes more than 3."""

    def shorten(name: str) -> str:
        others = [other.upper() for other in names if other != name]
        for length in range(1, 4):
            if not any(other.startswith(name.upper()[:length]) for other in others):
                return name.upper()[:length]
        return name

    return tuple(map(shorten, names))
