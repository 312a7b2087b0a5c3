"""Folders with other levels than domain and class, and the doubt about folders that look like them."""

from pathlib import Path

import pytest
from PIL import Image

from aidgn.data import load_dataset
from aidgn.data.layout import doubt_layout
from aidgn.errors import AidgnError, ParameterError

SITES, CLASSES = ("north", "south"), ("ill", "well")


def write(root: Path, *folders: str) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8)).save(root / folder / f"{number}.png")
    return root


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    names = [f"{site}/{site[0]}{patient}/{name}" for site in SITES for patient in range(3) for name in CLASSES]
    return write(tmp_path / "photos", *names)


def test_groups_by_folder(patients: Path) -> None:
    dataset = load_dataset(patients, layout="{domain}/{group}/{class}")
    assert dataset.classes == list(CLASSES) and dataset.domains == list(SITES) and len(dataset) == 24
    assert dataset.groups is not None and len(set(dataset.groups.tolist())) == 6
    for file, label, group in zip(dataset.files, dataset.labels, dataset.groups, strict=True):
        assert file.split("/")[2] == dataset.classes[label]
        assert (file.split("/")[1] == "n0") == (group == dataset.groups[0])


def test_classes_above_sites(tmp_path: Path) -> None:
    right = load_dataset(write(tmp_path / "a", *(f"{site}/{name}" for site in SITES for name in CLASSES)))
    turned = write(tmp_path / "b", *(f"{name}/{site}" for site in SITES for name in CLASSES))
    dataset = load_dataset(turned, layout="{class}/{domain}")
    assert dataset.labels.tolist() == right.labels.tolist() and dataset.domain_of.tolist() == right.domain_of.tolist()
    assert dataset.domains == right.domains and dataset.classes == right.classes


def test_groups_above_sites_are_the_same_everywhere(tmp_path: Path) -> None:
    root = write(tmp_path / "a", *(f"p{n}/{site}/{name}" for n in range(2) for site in SITES for name in CLASSES))
    dataset = load_dataset(root, layout="{group}/{domain}/{class}")
    assert dataset.groups is not None and len(set(dataset.groups.tolist())) == 2
    assert dataset.in_several_domains.all()


def test_default_layout_is_the_folder(tmp_path: Path) -> None:
    root = write(tmp_path / "a", *(f"{site}/{name}" for site in SITES for name in CLASSES))
    assert load_dataset(root, layout="{domain}/{class}").fingerprint == load_dataset(root).fingerprint


@pytest.mark.parametrize("layout", ["{domain}", "{domain}/{domain}/{class}", "domain/class", "{site}/{class}", ""])
def test_layouts_that_cannot_be(tmp_path: Path, layout: str) -> None:
    with pytest.raises(ParameterError, match="layout"):
        load_dataset(write(tmp_path / "a", "x/y"), layout=layout)


def test_too_few_levels(tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match="fewer levels"):
        load_dataset(write(tmp_path / "a", "north/ill", "south/well"), layout="{domain}/{group}/{class}")


def test_doubt_about_patients(patients: Path) -> None:
    doubt = doubt_layout(load_dataset(patients))
    assert doubt and "{domain}/{group}/{class}" in doubt and "ill, well" in doubt and "n0" in doubt


def test_doubt_about_classes_above(tmp_path: Path) -> None:
    doubt = doubt_layout(load_dataset(write(tmp_path / "a", "cat/oslo", "cat/rome", "dog/bern", "dog/kiev")))
    assert doubt and "{class}/{domain}" in doubt and "cat, dog" in doubt


def test_no_doubt(tmp_path: Path) -> None:
    plain = write(tmp_path / "a", *(f"{site}/{name}" for site in SITES for name in CLASSES), "north/rare")
    assert doubt_layout(load_dataset(plain)) is None
    # Folders within classes that differ are not another layout.
    days = write(tmp_path / "b", *(f"{s}/{name}/{name}-{day}" for s in SITES for name in CLASSES for day in range(2)))
    assert doubt_layout(load_dataset(days)) is None
