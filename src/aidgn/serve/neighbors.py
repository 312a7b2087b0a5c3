"""Show training images in the model's feature space: a map in two dimensions, and the nearest ones to a new picture."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image

from aidgn.analysis.embedding import tsne
from aidgn.analysis.features import Features
from aidgn.data import Dataset
from aidgn.data.images import read_shrunk
from aidgn.errors import AidgnError
from aidgn.inference import Model
from aidgn.inference.export import find_training_images
from aidgn.runs.checkpoints import read_weights
from aidgn.runs.folder import RunFolder
from aidgn.runs.inputs import open_run
from aidgn.runs.metadata import RunMetadata
from aidgn.terminal import log

MAX_COMPARED = 20_000  # training images that a picture is compared with
MIN_COMPARED = 10
SHOWN_NEIGHBORS = 6
POSITION_NEIGHBORS = 5  # training images on the map that determine the position of a picture
THUMBNAIL_SIDE = 128  # pixels
MAX_FEATURES_BYTES = 2 << 30  # reading a larger feature file takes longer than computing some features


@dataclass(frozen=True, eq=False)
class LatentSpace:
    """Features of N training images, evenly from all classes and domains. The first M have a position on the map."""

    directions: np.ndarray  # features divided by their norms, float32 [N, n]
    labels: np.ndarray  # class of each image, int64 [N]
    domains: np.ndarray  # domain of each image, int64 [N]
    positions: np.ndarray  # t-SNE of the directions, float64 [M, 2], from 0 to 1
    rows: np.ndarray  # index of each image in the data set, int64 [N]
    dataset: Dataset | None  # the data set; None if the images are not available

    def locate(self, feature: np.ndarray) -> tuple[list[float], list[tuple[int, float]]]:
        """Return the position of a picture on the map, and its nearest training images with their cosine distances.

        t-SNE has no position for new points. The position is the mean position of the nearest images on the map,
        weighted by 1 / distance, so that a training image keeps its position.
        """
        distances = 1 - self.directions @ normalize(feature[None])[0]
        neighbors = find_smallest(distances[: len(self.positions)], POSITION_NEIGHBORS)
        weights = 1 / (np.maximum(distances[neighbors], 0) + 1e-6)
        position = (self.positions[neighbors] * (weights / weights.sum())[:, None]).sum(0)
        shown = find_smallest(distances, SHOWN_NEIGHBORS)
        return position.tolist(), [(int(i), max(float(distances[i]), 0.0)) for i in shown]

    def thumbnail(self, index: int) -> bytes | None:
        """Return a small PNG of a training image, or None if the image is not available."""
        if self.dataset is None or not 0 <= index < len(self.rows):
            return None
        return make_thumbnail(self.dataset, int(self.rows[index]))


@lru_cache(2048)
def make_thumbnail(dataset: Dataset, row: int) -> bytes | None:
    """Return a small PNG of an image of a data set, or None if the image cannot be read."""
    if dataset.pixels is not None:
        picture = Image.fromarray(dataset.pixels[row])
    else:
        try:
            picture, _ = read_shrunk(str(Path(str(dataset.root), dataset.files[row])), 2 * THUMBNAIL_SIDE)
        except AidgnError:
            return None
        picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def build_latent_space(
    path: Path,
    model: Model,
    count: int,
    data: str | Path | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> LatentSpace:
    """Place training images on the map.

    Features come from the run's features.npz if the file belongs to this model. Otherwise the features of `count`
    images are computed.

    Args:
        path: Folder of a run, or an exported file.
        model: Its model.
        count: Number of images on the map.
        data: Folder of the images, if they have moved.
        on_progress: Receives a description, the number of images so far and their total.

    Raises:
        AidgnError: There are neither features nor enough images.
    """
    metadata = read_metadata(path)
    saved = load_features(path)
    report = on_progress or (lambda *_: None)
    try:
        dataset: Dataset | None = find_training_images(metadata, data, partial(report, "comparing images"))
    except AidgnError as error:
        if saved is None or data is not None:
            raise
        log.warning("The map has no pictures: %s", error)
        dataset = None
    if dataset is not None:
        labels, domains = dataset.labels, dataset.domain_of
        sources = [metadata.domains.index(name) for name in metadata.sources]
        training = [dataset.split(domain, metadata.identity["trial"])[0] for domain in sources]
    else:
        assert saved is not None
        labels, domains = saved.labels, saved.domains
        training = [saved.split(name)[0] for name in metadata.sources]
    rows = sample_evenly(labels, domains, training, MAX_COMPARED if saved else count)
    if saved is not None:
        features = saved.features[rows]
    else:
        assert dataset is not None
        rows, features = compute_features(model, dataset, rows, report)
    if len(rows) < MIN_COMPARED:
        raise AidgnError(f"Only {len(rows)} training images can be read.")
    directions = normalize(features)
    positions = tsne(directions[: min(count, len(rows))], seed=0)
    low = positions.min(0)
    high = positions.max(0)
    positions = (positions - low) / np.maximum(high - low, 1e-9)
    return LatentSpace(directions, labels[rows], domains[rows], positions, rows, dataset)


def read_metadata(path: Path) -> RunMetadata:
    """Return the metadata of a run folder, of its weights, or of an exported file."""
    run = RunFolder(path if path.is_dir() else path.parent)
    if path.is_file() and not run.exists:
        _, metadata = read_weights(path)
        if "run" not in metadata:
            raise AidgnError(f"{path} does not say what it was trained on.")
        return RunMetadata.from_dict(metadata["run"], path)
    return open_run(run.path).metadata


def load_features(path: Path) -> Features | None:
    """Return the saved features of a run, if they belong to the model of its selected step."""
    run = RunFolder(path if path.is_dir() else path.parent)
    if not run.exists or path not in (run.path, run.model):
        return None
    if not run.features.exists() or run.features.stat().st_size >= MAX_FEATURES_BYTES:
        return None
    features = Features.load(run.features)
    return features if features.model == run.model_digest else None


def sample_evenly(labels: np.ndarray, domains: np.ndarray, training: list[np.ndarray], count: int) -> np.ndarray:
    """Return up to `count` random training images, one of every class of every domain in turn."""
    rows = np.random.default_rng(0).permutation(np.concatenate(training))
    group = domains[rows] * (labels.max(initial=0) + 1) + labels[rows]
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    turn = np.empty(len(rows), np.int64)
    turn[order] = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
    return rows[np.argsort(turn, kind="stable")][:count]


def compute_features(
    model: Model, dataset: Dataset, rows: np.ndarray, on_progress: Callable[[str, int, int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute features of images of a data set. Return the rows of the readable images and their features."""
    if dataset.pixels is not None:
        return rows, model.predict(dataset.pixels[rows]).features.numpy()
    row_of = {str(Path(str(dataset.root), dataset.files[row])): row for row in rows.tolist()}
    readable: list[int] = []
    features: list[np.ndarray] = []
    for paths, prediction in model.batches(list(row_of), lambda *_: None):
        readable += [row_of[str(path)] for path in paths]
        features.append(prediction.features.numpy())
        on_progress("computing features", len(readable), len(rows))
    if not features:
        return np.empty(0, np.int64), np.empty((0, 1), np.float32)
    return np.array(readable, np.int64), np.concatenate(features)


def normalize(features: np.ndarray) -> np.ndarray:
    """Divide features by their norms, in float32. NaN and infinity count as 0, and 0 stays 0."""
    z = np.nan_to_num(features.astype(np.float32), posinf=0.0, neginf=0.0)
    return z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)


def find_smallest(distances: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` smallest distances, smallest first."""
    count = min(count, len(distances))
    smallest = np.argpartition(distances, count - 1)[:count]
    return smallest[np.argsort(distances[smallest], kind="stable")]
