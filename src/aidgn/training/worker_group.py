"""The worker processes of a run on several devices, started and stopped together.

Only rank 0 holds unsaved state, so the others can be killed at any moment.
"""

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

from aidgn.errors import AidgnError, Interrupted, ParameterError
from aidgn.runs.options import HEAD
from aidgn.runs.spec import RunSpec
from aidgn.terminal import log
from aidgn.training import distributed
from aidgn.training.interrupt import stoppable

ATTEMPTS = 3  # starts of a group whose workers get killed, before the run is given up
REASON_SECONDS = 3.0  # after one worker failed, for the others to report the reason
SAVE_SECONDS = 60.0  # to save and exit when the parent has died
MAX_DEVICES = 1024


class WorkerCrash(Exception):
    """An unexpected error in a worker, with its traceback."""


@dataclass
class Worker:
    """A process of the group."""

    process: subprocess.Popen
    pipe: Connection  # receives its messages
    # The folder of the run, or the exception that ended the worker; None until it reports
    result: Path | BaseException | None = None


class WorkerKilled(Exception):
    """A worker ended without a report. The run can continue in new workers."""


def train_in_workers(
    devices: int, first: torch.device, spec: RunSpec, out: str | Path, report: Callable[..., None], **options: Any
) -> Path:
    """Train one run with a process on each of several devices and return its folder.

    Args:
        devices: Number of devices.
        first: First device; the others follow it.
        spec: The run.
        out: Folder of runs.
        report: Called with the progress of rank 0.
        options: Options of `train`.
    """
    if spec.trains_head:
        raise ParameterError("devices", devices, f"1 with train={HEAD}, where a step is too short to share")
    placement = list_devices(devices, first)
    for attempts_left in reversed(range(ATTEMPTS)):
        with stoppable() as stopped:
            try:
                return _run_group(placement, spec, out, report, stopped, {**options, "devices": devices})
            except WorkerKilled as error:
                if stopped.is_set():
                    raise Interrupted("Stopped before the first step. The same command continues.") from None
                if not attempts_left:
                    raise AidgnError(
                        f"{error} This happened {ATTEMPTS} times, so the run was given up. Memory may be short: try a "
                        "smaller --batch-size. Saved progress is kept, and the same command continues from there."
                    ) from None
                log.warning("%s The run goes on from its last saved state.", error)
    raise AssertionError("unreachable")


def list_devices(count: int, first: torch.device) -> list[torch.device]:
    """Return `count` devices from `first` on; if `first` is the CPU, all are."""
    if not 1 <= count <= MAX_DEVICES:
        raise ParameterError("devices", count, f"a whole number from 1 to {MAX_DEVICES}")
    if first.type == "mps" and count > 1:
        raise ParameterError("devices", count, "1 on mps")
    if first.type != "cuda":
        return [first] * count
    start = first.index or 0
    present = torch.cuda.device_count()
    if start + count > present:
        raise ParameterError("devices", count, f"at most {present - start} from cuda:{start} on")
    return [torch.device("cuda", start + number) for number in range(count)]


def _run_group(
    placement: list[torch.device],
    spec: RunSpec,
    out: str | Path,
    report: Callable[..., None],
    stopped: threading.Event,
    options: dict[str, Any],
) -> Path:
    with tempfile.TemporaryDirectory(prefix="aidgn-") as folder:
        workers = [_start_worker() for _ in placement]
        try:
            for rank, (worker, device) in enumerate(zip(workers, placement, strict=True)):
                if rank:
                    options = {**options, "trackers": ()}
                with suppress(OSError):  # the worker has died, which reading its pipe will show
                    worker.pipe.send((rank, device, f"{folder}/rendezvous", spec, out, options))
            return wait_for_result(workers, report, stopped)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.wait()
                worker.pipe.close()


def _start_worker() -> Worker:
    """Start a process in a new session, which Ctrl-C in the terminal does not reach."""
    ours, theirs = Pipe()
    code = f"from aidgn.training.worker_group import worker_main; worker_main({theirs.fileno()})"
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


def wait_for_result(workers: list[Worker], report: Callable[..., None], stopped: threading.Event) -> Path:
    """Pass on progress until rank 0 is done and return the folder, or raise the first error of any worker.

    Raises:
        WorkerKilled: A worker ended without a report.
    """
    running = list(workers)
    errors: list[Exception] = []
    deadline = float("inf")
    stop_sent = False
    while running and time.monotonic() < deadline:
        if stopped.is_set() and not stop_sent:
            stop_sent = True
            with suppress(OSError):
                workers[0].pipe.send("stop")
        for pipe in wait([worker.pipe for worker in running], timeout=0.2):
            worker = next(worker for worker in running if worker.pipe is pipe)
            try:
                message, content = worker.pipe.recv()
            except (EOFError, OSError):
                message, content = "end", None
            if message == "progress":
                report(*content)
                continue
            running.remove(worker)
            worker.result = content
            if isinstance(content, AidgnError):
                raise content
            if isinstance(content, Exception):
                errors.append(content)
            if not isinstance(content, Path):  # another worker's failure may be the cause: wait for its report
                deadline = min(deadline, time.monotonic() + REASON_SECONDS)
            elif worker is workers[0]:
                return content
    for rank, worker in enumerate(workers):
        if worker.result is None and worker not in running:
            code = worker.process.wait()
            reason = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
            raise WorkerKilled(f"Process {rank + 1} of {len(workers)} of this run {reason}.")
    raise errors[0]  # the others follow from the first


# In the worker --------------------------------------------------------------------------------------------------------


def worker_main(descriptor: int) -> None:
    """Train as one of the group and report the result."""
    from aidgn.training.trainer import train

    pipe = Connection(descriptor)
    rank, device, rendezvous, spec, out, options = pipe.recv()
    threading.Thread(target=_watch_parent, args=(pipe, rank), daemon=True).start()
    result: Path | Exception

    def report(*progress: Any) -> None:
        if rank == 0 and progress[0] == "train":
            pipe.send(("progress", progress))

    try:
        distributed.init_process_group(rank, options["devices"], device, rendezvous)
        result = train(spec, out, device=str(device), on_progress=report, **options)
    except AidgnError as error:
        result = error
    except Exception:
        result = WorkerCrash(f"in process {rank + 1} of {options['devices']}:\n{traceback.format_exc()}")
    with suppress(OSError):
        pipe.send(("end", result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries would wait for the other processes


def _watch_parent(pipe: Connection, rank: int) -> None:
    """Checkpoint and exit on a stop message, or when the parent dies."""
    alive = True
    while alive:
        try:
            pipe.recv()
        except (EOFError, OSError):
            alive = False
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_SECONDS)
    os._exit(1)
