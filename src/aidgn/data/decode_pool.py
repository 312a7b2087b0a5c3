"""Decode image files into the slots of a pixel file or of shared memory, in worker processes where images are many.

The workers do not come from multiprocessing or concurrent.futures, which import the main script and, with it, torch. So
a script that trains needs no `if __name__ == "__main__"`, and Ctrl-C reaches this process only. If an image kills its
worker, the error names the images that the worker had.
"""

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
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
from typing import IO, NoReturn

import numpy as np
from PIL import ImageFile

from aidgn.data.cache_index import LARGER, CacheEntry, reliable, slot_bytes, stamp_of
from aidgn.data.images import add_installed_formats, open_image, read_shrunk
from aidgn.errors import AidgnError, FormatError
from aidgn.files import open_no_link, write_at

CHUNK = 16  # images in a task of a worker
FEW = 200  # this process decodes fewer images than that faster than workers start
# For glibc: reuse the memory of one image for the next instead of returning it to the system, which can cost a third
# of the time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 26), "MALLOC_TRIM_THRESHOLD_": str(1 << 27)}


def decode_all(
    root: str, pixels: Path, slot: int, limit: int, files: list[str], workers: int
) -> Generator[CacheEntry, None, None]:
    """Decode images into new rows of the pixel file, and yield their entries in order.

    Each row is assigned once, so workers of a killed run that still write do no harm.

    Args:
        root: Folder of the data set, with a separator at the end.
        pixels: The pixel file.
        slot: Side of its slots.
        limit: The largest side that slots may grow to.
        files: Paths below `root`.
        workers: Number of processes.
    """
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    reserving = threading.Lock()

    def reserve_rows(chunk: list[str]) -> tuple[str, str, int, int, int, list[str]]:
        """Append rows for a chunk to the pixel file; return the arguments of `decode_files`."""
        with reserving, open_no_link(pixels, "r+b") as store:
            row = -(-os.fstat(store.fileno()).st_size // slot_bytes(slot))
            store.truncate((row + len(chunk)) * slot_bytes(slot))
        return root, str(pixels), slot, limit, row, chunk

    with ExitStack() as stack:
        connections: list[Connection] = []
        if workers > 1 and len(files) >= FEW:
            with suppress(OSError):  # no more processes or open files: decode in this process
                process, connections = start_workers(stack, min(workers, len(chunks)))
        if not connections:
            for chunk in chunks:
                yield from decode_files(*reserve_rows(chunk))
            return
        idle: SimpleQueue[Connection] = SimpleQueue()
        for connection in connections:
            idle.put(connection)

        def delegate(chunk: list[str]) -> list[CacheEntry]:
            connection = idle.get()
            try:
                send_task(connection, decode_files, *reserve_rows(chunk))
                return [CacheEntry(*fields) for fields in receive_reply(connection)]
            except (EOFError, ConnectionError):
                raise worker_died(process, chunk) from None
            finally:
                idle.put(connection)

        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        try:
            for entries in pool.map(delegate, chunks):
                yield from entries
        except BaseException:  # Ctrl-C does not wait for sixteen large images
            process.terminate()
            raise


# Tasks of workers -----------------------------------------------------------------------------------------------------


def decode_files(root: str, pixels: str, slot: int, limit: int, row: int, files: list[str]) -> list[CacheEntry]:
    """Decode images into consecutive rows of the pixel file."""
    with open_no_link(Path(pixels), "r+b") as store:
        return [decode_file(root, file, slot, limit, store, row + number) for number, file in enumerate(files)]


def decode_file(root: str, file: str, slot: int, limit: int, store: IO[bytes], row: int) -> CacheEntry:
    """Decode an image into a row of the pixel file, unless the image is broken or needs a larger slot."""
    path = root + file
    try:
        stamp = reliable(stamp_of(path))  # taken before reading, so that a later change is noticed next time
        digest = blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        return CacheEntry(file, [], "", reason=f"cannot be read: {error.strerror}.")
    try:
        image, (height, width) = read_shrunk(path, slot)
    except AidgnError as error:
        reason = str(error).removeprefix(path).strip()
        cause = error.__context__
        is_temporary = isinstance(cause, MemoryError | FormatError) or getattr(cause, "errno", None)
        if is_temporary:  # not the file's fault: the next run tries again
            return CacheEntry(file, [], "", reason=reason)
        return CacheEntry(file, stamp, digest, reason=reason)
    if max(height, width) > slot and slot < limit:
        return CacheEntry(file, [], "", LARGER, (0, 0, height, width))
    geometry = image.height, image.width, height, width
    if image.size != (slot, slot):
        image = image.crop((0, 0, slot, slot))  # pads with zeros
    content = image.tobytes()
    write_at(store, content, row * slot_bytes(slot))
    return CacheEntry(file, stamp, digest, row, geometry, zlib.crc32(content))


def decode_into(store: int, slot: int, rows: list[int], files: list[str]) -> list[tuple[int, int] | str]:
    """Decode images into slots of shared memory.

    Args:
        store: File descriptor of the memory.
        slot: Side of a slot.
        rows: A slot for each image.
        files: Paths.

    Returns:
        Height and width of each image, or the problem with its file.
    """
    memory = map_memory(store, slot)
    results: list[tuple[int, int] | str] = []
    for row, file in zip(rows, files, strict=True):
        try:
            image, _ = read_shrunk(file, slot)
        except AidgnError as error:
            results.append(str(error))
            continue
        memory[row, : image.height, : image.width] = np.asarray(image)
        results.append((image.height, image.width))
    return results


def read_header(file: str) -> list[int | str | bool]:
    """Return width, height, mode and whether a colour is transparent; or the class and the text of the error."""
    try:
        with open_image(file) as image:
            return [image.width, image.height, image.mode, "transparency" in image.info]
    except Exception as error:  # decoders fail on damaged files with exceptions of every kind
        return [type(error).__name__, str(error)]


def run_limited(seconds: float, name: str, arguments: list) -> list:
    """Run another task with a limit on CPU time, which kills this process even inside a decoder written in C."""
    add_installed_formats()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return TASKS[name](*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


TASKS: dict[str, Callable[..., list]] = {
    task.__name__: task for task in (decode_files, decode_into, read_header, run_limited)
}


@cache
def map_memory(store: int, slot: int) -> np.ndarray:
    """Map shared memory, all pages at once: mapping page by page takes longer than writing the pixels."""
    memory = mmap.mmap(store, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return np.frombuffer(memory, np.uint8).reshape(-1, slot, slot, 3)


def content_digest(path: str) -> str:
    """Digest a file's content, as `decode_file` does."""
    try:
        return blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return "unreadable"


# Workers --------------------------------------------------------------------------------------------------------------


def start_workers(stack: ExitStack, count: int, *inherited: int) -> tuple[subprocess.Popen, list[Connection]]:
    """Start a process that forks workers. They end when the stack closes or this process ends.

    Args:
        stack: Ends the workers when it closes.
        count: Number of workers.
        inherited: File descriptors that the workers need.

    Returns:
        The process, and a connection to each worker.
    """
    ours, theirs = zip(*(Pipe() for _ in range(count)), strict=True)
    with ExitStack() as passed:
        for connection in theirs:
            passed.enter_context(connection)
        files = [connection.fileno() for connection in theirs]
        program = "from aidgn.data.decode_pool import fork_workers; fork_workers()"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            "OPENBLAS_NUM_THREADS": "1",
            **KEEP_MEMORY,
        }
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-c", program, *map(str, files)],
                pass_fds=[*files, *inherited],
                start_new_session=True,
                stdin=None if 0 in (*files, *inherited) else subprocess.DEVNULL,  # 0 is free if stdin was closed
                env=environment,
            )
        )
    for connection in ours:
        stack.enter_context(connection)
    stack.callback(process.terminate)
    try:
        for connection in ours:
            connection.recv_bytes()  # "started"
    except (EOFError, ConnectionError):
        raise OSError(errno.EAGAIN, "processes that decode images cannot be started") from None
    return process, [*ours]


