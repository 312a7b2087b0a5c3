"""Data sets in folders, written to disk: order, names, settings, mistakes of every kind, and the check."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from aidgn.cli import app
from aidgn.data.cache import prepare
from aidgn.data.loading import load_dataset
from aidgn.data.registry import DATASETS, short_names
from aidgn.data.splits import train_val_indices
from aidgn.data.validate import compare_counts, group_copies, inspect_dataset
from aidgn.errors import AidgnError
from aidgn.fitting import inspect


def write(path, seed=None):
    """A small image; the same for the same seed, by default one of its own for every path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(list(str(path).encode()) if seed is None else seed)
    Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).save(path)


def make(root, domains=("camera", "phone"), classes=("cat", "dog"), images=3):
    for domain in domains:
        for name in classes:
            for number in range(images):
                write(root / domain / name / f"{number}.png")
    return root


def error_of(*arguments, **options):
    with pytest.raises(AidgnError) as caught:
        load_dataset(*arguments, **options)
    return str(caught.value)


# What is found ------------------------------------------------------------------------------------------------------


def test_own_folder(tmp_path):
    dataset = load_dataset(make(tmp_path / "animals"))
    assert dataset.name == "animals"
    assert dataset.root == tmp_path / "animals"
    assert dataset.domains == ["camera", "phone"]
    assert list(dataset.info.letters) == ["C", "P"]
    assert dataset.classes == ["cat", "dog"]
    assert dataset.files == [
        f"{domain}/{name}/{number}.png"
        for domain in ("camera", "phone")
        for name in ("cat", "dog")
        for number in range(3)
    ]
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert dataset.domain_of.tolist() == [0] * 6 + [1] * 6
    assert dataset.labels.dtype == dataset.domain_of.dtype == np.int64
    assert dataset.indices(1).tolist() == [6, 7, 8, 9, 10, 11]
    info = dataset.info
    assert (info.image_size, info.augment, info.eval_every, info.steps) == (224, True, 100, 5000)
    assert dataset.image_size == 224 and not dataset.small
    assert dataset.pixels is None
    assert len(dataset) == 12


def test_order_is_that_of_torchvision(tmp_path):
    """DomainBed reads every domain with ImageFolder, the domains sorted by name."""
    from torchvision.datasets import ImageFolder

    root = make(tmp_path / "own", domains=("b 2", "a", "Z", "ä"), classes=("x", "B", "é", "b c"))
    for name in ("10.png", "9.png", "A.PNG", "z/0.png", "z 1/0.png", "z/y/1.png", "z-/3.png", "ü.png"):
        write(root / "a" / "x" / name)
    dataset = load_dataset(root)
    files, labels = [], []
    for domain in sorted(folder.name for folder in os.scandir(root)):
        folder = ImageFolder(str(root / domain))
        assert folder.classes == dataset.classes
        files += [Path(path).relative_to(root).as_posix() for path, _ in folder.samples]
        labels += folder.targets
    assert dataset.files == files
    assert dataset.labels.tolist() == labels


