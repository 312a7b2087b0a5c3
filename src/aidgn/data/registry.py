"""The data sets that are known by name: domains in the order of the tables, sizes, and the settings of their runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aidgn.errors import AidgnError, did_you_mean

SMALL_SIDE = 64  # of images that a small network from scratch suits


@dataclass(frozen=True)
class DatasetInfo:
    """One data set. `letters` name the domains in tables; `counts` is empty where no count is published."""

    name: str
    folder: str  # its name on disk
    domains: tuple[str, ...]
    letters: tuple[str, ...]
    number_of_classes: int
    counts: Mapping[str, int]  # images per domain
    classes: tuple[str, ...] = ()  # empty: taken from the folder
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # images per class, by domain
    other_counts: Mapping[str, int] = field(default_factory=dict)  # images per domain of a second accepted copy
    domain_aliases: Mapping[str, str] = field(default_factory=dict)  # other names of domain folders
    image_size: int = 224
    augment: bool = True
    eval_every: int = 300
    steps: int = 5000
    lr_milestones: tuple[int, ...] = ()

    def order(self, folders: Iterable[str]) -> list[str] | None:
        """`folders` in the order of the domains they stand for, None unless they are exactly these domains.

        A domain folder may bear the domain's name, its letter or an alias, in any case, with or without _, - and space.
        """
        known = {normalize_name(alias): domain for alias, domain in self.domain_aliases.items()}
        known |= {normalize_name(letter): domain for letter, domain in zip(self.letters, self.domains, strict=True)}
        known |= {normalize_name(domain): domain for domain in self.domains}
        meant = [(known.get(normalize_name(folder)), folder) for folder in folders]
        if sorted(str(domain) for domain, _ in meant) != sorted(self.domains):
            return None
        return [dict(meant)[domain] for domain in self.domains]


def normalize_name(name: str) -> str:
    """The name without case, spaces, _ and -: OfficeHome, office_home and Office-Home are one."""
    return name.casefold().translate({ord(character): None for character in " _-"})


OFFICE_HOME_CLASSES = (
    "Alarm_Clock",
    "Backpack",
    "Batteries",
    "Bed",
    "Bike",
    "Bottle",
    "Bucket",
    "Calculator",
    "Calendar",
    "Candles",
    "Chair",
    "Clipboards",
    "Computer",
    "Couch",
    "Curtains",
    "Desk_Lamp",
    "Drill",
    "Eraser",
    "Exit_Sign",
    "Fan",
    "File_Cabinet",
    "Flipflops",
    "Flowers",
    "Folder",
    "Fork",
    "Glasses",
    "Hammer",
    "Helmet",
    "Kettle",
    "Keyboard",
    "Knives",
    "Lamp_Shade",
    "Laptop",
    "Marker",
    "Monitor",
    "Mop",
    "Mouse",
    "Mug",
    "Notebook",
    "Oven",
    "Pan",
    "Paper_Clip",
    "Pen",
    "Pencil",
    "Postit_Notes",
    "Printer",
    "Push_Pin",
    "Radio",
    "Refrigerator",
    "Ruler",
    "Scissors",
    "Screwdriver",
    "Shelf",
    "Sink",
    "Sneakers",
    "Soda",
    "Speaker",
    "Spoon",
    "TV",
    "Table",
    "Telephone",
    "ToothBrush",
    "Toys",
    "Trash_Can",
    "Webcam",
)
TEN_DIGITS = tuple("0123456789")

DATASETS: dict[str, DatasetInfo] = {
    entry.name: entry
    for entry in (
        DatasetInfo(
            "PACS",
            "PACS",
            ("art_painting", "cartoon", "photo", "sketch"),
            ("A", "C", "P", "S"),
            7,
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
            "VLCS",
            ("Caltech101", "LabelMe", "SUN09", "VOC2007"),
            ("C", "L", "S", "V"),
            5,
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
            "office_home",
            ("Art", "Clipart", "Product", "Real World"),
            ("A", "C", "P", "R"),
            65,
            counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
            classes=OFFICE_HOME_CLASSES,
            eval_every=100,
            lr_milestones=(2000, 4000),
        ),
        # Published with 24788 images; annotations corrected since leave 24330 in the copy that can be downloaded today.
        DatasetInfo(
            "TerraIncognita",
            "terra_incognita",
            ("location_100", "location_38", "location_43", "location_46"),
            ("L100", "L38", "L43", "L46"),
            10,
            counts={"location_100": 4879, "location_38": 9767, "location_43": 4020, "location_46": 6122},
            other_counts={"location_100": 4741, "location_38": 9736, "location_43": 3970, "location_46": 5883},
            classes=("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"),
            eval_every=100,
        ),
        DatasetInfo(
            "DomainNet",
            "domain_net",
            ("clip", "info", "paint", "quick", "real", "sketch"),
            ("clip", "info", "paint", "quick", "real", "sketch"),
            345,
            counts={"clip": 48129, "info": 51605, "paint": 72266, "quick": 172500, "real": 172947, "sketch": 69128},
            domain_aliases={"clipart": "clip", "infograph": "info", "painting": "paint", "quickdraw": "quick"},
            eval_every=1000,
            steps=15000,
        ),
        # The 70000 images of MNIST dealt out to the domains in turn.
        DatasetInfo(
            "RotatedMNIST",
            "RotatedMNIST",
            ("0", "15", "30", "45", "60", "75"),
            ("0", "15", "30", "45", "60", "75"),
            10,
            counts={"0": 11667, "15": 11667, "30": 11667, "45": 11667, "60": 11666, "75": 11666},
            classes=TEN_DIGITS,
            image_size=28,
            augment=False,
        ),
        DatasetInfo(
            "ColoredMNIST",
            "ColoredMNIST",
            ("+90%", "+80%", "-90%"),
            ("+90%", "+80%", "-90%"),
            2,
            counts={"+90%": 23334, "+80%": 23333, "-90%": 23333},
            classes=("0", "1"),
            image_size=28,
            augment=False,
        ),
        # Comes with the package (digits.py).
        DatasetInfo(
            "digits",
            "digits",
            ("ink", "chalk", "poster", "outline"),
            ("I", "C", "P", "O"),
            10,
            counts={"ink": 450, "chalk": 449, "poster": 449, "outline": 449},
            classes=TEN_DIGITS,
            image_size=28,
            augment=False,
            eval_every=25,
            steps=150,
        ),
    )
}


def is_registered(name: str) -> bool:
    """Whether it is a name of the catalogue, not a folder; there may be a folder of that name."""
    return "/" not in name and normalize_name(name) in map(normalize_name, DATASETS)


def find_entry(name: str) -> DatasetInfo:
    """The data set of this name (case, _ and - do not matter), or an error that suggests the nearest."""
    for entry in DATASETS.values():
        if normalize_name(entry.name) == normalize_name(name):
            return entry
    raise AidgnError(
        f"There is no data set and no folder {name}.{did_you_mean(name, DATASETS)} The data sets known by "
        f"name are {', '.join(DATASETS)}; your own is given by its folder."
    )
