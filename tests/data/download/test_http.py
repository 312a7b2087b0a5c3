"""Transfers: resumed, tried again, verified; servers that drip, flood or send other files."""

import email.utils
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from email.message import Message
from pathlib import Path

import numpy as np
import pytest

from aidgn.data.download import connection, download
from aidgn.data.download import http as fetch
from aidgn.data.download.connection import MirrorError, SafeRedirects, check_address, parse_integer, retry_after
from aidgn.data.download.http import ATTEMPTS, CHUNK, File
from aidgn.data.download.mirrors import Mirror
from aidgn.data.loading import load_dataset
from aidgn.errors import AidgnError
from tests.conftest import Tally
from tests.data.download.conftest import (
    ARCHIVE,
    ENTRY,
    IMAGES,
    Handler,
    Server,
    break_off,
    contents,
    get,
    simple,
    source_of,
    zipped,
)

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


def test_wrong_bytes_lead_to_the_second_address(server: Server, tmp_path: Path) -> None:
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
    with pytest.raises(AidgnError, match=r"web page.*\(Quota exceeded\)"):
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


# Hostile servers ----------------------------------------------------------------------------------------------------


def send_forever(handler: Handler) -> None:
    """A body without a size, which never ends."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/zip")
    handler.end_headers()
    with suppress(OSError):
        while True:
            handler.wfile.write(bytes(CHUNK))


def test_a_server_that_sends_without_end_is_left(server: Server, tmp_path: Path, tally: Tally) -> None:
    bad, first = simple(server, "/first.zip")
    bad.first = [send_forever]
    _, second = simple(server, "/second.zip")
    with tally("mirrors that send without end"):
        assert contents(get(source_of(ENTRY, first, second, unpacked=10**6), tmp_path)) == IMAGES
        assert [request.path for request in server.log] == ["/first.zip", "/second.zip"]


STATUS = b"HTTP/1.1 200 OK\r\n"
CHUNKED = STATUS + b"Transfer-Encoding: chunked\r\n\r\n"
DRIPPING = {  # what the server sends first, then again and again, and the seconds between
    "body": (STATUS + b"Content-Length: 1000000\r\n\r\n", b"x", 0.05),
    "page": (STATUS + b"Content-Type: text/html\r\n\r\n<title>", b"x", 0.05),
    "status": (b"HTTP/1.1 200 ", b"O", 0.05),
    "header": (STATUS + b"X: ", b"x", 0.05),
    "interim": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, 0.0),
    "redirect": (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", b"x" * CHUNK, 0.0),
    "chunk size": (CHUNKED, b"0", 0.05),
    "trailer": (CHUNKED + b"1\r\nx\r\n0\r\n", b"X: y\r\n" * 100, 0.0),
}


@pytest.mark.parametrize("where", DRIPPING)
def test_a_server_that_drips_is_left(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, tally: Tally
) -> None:
    monkeypatch.setattr(fetch, "SPEED_WINDOW", 0.2)
    monkeypatch.setattr(connection, "PATIENCE", 0.2)
    monkeypatch.setattr(fetch, "ATTEMPTS", 2)
    stopped = threading.Event()

    def drip(handler: Handler) -> None:
        begin, more, pause = DRIPPING[where]
        with suppress(OSError):
            handler.wfile.write(begin)
            while not stopped.wait(pause):
                handler.wfile.write(more)
        handler.close_connection = True

    bad, first = simple(server, "/first.zip")
    bad.first = [drip] * 2
    _, second = simple(server, "/second.zip")
    given_up = threading.Timer(20, stopped.set)
    given_up.start()
    try:
        with tally("mirrors that drip"):
            assert contents(get(source_of(ENTRY, first, second), tmp_path)) == IMAGES
            assert not stopped.is_set()
    finally:
        stopped.set()
        given_up.cancel()


@pytest.mark.parametrize("text", ["\u00b2", "9" * 5000, "Wed, 01 Jan 99999 00:00:00 GMT"])
def test_strange_numbers_in_headers(text: str) -> None:
    headers = Message()
    headers["Retry-After"] = text
    assert (retry_after(headers) or 0) >= 0
    assert parse_integer(text) is None


def test_no_redirect_from_https_to_http(tally: Tally) -> None:
    check_address("https://b.org/x", "http://a.org/x")
    for url in ("http://b.org/x", "ftp://b.org/x", "file:///etc/passwd"):
        with tally("redirects to unsafe addresses"), pytest.raises(MirrorError):
            check_address(url, "https://a.org/x")
    request = urllib.request.Request("https://a.org/x")
    with pytest.raises(MirrorError):
        SafeRedirects().redirect_request(request, None, 302, "Found", {}, "http://b.org/x")


def test_a_416_does_not_complete_an_unverified_file(server: Server, tmp_path: Path, tally: Tally) -> None:
    """The part has as many bytes as the server's file, but other ones, and no checksum tells."""
    url = server.serve("/PACS.zip", ARCHIVE)
    folder = tmp_path / ".downloads" / "PACS"
    folder.mkdir(parents=True)
    (folder / "PACS.zip.part").write_bytes(bytes(len(ARCHIVE)))
    (folder / "PACS.zip.part.json").write_text(json.dumps({"url": url, "validator": '"one"', "total": None}))
    with tally("mirrors with another file than before"):
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
