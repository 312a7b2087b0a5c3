"""Runs in worker processes on this machine: each worker loads data and compiled code once and takes run after run."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from aidgn.data.cache import usable_cores
from aidgn.data.registry import SMALL_SIDE
from aidgn.devices import choose_device
from aidgn.errors import AidgnError
from aidgn.runs.spec import RunSpec
from aidgn.sweeps import journal as attempts

RETRIES = 2  # attempts at a run after its first one failed
STILLBORN = 9  # workers in a row that may die before they begin a run
GRACE = 60.0  # seconds for a worker to save its run and end
PATIENCE = 20.0  # seconds until a run that another process is training is looked at again

# Run number; "prepare" with (done, total), "step" with the steps done, "retry" with why, "done" with its folder,
# "failed" with why.
OnEvent = Callable[[int, str, Any], None]


class RunQueue:
    """The runs of a launcher with workers: which wait, which another process is training, which were set aside."""

    def __init__(self, specs: Sequence[RunSpec], out: str | Path, retries: int, on_event: OnEvent):
        self.specs, self.out, self.retries, self.on_event = specs, out, retries, on_event
        self.waiting = deque(range(len(specs)))
        self.later: list[tuple[float, int]] = []  # when to look again at runs of other processes
        self.failed: dict[int, str] = {}  # errors of those set aside

    def record_failure(self, run: int, why: str) -> None:
        if attempts.should_retry(self.specs[run], self.out, self.retries):
            self.waiting.appendleft(run)
            self.on_event(run, "retry", why)
        else:
            self.failed[run] = why
            self.on_event(run, "failed", why)

    def busy(self, run: int) -> None:
        self.later.append((time.monotonic() + PATIENCE, run))

    def look_again(self) -> None:
        """Let those wait whose time it is."""
        now = time.monotonic()
        self.waiting.extend(run for when, run in self.later if when <= now)
        self.later = [(when, run) for when, run in self.later if when > now]


@dataclass(frozen=True)
class WorkerDevice:
    """Where a worker computes: a device, and the GPUs it may see."""

    device: str
    visible: str | None = None  # CUDA_VISIBLE_DEVICES; None leaves it as it is


@dataclass
class Worker:
    process: SpawnProcess
    pipe: Connection
    place: WorkerDevice
    run: int | None = None


def run_all(
    specs: Sequence[RunSpec],
    out: str | Path,
    *,
    on_event: OnEvent = lambda *_: None,
    retries: int = RETRIES,
    workers: int | None = None,
    device: str = "auto",
    **options: Any,
) -> dict[int, str]:
    """Train every run; returns the errors of those that were set aside, by run number. Finished runs are not repeated.

    One worker per GPU; on the CPU one per core, or one for large images. More workers than GPUs share them. A run that
    fails is tried again `retries` times; a worker that dies is replaced and its run continued."""
    if not specs:
        return {}
    places = choose_places(device, workers, specs)
    context = multiprocessing.get_context("spawn")
    work = RunQueue(specs, out, retries, on_event)
    crew: list[Worker] = []
    stillborn = 0  # workers in a row that died before they began a run

    def start(place: WorkerDevice) -> Worker:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(theirs, str(out), {**options, "device": place.device}), daemon=True
        )
        # A terminal's Ctrl-C goes to every process; the workers leave it to this one to say when to stop.
        resource_tracker.ensure_running()  # multiprocessing's own, whose start would unblock it again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _visible(place.visible):
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return Worker(process, ours, place)

    def assign(worker: Worker) -> None:
        worker.run = work.waiting.popleft() if work.waiting else None
        if worker.run is not None:
            with suppress(OSError):  # it has died: its pipe says so when it is read
                worker.pipe.send((worker.run, specs[worker.run]))

    try:
        for place in places:
            crew.append(start(place))
            assign(crew[-1])
        while work.later or any(worker.run is not None for worker in crew):
            busy = [worker for worker in crew if worker.run is not None]
            pause = max(min(work.later)[0] - time.monotonic(), 0) if work.later else None
            for ready in wait([worker.pipe for worker in busy], pause):
                worker = next(worker for worker in busy if worker.pipe is ready)
                assert worker.run is not None
                try:
                    run, kind, what = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    worker.pipe.close()
                    crew.remove(worker)
                    why = f"its process died (exit code {worker.process.exitcode})"
                    stillborn = 0 if attempts.died(specs[worker.run], out, why, worker.process.pid) else stillborn + 1
                    if stillborn > STILLBORN:
                        raise AidgnError(f"Worker processes end before they begin a run; the last: {why}.") from None
                    work.record_failure(worker.run, why)
                    if work.waiting or work.later:
                        crew.append(start(worker.place))
                    continue
                if kind == "stop":
                    raise AidgnError(what)
                if kind in ("prepare", "step"):
                    on_event(run, kind, what)
                    continue
                worker.run = None
                if kind == "done":
                    on_event(run, kind, what)
                elif kind == "busy":
                    work.busy(run)
                else:
                    work.record_failure(run, what)
                    if kind == "crashed":  # what a crash leaves behind, on a GPU above all, is unknown
                        worker.pipe.close()
                        _end(worker, GRACE / 6)
                        crew.remove(worker)
                        if work.waiting or work.later:
                            crew.append(start(worker.place))
            work.look_again()
            for worker in crew:
                if worker.run is None:
                    assign(worker)
    finally:
        for worker in crew:
            if worker.run is not None and worker.process.is_alive():
                worker.process.terminate()  # saves its state, then ends
            worker.pipe.close()
        until = time.monotonic() + GRACE
        for worker in crew:
            _end(worker, until - time.monotonic())
    return work.failed


def _end(worker: Worker, seconds: float) -> None:
    """Wait for its end so long. One that hangs in the code of a driver or a file system hears no signal but the last,
    and would keep its GPU and its run."""
    worker.process.join(max(seconds, 0))
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def choose_places(device: str, workers: int | None, specs: Sequence[RunSpec]) -> list[WorkerDevice]:
    """A place for every worker: GPU by GPU in turn, or the CPU, of which large images keep all cores busy by one."""
    if workers is not None and workers < 1:
        raise AidgnError(f"--workers is {workers}; expected a whole number of at least 1.")
    chosen = choose_device(device)
    if chosen.type == "cpu":
        small = all((spec.image_size or 0) <= SMALL_SIDE for spec in specs)
        return [WorkerDevice("cpu")] * min(workers or (usable_cores() if small else 1), len(specs))
    numbers = [chosen.index] if chosen.index is not None else list(range(torch.cuda.device_count()))
    return share_gpus(numbers, workers, os.environ.get("CUDA_VISIBLE_DEVICES"))[: len(specs)]


def share_gpus(numbers: Sequence[int], workers: int | None, visible: str | None) -> list[WorkerDevice]:
    """Each worker sees one GPU and nothing of the others. `numbers` count within CUDA_VISIBLE_DEVICES, if it is set."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    gpus = [names[number] if number < len(names) else str(number) for number in numbers]
    return [WorkerDevice("cuda", gpus[i % len(gpus)]) for i in range(workers or len(gpus))]


