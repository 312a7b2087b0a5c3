"""Decode images ahead of their use, in order.

Threads decode a few images. Worker processes, which share no interpreter lock, decode many files into memory shared
with this process.
"""

import mmap
import os
import select
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from aidgn.data.cache_index import slot_bytes
from aidgn.data.decode_pool import CHUNK, FEW, decode_into, receive_reply, send_task, start_workers, worker_died
from aidgn.data.images import read_shrunk, to_rgb, turn_upright
from aidgn.data.row_cache import usable_cores
from aidgn.errors import AidgnError

IMAGES_PER_THREAD = 4  # images that a thread takes at a time
QUEUED_CHUNKS = 4  # chunks queued per worker; they fit into the pipe buffers, so there is no deadlock
LONGEST_NAME = 1024  # characters, for the same reason
ImageLike = str | Path | Image.Image | np.ndarray | Tensor
Decoded = np.ndarray | AidgnError  # pixels [h, w, 3] as in the cache, or the error in the image
OnBroken = Callable[[ImageLike, AidgnError], None]
loading = threading.Lock()  # a list may hold a lazily opened image twice


class Pixels(list[np.ndarray]):
    """Decoded images [h, w, 3]. If processes decoded all of them, `memory` [.., slot, slot, 3] has them in `rows`."""

    def __init__(self, images: Iterable[np.ndarray], memory: np.ndarray | None = None, rows: Sequence[int | None] = ()):
        super().__init__(images)
        self.memory = None if None in rows else memory
        self.rows = [row for row in rows if row is not None]

    def consecutive(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, row) of images that lie in consecutive rows, from `row` on."""
        breaks = [0, *(i for i in range(1, len(self)) if self.rows[i] != self.rows[i - 1] + 1), len(self)]
        return ((start, stop, self.rows[start]) for start, stop in pairwise(breaks))


def streamed(
    images: Iterable[ImageLike], slot: int, batch_size: int, on_broken: OnBroken | None = None, pinned: bool = False
) -> Generator[tuple[list[ImageLike], Pixels], None, None]:
    """Yield images and their pixels batch by batch. The pixels may change when the next batch is requested.

    Args:
        images: The images.
        slot: Longest side of decoded images; larger ones are shrunk.
        batch_size: Number of images in a batch.
        on_broken: Receives each image that cannot be read, and the error. By default the error is raised.
        pinned: Let a GPU read the shared memory directly.
    """
    rest = iter(images)
    first: list[ImageLike] = []
    for image in rest:
        first.append(image)
        if len(first) == FEW or not isinstance(image, str | Path):
            break
    many_files = len(first) == FEW and isinstance(first[-1], str | Path)
    rest = chain(first, rest)
    with ExitStack() as stack:
        decoders: Threads | Workers = Threads(stack, slot, batch_size)
        if many_files and usable_cores() > 1 and hasattr(os, "memfd_create"):
            with suppress(OSError):  # without shared memory or more processes, threads decode
                decoders = Workers(stack, slot, batch_size, pinned)
        waiting: deque[tuple[list[ImageLike], Callable[[], list[Decoded]]]] = deque()
        kept: list[ImageLike] = []
        pixels: list[np.ndarray] = []
        number = 0
        while True:
            while decoders.room(len(waiting)) and (part := list(islice(rest, decoders.chunk_size))):
                waiting.append((part, decoders.submit(part)))
            if not waiting:
                break
            part, results = waiting.popleft()
            for image, result in zip(part, results(), strict=True):
                if isinstance(result, np.ndarray):
                    kept.append(image)
                    pixels.append(result)
                elif on_broken is None:
                    raise result if isinstance(image, str | Path) else AidgnError(f"Image {number}: {result}")
                else:
                    on_broken(image, result)
                number += 1
                if len(kept) == batch_size:
                    yield kept, decoders.given(pixels)
                    decoders.release(batch_size)
                    kept, pixels = [], []
        if kept:
            yield kept, decoders.given(pixels)


class Threads:
    """Decode in threads, which start at once and take images of every type."""

    chunk_size = IMAGES_PER_THREAD

    def __init__(self, stack: ExitStack, slot: int, batch_size: int):
        self.slot = slot
        self.ahead = max(2 * batch_size // self.chunk_size, 2 * usable_cores())
        self.pool = ThreadPoolExecutor(usable_cores())  # decoders release the interpreter lock most of the time
        stack.callback(self.pool.shutdown, wait=False, cancel_futures=True)

    def room(self, waiting: int) -> bool:
        return waiting < self.ahead

    def submit(self, part: list[ImageLike]) -> Callable[[], list[Decoded]]:
        return self.pool.submit(decode, part, self.slot).result

    def given(self, pixels: list[np.ndarray]) -> Pixels:
        return Pixels(pixels)

    def release(self, count: int) -> None:
        """Do nothing: Python frees the pixels."""


@dataclass(eq=False)
class Worker:
    """A process with its queued tasks and its replies, each in order."""

    process: subprocess.Popen
    connection: Connection
    queued: deque[list[str]] = field(default_factory=deque)
    replies: deque[list] = field(default_factory=deque)

    def send(self, store: int, slot: int, rows: list[int], files: list[str]) -> None:
        self.queued.append(files)
        try:
            send_task(self.connection, decode_into, store, slot, rows, files)
        except ConnectionError:
            raise self.ended() from None

    def receive(self) -> None:
        try:
            self.replies.append(receive_reply(self.connection))
        except (EOFError, ConnectionError):
            raise self.ended() from None
        self.queued.popleft()

    def ended(self) -> AidgnError:
        return worker_died(self.process, self.queued[0] if self.queued else ())


class Workers:
    """Decode in processes that write into rows of an anonymous file in memory, which its last user frees."""

    chunk_size = CHUNK

    def __init__(self, stack: ExitStack, slot: int, batch_size: int, pinned: bool):
        cores, ahead = usable_cores(), 2 * batch_size
        if pinned:  # a GPU is fast: leave a core to the thread that feeds it, and absorb a late worker
            cores, ahead = cores - cores // 16, 4 * batch_size
        rows = batch_size + max(ahead, 2 * cores * self.chunk_size)  # a batch in use and the images ahead
        # Rows are used in turn, so that the images of a batch mostly lie in consecutive rows.
        self.slot, self.free, self.lent = slot, deque(range(rows)), deque[int | None]()
        self.store = os.memfd_create("aidgn")
        stack.callback(os.close, self.store)
        os.truncate(self.store, rows * slot_bytes(slot))
        self.memory = np.frombuffer(mmap.mmap(self.store, 0), np.uint8).reshape(rows, slot, slot, 3)
        self.workers: dict[int, Worker] = {}
        self.ready = select.poll()
        process, connections = start_workers(stack, cores, self.store)
        for connection in connections:
            self.workers[connection.fileno()] = Worker(process, connection)
            self.ready.register(connection, select.POLLIN)
        self.pin = partial(pin, stack, self.memory) if pinned else None

    def room(self, waiting: int) -> bool:
        for connection, _ in self.ready.poll(0):
            self.workers[connection].receive()
        return len(self.free) >= self.chunk_size and len(self.idlest().queued) < QUEUED_CHUNKS

    def idlest(self) -> Worker:
        return min(self.workers.values(), key=lambda worker: len(worker.queued))

    def submit(self, part: list[ImageLike]) -> Callable[[], list[Decoded]]:
        if not all(isinstance(image, str | Path) and len(str(image)) <= LONGEST_NAME for image in part):
            return partial(self.decoded_here, part)
        worker, rows = self.idlest(), [self.free.popleft() for _ in part]
        worker.send(self.store, self.slot, rows, [str(image) for image in part])
        return partial(self.decoded_by, worker, rows)

    def decoded_here(self, part: list[ImageLike]) -> list[Decoded]:
        """Decode a chunk with an image in memory or a very long name."""
        results = decode(part, self.slot)
        self.lent.extend(None for result in results if isinstance(result, np.ndarray))
        return results

    def decoded_by(self, worker: Worker, rows: list[int]) -> list[Decoded]:
        while not worker.replies:
            worker.receive()
        results: list[Decoded] = []
        for row, size_or_error in zip(rows, worker.replies.popleft(), strict=True):
            if isinstance(size_or_error, str):
                self.free.append(row)
                results.append(AidgnError(size_or_error))
            else:
                self.lent.append(row)
                height, width = size_or_error
                results.append(self.memory[row, :height, :width])
        return results

    def given(self, pixels: list[np.ndarray]) -> Pixels:
        if self.pin is not None:  # late, while the workers decode the batches after the first
            self.pin()
            self.pin = None
        return Pixels(pixels, self.memory, [*islice(self.lent, len(pixels))])

    def release(self, count: int) -> None:
        """Reuse the rows of the first `count` images that were handed out."""
        self.free.extend(row for row in (self.lent.popleft() for _ in range(count)) if row is not None)


def pin(stack: ExitStack, memory: np.ndarray) -> None:
    """Let the GPU read memory directly until the stack ends; if the driver refuses, it receives copies."""
    runtime, portable = torch.cuda.cudart(), 1  # for every GPU
    if runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, portable) == runtime.cudaError.success:
        stack.callback(runtime.cudaHostUnregister, memory.ctypes.data)
        return
    with suppress(RuntimeError):  # clear the error, which the next GPU call would raise
        torch.ones(1, device="cuda")


def decode(images: Sequence[ImageLike], slot: int) -> list[np.ndarray | AidgnError]:
    """Decode images upright, with sides of at most `slot`; broken images give an error in their place."""
    results: list[np.ndarray | AidgnError] = []
    for image in images:
        try:
            if isinstance(image, str | Path):
                picture, _ = read_shrunk(str(image), slot)
            else:
                picture = upright(image)
                size = min(slot, picture.width), min(slot, picture.height)
                if picture.size != size:
                    picture = picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=3.0)
            results.append(np.asarray(picture))
        except AidgnError as error:
            results.append(error)
    return results


def upright(image: ImageLike) -> Image.Image:
    """Convert an image in memory to mode RGB, upright as `read_image` does with files."""
    if isinstance(image, Image.Image):
        try:
            with loading:
                image.load()
            return turn_upright(image)
        except Exception as error:  # decoders fail on damaged files with exceptions of every kind
            raise AidgnError(f"it is damaged: {str(error) or type(error).__name__}.") from error
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image
        array = (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()
        expected = "a tensor [3, H, W] or [H, W]"
    elif isinstance(image, np.ndarray):
        array = image
        expected = "an array [H, W, 3] or [H, W]"
    else:
        raise AidgnError(f"it is a {type(image).__name__}; expected a path, a PIL image, an array or a tensor.")
    if array.ndim not in (2, 3) or not array.size or array.shape[2:] not in ((), (1,), (3,), (4,)):
        raise AidgnError(f"its shape is {list(image.shape)}; expected {expected}.")
    if np.issubdtype(array.dtype, np.floating):
        if not (array.min() >= 0 and array.max() <= 1):
            raise AidgnError(
                f"its values go from {array.min():g} to {array.max():g}; numbers with a fraction must be "
                "from 0 to 1, and not normalised."
            )
        array = np.round(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise AidgnError(f"its values are {image.dtype}; expected uint8 from 0 to 255, or fractions from 0 to 1.")
    return to_rgb(Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array)))