def test_what_is_not_an_image_is_left_out(tmp_path):
    root = make(tmp_path / "own")
    for name in ("notes.txt", "camera/readme.md", "camera/cat/Thumbs.db", "camera/cat/labels.csv", "phone/stray.png"):
        (root / name).write_text("text")
    for name in (".DS_Store", "camera/.DS_Store", "camera/cat/._0.png", ".git/config"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("hidden")
    (root / "camera" / ".thumbnails").mkdir()
    dataset = load_dataset(root)
    assert len(dataset) == 12
    assert dataset.classes == ["cat", "dog"]
    assert dataset.ignored == [
        "camera/cat/Thumbs.db",
        "camera/cat/labels.csv",
        "camera/readme.md",
        "notes.txt",
        "phone/stray.png",
    ]


def test_links_are_followed_but_not_in_circles(tmp_path):
    root = make(tmp_path / "own")
    make(tmp_path / "elsewhere", domains=("tablet",))
    (root / "tablet").symlink_to(tmp_path / "elsewhere" / "tablet")
    (root / "camera" / "cat" / "up").symlink_to(root / "camera")
    (root / "camera" / "cat" / "here").symlink_to(root / "camera" / "cat")
    (root / "camera" / "cat" / "self").symlink_to(root / "camera" / "cat" / "self")
    dataset = load_dataset(root)
    assert dataset.domains == ["camera", "phone", "tablet"]
    assert [file for file in dataset.files if file.startswith("camera/cat/")] == [
        f"camera/cat/{number}.png" for number in range(3)
    ]
    assert [file for file in dataset.files if file.startswith("tablet/cat/")] == [
        f"tablet/cat/{number}.png" for number in range(3)
    ]


def test_an_empty_class_folder_says_that_a_domain_has_none(tmp_path):
    root = make(tmp_path / "own")
    make(root, classes=("fox",), domains=("phone",))
    (root / "camera" / "fox").mkdir()
    dataset = load_dataset(root)
    assert dataset.classes == ["cat", "dog", "fox"]
    assert np.bincount(dataset.labels[dataset.indices(0)], minlength=3).tolist() == [3, 3, 0]


def test_short_names():
    assert short_names(["art", "photo", "sketch"]) == ("A", "P", "S")
    assert short_names(["cartoon", "clipart", "photo"]) == ("CA", "CL", "P")
    assert short_names(["camera1", "camera2"]) == ("camera1", "camera2")
    assert short_names(["a", "ab"]) == ("a", "AB")


# Names --------------------------------------------------------------------------------------------------------------


def test_find_domain(tmp_path):
    dataset = load_dataset(make(tmp_path / "own", domains=("Camera", "phone", "P")))
    assert dataset.find_domain("Camera") == dataset.find_domain("camera") == dataset.find_domain("c") == 0
    assert dataset.find_domain("P") == dataset.find_domain("p") == 1  # a name goes before a letter
    assert dataset.find_domain("PHONE") == 2
    with pytest.raises(AidgnError, match=r"phnoe.*\bphone\b.*Camera \(C\), P"):
        dataset.find_domain("phnoe")


def make_pacs(root):
    return make(root, domains=DATASETS["PACS"].domains, classes=DATASETS["PACS"].classes, images=1)


def test_a_known_data_set_by_name_and_by_folder(tmp_path, monkeypatch):
    make_pacs(tmp_path / "store" / "PACS")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AIDGN_DATA", raising=False)
    by_folder = load_dataset(tmp_path / "store" / "PACS")
    by_name = load_dataset("pacs", "store")
    monkeypatch.setenv("AIDGN_DATA", str(tmp_path / "store"))
    by_variable = load_dataset("PACS")
    for dataset in (by_folder, by_name, by_variable):
        assert dataset.name == "PACS"
        assert list(dataset.info.letters) == ["A", "C", "P", "S"]
        assert dataset.info.eval_every == 50
        assert dataset.info.lr_milestones == (2000, 4000)
        assert dataset.fingerprint == by_folder.fingerprint
    (tmp_path / "store").rename("data")
    assert load_dataset("PACS").root == Path("data/PACS")
    monkeypatch.chdir("data")
    assert load_dataset("PACS").root == Path("PACS")


def test_the_given_folder_goes_first(tmp_path, monkeypatch):
    for place in ("given", "variable", "data"):
        make_pacs(tmp_path / place / "PACS")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIDGN_DATA", "variable")
    assert load_dataset("PACS", "given").root == Path("given/PACS")
    assert load_dataset("PACS").root == Path("variable/PACS")
    monkeypatch.delenv("AIDGN_DATA")
    assert load_dataset("PACS").root == Path("data/PACS")


def test_other_names_of_folders_and_domains(tmp_path):
    """DomainBed's folder names; its environments are sorted folder names, which is the order of the tables too."""
    make(tmp_path / "domain_net", domains=("sketch", "clipart", "infograph", "painting", "quickdraw", "real"), images=1)
    dataset = load_dataset("DomainNet", tmp_path)
    assert dataset.domains == ["clip", "info", "paint", "quick", "real", "sketch"]
    assert dataset.files[0] == "clipart/cat/0.png"
    assert dataset.files[-1] == "sketch/dog/0.png"
    assert dataset.info.steps == 15000
    make(tmp_path / "office_home", domains=("Art", "Clipart", "Product", "Real_World"), images=1)
    office = load_dataset(tmp_path / "office_home")
    assert office.name == "OfficeHome"
    assert office.domains == ["Art", "Clipart", "Product", "Real World"]
    assert (tmp_path / "office_home" / office.files[-1]).exists()


def test_own_folder_with_a_known_name_is_not_taken_for_it(tmp_path):
    dataset = load_dataset(make(tmp_path / "PACS"))
    assert dataset.name == "own-PACS"
    assert dataset.info.eval_every == 100


def test_embedded(tmp_path, monkeypatch):
    monkeypatch.chdir(make(tmp_path / "digits").parent)
    assert load_dataset("digits").root is None
    assert load_dataset("./digits").name == "own-digits"


# Identity -----------------------------------------------------------------------------------------------------------


def test_fingerprint(tmp_path):
    dataset = load_dataset(make(tmp_path / "own"))
    moved = load_dataset(make(tmp_path / "other place" / "name"))
    assert dataset.fingerprint == moved.fingerprint
    assert len(dataset.fingerprint) == 64
    fewer = dataset.without([5])
    assert fewer.fingerprint != dataset.fingerprint
    (tmp_path / "own" / "camera" / "cat" / "0.png").rename(tmp_path / "own" / "camera" / "dog" / "00.png")
    assert load_dataset(tmp_path / "own").fingerprint != dataset.fingerprint


def test_without(tmp_path):
    dataset = load_dataset(make(tmp_path / "own"))
    fewer = dataset.without(np.array([0, 7]))
    assert len(fewer) == 10
    assert fewer.files == [file for index, file in enumerate(dataset.files) if index not in (0, 7)]
    assert fewer.labels.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert fewer.indices(1).tolist() == [5, 6, 7, 8, 9]
    assert dataset.without([]).files == dataset.files
    assert len(dataset) == 12


# Mistakes -----------------------------------------------------------------------------------------------------------


def test_missing_folder_file_and_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIDGN_DATA", "/nowhere")
    assert "does not exist" in error_of(tmp_path / "missing")
    (tmp_path / "file").touch()
    assert "not a folder" in error_of(tmp_path / "file")
    assert "Did you mean VLCS?" in error_of("VCLS")
    message = error_of("office_home", "given")
    assert all(
        part in message
        for part in (
            "given/office_home",
            "/nowhere/office_home",
            "data/office_home",
            "`aidgn data download OfficeHome`",
        )
    )


def test_no_domains_no_classes_one_class(tmp_path):
    write(tmp_path / "flat" / "0.png")
    assert "no domains" in error_of(tmp_path / "flat")
    write(tmp_path / "classes" / "cat" / "0.png")
    write(tmp_path / "classes" / "dog" / "0.png")
    assert "no class folders in its domains cat, dog" in error_of(tmp_path / "classes")
    assert "only the class cat" in error_of(make(tmp_path / "one", classes=("cat",)))


def test_a_domain_or_class_without_images(tmp_path):
    root = make(tmp_path / "own")
    for name in ("cat", "dog"):
        (root / "tablet" / name).mkdir(parents=True)
    (root / "tablet" / "cat" / "movie.mp4").touch()
    assert "domain tablet" in error_of(root)
    (root / "tablet" / "cat" / "movie.mp4").unlink()
    for name in ("cat", "dog"):
        (root / "tablet" / name).rmdir()
    (root / "tablet").rmdir()
    for domain in ("camera", "phone"):
        (root / domain / "fox").mkdir()
    assert "class fox" in error_of(root)


def test_a_domain_may_lack_a_class_but_not_spell_it_otherwise(tmp_path):
    root = make(tmp_path / "own", domains=("camera", "phone", "tablet"), classes=("cat", "dog", "fox"))
    whole = load_dataset(root)
    for missing in ("camera/fox", "phone/cat", "phone/dog"):
        (root / missing).rename(tmp_path / missing.replace("/", "-"))
    less = load_dataset(root)
    kept = [
        index for index, file in enumerate(whole.files) if not file.startswith(("camera/fox", "phone/cat", "phone/dog"))
    ]
    assert less.classes == whole.classes and less.files == [whole.files[index] for index in kept]
    assert less.labels.tolist() == whole.labels[kept].tolist()
    (root / "tablet" / "cat").rename(root / "tablet" / "Cat")
    assert "camera/cat and tablet/Cat" in error_of(root)


def test_the_same_name_in_two_forms_of_unicode(tmp_path):
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert "differently in bytes" in error_of(make(tmp_path / "short", domains=("\u00e9", "e\u0301")))
    root = make(tmp_path / "own", domains=("camera", "phone"), classes=("cat", composed))
    (root / "phone" / composed).rename(root / "phone" / decomposed)
    (root / "phone").rename(root / decomposed)
    dataset = load_dataset(root)
    assert dataset.classes == [composed, "cat"] or dataset.classes == ["cat", composed]
    assert dataset.domains[0] == composed or dataset.domains[1] == composed
    assert dataset.find_domain(composed) == dataset.domains.index(composed)
    assert all((root / file).is_file() for file in dataset.files)
    (root / "camera").rename(root / composed)
    assert "written differently in bytes" in error_of(root)


@pytest.mark.parametrize(
    ("one", "other"), [("north", "North"), ("a", "a "), ("a", " A"), ("bay  2", "bay 2"), ("bay\u00a02", "bay 2")]
)
def test_one_domain_written_in_two_ways(tmp_path, one, other):
    first, second = sorted((one, other))
    assert f"has the domains '{first}' and '{second}'" in error_of(make(tmp_path / "own", (one, other, "far")))


def test_domains_that_differ_in_signs(tmp_path):
    names = ["1-11", "11-1", "111", "bay 2", "bay2", "bay_2"]
    assert load_dataset(make(tmp_path / "own", domains=names)).domains == names


def test_a_name_that_is_not_utf_8_is_taken_for_latin_1(tmp_path):
    root = make(tmp_path / "own", domains=("camera", "phone"), classes=("cat", "caf\u00e9"))
    latin_1 = os.fsdecode("caf\u00e9".encode("latin-1"))  # as unpacked from an old archive
    (root / "phone" / "caf\u00e9").rename(root / "phone" / latin_1)
    (root / "phone").rename(root / latin_1)
    dataset = load_dataset(root)
    assert set(dataset.classes) == {"cat", "caf\u00e9"} and "caf\u00e9" in dataset.domains
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert all((root / file).is_file() for file in dataset.files)


def test_copies_across_the_split_and_across_classes(tmp_path):
    root = make(tmp_path / "own", domains=("camera", "phone"), classes=("cat", "dog"))
    dataset = load_dataset(root)
    digests = [f"{index}" for index in range(len(dataset))]
    indices = dataset.indices(1)
    inside, outside = train_val_indices(len(indices), 0, 1)
    if not len(outside):
        pytest.skip("too few images for a split")
    a, b = sorted((indices[inside[0]], indices[outside[0]]))
    digests[a] = digests[b] = "same"
    across, straddling, contradictory, within = group_copies(dataset, digests)
    assert across == [] and straddling == [[dataset.files[a], dataset.files[b]]]
    assert contradictory == (straddling if dataset.labels[a] != dataset.labels[b] else [])
    digests[0] = "same"
    assert within == []
    across, straddling, *_ = group_copies(dataset, digests)
    assert across == straddling == [[dataset.files[index] for index in (0, a, b)]]


def test_a_known_data_set_that_is_incomplete(tmp_path):
    make(tmp_path / "PACS", domains=("photo", "sketch"))
    message = error_of("PACS", tmp_path)
    assert "art_painting, cartoon, photo, sketch" in message
    assert "aidgn data download PACS" in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    root = make(tmp_path / "own")
    (root / "phone").chmod(0)
    try:
        assert "permission" in error_of(root)
    finally:
        (root / "phone").chmod(0o755)


# The check ----------------------------------------------------------------------------------------------------------


def test_check_finds_at_once_all_that_fit_refuses_in_turn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = make(tmp_path / "own", ("north", "south", "west"), images=3)
    for empty in ("nowhere/cat", "north/bird"):
        (root / empty).mkdir(parents=True)
    write(root / "south" / "Cat" / "0.png")
    for number in range(2):
        (root / "west" / "dog" / f"{number}.png").write_bytes(b"no image")
        write(root / "north" / "cat" / f"same {number}.png", seed=1)
    found = CliRunner().invoke(app, ["data", "check", "own"])
    assert found.exception.exit_code == 2
    names = ("north/cat and south/Cat", "domain nowhere", "domain west", "class bird")
    assert [name for name in names if name in found.output] == [*names]
    assert "west/dog/0.png" in found.output and "north/cat/same 0.png, north/cat/same 1.png" in found.output
    refused = 0
    for remedy in (
        lambda: (root / "south" / "Cat").rename(tmp_path / "Cat"),
        lambda: shutil.rmtree(root / "nowhere"),
        lambda: shutil.rmtree(root / "north" / "bird"),
        lambda: shutil.rmtree(root / "west"),
    ):
        with pytest.raises(AidgnError):
            inspect(prepare(load_dataset(root), skip_broken=True, cache_dir=tmp_path / "cache", workers=1))
        refused += 1
        remedy()
    inspect(prepare(load_dataset(root), cache_dir=tmp_path / "cache", workers=1))
    assert refused == found.output.count("`fit` would stop")


def test_check_cuts_long_lists_unless_asked_for_all(tmp_path):
    root = make(tmp_path / "own", images=12)
    for file in (root / "phone" / "cat").iterdir():
        file.write_bytes(b"no image")
    for file in (root / "camera" / "cat").iterdir():
        file.write_bytes(b"no image")
    found = CliRunner().invoke(app, ["data", "check", str(root)])
    assert found.output.count("broken: ") == 20 and "and 4 more" in found.output
    assert found.exception.exit_code == 2  # no picture of a cat is left
    every = CliRunner().invoke(app, ["data", "check", str(root), "--all"])
    assert every.output.count("broken: ") == 24 and "more" not in every.output


def test_check_counts_and_finds_broken_files_and_copies(tmp_path):
    root = make(tmp_path / "own", images=2)
    write(root / "camera" / "cat" / "same.png", seed=1)
    write(root / "phone" / "dog" / "also the same.png", seed=1)
    write(root / "camera" / "dog" / "twice.png", seed=2)
    write(root / "camera" / "dog" / "twice again.png", seed=2)  # within a domain: no leak
    content = (root / "camera" / "cat" / "0.png").read_bytes()
    (root / "camera" / "cat" / "1.png").write_bytes(content[:60])
    (root / "phone" / "cat" / "1.png").write_bytes(b"")
    seen = []
    dataset = load_dataset(root)
    result = inspect_dataset(dataset, lambda done, total: seen.append((done, total)))
    assert result.counts.tolist() == [[3, 4], [2, 3]]
    assert [file for file, _ in result.broken] == ["camera/cat/1.png", "phone/cat/1.png"]
    assert "damaged" in result.broken[0][1]
    assert "empty" in result.broken[1][1]
    assert result.across_domains == [["camera/cat/same.png", "phone/dog/also the same.png"]]
    assert result.published is None
    assert result.differences == []
    assert not result.fine
    assert seen == [(done, 12) for done in range(1, 13)]
    broken = [dataset.files.index(file) for file, _ in result.broken]
    leak = [dataset.files.index("camera/cat/same.png")]
    fewer = inspect_dataset(dataset.without(broken + leak))
    assert not fewer.broken and not fewer.across_domains
    assert len(fewer.refusals) == 1 and "phone has 4 images" in fewer.refusals[0]


def test_check_finds_the_same_pixels_in_other_files(tmp_path):
    root = make(tmp_path / "own", images=1)
    image = Image.open(root / "camera" / "cat" / "0.png")
    image.save(root / "phone" / "cat" / "0.bmp")
    image.save(root / "phone" / "cat" / "larger.png", compress_level=0)
    Image.frombytes("RGB", (6, 8), image.tobytes()).save(root / "phone" / "dog" / "same numbers, other size.png")
    image.convert("RGBA").save(root / "phone" / "dog" / "opaque.tif")
    assert inspect_dataset(load_dataset(root)).across_domains == [
        ["camera/cat/0.png", "phone/cat/0.bmp", "phone/cat/larger.png", "phone/dog/opaque.tif"]
    ]


def test_check_compares_with_the_published_counts(tmp_path):
    make_pacs(tmp_path / "PACS")
    result = inspect_dataset(load_dataset("PACS", tmp_path))
    assert result.published == "the copy of PACS published (9991 images)"
    assert "photo: 7 images, expected 1670" in result.differences
    assert "sketch/house: 1 images, expected 80" in result.differences
    assert len(result.differences) == 4 + 28


def test_check_accepts_both_copies_of_terra_incognita(tmp_path):
    info = DATASETS["TerraIncognita"]
    make(tmp_path / "terra_incognita", domains=info.domains, classes=info.classes, images=1)
    dataset = load_dataset(tmp_path / "terra_incognita")
    for counts, words in (
        (info.counts, "published (24788 images)"),
        (info.other_counts, "downloadable today (24330 images)"),
    ):
        totals = [counts[domain] for domain in info.domains]
        filled = replace(dataset, labels=np.full(sum(totals), 3), domain_of=np.arange(4).repeat(totals))
        published, differences = compare_counts(filled, info)
        assert published == f"the copy of TerraIncognita {words}"
        assert differences == []


def test_check_of_the_embedded_data_set():
    result = inspect_dataset(load_dataset("digits"))
    assert result.counts.sum() == 1797
    assert result.fine
