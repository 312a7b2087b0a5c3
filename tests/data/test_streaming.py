"""Images come in their order with the pixels of their files, from worker processes as from threads; and nothing stays
behind, however it ends."""

import gc
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from aidgn.data import streaming
from aidgn.data.decoding import FEW
from aidgn.data.streaming import ASKED, CHUNK, ImageLike, pin, streamed
from aidgn.errors import UserError

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
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """The worker processes, of which there are two."""
    found, start = list[subprocess.Popen](), streaming.start_worker

    def start_and_tell(stack: ExitStack, *inherited: int) -> tuple[subprocess.Popen, Connection]:
        process, connection = start(stack, *inherited)
        found.append(process)
        return process, connection

    monkeypatch.setattr(streaming, "start_worker", start_and_tell)
    monkeypatch.setattr(streaming, "usable_cores", lambda: 2)
    return found


@pytest.fixture(autouse=True)
def nothing_stays(started: list[subprocess.Popen]) -> Iterator[None]:
    """No process, no open file, no shared memory. A thread may be at its last image for a moment."""
    before = len([*Path("/proc/self/fd").iterdir()])
    yield
    assert all(process.poll() is not None for process in started)
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
def test_many_files_are_decoded_by_processes(paths: list[str], started: list[subprocess.Popen],
                                             batch_size: int) -> None:
    check([*paths], [np.asarray(Image.open(path)) for path in paths], batch_size)
    assert len(started) == 2


def test_few_files_and_images_in_memory_are_decoded_by_threads(paths: list[str],
                                                               started: list[subprocess.Popen]) -> None:
    arrays = [np.asarray(Image.open(path)) for path in paths]
    check([*paths[:FEW - 1]], arrays)
    check([*arrays], arrays)
    check([*paths[:50], arrays[50], *paths[51:]], arrays)
    assert not started


def test_images_in_memory_among_many_files(paths: list[str], started: list[subprocess.Popen]) -> None:
    arrays = [np.asarray(Image.open(path)) for path in paths]
    check([*paths[:FEW], *arrays[FEW:FEW + 30], *map(Path, paths[FEW + 30:])], arrays)
    assert len(started) == 2


def test_where_the_pixels_of_processes_lie(paths: list[str], tmp_path: Path) -> None:
    """In rows of the shared memory, behind each other but where the memory ends or something broken was."""
    files = [*paths * 3]
    files[70:70] = [str(tmp_path / "missing.png")]
    runs = []
    for _, pixels in streamed(files, SLOT, BATCH, lambda *_: None):
        assert pixels.memory is not None and pixels.memory.shape[1:] == (SLOT, SLOT, 3)
        found = [pixels.memory[row + i] for start, stop, row in pixels.consecutive() for i in range(stop - start)]
        for image, slot in zip(pixels, found, strict=True):
            np.testing.assert_array_equal(slot[:image.shape[0], :image.shape[1]], image)
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

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.remove,
                              cudaError=SimpleNamespace(success=0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", compute)
    with ExitStack() as stack:
        pin(stack, np.zeros((2, SLOT, SLOT, 3), np.uint8))
        assert not errors and len(registered) == (not refused)
    assert not registered


@pytest.mark.parametrize("hindered", ["memfd_create", "truncate"])
def test_threads_where_memory_cannot_be_shared(paths: list[str], started: list[subprocess.Popen], hindered: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, hindered, refuse)
    check([*paths], [np.asarray(Image.open(path)) for path in paths])
    assert not started


def test_broken_files_are_told_in_the_same_words(paths: list[str], started: list[subprocess.Popen], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "half.png").write_bytes(Path(paths[0]).read_bytes()[:60])
    wrong = [str(tmp_path / name) for name in ("missing.png", "empty.png", "half.png")]
    # More broken ones in a row than there is room for images.
    images = [*paths[:30], *wrong, *paths[30:50], *[wrong[0]] * (ASKED * 4 * CHUNK), *paths[50:], wrong[1]]
    outcomes = []
    for few in (FEW, 1 << 30):
        monkeypatch.setattr(streaming, "FEW", few)
        told: list[tuple[ImageLike, str]] = []
        kept = [image for batch, _ in streamed(images, SLOT, BATCH, lambda image, error, told=told: told.append(
            (image, str(error)))) for image in batch]
        assert kept == paths
        outcomes.append(told)
        with pytest.raises(UserError, match=r"missing\.png does not exist"):
            list(streamed(images, SLOT, BATCH))
    assert len(started) == 4 and outcomes[0] == outcomes[1]
    assert [image for image, _ in outcomes[0]] == [image for image in images if image in wrong]


@pytest.mark.parametrize("after", [0, 1])
def test_a_worker_that_dies_is_said(paths: list[str], started: list[subprocess.Popen], after: int) -> None:
    batches = streamed(paths * 4, SLOT, BATCH)
    for _ in range(after + 1):
        next(batches)
    started[after].kill()
    with pytest.raises(UserError, match=r"ended unexpectedly \(exit code -9\) at one of .*png"):
        list(batches)


def test_a_worker_that_cannot_start_is_said(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start = streaming.start_worker

    def start_and_kill(stack: ExitStack, *inherited: int) -> tuple[subprocess.Popen, Connection]:
        process, connection = start(stack, *inherited)
        process.kill()
        process.wait()
        return process, connection

    monkeypatch.setattr(streaming, "start_worker", start_and_kill)
    with pytest.raises(UserError, match=r"ended unexpectedly \(exit code -9\)\. If memory"):
        list(streamed(paths, SLOT, BATCH))


def test_ended_early(paths: list[str], started: list[subprocess.Popen]) -> None:
    with closing(streamed(paths * 4, SLOT, BATCH)) as batches:
        next(batches)
        assert "memfd:aidgn" in Path("/proc/self/maps").read_text()
        assert all(process.poll() is None for process in started)
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    with pytest.raises(KeyboardInterrupt):
        for number, _ in enumerate(streamed(paths * 4, SLOT, BATCH)):
            if number == 2:
                raise KeyboardInterrupt
