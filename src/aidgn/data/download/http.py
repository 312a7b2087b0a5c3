"""Download one file over HTTP: resume it, try again while the server is busy, verify size and checksum."""

import hashlib
import http.client
import json
import math
import shutil
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aidgn.data.download.connection import (
    MirrorError,
    TimedResponse,
    TransferError,
    connection_error,
    open_url,
    parse_integer,
    status_error,
    validator_of,
)
from aidgn.errors import AidgnError, amount
from aidgn.files import open_no_link, translate_os_errors, write_text

OnProgress = Callable[[int, int | None], None]  # bytes received, bytes of the whole file (None: not known)

CHUNK = 1 << 16
ATTEMPTS = 5  # failures in a row without progress
PROGRESS = 1 << 20  # bytes after which failures are counted from 0 again
LONGEST_WAIT = 60.0  # seconds, whatever the server asks for
SPEED_WINDOW = 60.0  # seconds
MIN_BYTES = 60_000  # bytes in SPEED_WINDOW; a slower server is given up


@dataclass(frozen=True)
class File:
    """A file with the same content at one or more addresses."""

    name: str  # name on disk
    urls: tuple[str, ...]  # addresses in order of preference
    size: int | None = None  # bytes, if known
    digest: str = ""  # checksum or its beginning: "md5:...", "sha256:...", "sha512:..."
    limit: float = math.inf  # most bytes that are accepted if the size is not known

    @property
    def max_bytes(self) -> float:
        """The most bytes that are accepted."""
        return self.limit if self.size is None else self.size


def fetch(file: File, folder: Path, on_progress: OnProgress | None = None, backoff: float = 1.0) -> Path:
    """Download a file to FOLDER/<name> and verify it.

    A file that exists is not downloaded again. An unfinished one stays as <name>.part and is continued the next time.

    Args:
        file: What to download.
        folder: Where to put the file.
        on_progress: Called with the bytes received and the bytes of the whole file.
        backoff: Seconds before the second attempt; the wait doubles with each further one.
    """
    target = folder / file.name
    if target.exists():
        if problem := find_mismatch(target, file):
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
    """Download a file from one address, with several attempts."""
    part = target.with_name(f"{target.name}.part")
    failures = 0
    best = size_of(part)
    restarted = False
    while True:
        try:
            resumed = receive(url, file, part, on_progress)
        except TransferError as error:
            failures += 1
            if size_of(part) - best >= PROGRESS:
                failures = 1
                best = size_of(part)
            if failures == ATTEMPTS:
                raise MirrorError(f"{error}, {ATTEMPTS} times") from None
            wait = backoff * 2 ** (failures - 1) if error.wait is None else error.wait
            time.sleep(min(LONGEST_WAIT, wait))
            continue
        problem = find_mismatch(part, file)
        if not problem:
            with translate_os_errors(target):
                part.replace(target)
                state_path(part).unlink(missing_ok=True)
            return
        discard(part)
        if restarted or not resumed:
            raise MirrorError(f"sent a file that {problem}")
        restarted = True  # the first part may have been of another file: once more, from the start


def receive(url: str, file: File, part: Path, on_progress: OnProgress | None) -> bool:
    """Receive the rest of a file; return whether an unfinished file was continued.

    A file is continued only if ETag or date show that the server has the same file, or if a checksum will be compared.
    """
    done = size_of(part)
    state = read_state(part)
    validator = state.get("validator") if state.get("url") == url else None
    if done and not (validator or file.digest):
        done = 0
    if done and done == (file.size or state.get("total")):
        return True
    try:
        response, confirmed = open_url(url, done, validator, state.get("confirmed") is True)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # nothing after the bytes that are here: the file is complete, or another one
                if file.digest and error.headers.get("Content-Range") == f"bytes */{done}":
                    return True
                discard(part)
            raise status_error(error) from None
    except (OSError, http.client.HTTPException) as error:
        raise connection_error(error) from None

    with response:
        total = parse_integer(response.headers.get("Content-Length"))
        if response.status == 206:
            begin, _, whole = (response.headers.get("Content-Range") or "").removeprefix("bytes ").partition("/")
            total = parse_integer(whole)
            if begin.partition("-")[0] != str(done) or validator not in (None, validator_of(response.headers)):
                discard(part)
                raise TransferError("has another file than before")
        elif response.status == 200:
            done = 0
        else:
            raise MirrorError(f"answered {response.status} {response.reason}")
        resumed = done > 0
        check_total(total, done, file, part)
        if not resumed:
            discard(part)  # before the state changes, so that old and new content never mix
            state = {"url": url, "validator": validator_of(response.headers), "total": total, "confirmed": confirmed}
            with translate_os_errors(part):
                open_no_link(part, "xb").close()
            write_text(state_path(part), json.dumps(state))
        done = append_response(response, part, done, total, file, on_progress)
        if total is not None and done < total:
            raise TransferError(f"broke off after {done} of {total} bytes")
    return resumed


def check_total(total: int | None, done: int, file: File, part: Path) -> None:
    """Refuse a file whose announced size is wrong or does not fit on the disk."""
    if total is None:
        return
    if file.size is not None and total != file.size:
        discard(part)
        raise MirrorError(f"has {total} bytes, expected {file.size}")
    free = shutil.disk_usage(part.parent).free
    if total - done > free:
        raise AidgnError(
            f"The disk is full: {part.parent} has {amount(free)} left and {file.name} needs "
            f"{amount(total - done)} more. Free some space or choose another --data-dir."
        )
    if total > file.max_bytes:
        raise too_much(file, part)


def append_response(
    response: TimedResponse,
    part: Path,
    done: int,
    total: int | None,
    file: File,
    on_progress: OnProgress | None,
) -> int:
    """Append a response to the unfinished file; return the file's size. Give up a server that sends next to nothing."""
    expected = done
    with translate_os_errors(part):
        output = open_no_link(part, "ab")
    with output:
        while True:
            if done >= expected:
                expected = done + MIN_BYTES
                response.deadline = time.monotonic() + SPEED_WINDOW
            if on_progress:
                on_progress(done, total)
            try:
                chunk = response.read1(CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise TransferError(f"broke off after {done} bytes ({error or type(error).__name__})") from None
            if not chunk:
                break
            done += len(chunk)
            if done > file.max_bytes:
                raise too_much(file, part)
            with translate_os_errors(part):
                output.write(chunk)
        with translate_os_errors(part):
            output.flush()
    return done


def too_much(file: File, part: Path) -> MirrorError:
    discard(part)
    return MirrorError(f"sends more than {amount(file.max_bytes)}")


def find_mismatch(path: Path, file: File) -> str:
    """Name the problem with the size or the checksum; '' if both are right."""
    if file.size is not None and size_of(path) != file.size:
        return f"has {size_of(path)} bytes, expected {file.size}"
    if file.digest:
        algorithm, _, expected = file.digest.partition(":")
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, algorithm).hexdigest()
        if not digest.startswith(expected):
            return f"has the {algorithm} checksum {digest[: len(expected)]}, expected {expected}"
    return ""


def state_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def read_state(part: Path) -> dict:
    """Return where an unfinished file comes from; {} if that is not known."""
    try:
        state = json.loads(state_path(part).read_text(encoding="utf-8"))
        return state if isinstance(state, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def discard(part: Path) -> None:
    with translate_os_errors(part):
        part.unlink(missing_ok=True)
        state_path(part).unlink(missing_ok=True)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
