"""Images come in their order with the pixels of their files, from worker processes as from threads; and nothing stays
behind, however it ends."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from aidgn.data.decode_pool import FEW
from aidgn.errors import AidgnError
from aidgn.inference import image_stream as streaming
from aidgn.inference.image_stream import CHUNK, QUEUED_CHUNKS, ImageLike, pin, streamed

SLOT, BATCH = 16, 40


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """PNG files of many sizes that fit a slot."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    files = [str(folder / f"{number} ü.png") for number in range(FEW + 60)]
    for file in files:
        Image.fromarray(random.integers(0, 256, (*random.integers(1, SLOT + 1, 2), 3), np.uint8)).save(file)
    return files


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The worker processes, of which there are two."""
    found, start = list[int](), streaming.start_workers

    def start_and_tell(stack: ExitStack, *arguments: int) -> tuple[subprocess.Popen, list[Connection]]:
        process, connections = start(stack, *arguments)
        found.extend(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
        return process, connections

    monkeypatch.setattr(streaming, "start_workers", start_and_tell)
    monkeypatch.setattr(streaming, "usable_cores", lambda: 2)
    return found


def alive(processes: list[int]) -> list[bool]:
    return [Path(f"/proc/{process}").exists() for process in processes]


@pytest.fixture(autouse=True)
def nothing_stays(started: list[int]) -> Iterator[None]:
    """No process, no open file, no shared memory. A thread may be at its last image for a moment."""
    before = len([*Path("/proc/self/fd").iterdir()])
    yield
    assert not any(alive(started))
    gc.collect()
    until = time.monotonic() + 5
    while len([*Path("/proc/self/fd").iterdir()]) > before and time.monotonic() < until:
        time.sleep(0.01)
    assert len([*Path("/proc/self/fd").iterdir()]) <= before
    assert "memfd:aidgn" not in Path("/proc/self/maps").read_text()


def check(images: list[ImageLike], wanted: list[np.ndarray], batch_size: int = BATCH) -> None:
    """Every image with its pixels, in batches that are full but for the last."""
    found, lengths = list[ImageLike](), list[int]()
    for kept, pixels in streamed(iter(images), SLOT, batch_size):
        for image, got in zip(kept, pixels, strict=True):
            np.testing.assert_array_equal(got, wanted[len(found)])
            found.append(image)
        lengths.append(len(kept))
    assert all(got is image for got, image in zip(found, images, strict=True))
    assert lengths == [min(batch_size, len(images) - start) for start in range(0, len(images), batch_size)]


@pytest.mark.parametrize("batch_size", [7, 64])
def test_many_files_are_decoded_by_processes(paths: list[str], started: list[int], batch_size: int) -> None:
    check([*paths], [np.asarray(Image.open(path)) for path in paths], batch_size)
    assert len(started) == 2


def test_few_files_and_images_in_memory_are_decoded_by_threads(paths: list[str], started: list[int]) -> None:
    arrays = [np.asarray(Image.open(path)) for path in paths]
    check([*paths[: FEW - 1]], arrays)
    check([*arrays], arrays)
    check([*paths[:50], arrays[50], *paths[51:]], arrays)
    assert not started


def test_images_in_memory_among_many_files(paths: list[str], started: list[int]) -> None:
    arrays = [np.asarray(Image.open(path)) for path in paths]
    check([*paths[:FEW], *arrays[FEW : FEW + 30], *map(Path, paths[FEW + 30 :])], arrays)
    assert len(started) == 2


def test_pixels_of_processes_are_in_shared_memory(paths: list[str], tmp_path: Path) -> None:
    """Rows are consecutive, except where the memory ends or a file was broken."""
    files = [*paths * 3]
    files[70:70] = [str(tmp_path / "missing.png")]
    runs = []
    for _, pixels in streamed(files, SLOT, BATCH, lambda *_: None):
        assert pixels.memory is not None and pixels.memory.shape[1:] == (SLOT, SLOT, 3)
        found = [pixels.memory[row + i] for start, stop, row in pixels.consecutive() for i in range(stop - start)]
        for image, slot in zip(pixels, found, strict=True):
            np.testing.assert_array_equal(slot[: image.shape[0], : image.shape[1]], image)
        runs.append(sum(1 for _ in pixels.consecutive()))
    assert max(runs) <= 4 and 1 in runs
    for _, pixels in streamed([*files[:FEW], np.zeros((2, 2, 3), np.uint8)], SLOT, FEW + 1, lambda *_: None):
        assert pixels.memory is None  # one of them is elsewhere


@pytest.mark.parametrize("refused", [False, True])
def test_a_refused_pin_does_not_stay_behind(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """CUDA keeps the error of a call and raises it at the next computation, which forgets it."""
    errors, registered = list[str](), list[int]()

    def register(address: int, size: int, flags: int) -> int:
        (errors if refused else registered).append("not permitted" if refused else address)
        return int(refused)

    def compute(*_: object, **__: object) -> None:
        if errors:
            raise RuntimeError(errors.pop())

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=registered.remove, cudaError=SimpleNamespace(success=0)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", compute)
    with ExitStack() as stack:
        pin(stack, np.zeros((2, SLOT, SLOT, 3), np.uint8))
        assert not errors and len(registered) == (not refused)
    assert not registered


@pytest.mark.parametrize("hindered", ["memfd_create", "truncate"])
def test_threads_without_shared_memory(
    paths: list[str], started: list[int], hindered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, hindered, refuse)
    check([*paths], [np.asarray(Image.open(path)) for path in paths])
    assert not started


def test_broken_files_have_the_same_message(
    paths: list[str], started: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "half.png").write_bytes(Path(paths[0]).read_bytes()[:60])
    wrong = [str(tmp_path / name) for name in ("missing.png", "empty.png", "half.png")]
    # More broken ones in a row than there is room for images.
    images = [*paths[:30], *wrong, *paths[30:50], *[wrong[0]] * (QUEUED_CHUNKS * 4 * CHUNK), *paths[50:], wrong[1]]
    outcomes = []
    for few in (FEW, 1 << 30):
        monkeypatch.setattr(streaming, "FEW", few)
        told: list[tuple[ImageLike, str]] = []
        kept = [
            image
            for batch, _ in streamed(
                images, SLOT, BATCH, lambda image, error, told=told: told.append((image, str(error)))
            )
            for image in batch
        ]
        assert kept == paths
        outcomes.append(told)
        with pytest.raises(AidgnError, match=r"missing\.png"):
            list(streamed(images, SLOT, BATCH))
    assert len(started) == 4 and outcomes[0] == outcomes[1]
    assert [image for image, _ in outcomes[0]] == [image for image in images if image in wrong]


def test_lines_of_something_else_instead_of_names(paths: list[str], started: list[int]) -> None:
    """They are longer than what a pipe holds."""
    lines, told = ["x" * 50_000] * 200, list[str]()
    kept = [
        image
        for batch, _ in streamed([*paths, *lines], SLOT, BATCH, lambda _, error: told.append(str(error)))
        for image in batch
    ]
    assert kept == paths and told == [f"{line} cannot be read: File name too long." for line in lines]
    assert len(started) == 2


@pytest.mark.parametrize("after", [0, 1])
def test_dead_worker_is_reported(paths: list[str], started: list[int], after: int) -> None:
    batches = streamed(paths * 4, SLOT, BATCH)
    for _ in range(after + 1):
        next(batches)
    os.kill(started[after], signal.SIGKILL)
    with pytest.raises(AidgnError, match="exit code -9"):
        list(batches)


def test_parent_ignores_ended_children(paths: list[str], started: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    """A daemon may ignore SIGCHLD, and the programs that it starts inherit this."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert [image for batch, _ in streamed(paths, SLOT, BATCH) for image in batch] == paths
        batches = streamed(paths * 4, SLOT, BATCH)
        next(batches)
        os.kill(started[2], signal.SIGKILL)
        with pytest.raises(AidgnError, match="unexpectedly"):
            list(batches)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert capfd.readouterr().err == ""


