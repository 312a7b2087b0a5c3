"""Batches: which images a step trains on, and how they reach the device.

The draw of step s depends on (seed, s) only, so a resumed run, another number of workers or images streamed instead of
held on the device change nothing.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from aidgn.data import transforms as augment
from aidgn.data.cache import DecodedDataset

RESIDENT_SHARE = 0.6  # of the free device memory that images may take
AHEAD = 4  # streamed batches in flight


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that nobody waits for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class BatchSampler:
    """What is random in a run's batches: per step, `batch_size` images of every source domain, uniformly with
    replacement and independently per domain, and the uniforms of their augmentation."""

    def __init__(self, pools: Sequence[np.ndarray], batch_size: int, seed: int):
        self.pools, self.batch_size, self.seed = pools, batch_size, seed

    def steps(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Image indices [stop - start, domains * batch_size] and uniforms [.., .., UNIFORMS] of steps start..stop-1."""
        size = len(self.pools) * self.batch_size
        indices = np.empty((stop - start, size), np.int64)
        uniforms = np.empty((stop - start, size, augment.UNIFORMS), np.float32)
        for row, step in enumerate(range(start, stop)):
            random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, step]))
            indices[row] = np.concatenate(
                [pool[random.integers(len(pool), size=self.batch_size)] for pool in self.pools]
            )
            random.random(out=uniforms[row], dtype=np.float32)
        return torch.from_numpy(indices), torch.from_numpy(uniforms)


class DeviceImageStore:
    """The decoded images of a data set as the device sees them: uint8 slots, geometry and labels by image index.

    They live on the device when they take at most `RESIDENT_SHARE` of its free memory; otherwise batches are gathered
    from the memory map by a thread, through pinned memory, `AHEAD` of their use.
    """

    def __init__(self, prepared: DecodedDataset, device: torch.device, resident: bool | None = None):
        self.prepared, self.device = prepared, device
        self.geometry = torch.from_numpy(prepared.geometry.astype(np.int32)).to(device)
        self.labels = torch.from_numpy(np.ascontiguousarray(prepared.dataset.labels)).to(device)
        fills = (prepared.geometry[:, :2] == prepared.slot).all()
        self.exact_fit = bool(fills and prepared.slot == prepared.dataset.image_size)
        if resident is None:
            resident = device.type == "cpu" or (
                prepared.pixels.nbytes <= RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
            )
        self.pixels: Tensor | None = None
        if resident and device.type != "cpu":
            shape = (len(prepared.rows), *prepared.pixels.shape[1:])
            self.pixels = torch.empty(shape, dtype=torch.uint8, device=device)
            for start in range(0, len(prepared.rows), 1024):
                rows = prepared.pixels[prepared.rows[start : start + 1024]]
                self.pixels[start : start + 1024] = torch.from_numpy(rows).to(device)

    def batches(self, rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For every row of image indices, on the host: uint8 images, geometry and labels on the device."""
        if not rows:  # of a few batches that are shared out, one process may have none
            return
        wheres = to_device(torch.cat(list(rows)), self.device).split([len(row) for row in rows])
        if self.pixels is None and self.device.type != "cpu":
            yield from self._streamed(rows, wheres)
            return
        for row, where in zip(rows, wheres, strict=True):
            pixels = self._gather(row) if self.pixels is None else self.pixels[where]
            yield pixels, self.geometry[where], self.labels[where]

    def _gather(self, row: Tensor) -> Tensor:
        return torch.from_numpy(self.prepared.pixels[self.prepared.rows[row.numpy()]])

    def _streamed(self, rows: Sequence[Tensor], wheres: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        ready: queue.Queue[Tensor | BaseException] = queue.Queue(AHEAD)
        stop = threading.Event()

        def hand_over(what: Tensor | BaseException) -> None:
            while not stop.is_set():
                with suppress(queue.Full):
                    return ready.put(what, timeout=0.1)

        def gather() -> None:
            try:
                for row in rows:
                    if stop.is_set():
                        return
                    hand_over(self._gather(row).pin_memory())
            except BaseException as error:
                hand_over(error)

        thread = threading.Thread(target=gather, daemon=True)
        thread.start()
        try:
            for where in wheres:
                batch = ready.get()
                if isinstance(batch, BaseException):
                    raise batch
                yield batch.to(self.device, non_blocking=True), self.geometry[where], self.labels[where]
        finally:
            stop.set()
            thread.join()
