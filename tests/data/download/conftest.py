"""A real server on this machine that misbehaves in the ways servers do, and small data sets to send."""

import hashlib
import io
import socket
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aidgn.data.download import download
from aidgn.data.download.http import File
from aidgn.data.download.mirrors import Mirror, Source
from aidgn.data.registry import DATASETS, DatasetInfo

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
