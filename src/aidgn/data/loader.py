"""Batches: which images a step trains on, and how they reach the device.

The images of step s depend on (seed, s) only. They stay the same if a run is resumed, has another number of workers, or
streams images instead of keeping them on the device.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from aidgn.data.cache import DecodedDataset
from aidgn.data.transforms import UNIFORMS, TrainTransform, Transform, build_transforms

DEVICE_SHARE = 0.6  # share of the free device memory that images may take
PREFETCHED = 4  # streamed batches that are gathered ahead
COPIED_TOGETHER = 1024  # images in a copy to the device

Batch = tuple[Tensor, Tensor, Tensor]  # uint8 images, geometry and labels on the device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class BatchSampler:
    """Draw the random numbers of a run's batches.

    A step has `batch_size` images of every source domain, uniformly with replacement and independently per domain, and
    uniform numbers for the augmentation of each. With `labels`, an image is drawn uniformly from a class, and the class
    uniformly from those that the domain has.

    Args:
        pools: Indices of the training images of each source domain.
        batch_size: Images per domain.
        seed: Seed of the run.
        labels: Class of every image of the data set, to draw classes equally often.
    """

    def __init__(self, pools: Sequence[np.ndarray], batch_size: int, seed: int, labels: np.ndarray | None = None):
        self.pools = pools
        # Ends of the intervals of [0, 1) that stand for the images of a pool
        self.ends = None if labels is None else [np.cumsum(balanced_shares(labels[pool])) for pool in pools]
        self.batch_size = batch_size
        self.seed = seed

    def steps(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return image indices [steps, domains * batch_size] and uniforms [.., .., UNIFORMS] of steps start..stop-1."""
        size = len(self.pools) * self.batch_size
        indices = np.empty((stop - start, size), np.int64)
        uniforms = np.empty((stop - start, size, UNIFORMS), np.float32)
        for row, step in enumerate(range(start, stop)):
            random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, step]))
            if self.ends is None:
                positions = [random.integers(len(pool), size=self.batch_size) for pool in self.pools]
            else:
                positions = [np.searchsorted(ends[:-1], random.random(self.batch_size), "right") for ends in self.ends]
            indices[row] = np.concatenate([pool[chosen] for pool, chosen in zip(self.pools, positions, strict=True)])
            random.random(out=uniforms[row], dtype=np.float32)
        return torch.from_numpy(indices), torch.from_numpy(uniforms)


def balanced_shares(labels: np.ndarray) -> np.ndarray:
    """Return the share of draws for each image, so that every class among the labels has the same, float64 [N]."""
    counts = np.bincount(labels)
    return 1 / (counts[labels] * np.count_nonzero(counts))


def inverse_class_shares(labels: np.ndarray, pools: Sequence[np.ndarray], num_classes: int) -> Tensor:
    """Return weights of classes, float32 [C], that are 1 on average over batches and give every class the same sum.

    A batch has as many images of each domain, so the share of a class is its mean share over pools. A class without
    images has no weight.
    """
    shares = np.mean([np.bincount(labels[pool], minlength=num_classes) / len(pool) for pool in pools], axis=0)
    weights = np.divide(1, shares * np.count_nonzero(shares), out=np.zeros(num_classes), where=shares > 0)
    return torch.from_numpy(weights).float()


class BatchStore(Protocol):
    """The source of a run's batches for training and evaluation: images or features."""

    decoded: DecodedDataset
    device: torch.device

    @property
    def frozen_weights(self) -> tuple[str, Mapping[str, Tensor]] | None:
        """The digest and the weights of the frozen network that computed the features."""

    def batches(self, rows: Sequence[Tensor]) -> Iterator[Batch]:
        """Yield the batch of each row of image indices, which are on the host."""

    def transforms(self, settings: Mapping[str, Any] = {}) -> tuple[TrainTransform, Transform]:
        """Return the training and the evaluation transform of batches; see `build_transforms` for `settings`."""


class DeviceImageStore:
    """A `BatchStore` of the decoded images of a data set: uint8 slots, geometry and labels by image index.

    Args:
        decoded: The images.
        device: Where batches are needed.
        resident: Whether all images are held on the device. By default they are if they take at most `DEVICE_SHARE`
            of its free memory. Otherwise a thread gathers `PREFETCHED` batches ahead, through pinned memory.
    """

    frozen_weights = None

    def __init__(self, decoded: DecodedDataset, device: torch.device, resident: bool | None = None):
        self.decoded = decoded
        self.device = device
        self.geometry = torch.from_numpy(decoded.geometry.astype(np.int32)).to(device)
        self.labels = torch.from_numpy(np.ascontiguousarray(decoded.dataset.labels)).to(device)
        fills_slot = (decoded.geometry[:, :2] == decoded.slot).all()
        self.exact_fit = bool(fills_slot and decoded.slot == decoded.dataset.image_size)
        if resident is None:
            resident = device.type != "cuda" or (
                decoded.pixels.nbytes <= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
            )
        self.pixels: Tensor | None = None
        if resident and device.type != "cpu":
            shape = (len(decoded.rows), *decoded.pixels.shape[1:])
            self.pixels = torch.empty(shape, dtype=torch.uint8, device=device)
            for start in range(0, len(decoded.rows), COPIED_TOGETHER):
                stop = start + COPIED_TOGETHER
                self.pixels[start:stop] = torch.from_numpy(decoded.pixels[decoded.rows[start:stop]]).to(device)

    def batches(self, rows: Sequence[Tensor]) -> Iterator[Batch]:
        if not rows:  # a process may have no share of the last batches
            return
        indices = to_device(torch.cat(list(rows)), self.device).split([len(row) for row in rows])
        if self.pixels is None and self.device.type != "cpu":
            yield from self._stream(rows, indices)
            return
        for row, index in zip(rows, indices, strict=True):
            pixels = self._gather(row) if self.pixels is None else self.pixels[index]
            yield pixels, self.geometry[index], self.labels[index]

    def transforms(self, settings: Mapping[str, Any] = {}) -> tuple[TrainTransform, Transform]:
        dataset = self.decoded.dataset
        return build_transforms(dataset.image_size, dataset.info.augment, self.exact_fit, settings)

    def _gather(self, row: Tensor) -> Tensor:
        return torch.from_numpy(self.decoded.pixels[self.decoded.rows[row.numpy()]])

    def _stream(self, rows: Sequence[Tensor], indices: Sequence[Tensor]) -> Iterator[Batch]:
        """Yield batches that a thread gathers ahead from the memory map."""
        pool = ThreadPoolExecutor(1)

        def gather(row: Tensor) -> Future[Tensor]:
            return pool.submit(lambda: self._gather(row).pin_memory())

        ahead = deque(map(gather, rows[:PREFETCHED]))
        try:
            for number, index in enumerate(indices, PREFETCHED):
                pixels = ahead.popleft().result()
                ahead.extend(map(gather, rows[number : number + 1]))
                yield pixels.to(self.device, non_blocking=True), self.geometry[index], self.labels[index]
        finally:
            pool.shutdown(cancel_futures=True)
