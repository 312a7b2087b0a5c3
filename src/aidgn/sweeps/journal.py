"""One attempt at one run of a sweep, and what is kept of it on disk, for every process and machine that shares it.

    SWEEP/.sweep/attempts/<key of the run>.jsonl    started, a step now and then, how it ended; only ever appended

Its last change says when the attempt was last alive. All launchers make their attempts here.
"""

import errno
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from aidgn.errors import AidgnError
from aidgn.files import StorageError, open_no_link, storage_error

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec
    from aidgn.training.trainer import Progress

BEAT = 15.0  # seconds between two signs of life
SILENCE = 4 * BEAT  # without one for so long, an attempt is over


def attempt(
    spec: "RunSpec", out: str | Path, *, on_progress: "Progress | None" = None, **options: Any
) -> tuple[str, str]:
    """Train one run, `options` going to `train`. How that ended, and what is to be said of it:

    "done"         its folder
    "failed"       a mistake in one sentence
    "crashed"      a traceback, or that memory ran out, a NaN came up or an own algorithm's code failed: what is left
                   in this process is unknown, another one goes on
                   Both count: `may_try` says whether there is another attempt
    "interrupted"  by Ctrl-C or SIGTERM, after saving
    "busy"         another process is training it: look again later
    "stop"         the disk is full or the like: no run can go on, the launcher stops and raises this as a UserError
    """
    from aidgn.errors import Interrupted
    from aidgn.runs.folder import Busy
    from aidgn.training.errors import CustomCodeError, NotFinite, OutOfMemory
    from aidgn.training.trainer import train

    log = _Log(spec, out)

    def progress(what: str, done: int, total: int, record: Mapping[str, Any] | None) -> None:
        if what == "train":
            log.step(done, record is not None)
        if on_progress:
            on_progress(what, done, total, record)

    try:
        log.start()
        kind, what = "done", str(train(spec, out, on_progress=progress, **options))
    except Interrupted as error:
        kind, what = "interrupted", str(error)
    except Busy as error:
        kind, what = "busy", str(error)
    except StorageError as error:
        kind, what = "stop", str(error)
    except AidgnError as error:
        kind, what = "crashed" if isinstance(error, OutOfMemory | NotFinite | CustomCodeError) else "failed", str(error)
    except Exception as error:
        kind, what = "crashed", traceback.format_exc()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            kind, what = "stop", str(storage_error(Path(out), error))
    except BaseException:
        log.end("interrupted", "")
        raise
    log.end(kind, what)
    return kind, what


def died(spec: "RunSpec", out: str | Path, why: str, pid: int | None = None) -> bool:
    """For a launcher that saw the process of an attempt end without a word: note it. False if it had not begun one."""
    open_ones = [one for one in history(out, spec.key()).attempts if one.kind is None and pid in (None, one.pid)]
    if open_ones:
        _append(_path(out, spec.key()), {"id": open_ones[-1].id, "kind": "died", "what": why, "time": time.time()})
    return bool(open_ones)


def should_retry(spec: "RunSpec", out: str | Path, retries: int) -> bool:
    """Whether a run that failed is to be tried again: at most `retries` times after the first, counted across calls."""
    return history(out, spec.key()).failures <= retries


def last_line(error: str) -> str:
    """Of a traceback what went wrong; a sentence as it is."""
    return error.strip().splitlines()[-1] if error.startswith("Traceback") else error.strip()


def reset_failures(out: str | Path, key: str) -> None:
    """Let a run that was set aside be tried anew."""
    _append(_path(out, key), {"id": "", "kind": "forgiven", "time": time.time()})


# What is on disk ----------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    id: str
    host: str = ""
    pid: int = 0
    began: float = 0.0
    first: int | None = None  # the step it began at, once it is known
    step: int = 0
    when: float = 0.0  # the time of that step
    kind: str | None = None  # how it ended
    what: str = ""
    step_seconds: float | None = None  # evaluation included, start aside


