"""The decoded cache against Pillow: exact where nothing is shrunk, complete after any interruption, never stale."""

import errno
import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from aidgn.data import Dataset, cache, cache_index, decode_pool, images, load_dataset
from aidgn.data.cache import DecodedDataset, cache_folder, prepare
from aidgn.data.cache_index import CacheIndex, format_line
from aidgn.data.validate import pixel_digests
from aidgn.errors import AidgnError, ParameterError, amount


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIDGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_index, "RACY_NS", -1)  # as if every file had been written long ago


def folder_of(root: Path) -> Path:
    """Where the decoded images of a data set lie."""
    return cache_folder(load_dataset(root))


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Smooth shades and sharp edges, as in a photograph."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 40
    waves = [np.sin(rng.normal() * x + rng.normal() * y + rng.uniform(0, 6)) for _ in range(3)]
    values = 128 + 60 * np.stack(waves, axis=2)
    values[height // 4 : height // 2, width // 3 :] = rng.uniform(0, 255, 3)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def noise(seed: int, height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def as_bytes(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


MOMENTS = itertools.count()


def fill(root: Path, files: Mapping[str, Image.Image | bytes], image_size: int = 224) -> Dataset:
    """Put files into a data set's folder, changed long ago, and load it."""
    for domain in "ab":
        for label in "xy":
            (root / domain / label).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = root / name
        path.write_bytes(content if isinstance(content, bytes) else as_bytes(content))
        os.utime(path, ns=(0, 10**18 + next(MOMENTS)))
    return load_dataset(root).with_image_size(image_size)


def many(root: Path, count: int = 12, side: int = 9, seed: int = 0) -> Dataset:
    """Different images, all of the same size and of the same number of bytes."""
    return fill(
        root,
        {
            f"{'ab'[i % 2]}/{'xy'[i // 2 % 2]}/{i:04}.bmp": as_bytes(noise(seed + i, side, side), "BMP")
            for i in range(count)
        },
    )


def check_exact(prepared: DecodedDataset) -> None:
    """Every image is in its slot as Pillow decodes it, and nothing else is."""
    root = prepared.dataset.root
    assert root is not None and len(prepared.rows) == len(prepared.geometry) == len(prepared.dataset)
    for number, file in enumerate(prepared.dataset.files):
        with Image.open(root / file) as image:
            expected = np.asarray(image.convert("RGB"))
        height, width = expected.shape[:2]
        slot = np.zeros((prepared.slot, prepared.slot, 3), np.uint8)
        slot[:height, :width] = expected
        assert np.array_equal(prepared.pixels[prepared.rows[number]], slot), file
        assert prepared.geometry[number].tolist() == [height, width, height, width]


# What is stored ------------------------------------------------------------------------------------------------------


def test_images_that_fit_are_stored_exactly(tmp_path: Path) -> None:
    dataset = fill(
        tmp_path / "d",
        {
            "a/x/1.png": noise(1, 227, 100),
            "a/y/2.jpg": as_bytes(picture(2, 60, 227), "JPEG"),
            "b/x/3.png": noise(3, 1, 1),
            "b/y/4.png": noise(4, 50, 70).convert("L"),
            "b/y/5.bmp": as_bytes(noise(5, 9, 8), "BMP"),
        },
    )
    prepared = prepare(dataset)
    assert prepared.slot == 227 and prepared.decoded == 5 and prepared.skipped == []
    assert prepared.pixels.dtype == np.uint8 and prepared.rows.dtype == np.int64 and prepared.geometry.dtype == np.int32
    check_exact(prepared)
    with pytest.raises(ValueError):
        prepared.pixels[0] = 0
    assert prepared.geometry[3].tolist() == [50, 70, 50, 70]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize(("height", "width"), [(300, 200), (40, 900), (1283, 1125), (4100, 57), (257, 256)])
def test_sides_beyond_the_slot_are_shrunk(tmp_path: Path, kind: str, height: int, width: int) -> None:
    options = {"quality": 92} if kind == "JPEG" else {"compress_level": 1}
    content = as_bytes(picture(height, height, width), kind, **options)
    files = {"a/x/1.png": content, "a/y/1.png": noise(0, 5, 5), "b/x/1.png": noise(1, 5, 6)}
    prepared = prepare(fill(tmp_path / "d", files))
    stored = min(256, height), min(256, width)
    assert prepared.slot == 256
    assert prepared.geometry[0].tolist() == [*stored, height, width]
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(image.resize(stored[::-1], Image.Resampling.BILINEAR)).astype(int)
    slot = prepared.pixels[prepared.rows[0]].astype(int)
    difference = np.abs(slot[: stored[0], : stored[1]] - expected)
    assert difference.mean() <= 0.6 and np.quantile(difference, 0.99) <= 3
    assert not slot[stored[0] :].any() and not slot[:, stored[1] :].any()


@pytest.mark.parametrize("turn", range(1, 9))
def test_turned_photographs_lie_where_they_should(tmp_path: Path, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    content = as_bytes(picture(7, 1021, 693), "JPEG", quality=92, exif=exif)  # decoded at a quarter: 255.25 x 173.25
    image, size = Image.open(io.BytesIO(content)), (64, 64)
    upright = ImageOps.exif_transpose(image)
    path = tmp_path / "1.jpg"
    path.write_bytes(content)
    found, original = images.read_shrunk(str(path), 64)
    expected = np.asarray(upright.resize(size, Image.Resampling.BILINEAR)).astype(int)
    difference = np.abs(np.asarray(found) - expected)
    assert original == (upright.height, upright.width)
    assert difference.mean() <= 0.6 and np.quantile(difference, 0.99) <= 3


def test_a_photograph_that_vanishes_once_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "1.jpg"
    path.write_bytes(as_bytes(picture(7, 1021, 693), "JPEG"))
    before, read = images.read_shrunk(str(path), 64), images.read_image

    def read_and_remove(file: str, at_least: int) -> tuple[Image.Image, tuple[int, int]]:
        found = read(file, at_least)
        path.unlink()
        return found

    monkeypatch.setattr(images, "read_image", read_and_remove)
    assert images.read_shrunk(str(path), 64) == before


def test_the_slot_follows_the_image_size(tmp_path: Path) -> None:
    files = {"a/x/1.png": picture(1, 300, 300), "a/y/1.png": noise(2, 20, 20), "b/x/1.png": noise(3, 20, 20)}
    slots = {size: prepare(fill(tmp_path / "d", files, size)).slot for size in (28, 224, 448)}
    assert slots == {28: 32, 224: 256, 448: 300}
    for size in slots:  # none has thrown out another
        assert prepare(fill(tmp_path / "d", {}, size)).decoded == 0


def test_embedded_images_need_no_file(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 28, 28, 3), dtype=np.uint8)
    prepared = prepare(replace(dataset, root=None, pixels=pixels))
    assert prepared.pixels is pixels and prepared.rows.tolist() == list(range(12)) and prepared.slot == 28
    assert prepared.geometry.tolist() == [[28] * 4] * 12 and not (tmp_path / "cache").exists()


# What is noticed -----------------------------------------------------------------------------------------------------


def test_nothing_is_decoded_twice(tmp_path: Path) -> None:
    dataset, seen = many(tmp_path / "d"), []
    assert prepare(dataset, on_progress=lambda done, total: seen.append((done, total))).decoded == 12
    assert seen == [(done, 12) for done in range(13)]
    before = {path.name: path.stat().st_mtime_ns for path in folder_of(tmp_path / "d").iterdir()}
    again = prepare(dataset)
    assert again.decoded == 0
    assert before == {path.name: path.stat().st_mtime_ns for path in folder_of(tmp_path / "d").iterdir()}
    check_exact(again)


def test_touched_files_are_compared_by_content_once(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d")
    prepare(dataset)
    for file in dataset.files[:5]:
        os.utime(tmp_path / "d" / file, ns=(0, 1234 * 10**15))
    assert prepare(dataset).decoded == 0
    index = folder_of(tmp_path / "d") / "index-256.jsonl"
    before = index.read_bytes()
    assert prepare(dataset).decoded == 0 and index.read_bytes() == before
    check_exact(prepare(dataset))


def test_changed_added_and_removed_files(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d")
    first = prepare(dataset)
    copy = first.pixels[first.rows]
    (tmp_path / "d" / dataset.files[2]).write_bytes(as_bytes(noise(99, 9, 9), "BMP"))
    (tmp_path / "d" / dataset.files[3]).write_bytes(as_bytes(noise(98, 4, 7), "BMP"))
    (tmp_path / "d" / dataset.files[4]).unlink()
    dataset = fill(tmp_path / "d", {"b/x/new.png": noise(97, 9, 2)})
    second = prepare(dataset)
    assert second.decoded == 3 and len(second.dataset) == 12
    check_exact(second)
    assert np.array_equal(first.pixels[first.rows], copy)  # who has mapped it sees no change
    part = prepare(dataset.without([0, 5]))
    assert part.decoded == 0
    check_exact(part)


def test_a_change_within_the_tick_of_the_clock_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_index, "RACY_NS", 2 * 10**9)
    dataset = many(tmp_path / "d")
    prepare(dataset)
    index = CacheIndex.load(folder_of(tmp_path / "d") / "index-256.jsonl")
    assert index and not any(entry.stamp for entry in index.entries.values())  # just written: no stamp can be relied on
    path = tmp_path / "d" / dataset.files[0]
    times = path.stat()
    path.write_bytes(as_bytes(noise(99, 9, 9), "BMP"))  # as many bytes as before
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = prepare(dataset)
    assert changed.decoded == 1
    check_exact(changed)


@pytest.mark.parametrize("how", ["renamed", "copied"])
def test_swapped_files_of_one_size_and_mtime(tmp_path: Path, how: str) -> None:
    dataset = many(tmp_path / "d")
    first, second = (tmp_path / "d" / file for file in dataset.files[:2])
    os.utime(second, ns=(0, first.stat().st_mtime_ns))
    before = prepare(dataset)
    assert first.stat().st_size == second.stat().st_size
    aside = tmp_path / "aside.bmp"
    for source, target in ((first, aside), (second, first), (aside, second)):
        if how == "renamed":
            source.rename(target)
        else:
            shutil.copy2(source, target)  # cp -p: size, mtime and, of the target, inode stay
    after = prepare(dataset)
    assert after.decoded == 2 and after.content != before.content
    assert after.digests[:2] == before.digests[1::-1]
    check_exact(after)


def test_a_restored_folder_is_read_but_not_decoded(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d")
    before = prepare(dataset)
    shutil.copytree(tmp_path / "d", tmp_path / "backup")
    shutil.rmtree(tmp_path / "d")
    shutil.copytree(tmp_path / "backup", tmp_path / "d")
    after = prepare(dataset)
    assert after.decoded == 0 and after.content == before.content
    index = folder_of(tmp_path / "d") / "index-256.jsonl"
    stamps = [Path(tmp_path / "d" / file).stat().st_ino for file in dataset.files]
    known = CacheIndex.load(index)
    assert known and [known.entries[file].stamp[3] for file in dataset.files] == stamps  # not read again next time
    check_exact(after)


def test_runs_of_the_same_images_stay_the_same(tmp_path: Path) -> None:
    """The digest that enters the identity of runs: of the digests of the files, in order."""
    dataset = many(tmp_path / "d")
    digests = [blake2b((tmp_path / "d" / file).read_bytes(), digest_size=16).hexdigest() for file in dataset.files]
    prepared = prepare(dataset)
    assert prepared.digests == digests
    assert prepared.content == blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def test_slots_grow_without_decoding_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path / "d")
    first = prepare(load_dataset(tmp_path / "d"))
    copy = first.pixels.copy()
    dataset = fill(tmp_path / "d", {"a/x/wide.png": noise(1, 3, 33), "b/y/high.png": noise(2, 44, 3)})
    monkeypatch.setattr(cache, "SAMPLED_HEADERS", 1)  # the first file's header does not show the larger image
    grown = prepare(dataset)
    assert grown.decoded == 2 and grown.slot == 44
    check_exact(grown)
    assert first.slot == 9 and np.array_equal(first.pixels, copy)
    large = prepare(fill(tmp_path / "d", {"a/x/large.png": picture(3, 400, 300)}))
    assert large.decoded == 1 and large.slot == 256
    check_exact(prepare(large.dataset.without([large.dataset.files.index("a/x/large.png")])))


def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    prepared = [prepare(many(tmp_path / "d", seed=100 * turn)) for turn in range(5)]
    assert [each.decoded for each in prepared] == [12] * 5
    assert len(prepared[-1].pixels) <= 24
    assert len(list(folder_of(tmp_path / "d").glob("pixels*"))) == 1
    check_exact(prepared[-1])
    for turn, each in enumerate(prepared):  # each still has the pixels of its time
        order = [int(Path(file).stem) for file in each.dataset.files]
        assert all(
            np.array_equal(each.pixels[row], np.asarray(noise(100 * turn + seed, 9, 9)))
            for row, seed in zip(each.rows, order, strict=True)
        )


# Broken files --------------------------------------------------------------------------------------------------------


def test_broken_files(tmp_path: Path) -> None:
    whole = as_bytes(noise(1, 60, 60), "JPEG")
    many(tmp_path / "d")
    dataset = fill(
        tmp_path / "d", {"a/x/cut.jpg": whole[: len(whole) // 2], "b/x/empty.png": b"", "b/y/text.png": b"hello"}
    )
    with pytest.raises(AidgnError, match=r"(?s)3 of 15 images .*--skip-broken") as caught:
        prepare(dataset)
    assert all(f"\n  {file} is " in str(caught.value) for file in ("a/x/cut.jpg", "b/x/empty.png", "b/y/text.png"))
    assert "0 bytes" in str(caught.value)
    prepared = prepare(dataset, skip_broken=True)
    assert prepared.skipped == ["a/x/cut.jpg", "b/x/empty.png", "b/y/text.png"]
    assert prepared.decoded == 0  # what is broken is remembered, too
    assert len(prepared.dataset) == 12
    check_exact(prepared)
    mended = prepare(fill(tmp_path / "d", {"a/x/cut.jpg": whole, "b/x/empty.png": noise(5, 4, 4)}), skip_broken=True)
    assert mended.decoded == 2 and mended.skipped == ["b/y/text.png"]
    check_exact(mended)


def test_what_is_broken_for_one_pillow_is_tried_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path / "d")
    dataset = fill(tmp_path / "d", {"b/y/text.png": b"hello"})
    prepare(dataset, skip_broken=True)
    monkeypatch.setattr(cache_index.PIL, "__version__", "999")
    assert prepare(dataset, skip_broken=True).decoded == 1
    assert prepare(dataset, skip_broken=True).decoded == 0


def test_ten_broken_files_are_named(tmp_path: Path) -> None:
    dataset = fill(tmp_path / "d", {f"{'ab'[i % 2]}/{'xy'[i // 2 % 2]}/{i}.png": b"?" for i in range(16)})
    with pytest.raises(AidgnError, match="and 6 more") as caught:
        prepare(dataset)
    assert str(caught.value).count("\n  ") == 11
    with pytest.raises(AidgnError, match="16 of 16"):
        prepare(dataset, skip_broken=True)


def test_a_vanished_file_is_named(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d")
    (tmp_path / "d" / dataset.files[3]).unlink()
    with pytest.raises(AidgnError, match=rf"{dataset.files[3]} cannot be read: No such file"):
        prepare(dataset)
    check_exact(prepare(dataset, skip_broken=True))
    check_exact(prepare(many(tmp_path / "d")))


# The same pixels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("image_size", [224, 28])  # stored exactly, shrunk to slots
def test_the_same_pixels_in_other_files(tmp_path: Path, image_size: int) -> None:
    image, exif = picture(0, 90, 70), Image.Exif()
    exif[0x0110] = "a camera"
    nearly = []
    for row in (40, 89):  # not the middle one, nor one of every 16th
        nearly.append(image.copy())
        nearly[-1].paste("red", (0, row, 70, row + 1))
    files = {
        "a/x/0.png": as_bytes(image, compress_level=0),
        "b/x/1.png": as_bytes(image, compress_level=9),
        "b/x/2.bmp": as_bytes(image, "BMP"),
        "b/y/3.png": as_bytes(image, compress_level=0),
        "a/y/4.jpg": as_bytes(image, "JPEG", exif=exif),
        "b/y/5.jpg": as_bytes(image, "JPEG"),
        "a/y/6.png": nearly[0],
        "a/y/7.png": nearly[1],
        "b/y/8.png": image.transpose(Image.Transpose.ROTATE_90),
    }
    prepared = prepare(fill(tmp_path / "d", files, image_size))
    groups: dict[str, set[str]] = {}
    for file, digest in zip(prepared.dataset.files, pixel_digests(prepared), strict=True):
        groups.setdefault(digest, set()).add(Path(file).stem)
    assert sorted(map(sorted, groups.values())) == [["0", "1", "2", "3"], ["4", "5"], ["6"], ["7"], ["8"]]
    # Files of the same content that two versions of Pillow have decoded.
    pixels = np.array(prepared.pixels)
    pixels[prepared.rows[prepared.dataset.files.index("b/y/3.png")]] += 1
    again = replace(prepared, pixels=pixels)
    assert pixel_digests(again) == pixel_digests(prepared)


def test_little_is_read_to_compare_pixels(tmp_path: Path) -> None:
    prepared = prepare(
        fill(
            tmp_path / "d",
            {f"{'ab'[i % 2]}/{'xy'[i // 2 % 2]}/{i}.png": noise(i, 100 + i // 8, 120) for i in range(16)}
            | {"a/x/copy.bmp": as_bytes(noise(3, 100, 120), "BMP"), "b/x/alone.png": noise(99, 30, 30)},
        )
    )
    rows: list[int] = []

    class Watched:
        def __getitem__(self, row: int) -> np.ndarray:
            rows.append(row)
            return prepared.pixels[row]

    assert len(set(pixel_digests(replace(prepared, pixels=Watched())))) == 17
    copies = [prepared.dataset.files.index(name) for name in ("b/y/3.png", "a/x/copy.bmp")]
    assert sorted(rows) == sorted(prepared.rows[copies])


def test_the_same_pixels_among_embedded_images() -> None:
    digits = load_dataset("digits")
    assert digits.pixels is not None
    pixels = digits.pixels.copy()
    pixels[5] = pixels[1]
    digests = pixel_digests(prepare(replace(digits, pixels=pixels)))
    assert digests[5] == digests[1] and len(set(digests)) == len(digits) - 1


# Where it is stored --------------------------------------------------------------------------------------------------


def everything_in(folder: Path) -> dict[Path, tuple[bytes | str, int]]:
    """The content and mtime of each file, where each link leads."""
    return {
        path: (str(path.readlink()) if path.is_symlink() else path.read_bytes(), path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_the_places_for_decoded_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = many(tmp_path / "d")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    places = []
    for unset in ("", "AIDGN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(unset, raising=False)
        prepare(dataset)
        places.append(cache_folder(dataset).parent)
        assert (cache_folder(dataset) / "index-256.jsonl").exists()
        assert cache_folder(dataset).stat().st_mode & 0o777 == 0o700
    assert places == [tmp_path / "cache", tmp_path / "xdg/aidgn", tmp_path / "home/.cache/aidgn"]


def test_nothing_is_written_beside_the_images(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d")
    before = everything_in(tmp_path / "d")
    prepare(dataset)
    prepare(many(tmp_path / "d", 0))
    assert everything_in(tmp_path / "d") == before


def test_a_cache_that_came_with_the_data_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset, victim = many(tmp_path / "d"), tmp_path / "authorized_keys"
    victim.write_bytes(b"ssh-ed25519 mine")
    sent = tmp_path / "d" / ".aidgn-cache"
    sent.mkdir()
    (sent / "index-256.jsonl").write_bytes(format_line({"version": 1, "slot": 9, "pixels": "pixels-256-0.u8"}))
    (sent / "pixels-256-0.u8").symlink_to(victim)
    before = everything_in(tmp_path / "d")
    check_exact(prepare(dataset))
    prepare(many(tmp_path / "d", 13))
    assert victim.read_bytes() == b"ssh-ed25519 mine"
    assert everything_in(sent) == {path: content for path, content in before.items() if path.is_relative_to(sent)}
    assert [record.getMessage().count(str(sent)) for record in caplog.records] == [1]  # said once


@pytest.mark.parametrize("name", ["index-256.jsonl", "lock-256", "pixels-256-*"])
def test_links_in_the_cache_are_not_followed(tmp_path: Path, name: str) -> None:
    dataset = many(tmp_path / "d")
    prepare(dataset)
    [path] = folder_of(tmp_path / "d").glob(name)
    victim = path.rename(tmp_path / "victim")
    path.symlink_to(victim)
    before = everything_in(tmp_path)[victim]
    dataset = many(tmp_path / "d", 20)
    if name == "lock-256":
        with pytest.raises(AidgnError, match="symbolic link"):
            prepare(dataset)
    else:
        check_exact(prepare(dataset))
    assert everything_in(tmp_path)[victim] == before


def test_a_folder_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = many(tmp_path / "d")
    prepare(dataset)
    user = os.getuid()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: user + 1)
        with pytest.raises(AidgnError, match=r"another user.*AIDGN_CACHE"):
            prepare(dataset)
    folder = folder_of(tmp_path / "d")
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AidgnError, match=r"is a link.*AIDGN_CACHE"):
        prepare(dataset)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d")
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(AidgnError, match=r"cannot be stored in .*AIDGN_CACHE"):
        prepare(dataset)


def test_a_folder_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = many(tmp_path / "1" / "d"), many(tmp_path / "2" / "d", seed=100)
    for dataset in (first, second):
        check_exact(prepare(dataset, cache_dir=tmp_path / "c"))
    assert len(list((tmp_path / "c").glob("d-*"))) == 2
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("AIDGN_CACHE", str(tmp_path / "c"))
    assert prepare(first).decoded == prepare(second).decoded == 0


def test_a_disk_too_small_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(AidgnError, match=r"need 2\.92 kB in .*cache/d-\w+, where 1 kB are free.*AIDGN_CACHE"):
        prepare(many(tmp_path / "d"))


def test_amounts_have_the_unit_that_suits_them() -> None:
    assert list(map(amount, (0, 999, 8210, 999_600, 1_500_000, 117_964_800_000, 2 * 10**15))) == [
        "0 bytes",
        "999 bytes",
        "8.21 kB",
        "1 MB",
        "1.5 MB",
        "118 GB",
        "2e+03 TB",
    ]


def test_files_that_cannot_be_read_need_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = many(tmp_path / "d")
    prepare(dataset)
    for name in ("a/x/dead.png", "b/y/dead.png"):
        (tmp_path / "d" / name).symlink_to("nowhere")
    dataset = load_dataset(tmp_path / "d")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 0))
    prepared = prepare(dataset, skip_broken=True)
    check_exact(prepared)
    assert prepared.skipped == ["a/x/dead.png", "b/y/dead.png"]
    assert prepare(dataset, skip_broken=True).decoded == 0  # known by now: nothing is written
    Image.new("RGB", (9, 9)).save(tmp_path / "d" / "nowhere.png")
    (tmp_path / "d" / "a/x/dead.png").unlink()
    (tmp_path / "d" / "a/x/dead.png").symlink_to("../../nowhere.png")
    with pytest.raises(AidgnError, match=r"need 243 bytes in .* 0 bytes are free"):
        prepare(dataset, skip_broken=True)


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, write, room = many(tmp_path / "d", 40), os.pwrite, [35 * 243 + 100]

    def pwrite(file: int, content: memoryview, position: int) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, content[: room[0]], position)  # the last write is cut short
        room[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", pwrite)
        with pytest.raises(AidgnError, match="disk is full"):
            prepare(dataset)
    prepared = prepare(dataset)
    assert prepared.decoded == 8  # the third chunk of 16
    check_exact(prepared)


def test_worthless_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="workers is 0"):
        prepare(many(tmp_path / "d"), workers=0)


# Damage and interruption ---------------------------------------------------------------------------------------------

DAMAGE = {
    "index header": 13,
    "index middle": 13,
    "index end": 1,
    "index gone": 13,
    "index zeroed": 13,
    "index garbage": 13,
    "index strange": 13,
    "pixels short": 1,
    "pixels half": 7,
    "pixels gone": 13,
    "pixels zeroed": 13,
    "pixels flipped": 1,
    "pixels swapped": 2,
    "pixels empty": 13,
}


@pytest.mark.parametrize(("damage", "decoded"), DAMAGE.items())
def test_damage_is_mended(tmp_path: Path, damage: str, decoded: int) -> None:
    dataset = many(tmp_path / "d")
    prepare(dataset)
    dataset = fill(tmp_path / "d", {"a/x/more.png": noise(50, 9, 9)})
    content = prepare(dataset).content  # a second batch in the index
    folder = folder_of(tmp_path / "d")
    (index,), (pixels,) = folder.glob("index*"), folder.glob("pixels*")
    lines, stored = index.read_bytes().splitlines(keepends=True), bytearray(pixels.read_bytes())
    flipped = {
        number: line[: len(line) // 2] + bytes([line[len(line) // 2] ^ 1]) + line[len(line) // 2 + 1 :]
        for number, line in enumerate(lines)
    }
    assert len(stored) == 13 * 243
    if damage.endswith("gone"):
        (index if damage.startswith("index") else pixels).unlink()
    elif damage.startswith("index"):
        index.write_bytes(
            {
                "header": flipped[0] + lines[1] + lines[2],
                "middle": lines[0] + flipped[1] + lines[2],
                "end": b"".join(lines)[:-20],
                "zeroed": bytes(len(b"".join(lines))),
                "garbage": os.urandom(1000),
                "strange": format_line(
                    {"version": cache_index.VERSION, "slot": 9, "pixels": f"../{pixels.name}"}
                ),  # though sound
            }[damage.split()[1]]
        )
    else:
        one, other = stored[:243], stored[243:486]
        at = 5 * 243 + 100
        pixels.write_bytes(
            {
                "short": stored[:-1],
                "half": stored[: 6 * 243 + 5],
                "zeroed": bytes(len(stored)),
                "empty": b"",
                "flipped": stored[:at] + bytes([stored[at] ^ 8]) + stored[at + 1 :],
                "swapped": other + one + stored[486:],
            }[damage.split()[1]]
        )
    mended = prepare(dataset)
    assert mended.decoded == decoded and mended.content == content
    check_exact(mended)
    assert prepare(dataset).decoded == 0
    assert len(list(folder.glob("pixels*"))) == 1


def test_mending_is_said_and_changes_no_map(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = many(tmp_path / "d")
    prepare(dataset)
    folder = folder_of(tmp_path / "d")
    [pixels] = folder.glob("pixels*")
    with pixels.open("r+b") as file:
        file.write(bytes(2 * 243))
    damaged = CacheIndex.load(folder / "index-256.jsonl")
    assert damaged
    seen = damaged.map.copy()  # by a run that has mapped the file since
    mended = prepare(dataset)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "2 of the decoded images of d" in message and str(folder) in message and "damaged" in message
    assert np.array_equal(damaged.map, seen)
    check_exact(mended)


def test_damage_is_not_copied_to_larger_slots(tmp_path: Path) -> None:
    many(tmp_path / "d")
    dataset = load_dataset(tmp_path / "d")
    prepare(dataset)
    [pixels] = folder_of(tmp_path / "d").glob("pixels*")
    with pixels.open("r+b") as file:
        file.write(bytes(3 * 243))
    grown = prepare(fill(tmp_path / "d", {"a/x/wide.png": noise(1, 3, 33)}))
    assert grown.decoded == 4 and grown.slot == 33
    check_exact(grown)


def test_damage_to_images_that_are_gone_is_an_error(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d")
    prepare(dataset)
    [pixels] = folder_of(tmp_path / "d").glob("pixels*")
    pixels.write_bytes(bytes(12 * 243))
    (tmp_path / "d" / dataset.files[3]).unlink()
    with pytest.raises(AidgnError, match=dataset.files[3]):
        prepare(dataset)


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d", 260)

    def interrupt(done: int, total: int) -> None:
        if done == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(dataset, workers=2, on_progress=interrupt)
    prepared = prepare(dataset, workers=2)
    assert prepared.decoded == 160
    check_exact(prepared)


def test_a_worker_that_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, start, started = many(tmp_path / "d", 260), decode_pool.start_workers, []

    def start_and_kill_one(stack: ExitStack, count: int) -> tuple[subprocess.Popen, list[Connection]]:
        process, connections = start(stack, count)
        started.extend(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
        os.kill(started[0], signal.SIGKILL)
        return process, connections

    with monkeypatch.context() as deadly:
        deadly.setattr(decode_pool, "start_workers", start_and_kill_one)
        with pytest.raises(AidgnError, match=r"ended unexpectedly \(exit code -9\).*fewer cores: taskset"):
            prepare(dataset, workers=2)
    assert len(started) == 2 and not any(Path(f"/proc/{process}").exists() for process in started)
    check_exact(prepare(dataset, workers=2))


def test_where_no_worker_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    check_exact(prepare(many(tmp_path / "d", 260), workers=2))


PROGRAM = """
import sys
from pathlib import Path
from aidgn.data import cache, load_dataset, row_cache
row_cache.COMMIT_SECONDS = 0.02
print(cache.prepare(load_dataset(Path(sys.argv[1])), workers=2).decoded)
assert "torch" not in sys.modules  # workers import what this does
"""


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_killed_at_any_moment_it_continues(tmp_path: Path) -> None:
    content = {
        f"{'ab'[i % 2]}/{'xy'[i // 2 % 2]}/{i:04}.png": as_bytes(noise(i, 150, 150), compress_level=1)
        for i in range(500)
    }
    dataset = fill(tmp_path / "d", content)
    path = folder_of(tmp_path / "d") / "index-256.jsonl"

    def committed() -> int:
        index = CacheIndex.load(path)
        return len(index.entries) if index else -1

    kept = []
    for least in (0, 1, 120, 250):  # as soon as there is an index, and when so many images are in it
        with start(tmp_path / "d") as process:
            while committed() < least and process.poll() is None:
                time.sleep(0.005)
            process.kill()
        kept.append(committed())
    assert kept == sorted(kept) and kept[2] >= 120 and kept[3] >= 250
    prepared = prepare(dataset, workers=2)
    assert prepared.decoded == 500 - kept[-1]
    check_exact(prepared)


def test_runs_at_the_same_time_share_the_work(tmp_path: Path) -> None:
    dataset = many(tmp_path / "d", 300, side=40)
    processes = [start(tmp_path / "d") for _ in range(3)]
    decoded = [int(process.communicate()[0]) for process in processes]
    assert sorted(decoded) == [0, 0, 300]
    prepared = prepare(dataset)
    assert prepared.decoded == 0
    check_exact(prepared)


def test_waiting_shows_how_far_the_other_is(tmp_path: Path) -> None:
    import fcntl
    import threading

    dataset = many(tmp_path / "d")
    prepare(dataset.without([0]))
    seen: list[tuple[int, int]] = []
    with (folder_of(tmp_path / "d") / "lock-256").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(
            target=prepare, args=(dataset,), kwargs={"on_progress": lambda done, total: seen.append((done, total))}
        )
        waiting.start()
        deadline = time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen and set(seen) == {(11, 12)}
        assert prepare(dataset.without([0])).decoded == 0  # who needs nothing new does not wait
    waiting.join()
    assert seen[-1] == (12, 12)
    check_exact(prepare(dataset))
