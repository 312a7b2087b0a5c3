"""Any images in their order, decoded ahead of their use: by threads or, where they are many files, by worker processes,
which no interpreter lock holds up, into memory that they share with this one."""

import mmap
import os
import select
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, islice, pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from aidgn.data.cache import usable_cores
from aidgn.data.cache_index import slot_bytes
from aidgn.data.decode_pool import CHUNK, FEW, decode_into, receive_reply, send_task, start_workers, worker_died
from aidgn.data.images import read_shrunk, to_rgb, turn_upright
from aidgn.errors import AidgnError

DECODED_TOGETHER = 4  # images that a thread takes at a time
ASKED = 4  # times CHUNK images that a worker has before it: what both pipes hold, so that nobody waits for the other
LONGEST = 1024  # letters of a name, for the same reason
ImageLike = str | Path | Image.Image | np.ndarray | Tensor
Decoded = np.ndarray | AidgnError  # pixels [h, w, 3] as the cache stores them, or what is wrong with the image
OnBroken = Callable[[ImageLike, AidgnError], None]
loading = threading.Lock()  # a lazily opened image may be in a list twice


class Pixels(list[np.ndarray]):
    """Decoded images [h, w, 3]. If processes decoded them all they lie in rows of `memory` [.., slot, slot, 3]."""

    def __init__(self, images: Iterable[np.ndarray], memory: np.ndarray | None = None, rows: Sequence[int | None] = ()):
        super().__init__(images)
        self.memory = None if None in rows else memory
        self.rows = [row for row in rows if row is not None]

    def consecutive(self) -> Iterator[tuple[int, int, int]]:
        """From which image to which they lie behind each other, and the row of the first of these."""
        breaks = [0, *(i for i in range(1, len(self)) if self.rows[i] != self.rows[i - 1] + 1), len(self)]
        return ((start, stop, self.rows[start]) for start, stop in pairwise(breaks))


