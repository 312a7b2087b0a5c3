"""Data sets that are known by name, with the settings of their runs."""

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from aidgn.errors import UnknownNameError
from aidgn.metrics import are_uneven

SMALL_SIDE = 64  # a small network trained from scratch suits images of at most this side


@dataclass(frozen=True)
class DatasetInfo:
    """Names, published counts and settings of runs of a data set, known before its images are read."""

    name: str  # name in tables and records
    domains: tuple[str, ...]  # names of the domains, in the order of the tables
    letters: tuple[str, ...]  # short names of the domains in tables
    num_classes: int  # number of classes
    folder: str = ""  # name of its folder on disk
    counts: Mapping[str, int] = field(default_factory=dict)  # published images per domain; empty if none are published
    classes: tuple[str, ...] = ()  # names of the classes; empty if the folder decides
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # published images per class, by domain
    other_counts: Mapping[str, int] = field(default_factory=dict)  # images per domain of a second accepted copy
    domain_aliases: Mapping[str, str] = field(default_factory=dict)  # other names of domain folders
    image_size: int = 224  # side of the network's input in pixels
    augment: bool = True  # whether training images are augmented
    eval_every: int = 300  # steps between evaluations
    steps: int = 5000  # training steps
    lr_milestones: tuple[int, ...] = ()  # steps at which the learning rate is halved
    marker: str = ""  # file or folder by which its folder is known, if that is not ROOT/<domain>/<class>
    page: str = ""  # web page to get it from, if `aidgn data download` cannot
    metric: str = "accuracy"  # the metric of its published tables

    def matches(self, folder: str | Path) -> bool:
        """Return whether a folder looks like this data set."""
        path = Path(folder)
        if self.marker:
            return (path / self.marker).exists()
        if not path.is_dir():
            return False
        names = [entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        return self.order_folders(names) is not None

    def order_folders(self, folders: Iterable[str]) -> list[str] | None:
        """Put domain folders in the order of the domains; None unless they are exactly these domains.

        A folder may have the name, the letter or an alias of its domain, with any case, spaces, _ and -.
        """
        domain_of = {normalize_name(alias): domain for alias, domain in self.domain_aliases.items()}
        domain_of |= {normalize_name(letter): domain for letter, domain in zip(self.letters, self.domains, strict=True)}
        domain_of |= {normalize_name(domain): domain for domain in self.domains}
        pairs = [(domain_of.get(normalize_name(folder)), folder) for folder in folders]
        if sorted(str(domain) for domain, _ in pairs) != sorted(self.domains):
            return None
        folder_of = dict(pairs)
        return [folder_of[domain] for domain in self.domains]


def normalize_name(name: str) -> str:
    """Remove case, spaces, _ and - from a name: OfficeHome, office_home and Office-Home are the same."""
    return name.casefold().translate({ord(character): None for character in " _-"})


def normalize_unicode(name: str) -> str:
    """Put a folder's name into one form of Unicode; a name that is not UTF-8 is read as Latin-1, as in old archives."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raw = os.fsencode(name)
        name = raw.decode("latin-1")
        with suppress(UnicodeDecodeError):  # the name is UTF-8 but the locale is not
            name = raw.decode()
    return unicodedata.normalize("NFC", name)


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """Shorten names to their first one to three letters, in capitals, where no other name starts with these."""

    def shorten(name: str) -> str:
        others = [other.upper() for other in names if other != name]
        for length in range(1, 4):
            if not any(other.startswith(name.upper()[:length]) for other in others):
                return name.upper()[:length]
        return name

    return tuple(map(shorten, names))


OFFICE_HOME_CLASSES = """
Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards Computer Couch
Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork Glasses Hammer Helmet Kettle
Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes
Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon TV Table
Telephone ToothBrush Toys Trash_Can Webcam
"""
TEN_DIGITS = tuple("0123456789")
SPAWRIOUS_CLASSES = ("bulldog", "dachshund", "labrador", "corgi")  # in the order of the backgrounds in benchmarks.py
SVIRO_CARS = ("aclass", "escape", "hilux", "i3", "lexus", "tesla", "tiguan", "tucson", "x5", "zoe")
HOSPITALS = tuple(f"hospital{number}" for number in range(5))
REGIONS = ("Africa", "Americas", "Asia", "Europe", "Oceania", "Other")
WILDS = "https://wilds.stanford.edu/get_started"
CAMELYON = DatasetInfo(
    "Camelyon17",
    HOSPITALS,
    tuple(f"H{number}" for number in range(5)),
    num_classes=2,
    folder="camelyon17_v1.0",
    counts=dict(zip(HOSPITALS, (59436, 34904, 85054, 129838, 146722), strict=True)),
    classes=("normal", "tumor"),
    image_size=96,
    marker="metadata.csv",
    page=WILDS,
)
FMOW = DatasetInfo(
    "FMoW", REGIONS, REGIONS, 62, "fmow_v1.1", marker="rgb_metadata.csv", page=WILDS, eval_every=1000, steps=15000
)
CAMERAS = (*(f"train{number}" for number in range(8)), "test")

DATASETS: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo(
            "PACS",
            ("art_painting", "cartoon", "photo", "sketch"),
            ("A", "C", "P", "S"),
            num_classes=7,
            folder="PACS",
            counts={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
            classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
            class_counts={
                "art_painting": (379, 255, 285, 184, 201, 295, 449),
                "cartoon": (389, 457, 346, 135, 324, 288, 405),
                "photo": (189, 202, 182, 186, 199, 280, 432),
                "sketch": (772, 740, 753, 608, 816, 80, 160),
            },
            eval_every=50,
            lr_milestones=(2000, 4000),
        ),
        DatasetInfo(
            "VLCS",
            ("Caltech101", "LabelMe", "SUN09", "VOC2007"),
            ("C", "L", "S", "V"),
            num_classes=5,
            folder="VLCS",
            counts={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
            classes=("bird", "car", "chair", "dog", "person"),
            class_counts={
                "Caltech101": (237, 123, 118, 67, 870),
                "LabelMe": (80, 1209, 88, 42, 1237),
                "SUN09": (20, 932, 1036, 30, 1264),
                "VOC2007": (330, 699, 428, 420, 1499),
            },
            eval_every=50,
        ),
        DatasetInfo(
            "OfficeHome",
            ("Art", "Clipart", "Product", "Real World"),
            ("A", "C", "P", "R"),
            num_classes=65,
            folder="office_home",
            counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
            classes=tuple(OFFICE_HOME_CLASSES.split()),
            eval_every=100,
            lr_milestones=(2000, 4000),
        ),
        # Published with 24788 images. Corrected annotations leave 24330 in the copy that can be downloaded today.
        DatasetInfo(
            "TerraIncognita",
            ("location_100", "location_38", "location_43", "location_46"),
            ("L100", "L38", "L43", "L46"),
            num_classes=10,
            folder="terra_incognita",
            counts={"location_100": 4879, "location_38": 9767, "location_43": 4020, "location_46": 6122},
            other_counts={"location_100": 4741, "location_38": 9736, "location_43": 3970, "location_46": 5883},
            classes=("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"),
            eval_every=100,
        ),
        DatasetInfo(
            "DomainNet",
            ("clip", "info", "paint", "quick", "real", "sketch"),
            ("clip", "info", "paint", "quick", "real", "sketch"),
            num_classes=345,
            folder="domain_net",
            counts={"clip": 48129, "info": 51605, "paint": 72266, "quick": 172500, "real": 172947, "sketch": 69128},
            domain_aliases={"clipart": "clip", "infograph": "info", "painting": "paint", "quickdraw": "quick"},
            eval_every=1000,
            steps=15000,
        ),
        # Every sixth, or third, of the 70000 images of MNIST is in the same domain.
        DatasetInfo(
            "RotatedMNIST",
            ("0", "15", "30", "45", "60", "75"),
            ("0", "15", "30", "45", "60", "75"),
            num_classes=10,
            folder="RotatedMNIST",
            counts={"0": 11667, "15": 11667, "30": 11667, "45": 11667, "60": 11666, "75": 11666},
            classes=TEN_DIGITS,
            image_size=28,
            augment=False,
        ),
        DatasetInfo(
            "ColoredMNIST",
            ("+90%", "+80%", "-90%"),
            ("+90%", "+80%", "-90%"),
            num_classes=2,
            folder="ColoredMNIST",
            counts={"+90%": 23334, "+80%": 23333, "-90%": 23333},
            classes=("0", "1"),
            image_size=28,
            augment=False,
        ),
        # benchmarks.py reads the following.
        CAMELYON,
        replace(
            CAMELYON,
            name="Camelyon17-official",
            domains=tuple(name for name in HOSPITALS if name != "hospital1"),
            letters=("H0", "H2", "H3", "H4"),
            counts={name: count for name, count in CAMELYON.counts.items() if name != "hospital1"},
        ),
        DatasetInfo(
            "iWildCam-official",
            CAMERAS,
            CAMERAS,
            num_classes=182,
            folder="iwildcam_v2.0",
            marker="metadata.csv",
            page=WILDS,
            metric="macro_f1",
            eval_every=1000,
            steps=15000,
        ),
        FMOW,
        replace(FMOW, name="FMoW-official", domains=(*REGIONS, "test"), letters=(*REGIONS, "test")),
        DatasetInfo("SVIRO", SVIRO_CARS, SVIRO_CARS, 7, folder="sviro", page="https://sviro.kl.dfki.de"),
        *(
            DatasetInfo(
                f"Spawrious{correlation}_{level}",
                ("Test", "SC_group_1", "SC_group_2"),
                ("T", "G1", "G2"),
                num_classes=4,
                folder="spawrious224",
                classes=tuple(sorted(SPAWRIOUS_CLASSES)),
                marker="0",
                page="https://github.com/aengusl/spawrious",
            )
            for correlation in ("O2O", "M2M")
            for level in ("easy", "medium", "hard")
        ),
        # Part of the package (digits.py).
        DatasetInfo(
            "digits",
            ("ink", "chalk", "poster", "outline"),
            ("I", "C", "P", "O"),
            num_classes=10,
            folder="digits",
            counts={"ink": 450, "chalk": 449, "poster": 449, "outline": 449},
            classes=TEN_DIGITS,
            image_size=28,
            augment=False,
            eval_every=25,
            steps=150,
        ),
    )
}


def lookup(name: str) -> DatasetInfo | None:
    """Find the data set of this name, whatever its case, spaces, _ and -; None if there is none."""
    return next((info for info in DATASETS.values() if normalize_name(info.name) == normalize_name(name)), None)


def is_registered(name: str) -> bool:
    """Return whether this is the name of a data set in the registry, and not a path with /."""
    return "/" not in name and lookup(name) is not None


def choose_metric(name: str, class_images: Sequence[int]) -> str:
    """Return the metric of a data set's tables: the published one; for other data sets macro-F1 if classes are uneven.

    Args:
        name: Name of the data set.
        class_images: Images of each class; empty if unknown.
    """
    if name in DATASETS:
        return DATASETS[name].metric
    return "macro_f1" if are_uneven(class_images) else "accuracy"


def get_info(name: str) -> DatasetInfo:
    """Find the data set of this name, or raise an error that suggests the nearest name."""
    info = lookup(name)
    if info is None:
        advice = f"Data sets known by name: {', '.join(DATASETS)}. Give your own images by their folder."
        raise UnknownNameError("data set or folder", name, DATASETS, advice)
    return info
