import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from aidgn.analysis import embedding
from aidgn.analysis.embedding import choose_images, tsne
from aidgn.analysis.features import Features
from aidgn.errors import AidgnError

Make = Callable[..., Features]


def test_neighbours_stay_neighbours_and_a_seed_gives_the_same(synthetic: Make) -> None:
    features = synthetic(images=12, kappa=200)
    values = features.features / np.linalg.norm(features.features, axis=1, keepdims=True)
    positions = tsne(values, seed=3)
    assert positions.shape == (len(features), 2) and positions.dtype == np.float32
    distances = np.linalg.norm(positions[:, None] - positions, axis=2) + 1e9 * np.eye(len(positions))
    nearest = features.labels[distances.argmin(1)]
    assert (nearest == features.labels).mean() > 0.95  # by chance a quarter
    np.testing.assert_array_equal(tsne(values, seed=3), positions)


def test_threads_share_one_computation(synthetic: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    compute = embedding._compute

    def count(values: np.ndarray, seed: int) -> np.ndarray:
        computed.append(seed)
        time.sleep(0.1)
        return compute(values, seed)

    monkeypatch.setattr(embedding, "_compute", count)
    values = synthetic(images=5).features
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda _: tsne(values, seed=7), range(4))
    assert computed == [7]
    for positions in others:
        np.testing.assert_array_equal(positions, first)
        assert positions is not first  # a caller may change its own


def test_a_failure_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(values: np.ndarray, seed: int) -> np.ndarray:
        raise MemoryError

    compute = embedding._compute
    monkeypatch.setattr(embedding, "_compute", fail)
    with pytest.raises(MemoryError):
        tsne(np.eye(5), seed=8)
    monkeypatch.setattr(embedding, "_compute", compute)
    assert tsne(np.eye(5), seed=8).shape == (5, 2)


def test_few_or_equal_vectors() -> None:
    assert tsne(np.eye(4)).shape == (4, 2)
    for values, message in (
        (np.eye(3), "at least 4"),
        (np.ones((9, 3)), "all feature vectors are the same"),
        (np.full((9, 3), np.nan), "finite"),
    ):
        with pytest.raises(AidgnError, match=message):
            tsne(values)


def test_choose_images_keeps_the_shares_of_domains_and_classes(synthetic: Make) -> None:
    features = synthetic(images=40)
    keep = (features.labels != 1) | (np.arange(len(features)) % 40 < 10)  # a rare class
    cut = {name: getattr(features, name)[keep] for name in ("features", "logits", "labels", "domains", "validation")}
    features = replace(features, **cut, files=["x"] * int(keep.sum()))
    chosen = choose_images(features.domains, features.labels, 130, seed=1)
    assert len(chosen) == 130 == len(set(chosen.tolist())) and (np.diff(chosen) > 0).all()
    for domain in range(4):
        for number in range(4):
            here = (features.domains == domain) & (features.labels == number)
            assert abs(here[chosen].sum() - here.sum() / 4) <= 1
    few = choose_images(features.domains, features.labels, 16, seed=1)
    assert len({(features.domains[i], features.labels[i]) for i in few}) == 16  # one of each
    np.testing.assert_array_equal(choose_images(features.domains, features.labels, 10_000), np.arange(len(features)))
    np.testing.assert_array_equal(choose_images(features.domains, features.labels, 130, seed=1), chosen)
    assert not np.array_equal(choose_images(features.domains, features.labels, 130, seed=2), chosen)


def test_the_last_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def count(values: np.ndarray, seed: int) -> np.ndarray:
        computed.append(seed)
        return values[:, :2]

    monkeypatch.setattr(embedding, "_compute", count)
    values = np.eye(5)
    for seed in range(100, 100 + embedding.KEPT):
        tsne(values, seed=seed)
    tsne(values, seed=100)
    assert len(computed) == embedding.KEPT
    tsne(values, seed=99)  # takes the place of the oldest
    tsne(values, seed=100)
    assert computed[-2:] == [99, 100]


@pytest.mark.slow
def test_ten_thousand_points_take_under_a_minute_on_two_cores() -> None:
    rng = np.random.default_rng(0)
    centres = 0.3 * rng.standard_normal((28, 2048))
    values = (centres[rng.integers(28, size=10_000)] + 0.5 * rng.standard_normal((10_000, 2048))).astype(np.float32)
    began = time.process_time()
    tsne(values)
    assert time.process_time() - began < 2 * 60  # of both cores together, so that other work does not count
