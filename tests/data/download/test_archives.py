"""Archives: unsafe, damaged or too large ones are refused."""

import gzip
import io
import random
import resource
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from aidgn.data.download.archives import DamagedFile, Limit, damage_named, read_members, unpack
from aidgn.data.download.connection import MirrorError
from aidgn.data.download.http import File
from aidgn.data.download.mirrors import Mirror
from aidgn.errors import AidgnError
from tests.conftest import Tally
from tests.data.download.conftest import (
    ARCHIVE,
    ENTRY,
    IMAGES,
    Server,
    contents,
    get,
    simple,
    source_of,
    tarred,
    zipped,
)

# Hostile archives ---------------------------------------------------------------------------------------------------


def link(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zip_link(name: str, target: str) -> bytes:
    buffer = io.BytesIO(ARCHIVE)
    with zipfile.ZipFile(buffer, "a") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = 0o120777 << 16
        archive.writestr(info, target)
    return buffer.getvalue()


EVIL = "kfold/photo/dog/evil.png"
HOSTILE = {
    "dots.zip": zipped({"kfold/photo/dog/../../../../evil.png": b"evil"}),
    "root.zip": zipped({"/tmp/photo/dog/evil.png": b"evil"}),
    "backslash.zip": zipped({"photo\\dog\\..\\..\\evil.png": b"evil"}),
    "drive.zip": zipped({"C:/photo/dog/evil.png": b"evil"}),
    "link.zip": zip_link("kfold/photo/dog", "/tmp"),
    "dots.tar.gz": tarred({"../photo/dog/evil.png": b"evil"}),
    "root.tar": tarred({"/photo/dog/evil.png": b"evil"}, "w:"),
    "symlink.tar.gz": tarred({"kfold/photo/dog": link("kfold/photo/dog", tarfile.SYMTYPE, "../../.."), EVIL: b"evil"}),
    "hardlink.tar.gz": tarred({EVIL: link(EVIL, tarfile.LNKTYPE, "/etc/passwd")}),
    "device.tar.gz": tarred({EVIL: link(EVIL, tarfile.CHRTYPE)}),
    "fifo.tar.gz": tarred({EVIL: link(EVIL, tarfile.FIFOTYPE)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_unsafe_archive_is_refused(server: Server, tmp_path: Path, name: str, tally: Tally) -> None:
    url = server.serve(f"/{name}", HOSTILE[name])
    with tally("unsafe archives"):
        with pytest.raises(AidgnError, match="refused"):
            get(source_of(ENTRY, Mirror("m", (File(name, (url,)),))), tmp_path / "data")
        assert not list(tmp_path.rglob("evil*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    _, good = simple(server)
    assert contents(get(source_of(ENTRY, Mirror("m", (File(name, (url,)),)), good), tmp_path / "data")) == IMAGES


@pytest.mark.parametrize("name", ["bytes.zip", "bytes.tar.gz", "files.zip", "files.tar.gz"])
def test_a_bomb_is_stopped(server: Server, tmp_path: Path, name: str, tally: Tally) -> None:
    """More than twice the bytes, or than four times the images and a thousand: some kB hold 30 MB or 2000 files."""
    if name.startswith("bytes"):
        files = {f"photo/dog/{number}.png": bytes(3_000_000) for number in range(10)}
    else:
        files = {f"photo/dog/{number}.png": b"x" for number in range(2000)}
    body = zipped(files, zipfile.ZIP_DEFLATED) if name.endswith(".zip") else tarred(files)
    url = server.serve(f"/{name}", body)
    with tally("archives that unpack without end"), pytest.raises(AidgnError, match="holds far more than the data set"):
        get(source_of(ENTRY, Mirror("m", (File(name, (url,)),)), unpacked=5_000_000), tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.png"))
    assert len(body) < 300_000 and written <= 10_000_000


def flip(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


def headers_of(size: int) -> bytes:
    """A tar.gz with an extended header of so many bytes, in a few kB."""
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb") as archive:
        info = tarfile.TarInfo("pax")
        info.type, info.size = tarfile.XHDTYPE, size
        archive.write(info.tobuf(tarfile.USTAR_FORMAT))
        archive.write(bytes(size))
    return buffer.getvalue()


def overwrite(content: bytes, position: int, value: bytes) -> bytes:
    return content[:position] + value + content[position + len(value) :]


DIRECTORY = ARCHIVE.index(b"PK\1\2")  # of the zip
TAR = tarred({f"kfold/{name}": content for name, content in IMAGES.items()})
DAMAGED = {
    "crc.zip": flip(ARCHIVE, ARCHIVE.index(b"IDAT") + 8),
    "bzip2.zip": overwrite(ARCHIVE, DIRECTORY + 10, b"\x0c"),  # the method of compression
    "nameless.zip": overwrite(ARCHIVE, DIRECTORY + 46, b"\0"),
    "cut.tar.gz": TAR[: len(TAR) // 2],
    "late cut.tar.gz": TAR[:-6],
    "flipped.tar.gz": flip(TAR, len(TAR) - 6),  # in the checksum at the end
    "headers.tar.gz": headers_of(50_000_000),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_found_and_does_not_stay(server: Server, tmp_path: Path, name: str) -> None:
    url = server.serve(f"/{name.replace(' ', '-')}", DAMAGED[name])
    sources = source_of(ENTRY, Mirror("m", (File(name, (url,)),)))
    with pytest.raises(AidgnError, match="damaged or no archive"):
        get(sources, tmp_path)
    assert not (tmp_path / "PACS").exists()
    server.routes[url.removeprefix(server.url(""))].body = ARCHIVE if name.endswith(".zip") else TAR
    assert contents(get(sources, tmp_path)) == IMAGES


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar"])
def test_flipped_or_cut_archives(name: str, tmp_path: Path, tally: Tally) -> None:
    dice, path = random.Random(name), tmp_path / name
    files = {f"photo/dog/{number}.png": dice.randbytes(300) for number in range(5)}
    content = zipped(files, zipfile.ZIP_DEFLATED) if name == "a.zip" else tarred(files, f"w:{name[6:]}")
    flips = [flip(content, dice.randrange(len(content))) for _ in range(150)]
    cuts = [content[: dice.randrange(len(content))] for _ in range(40)]
    if name == "a.tar":  # has checksums of its headers only: files without digest are announced as unverified
        flips = []
    for number, damaged in enumerate([*flips, *cuts]):
        path.write_bytes(damaged)
        folder = tmp_path / str(number)
        with tally(f"flipped or cut archives: {name[2:]}"), suppress(DamagedFile, MirrorError):
            unpack(path, folder, lambda member: [member], Limit(10**6, 100))
            assert {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("*/*/*")} == files


def test_giant_headers_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(headers_of(200_000_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedFile), damage_named(path):
        list(read_members(path, Limit(10**9, 10)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