@dataclass
class History:
    """The attempts at one run, and when the last sign of life was."""

    attempts: list[Attempt] = field(default_factory=list)
    seen: float = 0.0

    @property
    def running(self) -> Attempt | None:
        """The attempt that is alive, as far as can be known from here."""
        for one in reversed(self.attempts):
            if one.kind is None and abs(time.time() - self.seen) < SILENCE and _may_be_alive(one):
                return one
        return None

    @property
    def failures(self) -> int:
        """Attempts that failed. One whose process a launcher saw die counts if the run had got no further since the
        last such death: what kills runs at random does not make a run a broken one."""
        failed, deaths, furthest = 0, 0, -1
        for one in self.attempts:
            if one.kind in ("forgiven", "done"):
                failed, deaths, furthest = 0, 0, -1
            elif one.kind in ("failed", "crashed"):
                failed += 1
            elif one.kind == "died":
                deaths = deaths + 1 if (one.first or 0) <= furthest else 1
                furthest = max(furthest, one.first or 0)
        return max(failed, deaths)

    @property
    def error(self) -> str:
        """Of the last attempt that ended badly."""
        return next((one.what for one in reversed(self.attempts) if one.kind in ("failed", "crashed", "died")), "")

    @property
    def folder(self) -> str | None:
        """The folder's name of a run that was done."""
        return next((Path(one.what).name for one in reversed(self.attempts) if one.kind == "done"), None)


def history(out: str | Path, key: str) -> History:
    path = _path(out, key)
    try:
        with path.open("rb") as file:
            seen, text = os.fstat(file.fileno()).st_mtime, file.read()
    except OSError:
        return History()
    attempts: dict[str, Attempt] = {}
    for line in text.splitlines():
        try:
            said = json.loads(line)
            name = str(said["id"] or said["time"])
        except (ValueError, KeyError, TypeError):
            continue  # cut in half by a crash
        one = attempts.setdefault(name, Attempt(name))
        for attribute, value in said.items():
            if attribute in ("host", "pid", "began", "first", "step", "kind", "what", "step_seconds"):
                setattr(one, attribute, value)
        one.when = said.get("time", one.when)
    return History(list(attempts.values()), seen)


class _Log:
    """Writes the lines of one attempt, with a sign of life now and then from a thread of its own."""

    def __init__(self, spec: "RunSpec", out: str | Path):
        self.path, self.id = _path(out, spec.key()), token_hex(4)
        self.first: int | None = None
        self.done = 0
        self.record: tuple[int, float] | None = None  # step and time of the first record: from here on it is at speed
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.beat, daemon=True)

    def start(self) -> None:
        _append(self.path, {"id": self.id, "host": socket.gethostname(), "pid": os.getpid(), "began": time.time()})
        self.thread.start()

    def step(self, done: int, recorded: bool) -> None:
        self.done = done
        if self.first is None:
            self.first = done
            self.say({"first": done, "step": done})
        if recorded and self.record is None:
            self.record = (done, time.monotonic())

    def beat(self) -> None:
        while not self.over.wait(BEAT):
            self.say({"step": self.done})

    def say(self, what: Mapping[str, Any]) -> None:
        with suppress(StorageError):  # the run's own files tell of that
            _append(self.path, {"id": self.id, "time": time.time(), **what})

    def end(self, kind: str, what: str) -> None:
        self.over.set()
        if self.thread.ident is not None:
            self.thread.join()
        said: dict[str, Any] = {"kind": kind, "what": what, "step": self.done}
        if self.record and self.done > self.record[0]:
            said["step_seconds"] = (time.monotonic() - self.record[1]) / (self.done - self.record[0])
        self.say(said)


def _path(out: str | Path, key: str) -> Path:
    return Path(out) / ".sweep" / "attempts" / f"{key}.jsonl"


def _append(path: Path, said: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_no_link(path, "ab", buffering=0) as file:  # one write: lines of several processes do not mix
            file.write(b"\n" + json.dumps(said).encode())  # the line before may be cut in half
    except OSError as error:
        raise storage_error(path, error) from None


def _may_be_alive(one: Attempt) -> bool:
    """False only for a process of this machine that is gone."""
    if one.host != socket.gethostname():
        return True
    try:
        os.kill(one.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
