"""Image files into slots of the pixel file: hash, decode, shrink, store; by worker processes where images are many."""

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from hashlib import blake2b
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NamedTuple, NoReturn

import numpy as np
from PIL import Image, ImageFile

from aidgn.data.images import open_image, orientation, read_image
from aidgn.errors import AidgnError
from aidgn.files import open_no_link

CHUNK = 16  # images handed to a worker at a time
FEW = 200  # images decoded faster than workers start
# For glibc: what one image has left is used for the next, not given back and asked for again, page by page. That
# can cost a third of the time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 26), "MALLOC_TRIM_THRESHOLD_": str(1 << 27)}
RACY_NS = 2_000_000_000  # a file changed so shortly before may change again within the clock tick of its ctime
BROKEN, LARGER = -1, -2  # instead of a row: cannot be decoded; larger than a slot that can still grow


class CacheEntry(NamedTuple):
    """What is known of one image file."""

    file: str
    stamp: Sequence[int]  # see `stamp_of`; empty: compare the content next time
    digest: str  # of the content; empty: the file could not be read
    row: int = BROKEN
    geometry: Sequence[int] = (0, 0, 0, 0)
    checksum: int = 0  # CRC-32 of the slot
    reason: str = ""  # why it is broken


def largest_slot(image_size: int) -> int:
    """The most pixels of a side that are stored for a network of this input, so that crops keep their sharpness."""
    return round(image_size * 256 / 224)


def slot_bytes(slot: int) -> int:
    return slot * slot * 3


def content_digest(path: str) -> str:
    try:
        return blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return "unreadable"


def stamp_of(path: str) -> list[int]:
    """What changes whenever the file does: the system sets the ctime on every write, nobody can set it back."""
    stat = os.stat(path)  # noqa: PTH116, for half a million files
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def settled(stamp: list[int]) -> list[int]:
    """The stamp just taken, or an empty one if the file may yet change without changing it."""
    return stamp if abs(time.time_ns() - stamp[2]) > RACY_NS else []


def longest_side(path: str) -> int:
    """From the file's header; 1 if it is broken, for decoding will say so."""
    try:
        with open_image(path) as image:
            return max(image.size)
    except Exception:
        return 1


def shrunk(path: str, slot: int) -> tuple[Image.Image, tuple[int, int]]:
    """The image with each side at most `slot`, and the original height and width.

    Bilinear with antialiasing, from a JPEG decoded at 1/2, 1/4 or 1/8 of its size where that leaves two pixels or more
    for each one stored, and after box reduction that leaves three: on photographs this differs from the exact result
    by 0.6 of 255 on average and by at most 3 in 99 of 100 values.
    """
    image, (height, width) = read_image(path, at_least=2 * slot)
    size = min(slot, width), min(slot, height)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR, box=covered(image, width, height), reducing_gap=3.0)
    return image, (height, width)


