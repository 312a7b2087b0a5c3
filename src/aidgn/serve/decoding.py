"""Decode uploaded files in other processes, which end when a file takes too much time or its sender leaves.

A small file can take seconds of CPU time, for instance because of a comment of 30 MB in its header. Slow pictures have
a separate queue, so that fast ones need not wait for them.
"""

import asyncio
import mmap
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import numpy as np

from aidgn.data.cache_index import slot_bytes
from aidgn.data.decode_pool import decode_into, read_header, receive_reply, run_limited, send_task, start_workers
from aidgn.data.images import FORMAT_NAMES
from aidgn.serve.errors import RequestError

FAST_DECODERS = 2
FAST_SECONDS = 0.5  # CPU time; a picture that takes longer is slow
SLOW_SECONDS = 10.0  # CPU time limit of slow pictures
LARGE = 4_000_000  # pixels; larger pictures go to the slow queue at once
LEAVING_SECONDS = 0.5  # time to finish a picture whose sender has left; starting a new process often takes longer
# Modes that need few bytes per pixel on their way to RGB. Other modes, such as transparency, have a lower limit.
LEAN_MODES = ("1", "L", "P", "RGB", "CMYK", "YCbCr")
OTHER_MODES_SHARE = 1 / 4  # share of the pixel limit for other modes

Result = TypeVar("Result")


class OutOfTime(Exception):
    """A file took more CPU time than its limit."""


class Decoder:
    """A process that decodes one file at a time, and is replaced when it dies."""

    def __init__(self, slot: int, seconds: float):
        self.slot = slot
        self.seconds = seconds
        self.stack = ExitStack()
        self.connection: Connection | None = None
        self.closed = False
        self.thread = ThreadPoolExecutor(1, "decoder")
        self.thread.submit(self.connect)  # so that the first picture need not wait for the process

    def close(self) -> None:
        self.closed = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.stack.close()

    async def read_header(self, path: Path) -> list:
        """Call `decode_pool.read_header` in the process."""
        return await self.run(lambda: self.call(read_header, str(path)))

    async def decode(self, path: Path) -> np.ndarray | str:
        """Return the pixels of a file, or the problem with the file."""

        def work() -> np.ndarray | str:
            self.connect()
            [result] = self.call(decode_into, self.store.fileno(), self.slot, [0], [str(path)])
            return result if isinstance(result, str) else self.memory[: result[0], : result[1]].copy()

        return await self.run(work)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the thread; after a cancellation, end it soon."""
        future = asyncio.get_running_loop().run_in_executor(self.thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not (await asyncio.wait([future], timeout=LEAVING_SECONDS))[0]:
                self.process.terminate()
                await asyncio.wait([future])
            future.exception()  # marks it as retrieved, so that asyncio does not log it
            raise

    # In the thread ---------------------------------------------------------------------------------------------------

    def connect(self) -> Connection:
        """Return the connection to the process, and start one if there is none."""
        if self.connection is None:
            if self.closed:
                raise RequestError(503, "The server is about to stop.")
            try:
                self.store = self.stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
                self.store.truncate(slot_bytes(self.slot))
                self.memory = np.frombuffer(mmap.mmap(self.store.fileno(), 0), np.uint8).reshape(-1, self.slot, 3)
                self.process, [self.connection] = start_workers(self.stack, 1, self.store.fileno())
            except OSError as error:
                self.stack.close()
                raise RequestError(503, f"No process to decode this picture can be started: {error}.") from error
        return self.connection

    def call(self, task: Callable[..., list], *arguments: object) -> list:
        """Run a task in the process. If the process dies, the next call starts another one."""
        connection = self.connect()
        try:
            send_task(connection, run_limited, self.seconds, task.__name__, arguments)
            return receive_reply(connection)
        except (EOFError, ConnectionError):
            code = self.process.wait()
            self.connection = None
            self.stack.close()
            if code == -signal.SIGPROF:
                raise OutOfTime from None
            raise RequestError(422, f"This picture ended the process that decoded it (exit code {code}).") from None


class Decoders:
    """Decoders of fast and of slow pictures."""

    def __init__(self, slot: int, megapixels: float):
        self.megapixels = megapixels
        self.all = [Decoder(slot, FAST_SECONDS) for _ in range(FAST_DECODERS)]
        self.fast: asyncio.Queue[Decoder] = asyncio.Queue()
        for decoder in self.all:
            self.fast.put_nowait(decoder)
        self.slow: asyncio.Queue[Decoder] = asyncio.Queue()
        self.all.append(Decoder(slot, SLOW_SECONDS))
        self.slow.put_nowait(self.all[-1])

    def close(self) -> None:
        for decoder in self.all:
            decoder.close()

    async def decode(self, path: Path) -> np.ndarray:
        """Decode a file as `aidgn predict` does, after checking the number of pixels in its header."""
        try:
            async with lent(self.fast) as decoder:
                header = await decoder.read_header(path)
        except OutOfTime:
            raise RequestError(422, f"The header of this picture takes over {FAST_SECONDS:g} s to read.") from None
        pixels = check_header(header, path, self.megapixels)
        if pixels <= LARGE:
            with suppress(OutOfTime):
                async with lent(self.fast) as decoder:
                    return decoded(await decoder.decode(path), path)
        try:
            async with lent(self.slow) as decoder:
                return decoded(await decoder.decode(path), path)
        except OutOfTime:
            raise RequestError(422, f"This picture takes over {SLOW_SECONDS:g} s of computing to decode.") from None


@asynccontextmanager
async def lent(queue: asyncio.Queue[Decoder]) -> AsyncIterator[Decoder]:
    decoder = await queue.get()
    try:
        yield decoder
    finally:
        queue.put_nowait(decoder)


def check_header(header: list, path: Path, megapixels: float) -> int:
    """Return the number of pixels in a header; raise RequestError if the file is no picture, damaged or too large.

    Args:
        header: From `decode_pool.read_header`.
        path: The file.
        megapixels: Limit of a picture.
    """
    match header:
        case [int(width), int(height), mode, transparent]:
            lean = mode in LEAN_MODES and not transparent
            pixels = width * height
            size = f"{width:,} x {height:,}"
        case ["UnidentifiedImageError", *_]:
            if not path.stat().st_size:
                raise RequestError(415, "This file is empty (0 bytes).")
            raise RequestError(
                415, f"This is not a picture: its content is not {FORMAT_NAMES}, whatever its name says."
            )
        case ["FormatError", reason]:
            raise RequestError(415, f"This picture {reason}")
        case ["DecompressionBombError", *_]:
            pixels, lean, size = 1 << 62, True, "by far"
        case [name, reason]:
            raise RequestError(422, f"This picture is damaged: {reason or name}.")
    most = megapixels * (1 if lean else OTHER_MODES_SHARE)
    if pixels > most * 1e6:
        raise RequestError(
            413,
            f"This picture has too many pixels ({size}): up to {most:g} million are taken"
            f"{'' if lean else ' with transparency or 16-bit grey'}. Make it smaller.",
        )
    return pixels


def decoded(result: np.ndarray | str, path: Path) -> np.ndarray:
    if isinstance(result, str):
        raise RequestError(422, result.replace(str(path), "This picture"))
    return result
