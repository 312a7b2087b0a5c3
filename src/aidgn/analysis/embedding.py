"""Pictures of the latent space: t-SNE in two dimensions, and which images to show when there are many."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from aidgn.analysis.features import Features
from aidgn.errors import AidgnError

COMPONENTS = 50  # principal ones, in which neighbours are looked for
ITERATIONS, ITERATIONS_OF_FEW, FEW = 750, 500, 3_000  # few points settle sooner
THREADS = 1  # two spin while they wait for each other: 40 times slower on a busy machine; and sums keep their order

_latest: dict[str, NDArray[np.float32]] = {}  # the positions of the last vectors: runs may share a frozen network


def tsne(values: NDArray[np.floating], *, seed: int = 0) -> NDArray[np.float32]:
    """Positions [N, 2] of feature vectors [N, n] by t-SNE (van der Maaten 2014, Barnes-Hut), perplexity 30, from their
    first two principal components; the same for the same seed. The last result is kept for the same vectors."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    values = np.asarray(values, dtype=np.float32)
    if values.ndim != 2 or len(values) < 4 or not np.isfinite(values).all():
        raise AidgnError(
            f"t-SNE needs at least 4 feature vectors of finite numbers; got an array {list(values.shape)}."
        )
    if not np.ptp(values, axis=0).any():
        raise AidgnError("t-SNE has nothing to show: all feature vectors are the same.")
    key = f"{hashlib.sha256(values.tobytes()).hexdigest()} {values.shape} {seed}"
    if (known := _latest.get(key)) is not None:
        return known.copy()
    with threadpool_limits(THREADS):
        components = min(COMPONENTS, *values.shape)
        reduced = PCA(components, svd_solver="randomized", random_state=seed).fit_transform(values)
        found = TSNE(
            perplexity=min(30.0, (len(values) - 1) / 3),
            init="pca",
            random_state=seed,
            max_iter=ITERATIONS_OF_FEW if len(values) <= FEW else ITERATIONS,
        ).fit_transform(reduced)
    positions: NDArray[np.float32] = found.astype(np.float32)
    _latest.clear()
    _latest[key] = positions
    return positions.copy()


def subsample(features: Features, n: int, seed: int = 0) -> NDArray[np.intp]:
    """Indices, rising, of n images (all, if there are fewer), of each domain and class as large a share as of all; at
    least one of each, as far as n goes."""
    if n >= len(features):
        return np.arange(len(features))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(features))
    cell = (features.domains * len(features.class_names) + features.labels)[order]
    by_cell = np.argsort(cell, kind="stable")
    _, starts, sizes = np.unique(cell[by_cell], return_index=True, return_counts=True)
    # The k-th of m images of a cell comes at k/m: the first ones of all cells before any second.
    turn = np.empty(len(order))
    turn[by_cell] = (np.arange(len(order)) - np.repeat(starts, sizes)) / np.repeat(sizes, sizes)
    return np.sort(order[np.argsort(turn, kind="stable")[:n]])
