"""The embedded digits: every digit of the source once, balanced, the same everywhere, and still that digit."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits as load_source

from aidgn.data import digits, load_dataset
from aidgn.data.digits import enlarge, load_digits


@pytest.fixture(scope="module")
def dataset():
    return load_digits()


@pytest.fixture(scope="module")
def source():
    return load_source()


def numbers(dataset):
    """The number in the source of every image."""
    return np.array([int(file.split("/")[2].removesuffix(".png")) for file in dataset.files])


def test_every_digit_is_there_once_with_its_label(dataset, source):
    assert len(dataset) == 1797
    assert sorted(numbers(dataset)) == list(range(1797))
    assert (dataset.labels == source.target[numbers(dataset)]).all()


def test_form(dataset):
    assert dataset.pixels.shape == (1797, 28, 28, 3)
    assert dataset.pixels.dtype == np.uint8
    assert dataset.labels.dtype == dataset.domain_of.dtype == np.int64
    assert dataset.root is None
    assert dataset.small
    assert not dataset.info.augment
    assert dataset.classes == list("0123456789")
    assert dataset.domains == ["ink", "chalk", "poster", "outline"]
    assert [dataset.find_domain(letter) for letter in "ICPO"] == [0, 1, 2, 3]
    assert load_dataset("Digits").fingerprint == dataset.fingerprint


def test_domains_and_classes_are_balanced(dataset):
    table = np.zeros((4, 10), dtype=int)
    np.add.at(table, (dataset.domain_of, dataset.labels), 1)
    assert table.sum(1).tolist() == [450, 449, 449, 449]
    assert (table.max(0) - table.min(0)).max() <= 1


def test_order_is_that_of_files_in_folders(dataset):
    keys = [(domain, file.split("/", 1)[1]) for domain, file in zip(dataset.domain_of, dataset.files, strict=True)]
    assert keys == sorted(keys)
    for domain, label, file in zip(dataset.domain_of, dataset.labels, dataset.files, strict=True):
        assert file.startswith(f"{dataset.domains[domain]}/{label}/")


def test_the_same_every_time(dataset):
    np.random.seed(5)
    assert (load_digits().pixels == dataset.pixels).all()


def test_without_removes_the_pixels_too(dataset):
    assert (dataset.without([0, 2]).pixels[:2] == dataset.pixels[[1, 3]]).all()


def test_enlarging_is_cubic_convolution(source):
    """Pillow's bicubic filter on the digit in a border of zeros."""
    for image in source.images[:20] / 16:
        bordered = Image.fromarray(np.pad(image, 3).astype(np.float32))
        expected = np.asarray(bordered.resize((42, 42), Image.Resampling.BICUBIC))[7:35, 7:35]
        np.testing.assert_allclose(enlarge(image[None])[0], np.clip(expected, 0, 1), atol=1e-5)


def test_slant_moves_the_top_to_the_right(source):
    """A row h pixels above the middle lies slant * h further right than in the upright digit."""
    upright, slanted = (enlarge(source.images[:200] / 16, slant).sum(0) for slant in (0.0, 0.25))
    columns = np.arange(28) + 0.5
    for row in range(6, 22):
        moved = (slanted[row] @ columns) / slanted[row].sum() - (upright[row] @ columns) / upright[row].sum()
        assert moved == pytest.approx(0.25 * (14 - row - 0.5), abs=0.15)


def correlations(dataset, source, domain, slant=0.0, inside=24):
    """Of the three colours of every image with its own digit of the source."""
    chosen = dataset.indices(domain)
    strokes = enlarge(source.images[numbers(dataset)[chosen]] / 16, slant, inside).reshape(len(chosen), -1, 1)
    pixels = dataset.pixels[chosen].reshape(len(chosen), -1, 3).astype(float)
    strokes, pixels = strokes - strokes.mean(1, keepdims=True), pixels - pixels.mean(1, keepdims=True)
    return (strokes * pixels).sum(1) / np.sqrt((strokes**2).sum(1) * (pixels**2).sum(1) + 1e-9)


def test_every_image_shows_its_own_digit_in_its_style(dataset, source):
    assert (correlations(dataset, source, 0, 0.12) < -0.6).all()  # dark on light
    assert (correlations(dataset, source, 1, -0.24) > 0.6).all()  # light on dark
    posters = correlations(dataset, source, 2, inside=28)
    assert (np.abs(posters).max(1) > 0.6).all()  # in one colour at least, either way
    assert 0.15 < (posters.mean(1) < 0).mean() < 0.4
    assert (correlations(dataset, source, 3) < -0.3).all()


def test_styles_differ_in_brightness_and_colour(dataset):
    brightness = [dataset.pixels[dataset.indices(domain)].mean() for domain in range(4)]
    assert brightness[0] > brightness[3] > brightness[1]
    spread = [np.ptp(dataset.pixels[dataset.indices(domain)].astype(int), axis=-1).mean() for domain in range(4)]
    assert spread[2] > 80 > 10 > spread[3]


def test_the_source_is_read_without_importing_scikit_learn(source):
    program = """
import sys
from aidgn.data.digits import load_digits
assert len(load_digits()) == 1797 and "sklearn" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    images, labels = digits.load_source()
    assert (images == source.images).all() and (labels == source.target).all()


def test_scikit_learn_reads_a_source_that_it_keeps_elsewhere(source, monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    images, labels = digits.load_source()
    assert (images == source.images).all() and (labels == source.target).all()
