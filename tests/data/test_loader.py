"""Draws that depend on seed and step only; images that reach the device the same way resident or streamed."""

import itertools
import threading

import numpy as np
import pytest
import torch
from scipy import stats

from aidgn.data import load_dataset
from aidgn.data.cache import prepare
from aidgn.data.loader import PREFETCHED, BatchSampler, DeviceImageStore, inverse_class_shares
from aidgn.data.transforms import UNIFORMS

POOLS = [np.arange(100, 140), np.arange(7), np.array([50, 60, 70])]


def test_a_step_is_drawn_alike_from_wherever_one_starts() -> None:
    draws = BatchSampler(POOLS, 5, seed=3)
    indices, uniforms = draws.steps(0, 10)
    later_indices, later_uniforms = draws.steps(4, 7)
    assert torch.equal(indices[4:7], later_indices) and torch.equal(uniforms[4:7], later_uniforms)
    assert indices.shape == (10, 15) and uniforms.shape == (10, 15, UNIFORMS)
    other, _ = BatchSampler(POOLS, 5, seed=4).steps(0, 10)
    assert not torch.equal(indices, other)


def test_domains_are_sampled_uniformly_with_replacement() -> None:
    indices, uniforms = BatchSampler(POOLS, 4, seed=0).steps(0, 3000)
    for domain, pool in enumerate(POOLS):
        drawn = indices[:, 4 * domain : 4 * domain + 4].numpy()
        assert set(np.unique(drawn)) == set(pool)
        counts = np.array([(drawn == image).sum() for image in pool])
        assert stats.chisquare(counts).pvalue > 1e-3
    first, second = indices[:, 8].numpy(), indices[:, 9].numpy()
    assert (first == second).mean() == pytest.approx(1 / 3, abs=0.04)  # with replacement, independent
    assert stats.kstest(uniforms.flatten()[:20000].numpy(), "uniform").pvalue > 1e-3
    assert float(uniforms.min()) >= 0 and float(uniforms.max()) < 1


def test_balanced_sampling_draws_classes_equally_often() -> None:
    labels = np.zeros(140, np.int64)
    labels[100:103], labels[103:110] = 1, 2  # 3 and 7 of 40 images; the other domains have one class
    sampler = BatchSampler(POOLS, 4, seed=0, labels=labels)
    indices, uniforms = sampler.steps(0, 3000)
    drawn = indices[:, :4].numpy()
    assert stats.chisquare(np.bincount(labels[drawn].ravel())).pvalue > 1e-3
    for label in range(3):
        images = POOLS[0][labels[POOLS[0]] == label]
        assert stats.chisquare([(drawn == image).sum() for image in images]).pvalue > 1e-3
    assert set(np.unique(indices[:, 8:])) == set(POOLS[2])
    later_indices, later_uniforms = sampler.steps(4, 7)
    assert torch.equal(indices[4:7], later_indices) and torch.equal(uniforms[4:7], later_uniforms)


def test_class_weights_make_classes_count_alike() -> None:
    labels = np.array([0] * 8 + [1] * 2 + [0] * 3 + [1] * 1)
    pools = [np.arange(10), np.arange(10, 14)]
    weights = inverse_class_shares(labels, pools, 3)
    shares = [(0.8 + 0.75) / 2, (0.2 + 0.25) / 2]  # of a batch with as many images of each domain
    assert weights.tolist() == pytest.approx([1 / (2 * shares[0]), 1 / (2 * shares[1]), 0.0])


def test_stream_batches_equal_gathered_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streaming thread, on the CPU: pinning is the only part that needs a GPU."""
    prepared = prepare(load_dataset("digits"))
    images = DeviceImageStore(prepared, torch.device("cpu"))
    rows = list(torch.from_numpy(np.random.default_rng(0).integers(0, len(prepared.rows), (9, 6))))
    gathered = list(images.batches(rows))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    streamed = list(images._stream(rows, rows))
    assert len(streamed) == len(gathered) == 9
    for (pixels, geometry, labels), other in zip(gathered, streamed, strict=True):
        assert torch.equal(pixels, other[0]) and torch.equal(geometry, other[1]) and torch.equal(labels, other[2])
    for row, (pixels, _, labels) in zip(rows, gathered, strict=True):
        assert np.array_equal(pixels.numpy(), prepared.pixels[prepared.rows[row.numpy()]])
        assert np.array_equal(labels.numpy(), prepared.dataset.labels[row.numpy()])


def test_no_rows_no_batches() -> None:
    """Of a process that gets no share of a few batches."""
    assert list(DeviceImageStore(prepare(load_dataset("digits")), torch.device("cpu")).batches([])) == []


def test_leaving_a_stream_that_fails_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    images = DeviceImageStore(prepare(load_dataset("digits")), torch.device("cpu"))
    left, number = threading.Event(), itertools.count()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        if next(number) > PREFETCHED:  # the queue is full by now
            left.wait(10)
            raise RuntimeError("no memory to pin")
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    rows = [torch.arange(4)] * (PREFETCHED + 5)
    stream = images._stream(rows, rows)
    next(stream)
    closing = threading.Thread(target=stream.close, daemon=True)  # type: ignore[attr-defined]
    threading.Timer(0.3, left.set).start()
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_leaving_a_stream_early_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    images = DeviceImageStore(prepare(load_dataset("digits")), torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    before = threading.active_count()
    rows = [torch.arange(4)] * 100
    stream = images._stream(rows, rows)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
