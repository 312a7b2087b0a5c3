"""Open a web address: follow redirects, confirm download pages, and tell temporary from permanent errors."""

import email.utils
import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from functools import partial
from html.parser import HTMLParser
from typing import Any

TIMEOUT = 30.0  # seconds without a byte
PATIENCE = 60.0  # seconds for the header of a response, redirects included
MAX_PAGE = 1 << 20


class MirrorError(Exception):
    """This address or copy cannot be used; another one may work."""


class TransferError(Exception):
    """The transfer failed for a reason that may be temporary.

    Args:
        reason: What happened.
        wait: Seconds that the server asked for.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


def status_error(error: urllib.error.HTTPError) -> MirrorError | TransferError:
    """Return a TransferError for an answer that may be temporary, else a MirrorError."""
    if error.code == 416:
        return TransferError("has another file than before")
    answer = f"answered {error.code} {error.reason}"
    if error.code in (408, 429) or error.code >= 500:
        return TransferError(answer, retry_after(error.headers))
    return MirrorError(answer)


def connection_error(error: Exception) -> MirrorError | TransferError:
    """Return a TransferError for an error that may be temporary, else a MirrorError."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, socket.gaierror):
        return MirrorError("cannot be found (is this machine online?)")
    if isinstance(reason, ssl.SSLCertVerificationError):
        return MirrorError(f"cannot be trusted ({reason.verify_message})")
    return TransferError(f"could not be reached ({reason or type(error).__name__})")


class TimedResponse(http.client.HTTPResponse):
    """A response that cannot be read after its deadline, even if the server sends a byte now and then.

    The timeout of a socket starts again with every byte. This deadline covers whatever http.client reads: endless
    headers, interim responses, sizes of chunks and trailers.
    """

    def __init__(self, sock: socket.socket, *arguments: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.deadline = deadline
        self.fp = io.BufferedReader(TimedReader(self.fp.detach(), self))  # type: ignore[attr-defined]


class TimedReader(io.RawIOBase):
    """The socket of a `TimedResponse`."""

    def __init__(self, raw: io.RawIOBase, response: TimedResponse) -> None:
        self.raw = raw
        self.response = response

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if time.monotonic() > self.response.deadline:
            raise TimeoutError("the server sends next to nothing")
        return self.raw.readinto(buffer)  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        self.raw.close()
        super().close()


class TimedHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Open connections whose responses are read until the deadline at most."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self.deadline = deadline

    def do_open(self, http_class: Any, req: urllib.request.Request, **http_conn_args: Any) -> http.client.HTTPResponse:
        def connect(*host: Any, **settings: Any) -> http.client.HTTPConnection:
            connection: http.client.HTTPConnection = http_class(*host, **settings)
            connection.response_class = partial(TimedResponse, deadline=self.deadline)  # type: ignore[assignment]
            return connection

        return super().do_open(connect, req, **http_conn_args)  # type: ignore[arg-type]


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects, except from https to http and to addresses outside the web."""

    def redirect_request(  # type: ignore[no-untyped-def]
        self, request, response, code, reason, headers, url
    ) -> urllib.request.Request | None:
        check_address(url, request.full_url)
        response.close()  # otherwise urllib reads the body, which may never end
        return super().redirect_request(request, response, code, reason, headers, url)


def check_address(url: str, previous: str) -> None:
    """Refuse an address that is not on the web, or less secure than the one that led to it."""
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme not in ("http", "https"):
        raise MirrorError(f"leads to {url}, which is not a web address")
    if scheme == "http" and urllib.parse.urlsplit(previous).scheme == "https":
        raise MirrorError(f"leads to {url}, which is not encrypted; refused")


def open_url(url: str, offset: int, validator: str | None, asks: bool) -> tuple[TimedResponse, bool]:
    """Request a file from byte `offset` on, and submit the confirmation page that Google Drive has for large files.

    Args:
        url: Address.
        offset: First byte.
        validator: ETag or date of the file whose first part was received.
        asks: Whether a confirmation page comes first; the first request then asks for the whole page.

    Returns:
        The response, and whether a confirmation page came.
    """
    headers = {"User-Agent": "aidgn", "Accept-Encoding": "identity"}
    ranged = {"Range": f"bytes={offset}-"} if offset else {}
    ranged |= {"If-Range": validator} if offset and validator else {}
    timed = TimedHandler(time.monotonic() + PATIENCE)
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(), SafeRedirects(), timed)
    previous = url
    for hop in range(3):
        check_address(url, previous)
        request = urllib.request.Request(url, headers=headers if asks and hop == 0 else headers | ranged)
        response = opener.open(request, timeout=TIMEOUT)
        if response.headers.get_content_type() != "text/html" or "Content-Disposition" in response.headers:
            return response, hop > 0
        with response:
            page = Page()
            page.feed(response.read(MAX_PAGE).decode("utf-8", "replace"))
        if page.action is None:
            break
        previous = response.url
        url = f"{urllib.parse.urljoin(previous, page.action)}?{urllib.parse.urlencode(page.fields)}"
    raise MirrorError(f"sent a web page instead of the file ({page.title.strip() or 'without a title'})")


class Page(HTMLParser):
    """The title of a web page, and address and fields of its form `download-form`."""

    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.action: str | None = None
        self.fields: dict[str, str] = {}
        self.inside: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        if tag == "title" or (tag == "form" and values.get("id") == "download-form"):
            self.inside.add(tag)
        if tag == "form" and "form" in self.inside:
            self.action = values.get("action", "")
        if tag == "input" and "form" in self.inside and values.get("name"):
            self.fields[values["name"]] = values.get("value", "")

    def handle_endtag(self, tag: str) -> None:
        self.inside.discard(tag)

    def handle_data(self, data: str) -> None:
        if "title" in self.inside:
            self.title += data


def validator_of(headers: Message) -> str | None:
    """Return the strong ETag of a file, else its date: they differ between versions of the file."""
    tag = headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")


def retry_after(headers: Message) -> float | None:
    """Return the seconds to wait from the header's seconds or date; None if it has neither."""
    value = headers.get("Retry-After")
    if value is None:
        return None
    seconds = parse_integer(value.strip())
    if seconds is not None:
        return float(min(seconds, 10**9))
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return None


def parse_integer(text: str | None) -> int | None:
    """Parse a header's number: up to 18 ASCII digits."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 18 else None
