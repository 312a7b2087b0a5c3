"""One file over HTTP: resumed where it was broken off, retried when the server is busy, checked when it is complete."""

import email.utils
import errno
import hashlib
import http.client
import json
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path

from aidgn.errors import AidgnError, amount
from aidgn.files import open_no_link, storage_error, write_text

OnProgress = Callable[[int, int | None], None]  # bytes of the file that are here, bytes of the whole (None: not known)

CHUNK = 1 << 16
TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 5  # in a row that bring less than ENOUGH
ENOUGH = 1 << 20  # bytes after which the next failure counts as the first
LONGEST_WAIT = 60.0  # seconds, whatever the server asks for
LARGEST_PAGE = 1 << 20


class MirrorError(Exception):
    """This address or copy is of no use; the next may be."""


class BrokenOff(Exception):
    """The transfer failed in a way that may pass. `wait` is what the server asked for, in seconds."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class File:
    """A file at one or more addresses with the same content. `digest` may be the beginning of the checksum only."""

    name: str
    urls: tuple[str, ...]
    size: int | None = None
    digest: str = ""  # "md5:...", "sha256:...", "sha512:..."


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Operating-system errors in this block are about writing `path`: say so, in words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AidgnError(
                f"{path} cannot be written ({error.strerror}). Choose another folder with --data-dir."
            ) from error
        raise storage_error(path, error) from error


def fetch(file: File, folder: Path, on_progress: OnProgress | None = None, backoff: float = 1.0) -> Path:
    """FOLDER/<name>, complete and checked. Waits `backoff`, twice, four times that ... seconds between attempts.

    A file that is there is not fetched again. Unfinished ones stay as <name>.part and are continued the next time.
    """
    target = folder / file.name
    if target.exists():
        if problem := mismatch(target, file):
            raise MirrorError(f"{target} {problem}. Remove it to have it downloaded again")
        return target
    failures = []
    for url in file.urls:
        try:
            fetch_url(url, file, target, on_progress, backoff)
            return target
        except MirrorError as error:
            failures.append(f"{url} {error}")
    raise MirrorError("; ".join(failures))


def fetch_url(url: str, file: File, target: Path, on_progress: OnProgress | None, backoff: float) -> None:
    part = target.with_name(f"{target.name}.part")
    failures, restarted = 0, False
    while True:
        start = size_of(part)
        try:
            resumed = receive(url, file, part, on_progress)
        except BrokenOff as error:
            failures = 1 if size_of(part) - start >= ENOUGH else failures + 1
            if failures == ATTEMPTS:
                raise MirrorError(f"{error}, {ATTEMPTS} times") from None
            time.sleep(min(LONGEST_WAIT, backoff * 2 ** (failures - 1) if error.wait is None else error.wait))
            continue
        problem = mismatch(part, file)
        if problem:
            discard(part)
            if resumed and not restarted:  # it may have been continued from another file: once more, from the beginning
                restarted = True
                continue
            raise MirrorError(f"sent a file that {problem}")
        with storing(target):
            part.replace(target)
            state_of(part).unlink(missing_ok=True)
        return


def receive(url: str, file: File, part: Path, on_progress: OnProgress | None) -> bool:
    """Bring `part` to its full length. Returns whether it was continued rather than begun.

    It is continued only if the server says by ETag or date that it still has the same file, or if a checksum will tell.
    """
    done, state = size_of(part), read_state(part)
    validator = state.get("validator") if state.get("url") == url else None
    if done and not (validator or file.digest):
        done = 0
    if done and done == (file.size or state.get("total")):
        return True
    try:
        response, confirmed = open_url(url, done, validator, state.get("confirmed") is True)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # nothing beyond what is here: complete, or another file
                if error.headers.get("Content-Range") == f"bytes */{done}":
                    return True
                discard(part)
                raise BrokenOff("has another file than before") from None
            if error.code in (408, 429) or error.code >= 500:
                raise BrokenOff(f"answered {error.code} {error.reason}", retry_after(error.headers)) from None
            raise MirrorError(f"answered {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, socket.gaierror):
            raise MirrorError("cannot be found (is this machine online?)") from None
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise MirrorError(f"cannot be trusted ({reason.verify_message})") from None
        raise BrokenOff(f"could not be reached ({reason or type(error).__name__})") from None

    with response:
        total = integer(response.headers.get("Content-Length"))
        if response.status == 206:
            begin, _, whole = (response.headers.get("Content-Range") or "").removeprefix("bytes ").partition("/")
            total = integer(whole)
            if begin.partition("-")[0] != str(done) or validator not in (None, validator_of(response.headers)):
                discard(part)
                raise BrokenOff("has another file than before")
        elif response.status == 200:
            done = 0
        else:
            raise MirrorError(f"answered {response.status} {response.reason}")
        resumed = done > 0
        if file.size is not None and total not in (None, file.size):
            discard(part)
            raise MirrorError(f"has {total} bytes, expected {file.size}")
        free = shutil.disk_usage(part.parent).free
        if total is not None and total - done > free:
            raise AidgnError(
                f"The disk is full: {part.parent} has {amount(free)} left and {file.name} needs "
                f"{amount(total - done)} more. Free some space or choose another --data-dir."
            )
        with storing(part):
            output = open_no_link(part, "ab" if resumed else "wb")
        with output:
            if not resumed:  # after the old content is gone, so that the two never mix
                write_text(
                    state_of(part),
                    json.dumps(
                        {
                            "url": url,
                            "validator": validator_of(response.headers),
                            "total": total,
                            "confirmed": confirmed,
                        }
                    ),
                )
            while True:
                if on_progress:
                    on_progress(done, total)
                try:
                    chunk = response.read(CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    raise BrokenOff(f"broke off after {done} bytes ({error or type(error).__name__})") from None
                if not chunk:
                    break
                with storing(part):
                    output.write(chunk)
                done += len(chunk)
                if done > (file.size or done):
                    break  # refused by its size
            with storing(part):
                output.flush()
        if total is not None and done < total:
            raise BrokenOff(f"broke off after {done} of {total} bytes")
    return resumed


def open_url(url: str, offset: int, validator: str | None, asks: bool) -> tuple[http.client.HTTPResponse, bool]:
    """The answer from byte `offset` on. A page that asks to confirm (Google Drive, of large files) is confirmed.

    `asks`: such a page comes first, so that the offset is not meant for it. Returns whether one came as well.
    """
    headers = {"User-Agent": "aidgn", "Accept-Encoding": "identity"}
    ranged = {"Range": f"bytes={offset}-"} if offset else {}
    ranged |= {"If-Range": validator} if offset and validator else {}
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    for hop in range(3):
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise MirrorError(f"leads to {url}, which is not a web address")
        request = urllib.request.Request(url, headers=headers if asks and hop == 0 else headers | ranged)
        response = opener.open(request, timeout=TIMEOUT)
        if response.headers.get_content_type() != "text/html" or "Content-Disposition" in response.headers:
            return response, hop > 0
        with response:
            page = Page()
            page.feed(response.read(LARGEST_PAGE).decode("utf-8", "replace"))
        if page.action is None:
            break
        url = f"{urllib.parse.urljoin(response.url, page.action)}?{urllib.parse.urlencode(page.fields)}"
    raise MirrorError(f"sent a web page instead of the file ({page.title.strip() or 'without a title'})")


class Page(HTMLParser):
    """The title of a page, and where its form `download-form` leads with which fields."""

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


def mismatch(path: Path, file: File) -> str:
    """What is wrong with size or checksum, '' if nothing is."""
    if file.size is not None and (size := size_of(path)) != file.size:
        return f"has {size} bytes, expected {file.size}"
    if file.digest:
        kind, _, expected = file.digest.partition(":")
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, kind).hexdigest()
        if not found.startswith(expected):
            return f"has the {kind} checksum {found[: len(expected)]}, expected {expected}"
    return ""


def validator_of(headers: Message) -> str | None:
    """What tells this version of a file from another: its strong ETag, else its date."""
    tag = headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")


def retry_after(headers: Message) -> float | None:
    """Seconds to wait, from the header's seconds or date."""
    value = headers.get("Retry-After")
    if value is None or value.strip().isdigit():
        return None if value is None else float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def state_of(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def read_state(part: Path) -> dict:
    """Where the unfinished file comes from; empty if that is not known."""
    try:
        state = json.loads(state_of(part).read_text(encoding="utf-8"))
        return state if isinstance(state, dict) else {}
    except (OSError, ValueError):
        return {}


def discard(part: Path) -> None:
    with storing(part):
        part.unlink(missing_ok=True)
        state_of(part).unlink(missing_ok=True)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def integer(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
