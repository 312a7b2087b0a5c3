"""Downloads from a real server on this machine that misbehaves in the ways servers do."""

import email.utils
import gzip
import hashlib
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from aidgn.data.dataset import load_dataset
from aidgn.data.download import download, manual_steps
from aidgn.data.download import http as fetch
from aidgn.data.download.archives import DamagedFile, Limit, damage_named, read_members
from aidgn.data.download.connection import MirrorError, SafeRedirects, check_address, parse_integer, retry_after
from aidgn.data.download.http import ATTEMPTS, CHUNK, File
from aidgn.data.download.layouts import LAYOUTS
from aidgn.data.download.mirrors import MNIST, SOURCES, VLCS, Mirror, Source, hugging_face
from aidgn.data.registry import DATASETS, DatasetInfo
from aidgn.errors import AidgnError

Answer = Callable[["Handler"], None]


# A server -----------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    path: str
    range: str | None
    if_range: str | None
    time: float
    sent: int = 0


@dataclass
class Route:
    body: bytes
    kind: str = "application/octet-stream"
    etag: str | None = '"one"'
    ranges: bool = True
    first: list[Answer] = field(default_factory=list)  # answers to the first requests, in place of the usual


class Handler(BaseHTTPRequestHandler):
    server: "Server"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.request_seen = Request(self.path, self.headers["Range"], self.headers["If-Range"], time.monotonic())
        self.server.log.append(self.request_seen)
        route = self.server.routes.get(self.path)
        if route is None:
            return self.status(404)
        if route.first:
            return route.first.pop(0)(self)
        self.send(route)

    def status(self, code: int, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content_Length": "0", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send(
        self,
        route: Route,
        stop: int | None = None,
        then: Callable[[], object] | None = None,
        ignore_if_range: bool = False,
    ) -> None:
        """The body from the byte asked for; broken off before byte `stop`, after calling `then`."""
        start, wanted = 0, self.request_seen.range
        same = self.request_seen.if_range in (None, route.etag) or ignore_if_range
        if wanted and route.ranges and same:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(route.body):
                return self.status(416, Content_Range=f"bytes */{len(route.body)}")
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", route.kind)
        self.send_header("Content-Length", str(len(route.body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(route.body) - 1}/{len(route.body)}")
        if route.etag:
            self.send_header("ETag", route.etag)
        self.end_headers()
        part = route.body[start:stop]
        self.wfile.write(part)
        self.request_seen.sent = len(part)
        if stop is not None:
            self.wfile.flush()
            if then:
                then()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.routes: dict[str, Route] = {}
        self.log: list[Request] = []

    def serve(self, path: str, body: bytes, **options: object) -> str:
        self.routes[path] = Route(body, **options)  # type: ignore[arg-type]
        return self.url(path)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def requests(self, path: str) -> list[Request]:
        return [request for request in self.log if request.path == path]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def break_off(route: Route, stop: int) -> Answer:
    return lambda handler: handler.send(route, stop)


# Small data sets ----------------------------------------------------------------------------------------------------


def picture(seed: int, size: int = 4) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def small(name: str, classes: tuple[str, ...] | None = None) -> DatasetInfo:
    """The catalogue's entry with 1, 2, 3, ... images in the classes of the first domain, one more in the next, ..."""
    entry = DATASETS[name]
    classes = classes or entry.classes
    class_counts = {domain: tuple(1 + i + j for j in range(len(classes))) for i, domain in enumerate(entry.domains)}
    return replace(
        entry,
        classes=classes,
        num_classes=len(classes),
        class_counts=class_counts,
        other_counts={},
        counts={domain: sum(counts) for domain, counts in class_counts.items()},
    )


def images_of(
    entry: DatasetInfo, pattern: str = "{domain}/{label}/pic_{number:03d}.png", names: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """As many images as the entry says, by their names in an archive."""
    result: dict[str, bytes] = {}
    for domain, counts in entry.class_counts.items():
        for label, count in zip(entry.classes, counts, strict=True):
            for number in range(count):
                name = pattern.format(
                    domain=(names or {}).get(domain, domain), label=(names or {}).get(label, label), number=number
                )
                result[name] = picture(len(result))
    return result


def zipped(files: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return buffer.getvalue()


def tarred(files: Mapping[str, bytes | tarfile.TarInfo], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def source_of(entry: DatasetInfo, *mirrors: Mirror, unpacked: int = 1_000_000) -> dict[str, Source]:
    return {entry.name: Source(entry, mirrors, unpacked, "https://example.org/data")}


def get(sources: dict[str, Source], folder: Path, **options: object) -> Path:
    return download(next(iter(sources)), folder, sources=sources, backoff=0.01, **options)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*/*"))}


ENTRY = small("PACS")
IMAGES = images_of(ENTRY)
ARCHIVE = zipped(images_of(ENTRY, "kfold/{domain}/{label}/pic_{number:03d}.png"))


def simple(server: Server, path: str = "/PACS.zip", body: bytes = ARCHIVE, **options: object) -> tuple[Route, Mirror]:
    """A mirror whose archive is checked by its md5."""
    url = server.serve(path, body, **options)
    file = File(path[1:], (url,), digest=f"md5:{hashlib.md5(ARCHIVE).hexdigest()}")
    return server.routes[path], Mirror(f"the mirror {path}", (file,))


# Transfer -----------------------------------------------------------------------------------------------------------


def test_a_data_set_is_complete_and_loads(server: Server, tmp_path: Path) -> None:
    _, mirror = simple(server)
    said: list[str] = []
    seen: list[tuple[int, int | None]] = []
    folder = get(
        source_of(ENTRY, mirror),
        tmp_path,
        on_message=said.append,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert folder == tmp_path / "PACS"
    assert contents(folder) == IMAGES
    assert [len(load_dataset("PACS", tmp_path).indices(domain)) for domain in range(4)] == list(ENTRY.counts.values())
    assert seen[0] == (0, len(ARCHIVE)) and seen[-1] == (len(ARCHIVE), len(ARCHIVE)) and seen == sorted(seen)
    assert f"{len(IMAGES)} images" in said[-1]
    assert json.loads((folder / ".source.json").read_text())["mirror"] == "the mirror /PACS.zip"
    assert not (tmp_path / ".downloads" / "PACS").exists()

    assert get(source_of(ENTRY, mirror), tmp_path) == folder  # once is enough
    assert len(server.log) == 1


def test_a_broken_transfer_is_continued(server: Server, tmp_path: Path) -> None:
    route, mirror = simple(server)
    route.first = [break_off(route, 1000), break_off(route, 1500)]
    folder = get(source_of(ENTRY, mirror), tmp_path)
    assert contents(folder) == IMAGES
    assert [request.range for request in server.log] == [None, "bytes=1000-", "bytes=1500-"]
    assert {request.if_range for request in server.log[1:]} == {'"one"'}
    assert sum(request.sent for request in server.log) == len(ARCHIVE)


def test_a_server_without_ranges_begins_again(server: Server, tmp_path: Path) -> None:
    route, mirror = simple(server, ranges=False)
    route.first = [break_off(route, 1000)]
    assert contents(get(source_of(ENTRY, mirror), tmp_path)) == IMAGES
    assert [request.sent for request in server.log] == [1000, len(ARCHIVE)]


@pytest.mark.parametrize("ignore_if_range", [False, True])
def test_another_file_under_the_same_address_is_not_mixed_in(
    server: Server, tmp_path: Path, ignore_if_range: bool
) -> None:
    """The ETag changes between the parts. A careless server sends the rest of the new file all the same."""
    url = server.serve("/PACS.zip", bytes(len(ARCHIVE)))
    route = server.routes["/PACS.zip"]

    def break_off_and_change(handler: Handler) -> None:
        handler.send(route, 1000)
        route.body, route.etag = ARCHIVE, '"two"'

    route.first = [break_off_and_change]
    if ignore_if_range:
        route.first.append(lambda handler: handler.send(route, ignore_if_range=True))
    mirror = Mirror("changed", (File("PACS.zip", (url,)),))  # no checksum: only the ETag can tell
    assert contents(get(source_of(ENTRY, mirror), tmp_path)) == IMAGES
    assert server.log[1].range == "bytes=1000-" and server.log[1].if_range == '"one"'
    assert server.log[-1].sent == len(ARCHIVE)


def test_without_etag_and_checksum_nothing_is_continued(server: Server, tmp_path: Path) -> None:
    url = server.serve("/PACS.zip", ARCHIVE, etag=None)
    route = server.routes["/PACS.zip"]
    route.first = [break_off(route, 1000)]
    assert contents(get(source_of(ENTRY, Mirror("plain", (File("PACS.zip", (url,)),))), tmp_path)) == IMAGES
    assert [request.range for request in server.log] == [None, None]


@pytest.mark.parametrize("code", [403, 404])
def test_a_refusal_leads_to_the_next_mirror_at_once(server: Server, tmp_path: Path, code: int) -> None:
    bad, first = simple(server, "/first.zip")
    bad.first = [lambda handler: handler.status(code)] * 10
    _, second = simple(server, "/second.zip")
    assert contents(get(source_of(ENTRY, first, second), tmp_path)) == IMAGES
    assert [request.path for request in server.log] == ["/first.zip", "/second.zip"]


def test_too_many_requests_waits_as_asked(server: Server, tmp_path: Path) -> None:
    route, mirror = simple(server)
    route.first = [lambda handler: handler.status(429, Retry_After="1")]
    get(source_of(ENTRY, mirror), tmp_path)
    assert server.log[1].time - server.log[0].time >= 1.0


def test_no_server_makes_us_wait_for_hours(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "LONGEST_WAIT", 0.05)
    route, mirror = simple(server)
    for wait in (email.utils.formatdate(time.time() + 7200, usegmt=True), "100000", "nonsense", "-5"):
        route.first.append(lambda handler, wait=wait: handler.status(503, Retry_After=wait))  # type: ignore[misc]
    begin = time.monotonic()
    get(source_of(ENTRY, mirror), tmp_path)
    assert len(server.log) == 5 and time.monotonic() - begin < 20
    in_an_hour = Message()
    in_an_hour["Retry-After"] = email.utils.formatdate(time.time() + 3600, usegmt=True)
    assert retry_after(in_an_hour) == pytest.approx(3600, abs=5)


def test_waits_double_after_server_errors(server: Server, tmp_path: Path) -> None:
    route, mirror = simple(server)
    route.first = [lambda handler, code=code: handler.status(code) for code in (500, 503, 502)]  # type: ignore[misc]
    sources = source_of(ENTRY, mirror)
    download("PACS", tmp_path, sources=sources, backoff=0.1)
    waits = np.diff([request.time for request in server.log])
    assert (waits >= [0.1, 0.2, 0.4]).all() and waits[0] < 5


def test_a_server_that_never_works_is_given_up(server: Server, tmp_path: Path) -> None:
    bad, first = simple(server, "/first.zip")
    bad.first = [lambda handler: handler.status(500)] * 100
    _, second = simple(server, "/second.zip")
    assert contents(get(source_of(ENTRY, first, second), tmp_path)) == IMAGES
    assert len(server.requests("/first.zip")) == ATTEMPTS


def test_wrong_bytes_are_discarded(server: Server, tmp_path: Path) -> None:
    wrong = bytearray(ARCHIVE)
    wrong[100] ^= 1
    _, first = simple(server, "/first.zip", bytes(wrong))
    _, second = simple(server, "/second.zip")
    said: list[str] = []
    assert contents(get(source_of(ENTRY, first, second), tmp_path, on_message=said.append)) == IMAGES
    assert any("md5 checksum" in text and hashlib.md5(ARCHIVE).hexdigest() in text for text in said)


def test_wrong_bytes_from_the_first_address_are_fetched_from_the_second(server: Server, tmp_path: Path) -> None:
    urls = server.serve("/a", ARCHIVE[:-1] + b"x"), server.serve("/b", ARCHIVE)
    file = File("PACS.zip", urls, digest=f"sha512:{hashlib.sha512(ARCHIVE).hexdigest()[:50]}")
    assert contents(get(source_of(ENTRY, Mirror("two addresses", (file,))), tmp_path)) == IMAGES
    assert [request.path for request in server.log] == ["/a", "/b"]


def test_a_file_of_another_size_is_not_downloaded(server: Server, tmp_path: Path) -> None:
    url = server.serve("/PACS.zip", ARCHIVE)
    with pytest.raises(AidgnError, match=f"has {len(ARCHIVE)} bytes, expected 77"):
        get(source_of(ENTRY, Mirror("other", (File("PACS.zip", (url,), size=77),))), tmp_path)
    assert not list(tmp_path.rglob("*.part"))


def test_a_page_that_asks_to_confirm_is_confirmed(server: Server, tmp_path: Path) -> None:
    """As Google Drive does with large files; also when the transfer is continued."""
    page = (
        b'<html><head><title>Virus scan warning</title></head><form id="download-form" action="/download" '
        b'method="get"><input type="submit" value="Anyway"><input type="hidden" name="id" value="a b">'
        b'<input type="hidden" name="confirm" value="t"></form><input name="other" value="no"></html>'
    )
    url = server.serve("/uc?id=1", page, kind="text/html; charset=utf-8")
    server.serve("/download?id=a+b&confirm=t", ARCHIVE)
    route = server.routes["/download?id=a+b&confirm=t"]
    route.first = [break_off(route, 1000)]
    assert contents(get(source_of(ENTRY, Mirror("drive", (File("PACS.zip", (url,)),))), tmp_path)) == IMAGES
    assert [request.range for request in server.requests("/download?id=a+b&confirm=t")] == [None, "bytes=1000-"]

    other = server.serve("/uc?id=2", b"<title>Quota exceeded</title>", kind="text/html")
    with pytest.raises(AidgnError, match=r"a web page instead of the file \(Quota exceeded\)"):
        get(source_of(ENTRY, Mirror("drive", (File("PACS.zip", (other,)),))), tmp_path / "second")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_the_middle_it_fetches_only_the_rest(server: Server, tmp_path: Path, how: signal.Signals) -> None:
    images = {name: os.urandom(40_000) for name in IMAGES}
    archive = zipped({f"kfold/{name}": content for name, content in images.items()})
    url = server.serve("/PACS.zip", archive)
    route = server.routes["/PACS.zip"]
    stopped = threading.Event()
    route.first = [lambda handler: handler.send(route, 10 * CHUNK + 77, stopped.wait)]
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from dataclasses import replace
from aidgn.data.registry import DATASETS
from aidgn.data.download import download
from aidgn.data.download.http import File
from aidgn.data.download.mirrors import Mirror, Source
entry = replace(DATASETS["PACS"], counts={dict(ENTRY.counts)!r}, class_counts={dict(ENTRY.class_counts)!r})
print("ready", flush=True)
download("PACS", {str(tmp_path)!r}, sources={{"PACS": Source(entry, (Mirror("m", (File("PACS.zip", ({url!r},)),)),),
         10 ** 8, "")}})
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    part = tmp_path / ".downloads" / "PACS" / "PACS.zip.part"
    deadline = time.monotonic() + 120
    while not (part.exists() and part.stat().st_size >= 5 * CHUNK) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    process.communicate()
    stopped.set()
    have = part.stat().st_size
    assert process.returncode != 0 and 5 * CHUNK <= have < len(archive)
    assert not (tmp_path / "PACS").exists()

    mirror = Mirror("m", (File("PACS.zip", (url,)),))
    assert contents(get(source_of(ENTRY, mirror, unpacked=10**8), tmp_path)) == images
    _, second = server.log
    assert second.range == f"bytes={have}-" and second.sent == len(archive) - have


def test_two_at_once_download_it_once(server: Server, tmp_path: Path) -> None:
    route, mirror = simple(server)
    said: list[str] = []

    def slowly(handler: Handler) -> None:
        deadline = time.monotonic() + 60
        while not any("waiting" in text for text in said) and time.monotonic() < deadline:
            time.sleep(0.01)
        handler.send(route)

    route.first = [slowly]
    threads = [
        threading.Thread(target=get, args=(source_of(ENTRY, mirror), tmp_path), kwargs={"on_message": said.append})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(tmp_path / "PACS") == IMAGES
    assert len(server.log) == 1
    assert any("waiting" in text for text in said) and any("is there" in text for text in said)


def test_a_file_put_there_by_hand_is_taken(tmp_path: Path) -> None:
    place = tmp_path / ".downloads" / "PACS"
    place.mkdir(parents=True)
    (place / "PACS.zip").write_bytes(ARCHIVE)
    file = File("PACS.zip", ("http://127.0.0.1:9/",), digest=f"md5:{hashlib.md5(ARCHIVE).hexdigest()}")
    assert contents(get(source_of(ENTRY, Mirror("m", (file,))), tmp_path)) == IMAGES


# What goes wrong ----------------------------------------------------------------------------------------------------


def test_when_all_fails_it_says_what_was_tried_and_what_to_do(server: Server, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()[1]
    mirrors = (
        Mirror("the authors' page", (File("a.zip", (server.url("/gone.zip"),)),)),
        Mirror("another", (File("b.zip", (f"http://127.0.0.1:{closed}/b.zip",)),)),
        Mirror("nowhere", (File("c.zip", ("http://no-such-host.invalid/c.zip",)),)),
    )
    with pytest.raises(AidgnError) as caught:
        get(source_of(ENTRY, *mirrors), tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "PACS could not be downloaded. Tried:"
    assert "the authors' page" in lines[1] and "/gone.zip answered 404 Not Found" in lines[1]
    assert "another" in lines[2] and "Connection refused" in lines[2]
    assert "nowhere" in lines[3] and "online?" in lines[3]
    rest = "\n".join(lines[4:])
    assert "https://example.org/data" in rest and f"{tmp_path}/PACS/<domain>/<class>/<image>" in rest
    assert "aidgn data check PACS" in rest and "a.zip" in rest


@pytest.mark.parametrize("name", SOURCES)
def test_manual_steps_name_page_layout_and_check(name: str) -> None:
    text = manual_steps(name, "/my/data")
    entry = DATASETS[name]
    assert all(domain in text for domain in entry.domains) and SOURCES[name].page in text
    assert f"/my/data/{entry.folder}/<domain>/<class>/<image>" in text and f"aidgn data check {name}" in text


def test_a_missing_image_is_named_by_domain_and_class(server: Server, tmp_path: Path) -> None:
    images = images_of(ENTRY, "kfold/{domain}/{label}/pic_{number:03d}.png")
    del images["kfold/photo/guitar/pic_000.png"]
    url = server.serve("/PACS.zip", zipped(images))
    with pytest.raises(AidgnError, match=r"photo: 41 images, expected 42; photo/guitar: 5 images, expected 6\."):
        get(source_of(ENTRY, Mirror("m", (File("PACS.zip", (url,)),))), tmp_path)
    assert not (tmp_path / "PACS").exists()


def test_a_damaged_archive_is_fetched_anew_the_next_time(server: Server, tmp_path: Path) -> None:
    url = server.serve("/PACS.zip", ARCHIVE[:2000])
    sources = source_of(ENTRY, Mirror("m", (File("PACS.zip", (url,)),)))
    with pytest.raises(AidgnError, match=r"PACS\.zip, which is damaged or no archive"):
        get(sources, tmp_path)
    server.serve("/PACS.zip", ARCHIVE)
    assert contents(get(sources, tmp_path)) == IMAGES


def test_what_is_there_is_never_overwritten(server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "PACS" / "photo" / "dog" / "mine.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    _, mirror = simple(server)
    with pytest.raises(AidgnError, match=f"{tmp_path}/PACS is there, but is not PACS as published"):
        get(source_of(ENTRY, mirror), tmp_path)
    assert mine.read_bytes() == b"mine" and not server.log


def test_a_full_disk_is_seen_before(server: Server, tmp_path: Path) -> None:
    route, mirror = simple(server)
    route.first = [lambda handler: handler.status(200, Content_Length=str(10**15))]
    with pytest.raises(AidgnError, match="The disk is full"):
        get(source_of(ENTRY, mirror), tmp_path)


def test_a_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, mirror = simple(server)
    with pytest.raises(AidgnError, match=f"{tmp_path}/file/data/.downloads/PACS could not be written"):
        get(source_of(ENTRY, mirror), tmp_path / "file" / "data")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(server: Server, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    _, mirror = simple(server)
    with pytest.raises(AidgnError, match="--data-dir"):
        get(source_of(ENTRY, mirror), tmp_path)


def test_what_is_not_a_data_set_to_download(tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match="Did you mean PACS"):
        download("PACSS", tmp_path)
    with pytest.raises(AidgnError, match="comes with the package"):
        download("digits", tmp_path)


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
def test_an_unsafe_archive_is_refused(server: Server, tmp_path: Path, name: str) -> None:
    url = server.serve(f"/{name}", HOSTILE[name])
    with pytest.raises(AidgnError, match="refused"):
        get(source_of(ENTRY, Mirror("m", (File(name, (url,)),))), tmp_path / "data")
    assert not list(tmp_path.rglob("evil*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    _, good = simple(server)
    assert contents(get(source_of(ENTRY, Mirror("m", (File(name, (url,)),)), good), tmp_path / "data")) == IMAGES


@pytest.mark.parametrize("name", ["bytes.zip", "bytes.tar.gz", "files.zip", "files.tar.gz"])
def test_a_bomb_is_stopped(server: Server, tmp_path: Path, name: str) -> None:
    """More than twice the bytes, or than four times the images and a thousand: some kB hold 30 MB or 2000 files."""
    if name.startswith("bytes"):
        files = {f"photo/dog/{number}.png": bytes(3_000_000) for number in range(10)}
    else:
        files = {f"photo/dog/{number}.png": b"x" for number in range(2000)}
    body = zipped(files, zipfile.ZIP_DEFLATED) if name.endswith(".zip") else tarred(files)
    url = server.serve(f"/{name}", body)
    with pytest.raises(AidgnError, match="holds far more than the data set"):
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


TAR = tarred({f"kfold/{name}": content for name, content in IMAGES.items()})
DAMAGED = {
    "crc.zip": flip(ARCHIVE, ARCHIVE.index(b"IDAT") + 8),
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


def test_giant_headers_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(headers_of(200_000_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedFile), damage_named(path):
        list(read_members(path, Limit(10**9, 10)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


# Hostile servers ----------------------------------------------------------------------------------------------------


def send_forever(handler: Handler) -> None:
    """A body without a size, which never ends."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/zip")
    handler.end_headers()
    with suppress(OSError):
        while True:
            handler.wfile.write(bytes(CHUNK))


def drip(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(10**6))
    handler.end_headers()
    with suppress(OSError):
        for _ in range(600):
            handler.wfile.write(b"x")
            time.sleep(0.05)


def test_a_server_that_sends_without_end_is_left(server: Server, tmp_path: Path) -> None:
    bad, first = simple(server, "/first.zip")
    bad.first = [send_forever]
    _, second = simple(server, "/second.zip")
    assert contents(get(source_of(ENTRY, first, second, unpacked=10**6), tmp_path)) == IMAGES
    assert [request.path for request in server.log] == ["/first.zip", "/second.zip"]


def test_a_server_that_drips_is_left(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SPEED_WINDOW", 0.2)
    bad, first = simple(server, "/first.zip")
    bad.first = [drip] * ATTEMPTS
    _, second = simple(server, "/second.zip")
    begin = time.monotonic()
    assert contents(get(source_of(ENTRY, first, second), tmp_path)) == IMAGES
    assert time.monotonic() - begin < 15 and len(server.requests("/first.zip")) == ATTEMPTS


@pytest.mark.parametrize("text", ["\u00b2", "9" * 5000, "Wed, 01 Jan 99999 00:00:00 GMT"])
def test_strange_numbers_in_headers(text: str) -> None:
    headers = Message()
    headers["Retry-After"] = text
    assert (retry_after(headers) or 0) >= 0
    assert parse_integer(text) is None


def test_no_redirect_from_https_to_http() -> None:
    check_address("https://b.org/x", "http://a.org/x")
    for url in ("http://b.org/x", "ftp://b.org/x", "file:///etc/passwd"):
        with pytest.raises(MirrorError):
            check_address(url, "https://a.org/x")
    request = urllib.request.Request("https://a.org/x")
    with pytest.raises(MirrorError):
        SafeRedirects().redirect_request(request, None, 302, "Found", {}, "http://b.org/x")


def test_a_416_does_not_complete_an_unverified_file(server: Server, tmp_path: Path) -> None:
    """The part has as many bytes as the server's file, but other ones, and no checksum tells."""
    url = server.serve("/PACS.zip", ARCHIVE)
    folder = tmp_path / ".downloads" / "PACS"
    folder.mkdir(parents=True)
    (folder / "PACS.zip.part").write_bytes(bytes(len(ARCHIVE)))
    (folder / "PACS.zip.part.json").write_text(json.dumps({"url": url, "validator": '"one"', "total": None}))
    assert contents(get(source_of(ENTRY, Mirror("m", (File("PACS.zip", (url,)),))), tmp_path)) == IMAGES


def test_a_file_without_checksum_is_named(server: Server, tmp_path: Path) -> None:
    url = server.serve("/PACS.zip", ARCHIVE)
    messages: list[str] = []
    get(source_of(ENTRY, Mirror("m", (File("PACS.zip", (url,)),))), tmp_path / "1", on_message=messages.append)
    assert any("No checksum" in message and "PACS.zip" in message for message in messages)
    _, verified = simple(server)
    messages.clear()
    get(source_of(ENTRY, verified), tmp_path / "2", on_message=messages.append)
    assert not any("No checksum" in message for message in messages)


# The layout of each data set ----------------------------------------------------------------------------------------


def test_office_home_as_published_and_per_domain(server: Server, tmp_path: Path) -> None:
    entry = small("OfficeHome", ("Alarm_Clock", "TV"))
    images = images_of(entry)
    whole = {f"OfficeHomeDataset_10072016/{name}": content for name, content in images.items()}
    whole |= {"OfficeHomeDataset_10072016/imagelist.txt": b"x", "__MACOSX/Art/TV/._pic_000.png": b"x"}
    url = server.serve("/home.zip", zipped(whole))
    folder = get(source_of(entry, Mirror("m", (File("home.zip", (url,)),))), tmp_path / "one")
    assert folder.name == "office_home" and contents(folder) == images
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"Art", "Clipart", "Product", "Real World"}

    files = []
    for domain in entry.domains:
        name = domain.replace(" ", "_")
        part = {
            f"{name}/{path.partition('/')[2]}": content
            for path, content in images.items()
            if path.startswith(f"{domain}/")
        }
        files.append(File(f"{name}.tgz", (server.serve(f"/f/{name}/?dl=1", tarred(part)),)))
    assert contents(get(source_of(entry, Mirror("m", tuple(files))), tmp_path / "two")) == images


def test_vlcs_by_class_names_and_by_splits(server: Server, tmp_path: Path) -> None:
    entry = small("VLCS")
    images = images_of(entry)
    url = server.serve("/VLCS.tar.gz", tarred({f"VLCS/{name}": content for name, content in images.items()}))
    assert contents(get(source_of(entry, Mirror("m", (File("VLCS.tar.gz", (url,)),))), tmp_path / "one")) == images

    # Dassl's copy: CALTECH/{train,crossval,full,test}/{0..4}; full is train and crossval; names repeat between splits.
    names = VLCS.mirrors[1].names
    back = {value: key for key, value in names.items()}
    split: dict[str, bytes] = {}
    for path, content in images.items():
        domain, label, file = path.split("/")
        number = int(file[4:7])
        part = ("train", "crossval", "test")[number % 3]
        for where in (part, "full")[: 1 if part == "test" else 2]:
            at = number // 3 if where == part else number
            split[f"VLCS/{back[domain]}/{where}/{back[label]}/im{at}.png"] = content
    url = server.serve("/vlcs.zip", zipped(split))
    mirror = Mirror("m", (File("vlcs.zip", (url,)),), names=names)
    found = contents(get(source_of(entry, mirror), tmp_path / "two"))
    assert sorted((name.rpartition("/")[0], content) for name, content in found.items()) == sorted(
        (name.rpartition("/")[0], content) for name, content in images.items()
    )


def test_domain_net_takes_what_the_lists_name(server: Server, tmp_path: Path) -> None:
    """The painting domain has no image of one class: its folder is empty, for all domains must have the same."""
    entry = small("DomainNet", ("The_Eiffel_Tower", "t-shirt"))
    images = images_of(entry)
    entry = replace(entry, classes=(), class_counts={}, counts={**entry.counts, "paint": entry.counts["paint"] - 4})
    full = {"clip": "clipart", "info": "infograph", "paint": "painting", "quick": "quickdraw"}
    files = []
    expected = {path: content for path, content in images.items() if not path.startswith("paint/t-shirt")}
    for domain in entry.domains:
        name = full.get(domain, domain)
        members = {
            f"{name}/{path.partition('/')[2]}": content
            for path, content in expected.items()
            if path.startswith(f"{domain}/")
        }
        lines = [f"{path} {index}" for index, path in enumerate(members)]
        members[f"{name}/t-shirt/duplicate.png"] = b"a duplicate"
        files.append(File(f"{name}.zip", (server.serve(f"/{name}.zip", zipped(members)),)))
        for part, chosen in (("train", lines[::2]), ("test", lines[1::2])):
            text = "".join(f"{line}\n" for line in chosen).encode()
            files.append(File(f"{name}_{part}.txt", (server.serve(f"/{name}_{part}.txt", text, kind="text/plain"),)))
    mirror = Mirror("m", tuple(files), arrange="listed_folders")
    folder = get(source_of(entry, mirror), tmp_path)
    assert contents(folder) == expected
    assert list((folder / "paint" / "t-shirt").iterdir()) == []
    assert load_dataset("DomainNet", tmp_path).classes == ["The_Eiffel_Tower", "t-shirt"]


def camera_traps(
    server: Server, entry: DatasetInfo, left_out: int, zipped_json: bool
) -> tuple[Mirror, dict[str, bytes]]:
    """Images of six locations with eleven categories, annotated in COCO camera-traps form; and what is to be taken."""
    images = images_of(entry)
    categories = [*entry.classes, "car"]
    data: dict[str, list] = {
        "categories": [{"id": 30 + i, "name": name} for i, name in enumerate(categories)],
        "images": [],
        "annotations": [],
    }
    tar, expected = {}, {}
    for number, (path, content) in enumerate(images.items()):
        domain, label, _ = path.split("/")
        file = f"{number:04d}-23d2.png"
        tar[f"eccv_18_all_images_sm/{file}"] = content
        location = domain.removeprefix("location_")
        data["images"].append(
            {"id": f"id{number}", "file_name": file, "location": location if zipped_json else int(location)}
        )
        kept = number >= left_out
        labels = [label if kept else "car", "car"] + [label] * kept  # several boxes of one animal
        data["annotations"] += [
            {"id": len(data["annotations"]), "image_id": f"id{number}", "category_id": 30 + categories.index(name)}
            for name in labels
        ]
        if kept:
            expected[f"{domain}/{label}/{file}"] = content
    for location in ("7", "130"):
        data["images"].append({"id": f"far{location}", "file_name": f"far{location}.png", "location": location})
        data["annotations"].append({"image_id": f"far{location}", "category_id": 30})
        tar[f"eccv_18_all_images_sm/far{location}.png"] = b"another location"
    if zipped_json:
        name, body = "cct.json.zip", zipped({"caltech_images_20210113.json": json.dumps(data).encode()})
    else:  # in parts that each have the categories
        halves = [
            {"categories": data["categories"], "images": data["images"][i::2], "annotations": data["annotations"][i::2]}
            for i in range(2)
        ]
        name, body = (
            "eccv.tar.gz",
            tarred(
                {
                    f"eccv_18_annotation_files/{part}.json": json.dumps(half).encode()
                    for part, half in zip(("train", "cis_test"), halves, strict=True)
                }
            ),
        )
    files = (
        File("images.tar.gz", (server.serve("/images.tar.gz", tarred(tar)),)),
        File(name, (server.serve(f"/{name}", body),)),
    )
    return Mirror(name, files, arrange="camera_traps"), expected


@pytest.mark.parametrize("zipped_json", [False, True])
@pytest.mark.parametrize("left_out", [0, 3, 4])
def test_terra_incognita_is_cut_out_of_camera_traps(
    server: Server, tmp_path: Path, zipped_json: bool, left_out: int
) -> None:
    """Both counts are accepted and told apart; any other is an error that names both."""
    entry = small("TerraIncognita")
    other = {**entry.counts, "location_100": entry.counts["location_100"] - 3}
    entry = replace(entry, class_counts={}, other_counts=other)
    mirror, expected = camera_traps(server, small("TerraIncognita"), left_out, zipped_json)
    total, said = sum(entry.counts.values()), list[str]()
    if left_out == 4:
        with pytest.raises(AidgnError, match=r"location_100: 51 images, expected 52\."):
            get(source_of(entry, mirror), tmp_path)
        return
    folder = get(source_of(entry, mirror), tmp_path, on_message=said.append)
    assert folder.name == "terra_incognita" and contents(folder) == expected
    assert (
        f"TerraIncognita published ({total} images)"
        if left_out == 0
        else f"TerraIncognita downloadable today ({total - 3} images)"
    ) in said[-1]


def test_an_image_with_two_categories_lies_in_both(server: Server, tmp_path: Path) -> None:
    data = {
        "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}],
        "images": [{"id": i, "file_name": f"{i}.png", "location": "38"} for i in range(2)],
        "annotations": [
            {"image_id": 0, "category_id": 1},
            {"image_id": 0, "category_id": 2},
            {"image_id": 1, "category_id": 2},
        ],
    }
    entry = DatasetInfo(
        "TerraIncognita", ("location_38",), ("L38",), 2, "terra_incognita", {"location_38": 3}, classes=("cat", "dog")
    )
    files = (
        File("i.tar.gz", (server.serve("/i.tar.gz", tarred({"a/0.png": picture(0), "a/1.png": picture(1)})),)),
        File("a.json.zip", (server.serve("/a.json.zip", zipped({"a.json": json.dumps(data).encode()})),)),
    )
    folder = get(source_of(entry, Mirror("m", files, arrange="camera_traps")), tmp_path)
    assert contents(folder) == {
        "location_38/cat/0.png": picture(0),
        "location_38/dog/0.png": picture(0),
        "location_38/cat/1.png": picture(1),
    }


def test_annotations_that_are_none(server: Server, tmp_path: Path) -> None:
    files = (
        File("i.tar.gz", (server.serve("/i.tar.gz", tarred({"a/0.png": b"x"})),)),
        File("a.json.zip", (server.serve("/a.json.zip", zipped({"a.json": b'{"images": [{}]}'})),)),
    )
    with pytest.raises(AidgnError, match="not in COCO camera-traps form"):
        get(source_of(small("TerraIncognita"), Mirror("m", files, arrange="camera_traps")), tmp_path)


# Hugging Face -------------------------------------------------------------------------------------------------------


def hub(server: Server, entry: DatasetInfo, tables: list[bytes], wrong_oid: bool = False) -> Mirror:
    """The API and the files of a repository, at the addresses of the real mirror below another host."""
    real = hugging_face("someone/data", "main")
    listing = [{"type": "file", "path": "README.md", "size": 5, "oid": "x"}]
    for number, table in enumerate(tables):
        path = f"data/train-{number:05d}-of-{len(tables):05d}.parquet"
        server.serve(f"/datasets/someone/data/resolve/main/{path}", table)
        listing.append(
            {
                "type": "file",
                "path": path,
                "size": len(table),
                "oid": "x",
                "lfs": {  # type: ignore[dict-item]
                    "oid": "0" * 64 if wrong_oid else hashlib.sha256(table).hexdigest(),
                    "size": len(table),
                },
            }
        )
    server.serve("/api/datasets/someone/data/tree/main/data", json.dumps(listing).encode(), kind="application/json")
    return replace(
        real,
        listing=real.listing.replace("https://huggingface.co", server.url("")),
        resolve=real.resolve.replace("https://huggingface.co", server.url("")),
    )


def table_of(rows: list[dict], features: dict) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("numbered", [False, True])
def test_parquet_rows_become_files(server: Server, tmp_path: Path, numbered: bool) -> None:
    """PACS gives domains as words, DomainNet as numbers; some rows have no file name or one that is taken."""
    entry = small("PACS")
    rows = [
        {
            "image": {"bytes": content, "path": (None, "pic.png", f"{number}.png")[number % 3]},
            "domain": entry.domains.index(path.split("/")[0]) if numbered else path.split("/")[0],
            "label": entry.classes.index(path.split("/")[1]),
        }
        for number, (path, content) in enumerate(IMAGES.items())
    ]
    features: dict = {
        "image": {"_type": "Image"},
        "label": {"names": list(entry.classes), "_type": "ClassLabel"},
        "domain": {"names": list(entry.domains)} if numbered else {"dtype": "string"},
    }
    tables = [table_of(rows[:100], features), table_of(rows[100:], features)]
    found = contents(get(source_of(entry, hub(server, entry, tables)), tmp_path))
    assert sorted((name.rpartition("/")[0], content) for name, content in found.items()) == sorted(
        (name.rpartition("/")[0], content) for name, content in IMAGES.items()
    )
    assert {Path(name).suffix for name in found} == {".png"}
    assert found["art_painting/dog/000000.png"] == rows[0]["image"]["bytes"]  # type: ignore[index]


def test_parquet_with_wrong_checksum_or_columns(server: Server, tmp_path: Path) -> None:
    table = table_of([{"image": {"bytes": b"x", "path": "a.png"}, "label": 0}], {})
    with pytest.raises(AidgnError, match="sha256 checksum"):
        get(source_of(ENTRY, hub(server, ENTRY, [table], wrong_oid=True)), tmp_path)
    with pytest.raises(AidgnError, match="not a table of image, domain and label"):
        get(source_of(ENTRY, hub(server, ENTRY, [table])), tmp_path)
    with pytest.raises(AidgnError, match="not a table of image, domain and label"):
        get(source_of(ENTRY, hub(server, ENTRY, [b"no parquet"])), tmp_path)


def test_without_pyarrow_the_next_mirror_is_tried(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    parquet = hub(server, ENTRY, [b"x"])
    with pytest.raises(AidgnError, match="pip install pyarrow"):
        get(source_of(ENTRY, parquet), tmp_path)
    _, good = simple(server)
    assert contents(get(source_of(ENTRY, parquet, good), tmp_path)) == IMAGES
    assert {request.path for request in server.log} == {"/PACS.zip"}  # nothing was downloaded in vain


# MNIST --------------------------------------------------------------------------------------------------------------

TRAIN, TEST = 240, 60


def idx(values: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, values.ndim)) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(header + values.tobytes())


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images whose top left corner tells their number, and labels."""
    generator = np.random.default_rng(0)
    images = generator.integers(1, 256, (TRAIN + TEST, 28, 28)).astype(np.uint8)
    return images, generator.integers(0, 10, TRAIN + TEST).astype(np.uint8)


def mnist(server: Server, arrange: str, **changed: bytes) -> Mirror:
    images, labels = digits()
    bodies = {
        "train-images": idx(images[:TRAIN]),
        "train-labels": idx(labels[:TRAIN]),
        "t10k-images": idx(images[TRAIN:]),
        "t10k-labels": idx(labels[TRAIN:]),
    }
    bodies |= {name.replace("_", "-"): body for name, body in changed.items()}
    names = {file.name: file.name.rpartition("-idx")[0] for file in MNIST}
    return Mirror(
        "MNIST",
        tuple(File(name, (server.serve(f"/{name}", bodies[part]),)) for name, part in names.items()),
        arrange=arrange,
    )


def mnist_entry(name: str) -> DatasetInfo:
    entry = DATASETS[name]
    return replace(entry, counts=dict.fromkeys(entry.domains, (TRAIN + TEST) // len(entry.domains)))


def test_rotated_mnist(server: Server, tmp_path: Path) -> None:
    """Against torchvision's rotation of the images dealt out in the order of the stated seed."""
    said: list[str] = []
    folder = get(
        source_of(mnist_entry("RotatedMNIST"), mnist(server, "rotated_mnist")), tmp_path, on_message=said.append
    )
    assert "made from MNIST" in said[-1] and "RandomState(0)" in said[-1]
    images, labels = digits()
    order = np.random.RandomState(0).permutation(len(images))
    for position, angle in enumerate((0, 15, 30, 45, 60, 75)):
        mine = order[position::6]
        for number, at in enumerate(mine):
            path = folder / str(angle) / str(labels[at]) / f"{number:05d}.png"
            expected = rotate(Image.fromarray(images[at]), angle, InterpolationMode.BILINEAR, fill=0)
            with Image.open(path) as image:
                assert image.mode == "L" and image.size == (28, 28)
                assert np.array_equal(np.asarray(image), np.asarray(expected))
        assert len(list((folder / str(angle)).glob("*/*.png"))) == len(mine)


def test_colored_mnist(server: Server, tmp_path: Path) -> None:
    """Each image is one of MNIST in one colour; labels and colours are flipped as often as they should be."""
    folder = get(source_of(mnist_entry("ColoredMNIST"), mnist(server, "colored_mnist")), tmp_path)
    images, labels = digits()
    number_of = {image.tobytes(): number for number, image in enumerate(images)}
    order = list(np.random.RandomState(0).permutation(len(images)))
    seen = []
    for position, (domain, flip) in enumerate((("+90%", 0.1), ("+80%", 0.2), ("-90%", 0.9))):
        noisy, flipped, count = 0, 0, 0
        for path in sorted((folder / domain).glob("*/*.png")):
            label = int(path.parent.name)
            with Image.open(path) as image:
                pixels = np.asarray(image)
            assert pixels.shape == (28, 28, 3) and not pixels[..., 2].any()
            colour = 1 if pixels[..., 1].any() else 0
            assert not pixels[..., 1 - colour].any()
            number = number_of[np.ascontiguousarray(pixels[..., colour]).tobytes()]
            assert order.index(number) == 3 * int(path.stem) + position
            seen.append(number)
            noisy += label != int(labels[number] < 5)
            flipped += colour != label
            count += 1
        for found, probability in ((noisy, 0.25), (flipped, flip)):  # within four standard deviations
            assert abs(found - count * probability) < 4 * (count * probability * (1 - probability)) ** 0.5
    assert sorted(seen) == list(range(TRAIN + TEST))


def test_idx_files_are_read_strictly(server: Server, tmp_path: Path) -> None:
    images, labels = digits()
    whole = gzip.decompress(idx(images[:TRAIN]))
    for body, problem in (
        (gzip.compress(whole + b"x"), "longer than its beginning says"),
        (gzip.compress(whole[:-1]), "shorter than its beginning says"),
        (gzip.compress(b"\0\0\x0d\3" + whole[4:]), "not an idx file"),
        (gzip.compress(whole[:9]), "not an idx file"),
        (idx(images[:TRAIN, :14]), "not an idx file"),
        (gzip.compress(whole)[:-9], "damaged"),
        (whole, "damaged"),
    ):
        with pytest.raises(AidgnError, match=problem):
            get(source_of(mnist_entry("RotatedMNIST"), mnist(server, "rotated_mnist", train_images=body)), tmp_path)
    for wrong in (labels[: TRAIN - 1], labels[:TRAIN] + 10):
        with pytest.raises(AidgnError, match="labels that do not belong to the images"):
            get(
                source_of(mnist_entry("RotatedMNIST"), mnist(server, "rotated_mnist", train_labels=idx(wrong))),
                tmp_path / str(wrong[0]),
            )


# The table ----------------------------------------------------------------------------------------------------------


def test_sources_are_well_formed() -> None:
    assert set(SOURCES) == set(DATASETS) - {"digits"}
    for name, source in SOURCES.items():
        assert source.info is DATASETS[name]
        files: dict[str, File] = {}
        for mirror in source.mirrors:
            assert mirror.arrange in LAYOUTS
            assert bool(mirror.files) != bool(mirror.listing and mirror.resolve)
            for file in mirror.files:
                assert files.setdefault(file.name, file) is file  # two files of one name would be taken for each other
                assert file.urls and all(url.startswith(("https://", "http://")) for url in file.urls)
                kind, _, digest = file.digest.partition(":")
                assert not file.digest or (
                    kind in hashlib.algorithms_guaranteed
                    and len(digest) >= 32
                    and set(digest) <= set("0123456789abcdef")
                )
            for known in mirror.names.values():
                assert known in (*source.info.domains, *source.info.classes)


def test_mnist_checksums_are_torchvisions() -> None:
    from torchvision.datasets import MNIST as PUBLISHED

    assert {file.name: file.digest for file in MNIST} == {name: f"md5:{md5}" for name, md5 in PUBLISHED.resources}
    assert all(mirror.rstrip("/") in "".join(MNIST[0].urls) for mirror in PUBLISHED.mirrors)