def test_closed_standard_input(paths: list[str], started: list[int]) -> None:
    """The next file that is opened gets number 0."""
    kept = os.dup(0)
    os.close(0)
    try:
        assert [image for batch, _ in streamed(paths, SLOT, BATCH) for image in batch] == paths
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert len(started) == 2


def test_threads_if_no_worker_can_start(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert [image for batch, _ in streamed(paths, SLOT, BATCH) for image in batch] == paths


def test_either_all_workers_start_or_none(started: list[int]) -> None:
    program = """if True:
        import os
        from aidgn.data import decode_pool
        real, count = os.fork, iter(range(2))

        def fork():
            if next(count, None) is None:
                raise BlockingIOError
            return real()

        os.fork = fork
        decode_pool.fork_workers()
    """
    ours, theirs = zip(*(Pipe() for _ in range(3)), strict=True)
    files = [connection.fileno() for connection in theirs]
    with subprocess.Popen([sys.executable, "-c", program, *map(str, files)], pass_fds=files) as process:
        for connection in theirs:
            connection.close()
        for connection in ours:
            with connection, pytest.raises((EOFError, ConnectionError)):
                for _ in range(2):  # one of them may have started before there were no more processes
                    connection.recv_bytes()
    assert process.returncode == 0


def test_ended_early(paths: list[str], started: list[int]) -> None:
    with closing(streamed(paths * 4, SLOT, BATCH)) as batches:
        next(batches)
        assert "memfd:aidgn" in Path("/proc/self/maps").read_text()
        assert all(alive(started))
    assert len(started) == 2 and not any(alive(started))
    with pytest.raises(KeyboardInterrupt):
        for number, _ in enumerate(streamed(paths * 4, SLOT, BATCH)):
            if number == 2:
                raise KeyboardInterrupt
