"""Near copies: the correlation against a naive loop, and copies that are made from generated pictures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from aidgn.analysis.near_copies import FLAT, correlations, find_near_copies, similarities
from aidgn.data import load_dataset
from aidgn.data.cache import prepare


def scene(seed: int, side: int = 96) -> Image.Image:
    """Draw a picture of smooth shapes; two seeds have nothing in common."""
    noise = np.random.default_rng(seed).normal(size=(side, side, 3))
    smooth = gaussian_filter(noise, (5, 5, 0))
    return Image.fromarray(np.uint8(np.clip(128 + 400 * smooth, 0, 255)))


def test_correlations_match_a_naive_loop() -> None:
    rng = np.random.default_rng(0)
    image, crop = rng.uniform(0, 255, size=(2, 3, 12, 12)).astype(np.float32)
    side = 9
    shrunk = torch.nn.functional.interpolate(
        torch.from_numpy(crop)[None], (side, side), mode="bilinear", antialias=True
    )[0].numpy()
    found = correlations(torch.from_numpy(image)[None], torch.from_numpy(crop)[None], side)[0]
    assert found.shape == (4, 4)
    for top in range(4):
        for left in range(4):
            part = image[:, top : top + side, left : left + side]
            assert found[top, left] == pytest.approx(np.corrcoef(part.ravel(), shrunk.ravel())[0, 1], abs=1e-4)


def test_flat_pictures_are_like_nothing() -> None:
    flat = np.full((1, 3, 32, 32), 200, np.float32) + np.random.default_rng(0).normal(size=(1, 3, 32, 32)) * FLAT / 9
    pictures = np.concatenate([flat, flat]).astype(np.float32)
    assert similarities(pictures, np.array([[0, 1]]))[0] < 0.5


def test_sites_of_different_pictures_have_no_copies(tmp_path: Path) -> None:
    for number in range(12):
        folder = tmp_path / ("north", "south")[number % 2] / ("cat", "dog")[number // 6]
        folder.mkdir(parents=True, exist_ok=True)
        scene(number).save(folder / f"{number}.png")
    decoded = prepare(load_dataset(tmp_path))
    assert find_near_copies(decoded, np.random.default_rng(0).normal(size=(12, 4))) == []


def test_copies_across_sites_are_found(tmp_path: Path) -> None:
    copies = {
        0: lambda image: image.resize((64, 64), Image.Resampling.BICUBIC),
        1: lambda image: image.resize((150, 150), Image.Resampling.BICUBIC),
        2: lambda image: image,  # recompressed below
        3: lambda image: image.crop((10, 4, 90, 84)),
        4: lambda image: image.crop((20, 20, 93, 93)),
    }
    for number in range(12):
        label = "cat" if number % 2 else "dog"
        for site in ("north", "south"):
            (tmp_path / site / label).mkdir(parents=True, exist_ok=True)
        image = scene(number)
        image.save(tmp_path / "north" / label / f"{number}.png")
        if number in copies:
            copies[number](image).save(tmp_path / "south" / label / f"copy{number}.jpg", quality=40)
        else:
            scene(100 + number).save(tmp_path / "south" / label / f"{number}.png")
    same = scene(50)
    for place in ("north/cat/same.png", "south/cat/same.png", "north/dog/twin.png"):
        same.save(tmp_path / place)  # equal pixels are reported elsewhere; a site's own copies flatter nothing
    decoded = prepare(load_dataset(tmp_path).with_image_size(96))
    features = np.random.default_rng(0).normal(size=(len(decoded.dataset), 8))  # of no help: pixels find these
    found = find_near_copies(decoded, features)
    label = {number: "cat" if number % 2 else "dog" for number in copies}
    expected = {(f"north/{label[n]}/{n}.png", f"south/{label[n]}/copy{n}.jpg") for n in copies}
    assert {(copy.first, copy.second) for copy in found} == expected
    assert [copy.similarity for copy in found] == sorted((copy.similarity for copy in found), reverse=True)


def test_different_pictures_have_no_copies(tmp_path: Path) -> None:
    for number in range(8):
        place = tmp_path / ("north", "south")[number % 2] / ("cat", "dog")[number // 4]
        place.mkdir(parents=True, exist_ok=True)
        scene(number).save(place / f"{number}.png")
    decoded = prepare(load_dataset(tmp_path).with_image_size(96))
    assert find_near_copies(decoded, np.random.default_rng(0).normal(size=(8, 8))) == []