def send_task(connection: Connection, task: Callable[..., list], *arguments: object) -> None:
    """Have a worker run one of `TASKS`."""
    connection.send_bytes(json.dumps((task.__name__, arguments)).encode())


def receive_reply(connection: Connection) -> list:
    """Return the result of a worker's task, or raise its operating-system error."""
    reply = json.loads(connection.recv_bytes())
    if isinstance(reply, dict):
        raise OSError(reply["errno"], reply["strerror"])
    return reply


def worker_died(process: subprocess.Popen, files: Sequence[str]) -> AidgnError:
    """Compose the error for a worker that died, most likely because of its images or for lack of memory."""
    where = f" at one of {files[0]} to {files[-1]}" if files else ""
    return AidgnError(
        f"A process that decodes images ended unexpectedly (exit code {process.wait()}){where}. If memory "
        "ran out, use fewer cores: taskset -c 0-3 aidgn ..."
    )


def fork_workers() -> None:
    """Fork a worker for each connection given as an argument; the main function of the started process.

    Forking takes less time than importing this module in each worker. If one worker dies, all are ended, and this
    process ends with the same exit code or signal.
    """
    ImageFile.MAXBLOCK = 1 << 20  # larger pieces, which Pillow joins by copying
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some daemons ignore it, and then no child can be waited for
    connections = [int(argument) for argument in sys.argv[1:]]
    workers: set[int] = set()
    code = 0
    try:
        while connections:
            connection = connections.pop()
            worker = os.fork()
            if not worker:
                for other in connections:
                    os.close(other)
                run_worker(connection)
            workers.add(worker)
            os.close(connection)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        while workers and not code:
            worker, status = os.wait()
            workers.remove(worker)
            code = os.waitstatus_to_exitcode(status)
    except BlockingIOError:  # no more processes: all workers or none
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for worker in workers:
            with suppress(ProcessLookupError):  # the worker has just ended
                os.kill(worker, signal.SIGKILL)
                os.waitpid(worker, 0)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def run_worker(file: int) -> NoReturn:
    """Run tasks that come over a connection, until the other end closes it."""
    try:
        with Connection(file) as connection, suppress(EOFError, ConnectionError):
            connection.send_bytes(b"started")
            while True:
                name, arguments = json.loads(connection.recv_bytes())
                try:
                    reply: object = TASKS[name](*arguments)
                except OSError as error:
                    reply = {"errno": error.errno, "strerror": error.strerror}
                connection.send_bytes(json.dumps(reply).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
