"""WILDS, SVIRO and Spawrious in generated copies of the folders that people unpack.

The layouts are those that the `wilds` package (camelyon17_dataset.py, iwildcam_dataset.py, fmow_dataset.py of
p-lambda/wilds), DomainBed (datasets.py) and aengusl/spawrious (torch.py) read.
"""

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from aidgn.cli import app
from aidgn.data import DATASETS, load_dataset
from aidgn.data.download import download
from aidgn.errors import AidgnError
from aidgn.training import RunSpec, train

RNG = np.random.default_rng(0)


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)


def write_table(path, names, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def camelyon(parent):
    root, rows = parent / "camelyon17_v1.0", []
    for number in range(100):
        patient, node, center = f"{number % 7:03}", number % 3, number % 5
        slide = f"patient_{patient}_node_{node}"
        picture(root / "patches" / slide / f"patch_{slide}_x_{number}_y_{2 * number}.png")
        rows.append([number, patient, node, number, 2 * number, number // 5 % 2, number % 50, center, number % 4 // 3])
    write_table(
        root / "metadata.csv", ["", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"], rows
    )
    return rows


def iwildcam(parent, each=8):
    root, rows = parent / "iwildcam_v2.0", []
    for location in range(20):
        for number in range(each):
            split = ("val", "test")[location % 2] if location > 15 else ("train", "id_val", "id_test")[number % 3]
            file = f"{location}-{number}.jpg"
            picture(root / "train" / file)
            rows.append([split, location, 0, "2013-06-05 05:44:19.000", file, number % 4, file])
    write_table(
        root / "metadata.csv",
        ["split", "location_remapped", "sequence_remapped", "datetime", "image_id", "y", "filename"],
        rows,
    )
    names = [[0, 0, "empty"], [1, 2, "gazelle"], [2, 3, "aardvark"]]
    write_table(root / "categories.csv", ["y", "category_id", "name"], names)
    return rows


def fmow(parent):
    root, rows = parent / "fmow_v1.1", []
    for number in range(240):
        country = ("KEN", "USA", "JPN", "FRA", "AUS", "XKX")[number % 6]
        split = ("train", "val", "test", "train", "seq")[number // 6 % 5]
        year = 2010 + number // 30
        rows.append([split, f"{number}.jpg", ("zoo", "airport")[number // 6 % 2], country, f"{year}-03-18T10:04:12Z"])
        picture(root / "images" / f"rgb_img_{number}.png")
    write_table(root / "rgb_metadata.csv", ["split", "img_filename", "category", "country_code", "timestamp"], rows)
    regions = [["KEN", "Africa"], ["USA", "Americas"], ["JPN", "Asia"], ["FRA", "Europe"], ["AUS", "Oceania"]]
    write_table(root / "country_code_mapping.csv", ["alpha-3", "region"], regions)
    return rows


def test_camelyon17(tmp_path):
    rows = camelyon(tmp_path)
    dataset = load_dataset("Camelyon17", tmp_path)
    assert dataset.domains == [f"hospital{number}" for number in range(5)] and dataset.classes == ["normal", "tumor"]
    assert (dataset.count_images() == 10).all() and dataset.image_size == 96
    for file, label, domain in zip(dataset.files, dataset.labels, dataset.domain_of, strict=True):
        row = next(row for row in rows if f"x_{row[3]}_" in file)
        assert (row[5], row[7]) == (label, domain) and f"patient_{row[1]}_node_{row[2]}" in file
    by_path = load_dataset(tmp_path / "camelyon17_v1.0")
    assert by_path.name == "Camelyon17" and by_path.fingerprint == dataset.fingerprint
    assert sum(DATASETS["Camelyon17"].counts.values()) == 302436 + 33560 + 34904 + 85054  # of the WILDS paper


def test_the_official_validation_images_of_camelyon17(tmp_path):
    rows = camelyon(tmp_path)
    dataset = load_dataset("camelyon17_official", tmp_path)
    assert dataset.domains == ["hospital0", "hospital2", "hospital3", "hospital4"]
    train_part, validation = dataset.split(1, 0)  # hospital 2 tests
    assert len(validation) == 4 and len(train_part) == 16
    for domain, center in ((0, 0), (2, 3), (3, 4)):
        train_part, validation = dataset.split(domain, 0)
        for part, mark in ((train_part, 0), (validation, 1)):
            expected = {row[3] for row in rows if row[7] == center and row[8] == mark}
            assert {int(dataset.files[index].split("_x_")[1].split("_")[0]) for index in part} == expected
    fewer = dataset.without([0])
    assert len(fewer.held_out) == len(fewer) == 79


def test_iwildcam(tmp_path):
    rows = iwildcam(tmp_path)
    dataset = load_dataset("iWildCam-official", tmp_path)
    counts = Counter(dataset.domains[domain] for domain in dataset.domain_of)
    assert counts == {**{f"train{number}": 16 for number in range(8)}, "test": 16}
    assert dataset.classes == ["3", "aardvark", "empty", "gazelle"]  # one class has no name in the table
    by_file = {row[6]: row for row in rows}
    train_part, validation = dataset.split(3, 0)
    assert {by_file[dataset.files[index]][0] for index in train_part} == {"train"}
    assert {by_file[dataset.files[index]][0] for index in validation} == {"id_val"}
    assert {by_file[dataset.files[index]][1] for index in [*train_part, *validation]} == {3, 11}
    assert DATASETS[dataset.name].metric == "macro_f1"


def test_fmow(tmp_path):
    rows = fmow(tmp_path)
    dataset = load_dataset("FMoW", tmp_path)
    assert dataset.domains == ["Africa", "Americas", "Asia", "Europe", "Oceania", "Other"]
    assert len(dataset) == sum(row[0] != "seq" for row in rows) and set(dataset.count_images().sum(1)) == {32}
    official = load_dataset("FMoW-official", tmp_path)
    expected = Counter()
    for split, _, _, country, time in rows:
        year = int(time[:4])
        if year < 2013 and split != "seq":
            expected[country] += 1
        expected["test"] += year >= 2016 and split == "test"
    found = Counter(official.domains[domain] for domain in official.domain_of)
    assert (found["test"], found["Africa"]) == (expected["test"], expected["KEN"])
    train_part, validation = official.split(0, 0)
    numbers = [int(official.files[index].split("_")[-1][:-4]) for index in validation]
    assert {rows[number][0] for number in numbers} == {"val"} and len(train_part) > len(validation)


def test_sviro(tmp_path):
    for car in DATASETS["SVIRO"].domains:
        for label in range(7):
            picture(tmp_path / "sviro" / car / str(label) / "0.png")
    dataset = load_dataset("SVIRO", tmp_path)
    assert dataset.domains == [*DATASETS["SVIRO"].domains] and len(dataset.classes) == 7
    assert load_dataset(tmp_path / "sviro").name == "SVIRO"


@pytest.mark.parametrize("archive", ["", "{car}_{kind}/"])
@pytest.mark.parametrize("kinds", [("grayscale", "RGB", "depth"), ("RGB",)])
def test_sviro_as_unpacked(tmp_path, archive, kinds):
    """The layout and names of https://sviro.kl.dfki.de/data-format: pictures of seats and of the whole bench."""
    root = tmp_path / "sviro"
    cars = DATASETS["SVIRO"].domains
    for car in cars:
        for kind in kinds:
            above = root / archive.format(car=car, kind=kind) / car
            for label in range(7):
                name = f"{car}_{{}}_imageID_{label}_seatPosition_{label % 3}_GT_{label}.png"
                picture(above / "train" / kind / str(label) / name.format("train"))
                picture(above / "test_with_labels" / kind / str(label) / name.format("test"))
            picture(above / "train" / f"{kind}_wholeImage" / f"{car}_train_imageID_9_GT_0_1_2.png")
    for dataset in (load_dataset("SVIRO", tmp_path), load_dataset(root)):
        assert dataset.name == "SVIRO" and dataset.domains == [*cars] and dataset.classes == [*"0123456"]
        assert (dataset.count_images() == 1).all()
        for file, label, domain in zip(dataset.files, dataset.labels, dataset.domain_of, strict=True):
            path = dataset.root / file
            assert path.is_file() and path.parts[-4:-1] == ("train", kinds[0], str(label))
            assert path.name.startswith(f"{cars[domain]}_train") and path.stem.endswith(f"GT_{label}")


def test_sviro_that_is_not_complete(tmp_path):
    root = tmp_path / "sviro"
    picture(root / "x5" / "train" / "grayscale_wholeImage" / "x5_train_imageID_0_GT_0_0_0.png")
    with pytest.raises(AidgnError, match="single seats"):
        load_dataset("SVIRO", tmp_path)
    picture(root / "x5" / "train" / "grayscale" / "0" / "x5_train_imageID_0_seatPosition_0_GT_0.png")
    with pytest.raises(AidgnError, match="no image of aclass"):
        load_dataset("SVIRO", tmp_path)


def test_spawrious(tmp_path, monkeypatch):
    monkeypatch.setattr("aidgn.data.benchmarks.SPAWRIOUS_IMAGES", 10)
    for folder in range(2):
        for place in ("snow", "jungle", "desert", "dirt", "mountain", "beach"):
            for name in ("bulldog", "corgi", "dachshund", "labrador"):
                for number in range(10):
                    picture(tmp_path / "spawrious224" / str(folder) / place / name / f"{number}.png")
    one = load_dataset("SpawriousO2O_easy", tmp_path)

    def found(dataset, domain, name):
        chosen = (dataset.domain_of == dataset.find_domain(domain)) & (dataset.labels == dataset.classes.index(name))
        files = (dataset.root / dataset.files[index] for index in np.flatnonzero(chosen))
        return Counter("/".join(file.parts[-4:-2]) for file in files)

    assert found(one, "SC_group_1", "bulldog") == {"0/desert": 9, "0/beach": 1}
    assert found(one, "SC_group_2", "labrador") == {"1/dirt": 8, "1/beach": 2}
    assert found(one, "Test", "corgi") == {"0/jungle": 10, "1/jungle": 10}
    many = load_dataset("SpawriousM2M_hard", tmp_path)
    assert found(many, "SC_group_1", "bulldog") == found(many, "SC_group_2", "dachshund") == {"0/dirt": 10}
    assert found(many, "SC_group_2", "labrador") == found(many, "SC_group_1", "corgi") == {"0/beach": 10}
    assert found(many, "Test", "dachshund") == {"0/beach": 10, "0/snow": 10}


def test_a_run_on_the_official_splits_and_its_table(tmp_path):
    iwildcam(tmp_path)
    spec = RunSpec(
        "iWildCam-official", "ERM", ("test",), steps=2, eval_every=2, image_size=28, backbone="small",
        weights="none", hyper_parameters={"batch_size": 2},
    )  # fmt: skip
    train(spec, tmp_path / "runs", data_dir=tmp_path, device="cpu")
    train(
        RunSpec("digits", "ERM", ("ink",), steps=2, eval_every=2, hyper_parameters={"batch_size": 2}),
        tmp_path / "runs",
        device="cpu",
    )
    again = CliRunner().invoke(app, ["table", str(tmp_path / "runs")])
    assert again.exit_code == 0 and "iWildCam-official, macro-F1" in again.output
    assert "digits, training" in again.output and "All data sets" not in again.output  # of different metrics
    accuracy = CliRunner().invoke(app, ["table", str(tmp_path / "runs"), "--metric", "accuracy"])
    assert accuracy.exit_code == 0 and "macro-F1" not in accuracy.output
    paper = CliRunner().invoke(app, ["table", str(tmp_path / "runs"), "--paper"])
    assert paper.exit_code == 0 and "macro-F1" not in paper.output


def test_other_folders_are_refused_and_downloads_name_the_page(tmp_path):
    with pytest.raises(AidgnError, match=r"not on this disk.*Get it from https://wilds"):
        load_dataset("Camelyon17", tmp_path)
    (tmp_path / "camelyon17_v1.0").mkdir()
    with pytest.raises(AidgnError, match=r"has no metadata.csv, so it is not Camelyon17"):
        load_dataset("Camelyon17", tmp_path)
    with pytest.raises(AidgnError, match=r"does not download FMoW.*wilds.stanford.edu.*fmow_v1.1"):
        download("FMoW", tmp_path)
    rows = camelyon(tmp_path)
    header = ["", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"]
    write_table(tmp_path / "camelyon17_v1.0" / "metadata.csv", header, [row for row in rows if row[7]])
    with pytest.raises(AidgnError, match=r"no image of hospital0"):
        load_dataset("Camelyon17", tmp_path)


def test_the_how_to_for_variants_of_imagenet(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "data-sets.md").read_text(encoding="utf-8")
    script = page.partition('title="imagenet_variants.py"\n')[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    for folder, classes in (("imagenet/val", 4), ("imagenet-r", 2), ("sketch", 4)):
        for name in range(classes):
            for number in range(5):
                picture(tmp_path / folder / f"n0{name}" / f"ILSVRC_{number}.JPEG")
    exec(script, {})
    dataset = load_dataset("imagenet.csv")
    assert dataset.domains == ["photo", "rendition", "sketch"] and dataset.classes == ["n00", "n01"]
    assert (dataset.count_images() == 5).all()
