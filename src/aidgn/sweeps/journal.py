"""Train the runs of a sweep and keep a journal of each attempt, which all processes and machines of the sweep share.

    SWEEP/.sweep/attempts/<key of the run>.jsonl    start, heartbeats with the step, end; lines are only appended

The modification time of the file is the last heartbeat. All launchers train by `attempt`.
"""

import errno
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, get_type_hints

from aidgn.errors import AidgnError, Interrupted
from aidgn.files import StorageError, is_of_type, open_no_link, parse_json, storage_error, translate_os_errors
from aidgn.sweeps import names

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec

BEAT = 15.0  # seconds between two heartbeats
SILENCE = 4 * BEAT  # no heartbeat for this long: the attempt is dead
FAILURES = ("failed", "crashed", "died", "killed")  # outcomes of attempts that count as failures
KILLS = 10  # a run is set aside after more kills than this in a row, without a step saved between them


def attempt(
    spec: "RunSpec", out: str | Path, *, on_event: Callable[[str, Any], None] | None = None, **training: Any
) -> tuple[str, str]:
    """Train one run and return the outcome with a text.

    "done"         the run's folder
    "failed"       an error message
    "crashed"      an error after which the process may be in any state: a traceback, out of memory, a NaN, or an error
                   in a custom algorithm
    "interrupted"  stopped by Ctrl-C or SIGTERM, after saving
    "busy"         another process is training the run
    "stop"         an error that concerns all runs, such as a full disk; the launcher stops

    Args:
        spec: The resolved run.
        out: Folder of the sweep.
        on_event: Called at most ten times a second, with "step" and the steps done, and before the first step with the
            other phases of `train` and (done, total).
        training: Further arguments of `train`.
    """
    from aidgn.runs.folder import Busy
    from aidgn.training.errors import CustomCodeError, NotFinite, OutOfMemory
    from aidgn.training.trainer import train

    log = _Log(spec, out)
    last_event = 0.0

    def progress(phase: str, done: int, total: int, record: Mapping[str, Any] | None) -> None:
        nonlocal last_event
        if phase == "train":
            log.step(done, record is not None)
        now = time.monotonic()
        if on_event is None or (record is None and done < total and now - last_event <= 0.1):
            return
        last_event = now
        if phase == "train":
            on_event("step", done)
        else:
            on_event(phase, (done, total))

    try:
        log.start()
        text = str(train(spec, out, on_progress=progress, **training))
        outcome = "done"
    except AidgnError as error:
        text = str(error)
        outcome = "failed"
        if isinstance(error, Interrupted):
            outcome = "interrupted"
        elif isinstance(error, Busy):
            outcome = "busy"
        elif isinstance(error, StorageError):
            outcome = "stop"
        elif isinstance(error, OutOfMemory | NotFinite | CustomCodeError):
            outcome = "crashed"
    except Exception as error:
        outcome = "crashed"
        text = traceback.format_exc()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            outcome = "stop"
            text = str(storage_error(Path(out), error))
    except BaseException:
        log.end("interrupted", "")
        raise
    log.end(outcome, text)
    return outcome, text


def record_death(spec: "RunSpec", out: str | Path, error: str, pid: int | None = None, *, killed: bool = False) -> bool:
    """Record that the process of an attempt died. Return whether the attempt had begun.

    Args:
        spec: The run.
        out: Folder of the sweep.
        error: What happened.
        pid: The process, if it is known.
        killed: Whether something outside, such as preemption, may have killed it. Such deaths are counted separately.
    """
    attempts = history(out, spec.key()).attempts
    running = [attempt for attempt in attempts if attempt.kind is None and pid in (None, attempt.pid)]
    if running:
        line = {"id": running[-1].id, "kind": "killed" if killed else "died", "what": error, "time": time.time()}
        _append(_path(out, spec.key()), line)
    return bool(running)


def should_retry(spec: "RunSpec", out: str | Path, retries: int) -> bool:
    """Return whether a run may be tried again, from its attempts in all calls; see `History.given_up`."""
    return not history(out, spec.key()).given_up(retries)


def last_line(error: str) -> str:
    """Return the last line of a traceback, or a whole message."""
    return error.strip().splitlines()[-1] if error.startswith("Traceback") else error.strip()


def reset_failures(out: str | Path, key: str) -> None:
    """Allow further attempts at a run that was set aside."""
    _append(_path(out, key), {"id": "", "kind": "forgiven", "time": time.time()})


# Files --------------------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """One attempt at a run, from the lines of the journal with its id; later values replace earlier ones."""

    id: str  # a random name
    host: str = ""
    pid: int = 0
    began: float = 0.0  # when it began
    first: int | None = None  # step at which it began, once that is known
    step: int = 0  # last known step
    time: float = 0.0  # time of that step
    kind: str | None = None  # the outcome, None while it runs
    what: str = ""  # the text of the outcome
    step_seconds: float | None = None  # time per step with evaluations, without the start


