"""The processes of a run on several devices: started together, listened to, and ended together, however one ends.

None but the first holds anything that is not on disk or in the others, so that the rest can be killed at any moment.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch

from aidgn.errors import AidgnError, Interrupted
from aidgn.runs.spec import RunSpec
from aidgn.training import distributed as parallel
from aidgn.training.interrupt import stoppable

STARTS = 3  # of a crew whose processes get killed, before it is given up
NEWS = 3.0  # seconds in which the others may say why one has ended
GRACE = 60.0  # seconds to save and end when who started the processes is gone
log = logging.getLogger("aidgn")


@dataclass
class Worker:
    process: subprocess.Popen
    pipe: Connection
    end: Any = None  # how it ended: the run's folder, an exception, or None without a word


def train(
    devices: int, first: torch.device, spec: RunSpec, out: str | Path, report: Callable[..., None], **options: Any
) -> Path:
    """Train one run with a process on each of `devices` devices from `first` on; its folder."""
    if devices < 1:
        raise AidgnError(f"--devices is {devices}; expected a whole number of at least 1.")
    places = [torch.device("cpu")] * devices
    if first.type == "cuda":
        start, present = first.index or 0, torch.cuda.device_count()
        if start + devices > present:
            raise AidgnError(f"--devices {devices} from cuda:{start} on: this machine has {present} GPUs.")
        places = [torch.device("cuda", start + number) for number in range(devices)]
    for remaining in reversed(range(STARTS)):
        with tempfile.TemporaryDirectory(prefix="aidgn-") as folder, stoppable() as stopped:
            crew = [_start() for _ in places]
            try:
                for rank, (member, place) in enumerate(zip(crew, places, strict=True)):
                    own = options if rank == 0 else {**options, "trackers": ()}
                    with suppress(OSError):  # it has died: its pipe says so when it is read
                        member.pipe.send((rank, place, f"{folder}/meeting", spec, out, {**own, "devices": devices}))
                end = _listen(crew, report, stopped)
            finally:
                for member in crew:
                    member.process.kill()
                    member.process.wait()
                    member.pipe.close()
        if isinstance(end, Path):
            return end
        if isinstance(end, BaseException):
            raise end
        if stopped.is_set():
            raise Interrupted("Stopped before a step was made. The same command goes on.")
        if remaining:
            log.warning("%s The run goes on from its last saved state.", end)
    raise AidgnError(
        f"{end} This happened {STARTS} times, so that the run was given up; memory may be short: try a "
        "smaller --batch-size. What was saved is kept, and the same command goes on from there."
    )


def _start() -> Worker:
    """A process in a session of its own, which a terminal's Ctrl-C does not reach."""
    ours, theirs = Pipe()
    code = f"from aidgn.training.worker_group import work; work({theirs.fileno()})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    theirs.close()
    return Worker(process, ours)


def _listen(crew: list[Worker], report: Callable[..., None], stopped: threading.Event) -> Path | BaseException | str:
    """Pass progress on until the crew is done: the folder, the error to raise, or a sentence on who was killed."""
    talking, errors, until, told = list(crew), list[Exception](), float("inf"), False
    while talking and time.monotonic() < until:
        if stopped.is_set() and not told:
            told = True
            with suppress(OSError):
                crew[0].pipe.send("stop")
        for ready in wait([member.pipe for member in talking], timeout=0.2):
            member = next(member for member in talking if member.pipe is ready)
            try:
                kind, what = member.pipe.recv()
            except (EOFError, OSError):
                kind, what = "end", None
            if kind == "progress":
                report(*what)
                continue
            talking.remove(member)
            member.end = what
            if isinstance(what, AidgnError) or (isinstance(what, Path) and member is crew[0]):
                return what
            if isinstance(what, Exception):
                errors.append(what)
            if not isinstance(what, Path):  # its reason may be another's end
                until = min(until, time.monotonic() + NEWS)
    for rank, member in enumerate(crew):
        if member.end is None and member not in talking:
            code = member.process.wait()
            how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
            return f"Process {rank + 1} of {len(crew)} of this run {how}."
    return errors[0]  # the others' follow from it


# In the process -------------------------------------------------------------------------------------------------------


class WorkerCrash(Exception):
    """An error that is nobody's mistake, with the traceback of the process where it happened."""


def work(descriptor: int) -> None:
    """Train as one of the crew, and say how it ended."""
    from aidgn.training.trainer import train

    pipe = Connection(descriptor)
    rank, device, meeting_point, spec, out, options = pipe.recv()
    threading.Thread(target=_obey, args=(pipe, rank), daemon=True).start()
    end: Path | Exception

    def report(*news: Any) -> None:
        if rank == 0 and news[0] == "train":
            pipe.send(("progress", news))

    try:
        parallel.join(rank, options["devices"], device, meeting_point)
        end = train(spec, out, device=str(device), on_progress=report, **options)
    except AidgnError as error:
        end = error
    except Exception:
        end = WorkerCrash(f"in process {rank + 1} of {options['devices']}:\n{traceback.format_exc()}")
    with suppress(OSError):
        pipe.send(("end", end))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries would wait for the others


def _obey(pipe: Connection, rank: int) -> None:
    """Told to stop, save and end; so too, within a while, when who could tell it is gone."""
    gone = False
    while not gone:
        try:
            pipe.recv()
        except (EOFError, OSError):
            gone = True
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
