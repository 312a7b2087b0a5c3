"""Processes that decode uploaded files: same pixels, limits of computing time, cancelling, dying."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aidgn.data.images import read_shrunk
from aidgn.serve import decoding
from aidgn.serve.decoding import Decoder, Decoders
from aidgn.serve.errors import RequestError

SLOT = 64
COMMENT = b"P6\n#" + b"x" * 20_000_000 + b"\n2 2 255\n" + bytes(12)


def run(scene: Callable[[Decoders], Awaitable[None]]) -> None:
    async def play() -> None:
        decoders = Decoders(SLOT, 1)
        try:
            await scene(decoders)
        finally:
            decoders.close()

    asyncio.run(play())


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (90, 200, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.jpg")
    return tmp_path / "photo.jpg"


def test_pixels_are_those_of_predict(photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (9, 7), 40).save(tmp_path / "small.png")

    async def scene(decoders: Decoders) -> None:
        for large in (4_000_000, 0):  # by the fast processes and by the slow one
            monkeypatch.setattr(decoding, "LARGE", large)
            for path in (photo, tmp_path / "small.png", photo):
                np.testing.assert_array_equal(await decoders.decode(path), np.asarray(read_shrunk(str(path), SLOT)[0]))

    run(scene)


def test_formats_with_a_module_and_files_that_are_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pydicom = pytest.importorskip("pydicom")
    scan = Path(pydicom.__file__).parent / "data" / "test_files" / "MR_small.dcm"

    async def scene(decoders: Decoders) -> None:
        np.testing.assert_array_equal(await decoders.decode(scan), np.asarray(read_shrunk(str(scan), SLOT)[0]))

    run(scene)
    with pytest.raises(RequestError) as caught:
        decoding.check_header(["FormatError", "is HEIC, which needs pillow-heif"], scan, 1)
    assert caught.value.status == 415 and "This picture is HEIC" in str(caught.value)


def test_computing_time_is_limited(photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "FAST_SECONDS", 0.3)
    (tmp_path / "a.ppm").write_bytes(COMMENT)

    async def scene(decoders: Decoders) -> None:
        for _ in range(2):
            with pytest.raises(RequestError, match="header") as refused:
                await decoders.decode(tmp_path / "a.ppm")
            assert refused.value.status == 422
            assert (await decoders.decode(photo)).shape == (64, 64, 3)

    run(scene)


def test_slow_pictures_are_passed_by_others(photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "FAST_SECONDS", 0.1)
    (tmp_path / "slow.ppm").write_bytes(b"P3 990 1000 255 " + b"7 " * 2_970_000)
    order = []

    async def scene(decoders: Decoders) -> None:
        async def decode(path: Path, pause: float = 0) -> None:
            await asyncio.sleep(pause)
            order.append((path.name, (await decoders.decode(path)).max()))

        await asyncio.gather(decode(tmp_path / "slow.ppm"), decode(photo, 0.05))
        assert order[0][0] == photo.name and order[1] == ("slow.ppm", 7)
        decoders.all[-1].seconds = 0.1
        with pytest.raises(RequestError, match="computing"):
            await decoders.decode(tmp_path / "slow.ppm")

    run(scene)


def test_a_cancelled_picture_ends(tmp_path: Path, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "FAST_SECONDS", 60.0)
    (tmp_path / "a.ppm").write_bytes(COMMENT * 10)

    async def scene(decoders: Decoders) -> None:
        decoding_it = [asyncio.create_task(decoders.decode(tmp_path / "a.ppm")) for _ in range(2)]
        await asyncio.sleep(1)
        began = time.monotonic()
        for task in decoding_it:
            task.cancel()
        assert (await decoders.decode(photo)).shape == (64, 64, 3)
        assert time.monotonic() - began < 5
        assert all(isinstance(result, asyncio.CancelledError) for result in await gather_errors(decoding_it))

    run(scene)


async def gather_errors(tasks: list[asyncio.Task]) -> list:
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_a_process_that_dies_is_replaced(photo: Path) -> None:
    async def play() -> None:
        decoder = Decoder(SLOT, 5)
        await decoder.decode(photo)
        os.kill(decoder.process.pid, signal.SIGKILL)
        decoder.process.wait()
        os.kill(find_worker(decoder), signal.SIGKILL)
        with pytest.raises(RequestError):
            await decoder.decode(photo)
        assert isinstance(await decoder.decode(photo), np.ndarray)
        decoder.close()

    asyncio.run(play())


def find_worker(decoder: Decoder) -> int:
    """Return the process that the killed one forked: the same session, another parent."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
        except OSError:
            continue
        if session == decoder.process.pid:
            return int(folder.name)
    raise AssertionError
