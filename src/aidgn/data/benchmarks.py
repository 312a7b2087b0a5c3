"""Load WILDS, SVIRO and Spawrious from the folders of their archives, which are not ROOT/<domain>/<class>."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aidgn.data.dataset import Dataset
from aidgn.data.folders import walk_images
from aidgn.data.registry import SPAWRIOUS_CLASSES, DatasetInfo
from aidgn.data.source import DataSource
from aidgn.data.table import arrange
from aidgn.data.table_reader import read_table
from aidgn.errors import AidgnError

OFFICIAL = "-official"  # ends the names of data sets with the published training and validation images
HELD_OUT = {"train": False, "id_val": True, "val": True}  # on the sources; other splits are neither
# Published validation images of other domains are not used: runs select steps by validation images of their sources.
Row = tuple[str, str, str, bool | None]  # file, class, domain, whether it is held out for validation


def is_unpacked(root: Path, info: DatasetInfo) -> bool:
    """Return whether a folder has the layout of the data set's archives instead of ROOT/<domain>/<class>."""
    return bool(info.marker) or (info.name == "SVIRO" and find_seats(root, info) is not None)


def load_benchmark(root: Path, info: DatasetInfo, tolerant: bool = False) -> Dataset:
    """Load a data set from a folder with the layout of its archives."""
    marker = root / info.marker
    if not marker.exists():
        raise AidgnError(f"{root} has no {info.marker}, so it is not {info.name}. Get it from {info.page}.")
    family = info.name.removesuffix(OFFICIAL)
    read: Callable[[Path, DatasetInfo], list[Row]] = READERS.get(family, read_spawrious)
    rows = read(root, info)
    absent = [name for name in info.domains if name not in {domain for _, _, domain, _ in rows}]
    if absent:
        raise AidgnError(f"{root} has no image of {', '.join(absent)}, so it is not all of {info.name}.")
    files, labels, domains, held_out = zip(*rows, strict=True)
    return arrange(
        DataSource(str(root)),
        root,
        [str(root / file) for file in files],
        labels,
        domains,
        None,
        tolerant=tolerant,
        info=info,
        held_out=held_out if info.name.endswith(OFFICIAL) else None,
    )


def read_columns(path: Path, *names: str) -> Iterator[tuple[Any, ...]]:
    """Read columns of a table, row by row."""
    table = read_table(path)
    return zip(*(table.texts("file", name, required=False) for name in names), strict=True)


def read_camelyon(root: Path, info: DatasetInfo) -> list[Row]:
    """Read hospitals as domains; hospital 1 validates and hospital 2 tests in WILDS."""
    rows: list[Row] = []
    for patient, node, x, y, tumor, center, split in read_columns(
        root / info.marker, "patient", "node", "x_coord", "y_coord", "tumor", "center", "split"
    ):
        slide = f"patient_{patient}_node_{node}"
        file = f"patches/{slide}/patch_{slide}_x_{x}_y_{y}.png"
        held_out = None if center == "2" else {"0": False, "1": True}.get(split)
        if f"hospital{center}" in info.domains:
            rows.append((file, info.classes[int(tumor)], f"hospital{center}", held_out))
    return rows


def read_iwildcam(root: Path, info: DatasetInfo) -> list[Row]:
    """Read all test cameras as one domain, and spread the training cameras over eight domains."""
    names = dict(read_columns(root / "categories.csv", "y", "name"))
    rows: list[Row] = []
    for file, y, location, split in read_columns(root / info.marker, "filename", "y", "location_remapped", "split"):
        domain = split if split in ("val", "test") else f"train{int(location) % 8}"
        if domain in info.domains:
            rows.append((f"train/{file}", names.get(y, y), domain, HELD_OUT.get(split)))
    return rows


def read_fmow(root: Path, info: DatasetInfo) -> list[Row]:
    """Read world regions as domains.

    In the official data set, images before 2013 train or validate, images of the split `test` from 2016 on are the
    domain `test`, and others are left out.
    """
    region_of = dict(read_columns(root / "country_code_mapping.csv", "alpha-3", "region"))
    rows: list[Row] = []
    columns = read_columns(root / info.marker, "category", "country_code", "timestamp", "split")
    for number, (category, country, timestamp, split) in enumerate(columns):
        domain = region_of.get(country, "Other")
        if info.name.endswith(OFFICIAL) and (year := int(timestamp[:4])) >= 2013:
            domain = "test" if year >= 2016 and split == "test" else ""
        if split != "seq" and domain:  # sequestered
            rows.append((f"images/rgb_img_{number}.png", category, domain, HELD_OUT.get(split)))
    return rows