def streamed(
    images: Iterable[ImageLike], slot: int, batch_size: int, on_broken: OnBroken | None = None, pinned: bool = False
) -> Generator[tuple[list[ImageLike], Pixels], None, None]:
    """Images and their pixels, a batch at a time; the pixels may change once the next batch is asked for.

    What cannot be read is left out and told to `on_broken`; without it, it is an error. pinned: a GPU is to read the
    memory that processes write to."""
    rest, first = iter(images), list[ImageLike]()
    for image in rest:
        first.append(image)
        if len(first) == FEW or not isinstance(image, str | Path):
            break
    many_files, rest = len(first) == FEW and isinstance(first[-1], str | Path), chain(first, rest)
    with ExitStack() as stack:
        decoders: Threads | Workers = Threads(stack, slot, batch_size)
        if many_files and usable_cores() > 1 and hasattr(os, "memfd_create"):
            with suppress(OSError):  # memory that cannot be shared, no more processes: threads will do
                decoders = Workers(stack, slot, batch_size, pinned)
        waiting: deque[tuple[list[ImageLike], Callable[[], list[Decoded]]]] = deque()
        kept: list[ImageLike] = []
        pixels: list[np.ndarray] = []
        number = 0
        while True:
            while decoders.room(len(waiting)) and (part := list(islice(rest, decoders.together))):
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
    """They need no start, and take images of every kind."""

    together = DECODED_TOGETHER

    def __init__(self, stack: ExitStack, slot: int, batch_size: int):
        self.slot, self.ahead = slot, max(2 * batch_size // self.together, 2 * usable_cores())
        self.pool = ThreadPoolExecutor(usable_cores())  # decoders release the interpreter lock, if not all the time
        stack.callback(self.pool.shutdown, wait=False, cancel_futures=True)

    def room(self, waiting: int) -> bool:
        return waiting < self.ahead

    def submit(self, part: list[ImageLike]) -> Callable[[], list[Decoded]]:
        return self.pool.submit(decode, part, self.slot).result

    def given(self, pixels: list[np.ndarray]) -> Pixels:
        return Pixels(pixels)

    def release(self, count: int) -> None:
        """Pixels are freed by themselves."""


class Worker:
    """A process with what it has been asked and what it has answered, both in the order of the questions."""

    def __init__(self, process: subprocess.Popen, connection: Connection):
        self.process, self.connection = process, connection
        self.asked: deque[list[str]] = deque()
        self.answers: deque[list] = deque()

    def ask(self, store: int, slot: int, rows: list[int], files: list[str]) -> None:
        self.asked.append(files)
        try:
            send_task(self.connection, decode_into, store, slot, rows, files)
        except ConnectionError:
            raise self.ended() from None

    def receive(self) -> None:
        try:
            self.answers.append(receive_reply(self.connection))
        except (EOFError, ConnectionError):
            raise self.ended() from None
        self.asked.popleft()

    def ended(self) -> AidgnError:
        return worker_died(self.process, self.asked[0] if self.asked else ())


class Workers:
    """They write into rows of a file without a name that lives in memory, mapped here: gone whatever happens."""

    together = CHUNK

    def __init__(self, stack: ExitStack, slot: int, batch_size: int, pinned: bool):
        cores, ahead = usable_cores(), 2 * batch_size
        if pinned:  # a GPU is fast: leave a core to the thread that feeds it, and let one late worker not hold up all
            cores, ahead = cores - cores // 16, 4 * batch_size
        rows = batch_size + max(ahead, 2 * cores * self.together)  # a batch in use, the others ahead
        # In turn, so that the images of a batch mostly lie behind each other.
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
        return len(self.free) >= self.together and len(self.idlest().asked) < ASKED

    def idlest(self) -> Worker:
        return min(self.workers.values(), key=lambda worker: len(worker.asked))

    def submit(self, part: list[ImageLike]) -> Callable[[], list[Decoded]]:
        if not all(isinstance(image, str | Path) and len(str(image)) <= LONGEST for image in part):
            return partial(self.decoded_here, part)
        worker, rows = self.idlest(), [self.free.popleft() for _ in part]
        worker.ask(self.store, self.slot, rows, [str(image) for image in part])
        return partial(self.decoded_by, worker, rows)

    def decoded_here(self, part: list[ImageLike]) -> list[Decoded]:
        """Where an image in memory or a very long name is among them."""
        found = decode(part, self.slot)
        self.lent.extend(None for each in found if isinstance(each, np.ndarray))
        return found

    def decoded_by(self, worker: Worker, rows: list[int]) -> list[Decoded]:
        while not worker.answers:
            worker.receive()
        found: list[Decoded] = []
        for row, each in zip(rows, worker.answers.popleft(), strict=True):
            if isinstance(each, str):
                self.free.append(row)
                found.append(AidgnError(each))
            else:
                self.lent.append(row)
                height, width = each
                found.append(self.memory[row, :height, :width])
        return found

    def given(self, pixels: list[np.ndarray]) -> Pixels:
        if self.pin is not None:  # now, while the workers decode the batches behind the first
            self.pin()
            self.pin = None
        return Pixels(pixels, self.memory, [*islice(self.lent, len(pixels))])

    def release(self, count: int) -> None:
        """The first `count` pixels that were given out are not needed any more."""
        self.free.extend(row for row in (self.lent.popleft() for _ in range(count)) if row is not None)


def pin(stack: ExitStack, memory: np.ndarray) -> None:
    """Have the GPU read memory by itself until the stack ends; where that is refused it is given copies."""
    runtime, portable = torch.cuda.cudart(), 1  # for every GPU
    if runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, portable) == runtime.cudaError.success:
        stack.callback(runtime.cudaHostUnregister, memory.ctypes.data)
        return
    with suppress(RuntimeError):  # the refusal stays behind: whatever the GPU is given next would raise it
        torch.ones(1, device="cuda")


def decode(images: Sequence[ImageLike], slot: int) -> list[np.ndarray | AidgnError]:
    """Pixels [h, w, 3] of upright images, each side shrunk to at most `slot`; an error in the place of a broken one."""
    found: list[np.ndarray | AidgnError] = []
    for image in images:
        try:
            if isinstance(image, str | Path):
                picture, _ = read_shrunk(str(image), slot)
            else:
                picture = upright(image)
                size = min(slot, picture.width), min(slot, picture.height)
                if picture.size != size:
                    picture = picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=3.0)
            found.append(np.asarray(picture))
        except AidgnError as error:
            found.append(error)
    return found


def upright(image: ImageLike) -> Image.Image:
    """An image that is in memory in mode RGB, upright as `read_image` gives that of a file."""
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
        wanted = "a tensor [3, H, W] or [H, W]"
    elif isinstance(image, np.ndarray):
        array, wanted = image, "an array [H, W, 3] or [H, W]"
    else:
        raise AidgnError(f"it is a {type(image).__name__}; expected a path, a PIL image, an array or a tensor.")
    if array.ndim not in (2, 3) or not array.size or array.shape[2:] not in ((), (1,), (3,), (4,)):
        raise AidgnError(f"its shape is {list(image.shape)}; expected {wanted}.")
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