@contextmanager
def _visible(gpus: str | None) -> Iterator[None]:
    """Set CUDA_VISIBLE_DEVICES for processes started meanwhile: it counts only if it is set before CUDA starts."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    try:
        yield
    finally:
        if gpus is not None:
            if before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


def _work(pipe: Connection, out: str, options: dict[str, Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger("aidgn").addFilter(_Once())
    kind = ""
    while kind not in ("crashed", "interrupted"):
        try:
            number, spec = pipe.recv()
        except (EOFError, OSError):
            return

        def report(what: str, done: int, total: int, record: Any, number: int = number) -> None:
            if record is not None or done % 10 == 0:
                with suppress(OSError):
                    pipe.send((number, "step", done) if what == "train" else (number, "prepare", (done, total)))

        kind, what = attempts.attempt(spec, out, on_progress=report, **options)
        if kind != "interrupted":
            with suppress(OSError):
                pipe.send((number, kind, what))


class _Once(logging.Filter):
    """Lets a warning through once: what is true of many runs is not said of each."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        known = len(self.said)
        self.said.add(record.getMessage())
        return len(self.said) > known


def _end_with_parent() -> None:
    """Once the parent is gone, however it ended, save the run in progress and end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    until = time.monotonic() + GRACE
    while time.monotonic() < until:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # a run is in progress that was not told yet
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    os._exit(1)  # it hangs