SEATS = ("grayscale", "RGB")  # folders of the pictures of single seats; DomainBed's copy is grey


def find_seats(root: Path, info: DatasetInfo) -> dict[str, Path] | None:
    """Return the folder of each car's training pictures; None if the folder has no car of SVIRO's archives.

    An archive holds <car>/train/<seats>/<class>/<picture>. Many programs unpack it into a folder with its name.
    """
    train_folders = {car: [*root.glob(f"{car}/train"), *root.glob(f"*/{car}/train")] for car in info.domains}
    if not any(train_folders.values()):
        return None
    candidates = []
    for seats in SEATS:
        folder_of: dict[str, Path] = {}
        for car, paths in train_folders.items():
            folder = next((path / seats for path in paths if (path / seats).is_dir()), None)
            if folder is not None:
                folder_of[car] = folder
        candidates.append(folder_of)
    return max(candidates, key=len)


def read_sviro(root: Path, info: DatasetInfo) -> list[Row]:
    """Read cars as domains. The classes are the numbers of SVIRO, from 0 (empty seat) to 6 (empty child seat)."""
    seats = find_seats(root, info)
    if not seats:
        raise AidgnError(
            f"{root} has no pictures of single seats, <car>/train/{SEATS[0]}/<class>. Get the archives for "
            f"classification from {info.page}."
        )
    rows: list[Row] = []
    for car, folder in seats.items():
        below = str(folder.relative_to(root))
        files = sorted(f"{parent}/{file}" for parent, file in walk_images(root, below, []))
        rows.extend((file, file[len(below) + 1 :].split("/")[0], car, None) for file in files)
    return rows


# Backgrounds of bulldog, dachshund, labrador and corgi in training and in the test, and the background of all.
SPAWRIOUS = {
    "O2O_easy": ("desert jungle dirt snow", "dirt snow desert jungle", "beach"),
    "O2O_medium": ("mountain beach dirt jungle", "jungle dirt beach snow", "desert"),
    "O2O_hard": ("jungle mountain snow desert", "mountain snow desert jungle", "beach"),
    "M2M_easy": ("desert mountain dirt jungle", "dirt jungle mountain desert", ""),
    "M2M_medium": ("beach snow mountain desert", "desert mountain beach snow", ""),
    "M2M_hard": ("dirt jungle snow beach", "snow beach dirt jungle", ""),
}
SPAWRIOUS_IMAGES = 3168  # of a class on a background
SPAWRIOUS_SHARES = (0.97, 0.87)  # of a class on its background, in the two groups for training


def read_spawrious(root: Path, info: DatasetInfo) -> list[Row]:
    """Read the two groups for training and the test of a benchmark.

    One to one (O2O): each class has one background, apart from a few images on a background that all classes share.
    Many to many (M2M): two classes share two backgrounds and exchange them between the groups.
    """
    train, test, shared = SPAWRIOUS[info.name.removeprefix("Spawrious")]
    rows: list[Row] = []

    def add(domain: str, folder: int, place: str, name: str, limit: int | None = None) -> None:
        below = f"{folder}/{place}/{name}"
        files = sorted(f"{parent}/{file}" for parent, file in walk_images(root, below, []))
        rows.extend((file, name, domain, None) for file in files[:limit])

    for group, share in enumerate(SPAWRIOUS_SHARES):
        domain = f"SC_group_{group + 1}"
        for number, name in enumerate(SPAWRIOUS_CLASSES):
            swapped = number if shared else number ^ group  # 0 and 1, 2 and 3 change places
            count = int(share * SPAWRIOUS_IMAGES) if shared else SPAWRIOUS_IMAGES
            add(domain, group if shared else 0, train.split()[swapped], name, count)
            if shared:
                add(domain, group, shared, name, SPAWRIOUS_IMAGES - count)
            add("Test", group if shared else 0, test.split()[swapped], name)
    return rows


READERS: dict[str, Callable[[Path, DatasetInfo], list[Row]]] = {
    "Camelyon17": read_camelyon,
    "iWildCam": read_iwildcam,
    "FMoW": read_fmow,
    "SVIRO": read_sviro,
}
