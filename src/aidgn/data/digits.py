"""The data set that comes with the package: 1797 handwritten digits, drawn in four styles as four domains.

The digits are those of scikit-learn (8 x 8 pixels, 13 writers, from UCI), enlarged to 28 x 28. Each is in one domain.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from aidgn.data.dataset import Dataset
from aidgn.data.registry import DATASETS

SIZE = 28
INFO = DATASETS["digits"]


@cache
def load_digits() -> Dataset:
    """Draw the digits of each class in turn for each domain; sort them by domain, class and number in the source."""
    images, labels_of_source = load_source()
    by_class = np.argsort(labels_of_source, kind="stable")
    by_domain = [by_class[domain :: len(INFO.domains)] for domain in range(len(INFO.domains))]
    styles = (ink, chalk, poster, outline)
    rng = np.random.Generator(np.random.PCG64(1797))
    pixels = np.concatenate([style(images[chosen] / 16, rng) for style, chosen in zip(styles, by_domain, strict=True)])
    order = np.concatenate(by_domain)
    domain_of = np.arange(len(by_domain)).repeat([len(chosen) for chosen in by_domain])
    labels = labels_of_source[order].astype(np.int64)
    files = [
        f"{INFO.domains[domain]}/{label}/{number:04}.png"
        for domain, label, number in zip(domain_of.tolist(), labels.tolist(), order.tolist(), strict=True)
    ]
    pixels = np.round(np.round(pixels * 255, 6))  # to 6 places first, so that every processor rounds halves alike
    pixels = np.clip(pixels, 0, 255).astype(np.uint8)
    return Dataset(INFO, list(INFO.classes), files, labels, domain_of, pixels=pixels)


def load_source() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits, 0 to 16 [N, 8, 8], and their classes.

    They are read from scikit-learn's file: importing scikit-learn would take a second in every worker of a sweep.
    """
    package = find_spec("sklearn")
    if package is not None and package.origin:
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            table = np.loadtxt(path, delimiter=",")
            return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits as load_bunch

    bunch = load_bunch()
    return bunch.images, bunch.target


# The strokes --------------------------------------------------------------------------------------------------------


def enlarge(images: np.ndarray, slant: float = 0.0, inside: int = 24) -> np.ndarray:
    """Enlarge coverage by ink, 0 to 1, [N, 8, 8] by cubic convolution to `inside` pixels in a frame of SIZE.

    The writing leans to the right by `slant` pixels per pixel of height.
    """
    position = (np.arange(SIZE) + 0.5 - SIZE / 2) * images.shape[1] / inside  # from the middle, in pixels of the source
    rows = cubic(position[:, None] + (images.shape[1] - 1) / 2 - np.arange(images.shape[1]))
    columns = cubic(
        position[None, :, None]
        + slant * position[:, None, None]
        + (images.shape[1] - 1) / 2
        - np.arange(images.shape[1])
    )
    return np.clip(np.einsum("ya,nab,yxb->nyx", rows, images, columns, optimize=True), 0, 1)


def cubic(distance: np.ndarray) -> np.ndarray:
    """Compute the weights of cubic convolution (Keys 1981, a = -1/2)."""
    d = np.abs(distance)
    return np.where(d < 1, 1.5 * d**3 - 2.5 * d**2 + 1, np.where(d < 2, -0.5 * d**3 + 2.5 * d**2 - 4 * d + 2, 0))


def blur(images: np.ndarray) -> np.ndarray:
    """Blur with weights 1/4, 1/2, 1/4 along both sides."""
    for axis in (1, 2):
        images = (np.roll(images, 1, axis) + 2 * images + np.roll(images, -1, axis)) / 4
    return images


def step(values: np.ndarray, at: float, width: float) -> np.ndarray:
    """Rise smoothly from 0 to 1 around `at`, over this width."""
    t = np.clip((values - at) / width + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


def paint(ground: np.ndarray, colour: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """Paint `colour` over `ground`, both [N or 1, SIZE or 1, SIZE or 1, 3], where `cover` [N, SIZE, SIZE] is 1."""
    return ground + cover[..., None] * (colour - ground)


def tones(rng: np.random.Generator, n: int, low: tuple[float, ...], high: tuple[float, ...]) -> np.ndarray:
    """Draw a colour between two for each image."""
    return np.asarray(low) + rng.random((n, 1, 1, 1)) * (np.asarray(high) - np.asarray(low))


def noise(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.random((n, SIZE, SIZE)) - 0.5


# The styles: images [N, 8, 8] in, colours [N, SIZE, SIZE, 3] out, all from 0 to 1 ------------------------------------


def ink(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw with a thin blue-black pen on ruled cream paper, leaning to the right."""
    n, strokes = len(images), enlarge(images, slant=0.12)
    paper = tones(rng, n, (0.88, 0.85, 0.76), (0.98, 0.97, 0.93)) + 0.05 * noise(rng, n)[..., None]
    ruled = (np.arange(SIZE)[:, None] - rng.integers(0, 7, (n, 1, 1))) % 7 == 0
    paper = paint(paper, np.array([0.55, 0.65, 0.85]), 0.5 * ruled)
    return paint(paper, tones(rng, n, (0.05, 0.06, 0.18), (0.15, 0.2, 0.45)), step(strokes, 0.6, 0.4))


def chalk(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw with white chalk on a dusty green board, leaning to the left; the chalk skips grains."""
    n, strokes = len(images), enlarge(images, slant=-0.24)
    board = tones(rng, n, (0.09, 0.22, 0.16), (0.16, 0.33, 0.25)) + 0.5 * blur(blur(noise(rng, n)))[..., None]
    cover = step(strokes, 0.45, 0.6) * np.clip(0.8 + 0.9 * noise(rng, n), 0, 1)
    return paint(board, tones(rng, n, (0.85, 0.85, 0.8), (0.98, 0.98, 0.94)), cover)


def poster(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a large bright digit on darker stripes of another colour; swap the colours in one of four images."""
    n, strokes = len(images), enlarge(images, inside=SIZE)
    hue = rng.random((n, 1, 1, 1))
    dark, light = 0.5 * wheel(hue), 0.3 + 0.7 * wheel(hue + 0.35 + 0.3 * rng.random((n, 1, 1, 1)))
    swapped = rng.random((n, 1, 1, 1)) < 0.25
    y, x = np.mgrid[:SIZE, :SIZE]
    angle, phase = 2 * np.pi * rng.random((2, n, 1, 1))
    stripes = np.sin(1.1 * (np.cos(angle) * x + np.sin(angle) * y) + phase)
    ground = np.where(swapped, light, dark) + 0.1 * stripes[..., None]
    return paint(ground, np.where(swapped, dark, light), step(strokes, 0.43, 0.4))


def outline(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw the contour of the strokes in pencil on grey card, with light shading inside."""
    n, strokes = len(images), enlarge(images)
    cover = np.maximum(np.clip(1 - np.abs(strokes - 0.45) / 0.28, 0, 1), 0.38 * step(strokes, 0.45, 0.4))
    card = tones(rng, n, (0.6, 0.6, 0.62), (0.8, 0.8, 0.8)) + 0.06 * noise(rng, n)[..., None]
    return paint(card, tones(rng, n, (0.1, 0.1, 0.1), (0.3, 0.3, 0.3)), cover)


def wheel(hue: np.ndarray) -> np.ndarray:
    """Return full colours for hues from 0 to 1: red, green, blue, red."""
    return 0.5 + 0.5 * np.cos(2 * np.pi * (hue - np.array([0, 1 / 3, 2 / 3])))
