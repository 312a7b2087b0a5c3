"""Training images as the model sees them: a map of them in two dimensions, and which are nearest to a new picture."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from aidgn.analysis.embedding import tsne
from aidgn.analysis.features import Features, open_run
from aidgn.data import Dataset
from aidgn.data.images import read_shrunk
from aidgn.data.splits import train_val_indices
from aidgn.errors import AidgnError
from aidgn.inference.export import images_of
from aidgn.inference.model import Model
from aidgn.runs.checkpoints import read_weights
from aidgn.runs.folder import RunFolder
from aidgn.runs.metadata import RunMetadata

MOST = 20_000  # training images that a picture is compared with
NEAREST = 6  # of these are shown
AMID = 5  # training images on the map that a picture is put amid
THUMBNAIL = 128  # pixels
LARGEST = 2 << 30  # bytes of a feature file that is read; of a larger one a few features are computed sooner


@dataclass(frozen=True, eq=False)
class LatentSpace:
    """Directions z / |z| of N training images; the first M of them, from all classes and domains alike, have a place
    on the map: t-SNE of the directions."""

    directions: np.ndarray  # float32 [N, n], of length 1
    labels: np.ndarray  # int64 [N]
    domains: np.ndarray  # int64 [N]
    places: np.ndarray  # float64 [M, 2], from 0 to 1
    rows: np.ndarray  # int64 [N]: which images of the data set they are
    dataset: Dataset | None  # None: their pictures are not here

    def around(self, feature: np.ndarray) -> tuple[list[float], list[tuple[int, float]]]:
        """Where a picture lies on the map, and the nearest training images with their cosine distances.

        t-SNE has no place for new points; the picture goes amid the nearest images on the map, weighed by 1 / distance,
        so that a training image lies where it lies."""
        distances = 1 - self.directions @ unit(feature[None])[0]
        near = nearest(distances[: len(self.places)], AMID)
        weights = 1 / (np.maximum(distances[near], 0) + 1e-6)
        place = (self.places[near] * (weights / weights.sum())[:, None]).sum(0)
        best = nearest(distances, NEAREST)
        return place.tolist(), [(int(i), max(float(distances[i]), 0.0)) for i in best]

    def thumbnail(self, index: int) -> bytes | None:
        """A small PNG of a training image; None if it is not here any more."""
        return (
            None
            if self.dataset is None or not 0 <= index < len(self.rows)
            else picture_of(self.dataset, int(self.rows[index]))
        )


@lru_cache(2048)
def picture_of(dataset: Dataset, row: int) -> bytes | None:
    if dataset.pixels is not None:
        picture = Image.fromarray(dataset.pixels[row])
    else:
        try:
            picture, _ = read_shrunk(str(Path(str(dataset.root), dataset.files[row])), 2 * THUMBNAIL)
        except AidgnError:
            return None
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def latent_space(
    path: Path,
    model: Model,
    count: int,
    data: str | Path | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> LatentSpace:
    """That of a run folder or an exported file, with `count` images on the map; an error says why there is none.

    Features come from RUN/features.npz where it is of this model; otherwise those of `count` images are computed."""
    report = on_progress or (lambda *_: None)
    run = RunFolder(path if path.is_dir() else path.parent)
    metadata = describe(path)
    selected = path.is_dir() or path == run.model
    kept = run.features
    usable = selected and run.exists and kept.exists() and kept.stat().st_size < LARGEST
    known = Features.load(kept) if usable else None
    if known is not None and known.model != run.model_digest:
        known = None
    try:
        dataset: Dataset | None = images_of(metadata, data)
    except AidgnError:
        if known is None:
            raise
        dataset = None
    labels = dataset.labels if dataset else known.labels if known else np.empty(0, np.int64)
    domains = dataset.domain_of if dataset else known.domains if known else np.empty(0, np.int64)
    sources = [metadata.domains.index(name) for name in metadata.sources]
    rows = spread(labels, domains, sources, metadata.identity["trial"], MOST if known else count)
    if known is not None:
        features = known.features[rows]
    else:
        assert dataset is not None
        rows, features = compute(model, dataset, rows, report)
    if len(rows) < 10:
        raise AidgnError(f"Only {len(rows)} training images can be read.")
    directions = unit(features)
    count = min(count, len(rows))
    places = tsne(directions[:count], seed=0)
    low, high = places.min(0), places.max(0)
    return LatentSpace(
        directions, labels[rows], domains[rows], (places - low) / np.maximum(high - low, 1e-9), rows, dataset
    )


def describe(path: Path) -> RunMetadata:
    """Return the metadata of a run folder, of its weights, or of an exported file."""
    folder = RunFolder(path if path.is_dir() else path.parent)
    if path.is_file() and not folder.exists:
        _, metadata = read_weights(path)
        if "run" not in metadata:
            raise AidgnError(f"{path} does not say what it was trained on.")
        return RunMetadata.from_dict(metadata["run"], path)
    return open_run(folder.path).metadata


def spread(labels: np.ndarray, domains: np.ndarray, sources: list[int], trial: int, count: int) -> np.ndarray:
    """Up to `count` images that the training saw: one of every class of every domain in turn, at random."""
    inside = [np.flatnonzero(domains == domain) for domain in sources]
    rows = np.concatenate(
        [row[train_val_indices(len(row), trial, domain)[0]] for row, domain in zip(inside, sources, strict=True)]
    )
    rows = np.random.default_rng(0).permutation(rows)
    group = domains[rows] * (labels.max(initial=0) + 1) + labels[rows]
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    turn = np.empty(len(rows), np.int64)
    turn[order] = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
    return rows[np.argsort(turn, kind="stable")][:count]


def compute(
    model: Model, dataset: Dataset, rows: np.ndarray, report: Callable[[str, int, int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Features of images of a data set, and which of them could be read."""
    where: dict[str, int] = {}
    if dataset.pixels is not None:
        return rows, model.predict(dataset.pixels[rows]).features.numpy()
    for row in rows.tolist():
        where[str(Path(str(dataset.root), dataset.files[row]))] = row
    read: list[int] = []
    found: list[np.ndarray] = []
    for paths, prediction in model.batches(list(where), lambda *_: None):
        read += [where[str(path)] for path in paths]
        found.append(prediction.features.numpy())
        report("computing features", len(read), len(rows))
    return np.array(read, np.int64), np.concatenate(found) if found else np.empty((0, 1), np.float32)


def unit(features: np.ndarray) -> np.ndarray:
    """Directions, float32; of a feature that is 0 or no number, 0."""
    z = np.nan_to_num(features.astype(np.float32), posinf=0.0, neginf=0.0)
    return z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)


def nearest(distances: np.ndarray, count: int) -> np.ndarray:
    count = min(count, len(distances))
    some = np.argpartition(distances, count - 1)[:count]
    return some[np.argsort(distances[some], kind="stable")]