def covered(image: Image.Image, width: int, height: int) -> tuple[float, float, float, float]:
    """The part of a JPEG decoded at a fraction of its size that the original fills: its last column and row may stick
    out by a part of a pixel, to whichever side EXIF, which the upright image still has, has turned them."""
    scale = next(scale for scale in (1, 2, 4, 8) if image.size == (-(-width // scale), -(-height // scale)))
    wide, high = width / scale, height / scale
    left = top = 0.0
    if (wide, high) != image.size:
        turn = orientation(image)
        left = image.width - wide if turn in (2, 3, 6, 7) else 0.0
        top = image.height - high if turn in (3, 4, 7, 8) else 0.0
    return left, top, left + wide, top + high


def decode(root: str, pixels: str, slot: int, limit: int, row: int, files: list[str]) -> list[CacheEntry]:
    """Decode images into consecutive rows of the pixel file."""
    with open_no_link(Path(pixels), "r+b") as store:
        return [decode_one(root, file, slot, limit, store, row + number) for number, file in enumerate(files)]


def decode_one(root: str, file: str, slot: int, limit: int, store: IO[bytes], row: int) -> CacheEntry:
    path = root + file
    try:
        stamp = settled(stamp_of(path))  # before reading, so that a later change shows next time
        digest = blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        return CacheEntry(file, [], "", reason=f"cannot be read: {error.strerror}.")
    try:
        image, (height, width) = shrunk(path, slot)
    except AidgnError as error:
        reason, cause = str(error).removeprefix(path).strip(), error.__context__
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None):  # the fault is not the file's: try again
            return CacheEntry(file, [], "", reason=reason)
        return CacheEntry(file, stamp, digest, reason=reason)
    if max(height, width) > slot and slot < limit:
        return CacheEntry(file, [], "", LARGER, (0, 0, height, width))
    geometry = image.height, image.width, height, width
    if image.size != (slot, slot):
        image = image.crop((0, 0, slot, slot))  # fills up with zeros
    rest = memoryview(image.tobytes())
    checksum = zlib.crc32(rest)
    position = row * slot_bytes(slot)
    while rest:
        written = os.pwrite(store.fileno(), rest, position)
        rest, position = rest[written:], position + written
    return CacheEntry(file, stamp, digest, row, geometry, checksum)


def fill(store: int, slot: int, rows: list[int], files: list[str]) -> list[tuple[int, int] | str]:
    """Decode images into shared memory, an open file, each to the upper left of a row, which is a slot: height and
    width of each, or what is wrong with it."""
    memory, found = mapped(store, slot), list[tuple[int, int] | str]()
    for row, file in zip(rows, files, strict=True):
        try:
            image, _ = shrunk(file, slot)
        except AidgnError as error:
            found.append(str(error))
            continue
        memory[row, : image.height, : image.width] = np.asarray(image)
        found.append((image.height, image.width))
    return found


@cache
def mapped(store: int, slot: int) -> np.ndarray:
    """All at once, not page by page, which costs more than writing to it."""
    memory = mmap.mmap(store, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return np.frombuffer(memory, np.uint8).reshape(-1, slot, slot, 3)


def decode_all(
    root: str, pixels: Path, slot: int, limit: int, files: list[str], workers: int
) -> Generator[CacheEntry, None, None]:
    """Decode into new rows of the pixel file, by worker processes if the images are many. A row is given out once: what
    the workers of a killed run still write harms nobody."""
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    reserving = threading.Lock()

    def task(chunk: list[str]) -> tuple[str, str, int, int, int, list[str]]:
        with reserving, open_no_link(pixels, "r+b") as store:
            row = -(-os.fstat(store.fileno()).st_size // slot_bytes(slot))
            store.truncate((row + len(chunk)) * slot_bytes(slot))
        return root, str(pixels), slot, limit, row, chunk

    idle: SimpleQueue[Connection] = SimpleQueue()

    def delegate(chunk: list[str]) -> list[CacheEntry]:
        connection = idle.get()
        try:
            ask(connection, decode, *task(chunk))
            return [CacheEntry(*fields) for fields in answer(connection)]
        except (EOFError, ConnectionError):
            raise ended(process, chunk) from None
        finally:
            idle.put(connection)

    with ExitStack() as stack:
        connections: list[Connection] = []
        if workers > 1 and len(files) >= FEW:
            with suppress(OSError):  # no more processes or open files: this one will do
                process, connections = start_workers(stack, min(workers, len(chunks)))
        if not connections:
            for chunk in chunks:
                yield from decode(*task(chunk))
            return
        for connection in connections:
            idle.put(connection)
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        try:
            for entries in pool.map(delegate, chunks):
                yield from entries
        except BaseException:  # Ctrl-C does not wait for sixteen large images
            process.terminate()
            raise


# Workers --------------------------------------------------------------------------------------------------------------


def start_workers(stack: ExitStack, count: int, *inherited: int) -> tuple[subprocess.Popen, list[Connection]]:
    """A process that runs `work`, and connections to its workers. They import neither the main script nor torch, as
    multiprocessing's would, have these open files too, end when this process does, and leave Ctrl-C to it. Until the
    stack ends: idle or not, they are not waited for."""
    ours, theirs = zip(*(Pipe() for _ in range(count)), strict=True)
    with ExitStack() as passed:
        for each in theirs:
            passed.enter_context(each)
        files = [each.fileno() for each in theirs]
        process = stack.enter_context(
            subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-W",
                    "ignore",
                    "-c",
                    "from aidgn.data.decode_pool import work; work()",
                    *map(str, files),
                ],
                pass_fds=[*files, *inherited],
                start_new_session=True,
                stdin=None if 0 in (*files, *inherited) else subprocess.DEVNULL,  # one may be 0 where that was closed
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
                    "OPENBLAS_NUM_THREADS": "1",
                    **KEEP_MEMORY,
                },
            )
        )
    for each in ours:
        stack.enter_context(each)
    stack.callback(process.terminate)
    try:
        for each in ours:
            each.recv_bytes()
    except (EOFError, ConnectionError):
        raise OSError(errno.EAGAIN, "processes that decode images cannot be started") from None
    return process, [*ours]


def ask(connection: Connection, task: Callable[..., list], *arguments: object) -> None:
    """Have a worker run `decode` or `fill`."""
    connection.send_bytes(json.dumps((task.__name__, arguments)).encode())


def answer(connection: Connection) -> list:
    """What came of it."""
    reply = json.loads(connection.recv_bytes())
    if isinstance(reply, dict):
        raise OSError(reply["errno"], reply["strerror"])
    return reply


def ended(process: subprocess.Popen, files: Sequence[str]) -> AidgnError:
    where = f" at one of {files[0]} to {files[-1]}" if files else ""
    return AidgnError(
        f"A process that decodes images ended unexpectedly (exit code {process.wait()}){where}. If memory "
        "ran out, use fewer cores: taskset -c 0-3 aidgn ..."
    )


def work() -> None:
    """Workers, one for each connection: forks of this process, as importing takes it longer than them their first
    hundred images. Should one end otherwise than when its connection does, all end, this process in the same way."""
    ImageFile.MAXBLOCK = 1 << 20  # in how large pieces Pillow gives pixels away, which it joins by copying
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, as by some daemons, no end can be waited for
    connections, workers, code = [int(each) for each in sys.argv[1:]], set[int](), 0
    try:
        while connections:
            connection = connections.pop()
            worker = os.fork()
            if not worker:
                for other in connections:
                    os.close(other)
                serve(connection)
            workers.add(worker)
            os.close(connection)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        while workers and not code:
            worker, status = os.wait()
            workers.remove(worker)
            code = os.waitstatus_to_exitcode(status)
    except BlockingIOError:  # no more processes: then none
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for worker in workers:
            with suppress(ProcessLookupError):  # it ended just when this process was told to
                os.kill(worker, signal.SIGKILL)
                os.waitpid(worker, 0)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve(file: int) -> NoReturn:
    """A worker: what to do comes in, its result goes out."""
    tasks: dict[str, Callable[..., list]] = {"decode": decode, "fill": fill}
    try:
        with Connection(file) as connection, suppress(EOFError, ConnectionError):
            connection.send_bytes(b"started")
            while True:
                name, arguments = json.loads(connection.recv_bytes())
                try:
                    reply: object = tasks[name](*arguments)
                except OSError as error:
                    reply = {"errno": error.errno, "strerror": error.strerror}
                connection.send_bytes(json.dumps(reply).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
