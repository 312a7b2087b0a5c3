"""The registry against the published sizes, and the finding of entries and domains by name."""

import subprocess
import sys

import pytest

from aidgn.data.registry import DATASETS, get_info
from aidgn.errors import UnknownNameError

PUBLISHED = {  # images, classes, domains
    "PACS": (9991, 7, 4),
    "VLCS": (10729, 5, 4),
    "OfficeHome": (15588, 65, 4),
    "TerraIncognita": (24788, 10, 4),
    "DomainNet": (586575, 345, 6),
    "RotatedMNIST": (70000, 10, 6),
    "ColoredMNIST": (70000, 2, 3),
    "digits": (1797, 10, 4),
    "Camelyon17": (455954, 2, 5),
    "Camelyon17-official": (421050, 2, 4),
}
UNCOUNTED = {"iWildCam-official": 182, "FMoW": 62, "FMoW-official": 62, "SVIRO": 7}  # classes
UNCOUNTED |= {f"Spawrious{kind}_{level}": 4 for kind in ("O2O", "M2M") for level in ("easy", "medium", "hard")}


def test_all_data_sets_are_there():
    assert set(DATASETS) == {*PUBLISHED, *UNCOUNTED}
    assert {name: DATASETS[name].num_classes for name in UNCOUNTED} == UNCOUNTED


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name):
    info = DATASETS[name]
    images, classes, domains = PUBLISHED[name]
    assert info.name == name
    assert sum(info.counts.values()) == images
    assert len(info.domains) == len(info.letters) == len(set(info.letters)) == domains
    assert set(info.counts) == set(info.domains)
    assert info.num_classes == classes
    if info.classes:
        assert len(info.classes) == classes
        assert list(info.classes) == sorted(info.classes)  # the order of folders


@pytest.mark.parametrize("name", ["PACS", "VLCS"])
def test_class_counts_add_up_to_the_domains(name):
    info = DATASETS[name]
    assert {domain: sum(counts) for domain, counts in info.class_counts.items()} == info.counts


def test_second_copy_of_terra_incognita():
    assert sum(DATASETS["TerraIncognita"].other_counts.values()) == 24330


def test_settings_of_the_protocol():
    assert {name: info.eval_every for name, info in DATASETS.items() if not info.page and name != "digits"} == {
        "PACS": 50,
        "VLCS": 50,
        "OfficeHome": 100,
        "TerraIncognita": 100,
        "DomainNet": 1000,
        "RotatedMNIST": 300,
        "ColoredMNIST": 300,
    }
    assert {name for name, info in DATASETS.items() if info.lr_milestones == (2000, 4000)} == {"PACS", "OfficeHome"}
    assert {name for name, info in DATASETS.items() if info.image_size == 28} == {
        "RotatedMNIST",
        "ColoredMNIST",
        "digits",
    }
    for info in DATASETS.values():
        assert info.image_size in (28, 96, 224)
        assert info.augment == (info.image_size > 28)
    assert DATASETS["DomainNet"].steps == 15000
    assert DATASETS["PACS"].steps == 5000


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("PACS", "PACS"),
        ("pacs", "PACS"),
        ("office_home", "OfficeHome"),
        ("Office-Home", "OfficeHome"),
        ("terra_incognita", "TerraIncognita"),
        ("domain_net", "DomainNet"),
        ("rotatedmnist", "RotatedMNIST"),
    ],
)
def test_get_info(given, name):
    assert get_info(given) is DATASETS[name]


def test_get_info_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="PCAS"):
        get_info("PCAS")


@pytest.mark.parametrize(
    ("name", "folders", "ordered"),
    [
        ("PACS", ["sketch", "photo", "cartoon", "art_painting"], ["art_painting", "cartoon", "photo", "sketch"]),
        ("PACS", ["S", "P", "C", "A"], ["A", "C", "P", "S"]),
        ("OfficeHome", ["Real_World", "Product", "Clipart", "Art"], ["Art", "Clipart", "Product", "Real_World"]),
        ("OfficeHome", ["RealWorld", "product", "clipart", "art"], ["art", "clipart", "product", "RealWorld"]),
        ("TerraIncognita", ["L46", "location_38", "L43", "L100"], ["L100", "location_38", "L43", "L46"]),
        (
            "DomainNet",
            ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"],
            ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"],
        ),
        ("ColoredMNIST", ["-90%", "+80%", "+90%"], ["+90%", "+80%", "-90%"]),
        ("PACS", ["sketch", "photo", "cartoon"], None),
        ("PACS", ["sketch", "photo", "cartoon", "art_painting", "extra"], None),
        ("PACS", ["sketch", "S", "photo", "cartoon", "art_painting"], None),
        ("PACS", ["a", "b", "c", "d"], None),
    ],
)
def test_domain_folders_by_any_of_their_names(name, folders, ordered):
    assert DATASETS[name].order_folders(folders) == ordered


def test_import_is_light():
    """The command line lists data sets without waiting for torch."""
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, aidgn.data; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "aidgn.data.registry" in loaded
    assert not {"torch", "torchvision", "sklearn", "scipy"} & set(loaded)
