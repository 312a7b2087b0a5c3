"""Find pictures of one site that are resized, recompressed or cropped copies of pictures of another.

Copies across sites make an estimate too high, because the run has then seen some pictures of the unseen site. Each
picture is compared with the pictures of other sites whose features are nearest. Features alone cannot distinguish
copies from other pictures of one object, so pixels decide: one picture of a pair is slid over the other at several
scales, and the highest normalised cross-correlation is their similarity, 1 for equal pictures, whatever their
brightness and contrast. Turned and mirrored copies are not found.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from aidgn.data.cache import DecodedDataset
from aidgn.trust import unit_rows

NEIGHBORS = 3  # pictures of other sites that each picture is compared with, by features and by pixels each
SIDE = 32  # pixels of the pictures that are compared
MIN_CROP = 0.7  # side of the smallest crop that is looked for, as a share of the whole
PROMISING = 0.85  # similarity at half the side, below which pairs are not compared further
ALIKE = 0.94  # similarity of copies; docs/own-data.md has the distribution behind it
MAX_IMAGES = 50_000  # with more, comparing all pairs of features would take too long
CHUNK = 1024  # images or pairs that are computed at a time
BLOCK = 128  # pictures that are compared with all others at a time
FLAT = 4.0  # standard deviation of grey levels, of 255, below which a picture shows nothing to compare

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class NearCopy:
    """Two pictures of different sites that seem to be copies of one."""

    first: str
    second: str
    similarity: float


def find_near_copies(
    decoded: DecodedDataset, features: NDArray[np.floating], on_progress: Progress | None = None
) -> list[NearCopy]:
    """Find copies across sites, the most similar first; pictures with exactly the same pixels are left out.

    Args:
        decoded: The pictures.
        features: Their features [N, n], in the same order.
        on_progress: Called with the part of the work, the number done and the total.
    """
    report = on_progress or (lambda *_: None)
    if len(decoded.dataset) > MAX_IMAGES or len(decoded.dataset.domains) < 2:
        return []
    small, contrasts = shrink_all(decoded)
    sites = decoded.dataset.domain_of
    pairs = np.unique(
        np.concatenate([candidate_pairs(features, sites), candidate_pairs(centred(small), sites)]),
        axis=0,
    )
    pairs = pairs[(contrasts[pairs] >= FLAT).all(axis=1)]
    copies = []
    for start in range(0, len(pairs), CHUNK):
        report("comparing sites", start, len(pairs))
        part = pairs[start : start + CHUNK]
        part = part[similarities(small, part) >= PROMISING]
        if not len(part):
            continue
        numbers, places = np.unique(part, return_inverse=True)
        thumbnails = np.stack([make_thumbnail(decoded, number) for number in numbers])
        similarity_of = similarities(thumbnails, places.reshape(part.shape))
        for (i, j), similarity in zip(part.tolist(), similarity_of.tolist(), strict=True):
            same_pixels = np.array_equal(picture(decoded, i), picture(decoded, j))  # `inspect` reports these
            if similarity >= ALIKE and not same_pixels:
                copies.append(NearCopy(decoded.dataset.files[i], decoded.dataset.files[j], similarity))
    report("comparing sites", len(pairs), len(pairs))
    return sorted(copies, key=lambda copy: -copy.similarity)


def shrink_all(decoded: DecodedDataset) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a picture of half the side for every thumbnail, [N, 3, SIDE / 2, SIDE / 2], and the thumbnails' contrasts.

    The whole thumbnails of all pictures would take four times the memory.
    """
    count = len(decoded.dataset)
    small = np.empty((count, 3, SIDE // 2, SIDE // 2), np.float32)
    contrasts = np.empty(count, np.float32)
    for number in range(count):
        thumbnail = make_thumbnail(decoded, number)
        contrasts[number] = thumbnail.std()
        small[number] = F.avg_pool2d(torch.from_numpy(thumbnail), 2).numpy()
    return small, contrasts


def make_thumbnail(decoded: DecodedDataset, number: int) -> NDArray[np.float32]:
    """Shrink or stretch a picture to a small square: float32 [3, SIDE, SIDE], from 0 to 255."""
    image = torch.tensor(picture(decoded, number)).permute(2, 0, 1)[None].float()
    thumbnail: NDArray[np.float32] = F.interpolate(image, (SIDE, SIDE), mode="bilinear", antialias=True)[0].numpy()
    return thumbnail


def picture(decoded: DecodedDataset, number: int) -> NDArray[np.uint8]:
    """Return the decoded pixels of a picture [H, W, 3]."""
    height, width = decoded.geometry[number, :2].tolist()
    return decoded.pixels[decoded.rows[number], :height, :width]


def centred(thumbnails: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each thumbnail as a row without its mean."""
    rows = thumbnails.reshape(len(thumbnails), -1)
    return rows - rows.mean(axis=1, keepdims=True)


def candidate_pairs(rows: NDArray[np.floating], sites: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return pairs (i, j), i < j, of each picture and the nearest ones of other sites, by the cosine of their rows."""
    pairs = []
    units = np.empty(rows.shape, np.float32)
    for start in range(0, len(rows), CHUNK):
        units[start : start + CHUNK] = unit_rows(rows[start : start + CHUNK])
    columns = torch.from_numpy(units)
    domains = torch.from_numpy(sites)
    most = min(NEIGHBORS, len(rows) - 1)
    for start in range(0, len(rows), BLOCK):
        cosines = columns[start : start + BLOCK] @ columns.T
        cosines[domains[start : start + BLOCK, None] == domains] = -2
        values, nearest = cosines.topk(most, dim=1)
        first = torch.arange(start, start + len(values))[:, None].expand_as(nearest)
        pairs.append(torch.stack([first, nearest], dim=-1)[values > -2].numpy())
    return np.sort(np.concatenate(pairs), axis=1)


def similarities(thumbnails: NDArray[np.float32], pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the highest normalised cross-correlation of each pair, with either picture as the crop."""
    if not len(pairs):
        return np.empty(0)
    first, second = (torch.from_numpy(thumbnails[pairs[:, place]]) for place in (0, 1))
    whole = thumbnails.shape[-1]
    highest = [
        correlations(large, small, side).amax(dim=(1, 2))
        for large, small in ((first, second), (second, first))
        for side in range(whole, round(MIN_CROP * whole), -1)
    ]
    return torch.stack(highest).amax(dim=0).clamp(-1, 1).double().numpy()


def correlations(images: Tensor, crops: Tensor, side: int) -> Tensor:
    """Return the normalised cross-correlation of each image with its crop at every place: [B, P, P].

    Args:
        images: [B, 3, S, S].
        crops: [B, 3, S, S]; each is shrunk to this side.
        side: Side of the crop within the image.
    """
    count = len(images)
    kernel = F.interpolate(crops, (side, side), mode="bilinear", antialias=True) if side < crops.shape[-1] else crops
    kernel = kernel - kernel.mean(dim=(1, 2, 3), keepdim=True)
    kernel = kernel / kernel.flatten(1).norm(dim=1).clamp(min=1e-6)[:, None, None, None]
    products = F.conv2d(images.reshape(1, -1, *images.shape[2:]), kernel, groups=count)[0]
    size = 3 * side * side
    ones = images.new_ones(1, 3, side, side)
    sums, squares = F.conv2d(images, ones)[:, 0], F.conv2d(images.square(), ones)[:, 0]
    return products / (squares - sums.square() / size).clamp(min=size * FLAT**2 / 4).sqrt()
