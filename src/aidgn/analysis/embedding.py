"""Embed the latent space in two dimensions by t-SNE, and choose images to show when there are many."""

import hashlib
import threading
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from aidgn.errors import AidgnError

COMPONENTS = 50  # principal components in which t-SNE looks for neighbours
FEW = 3_000  # up to so many points converge in fewer iterations
ITERATIONS = 750
ITERATIONS_OF_FEW = 500
KEPT = 8  # results in memory: runs may share a frozen network, and another thread may compute ahead
THREADS = 1  # on a busy machine, several threads are up to 40 times slower; they also add in another order

_lock = threading.Lock()
_latest: dict[str, Future[NDArray[np.float32]]] = {}  # positions of the last vectors, the oldest first


def tsne(values: NDArray[np.floating], *, seed: int = 0) -> NDArray[np.float32]:
    """Compute positions [N, 2] of feature vectors [N, n] by t-SNE from their first two principal components.

    This is Barnes-Hut t-SNE (van der Maaten, 2014) with perplexity 30. The same seed gives the same positions. The last
    results are kept. A second thread with the same vectors waits for the result of the first.
    """
    values = np.asarray(values, dtype=np.float32)
    if values.ndim != 2 or len(values) < 4 or not np.isfinite(values).all():
        raise AidgnError(
            f"t-SNE needs at least 4 feature vectors of finite numbers; got an array {list(values.shape)}."
        )
    if not np.ptp(values, axis=0).any():
        raise AidgnError("t-SNE has nothing to show: all feature vectors are the same.")
    key = f"{hashlib.sha256(values.tobytes()).hexdigest()} {values.shape} {seed}"
    result: Future[NDArray[np.float32]] = Future()
    with _lock:
        known = _latest.get(key)
        if known is None:
            while len(_latest) >= KEPT:
                del _latest[next(iter(_latest))]
            _latest[key] = result
    if known is not None:
        return known.result().copy()
    try:
        positions = _compute(values, seed)
    except BaseException as error:
        with _lock:
            _latest.pop(key, None)
        result.set_exception(error)
        raise
    result.set_result(positions)
    return positions.copy()


def _compute(values: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    with threadpool_limits(THREADS):
        components = min(COMPONENTS, *values.shape)
        reduced = PCA(components, svd_solver="randomized", random_state=seed).fit_transform(values)
        positions: NDArray[np.floating] = TSNE(
            perplexity=min(30.0, (len(values) - 1) / 3),
            init="pca",
            random_state=seed,
            max_iter=ITERATIONS_OF_FEW if len(values) <= FEW else ITERATIONS,
        ).fit_transform(reduced)
    return positions.astype(np.float32)


def choose_images(domains: NDArray[np.integer], labels: NDArray[np.integer], n: int, seed: int = 0) -> NDArray[np.intp]:
    """Choose n images (all if there are fewer), with the same share of every domain and class.

    Every domain and class has at least one image if n allows.

    Returns:
        Numbers of images in ascending order.
    """
    if n >= len(labels):
        return np.arange(len(labels))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    cell = (domains * (labels.max() + 1) + labels)[order]
    by_cell = np.argsort(cell, kind="stable")
    _, starts, sizes = np.unique(cell[by_cell], return_index=True, return_counts=True)
    # The k-th of m images of a cell has the turn k/m, so that every cell's first image comes before any second one.
    turn = np.empty(len(order))
    turn[by_cell] = (np.arange(len(order)) - np.repeat(starts, sizes)) / np.repeat(sizes, sizes)
    return np.sort(order[np.argsort(turn, kind="stable")[:n]])