@dataclass
class History:
    """The attempts at one run and the time of the last heartbeat."""

    attempts: list[Attempt] = field(default_factory=list)
    seen: float = 0.0

    @property
    def running(self) -> Attempt | None:
        """The attempt that is alive, as far as this machine can know."""
        if abs(time.time() - self.seen) >= SILENCE:
            return None
        alive = (attempt for attempt in reversed(self.attempts) if attempt.kind is None and _may_be_alive(attempt))
        return next(alive, None)

    @property
    def recent(self) -> list[Attempt]:
        """The attempts since the run was last done or its failures were reset."""
        resets = [number for number, attempt in enumerate(self.attempts, 1) if attempt.kind in ("forgiven", "done")]
        return self.attempts[max(resets, default=0) :]

    @property
    def failures(self) -> int:
        """Number of failed attempts, or of deaths in a row without progress, whichever is larger.

        Deaths with progress between them do not add up: a run is not broken because its processes are killed.
        """
        return max(len(self._errors), self._count_without_progress("died"))

    @property
    def _errors(self) -> list[str]:
        return [last_line(attempt.what) for attempt in self.recent if attempt.kind in ("failed", "crashed")]

    def _count_without_progress(self, outcome: str) -> int:
        """Count attempts in a row with this outcome that began no later in training than the ones before them."""
        count = 0
        furthest = -1
        for attempt in self.recent:
            if attempt.kind == outcome:
                first = attempt.first or 0
                count = count + 1 if first <= furthest else 1
                furthest = max(furthest, first)
        return count

    @property
    def repeats(self) -> bool:
        """Whether the last two attempts that failed ended with the same error."""
        return len(self._errors) > 1 and len(set(self._errors[-2:])) == 1

    def given_up(self, retries: int) -> bool:
        """Return whether the run is set aside.

        It is if it failed more than `retries` times, failed twice in a row with the same error, or was killed more than
        `KILLS` times in a row without progress.
        """
        return self.failures > retries or self.repeats or self._count_without_progress("killed") > KILLS

    @property
    def error(self) -> str:
        """The error of the last attempt that failed."""
        return next((attempt.what for attempt in reversed(self.attempts) if attempt.kind in FAILURES), "")

    @property
    def folder(self) -> str | None:
        """The name of the folder of a run that was done."""
        return next((Path(attempt.what).name for attempt in reversed(self.attempts) if attempt.kind == "done"), None)


ATTRIBUTES = get_type_hints(Attempt)


def history(out: str | Path, key: str) -> History:
    """Read the journal of a run."""
    try:
        with _path(out, key).open("rb") as file:
            seen = os.fstat(file.fileno()).st_mtime
            lines = file.read().splitlines()
    except OSError:
        return History()
    attempts: dict[str, Attempt] = {}
    for line in lines:
        try:
            values = {name: value for name, value in parse_json(line).items() if name in ATTRIBUTES}
            name = str(values["id"] or values["time"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # cut in half by a crash
        if not all(_is_valid(*entry) for entry in values.items()):
            continue  # changed by another program
        attempt = attempts.setdefault(name, Attempt(name))
        for attribute, value in values.items():
            setattr(attempt, attribute, value)
    return History(list(attempts.values()), seen)


def _is_valid(name: str, value: Any) -> bool:
    most = 1e12 if name in ("began", "time", "step_seconds") else 1 << 31
    return is_of_type(value, ATTRIBUTES[name]) and (value is None or isinstance(value, str) or 0 <= value < most)


class _Log:
    """Write the lines of one attempt, and heartbeats from a thread."""

    def __init__(self, spec: "RunSpec", out: str | Path):
        self.path = _path(out, spec.key())
        self.id = token_hex(4)
        self.first: int | None = None
        self.done = 0
        self.record: tuple[int, float] | None = None  # step and time of the first record; speed is steady after it
        self.step_seconds: float | None = None  # seconds per step from the first record to the latest
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.beat, daemon=True)

    def start(self) -> None:
        _append(self.path, {"id": self.id, "host": socket.gethostname(), "pid": os.getpid(), "began": time.time()})
        self.thread.start()

    def step(self, done: int, recorded: bool) -> None:
        self.done = done
        if self.first is None:
            self.first = done
            self.write({"first": done, "step": done})
        if recorded and self.record is None:
            self.record = (done, time.monotonic())
        elif recorded and self.record is not None and done > self.record[0]:
            self.step_seconds = (time.monotonic() - self.record[1]) / (done - self.record[0])

    def beat(self) -> None:
        while not self.over.wait(BEAT):
            speed = {} if self.step_seconds is None else {"step_seconds": self.step_seconds}
            self.write({"step": self.done, **speed})

    def write(self, values: Mapping[str, Any]) -> None:
        with suppress(StorageError):  # writing the run's files will raise the same error
            _append(self.path, {"id": self.id, "time": time.time(), **values})

    def end(self, outcome: str, text: str) -> None:
        self.over.set()
        if self.thread.ident is not None:
            self.thread.join()
        values: dict[str, Any] = {"kind": outcome, "what": text, "step": self.done}
        if self.record and self.done > self.record[0]:
            values["step_seconds"] = (time.monotonic() - self.record[1]) / (self.done - self.record[0])
        self.write(values)


def _path(out: str | Path, key: str) -> Path:
    return Path(out) / names.ATTEMPTS / f"{key}.jsonl"


def _append(path: Path, values: Mapping[str, Any]) -> None:
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_no_link(path, "ab", buffering=0) as file:  # one write, so that lines of several processes do not mix
            file.write(b"\n" + json.dumps(values).encode())  # the line before may be cut in half


def _may_be_alive(attempt: Attempt) -> bool:
    """Return False only if the process was on this machine and is gone."""
    if attempt.host != socket.gethostname():
        return True
    try:
        os.kill(attempt.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
