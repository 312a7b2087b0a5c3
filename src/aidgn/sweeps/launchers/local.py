"""Train runs in worker processes on this machine.

Each worker loads the data and compiles code once, and trains run after run.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

from aidgn.errors import AidgnError
from aidgn.runs.options import option
from aidgn.sweeps import journal
from aidgn.sweeps.launchers.base import Launcher, RunQueue
from aidgn.sweeps.launchers.gpu_sharing import count_runs, start_mps
from aidgn.terminal import log

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec

UNGUARDED = 97  # exit code of a worker that would train while it imports the user's script
MAX_STILLBORN = 9  # workers in a row that may die before they begin a run
GRACE = 60.0  # seconds for a worker to save its run and exit


@dataclass(frozen=True)
class WorkerDevice:
    """Where a worker computes."""

    device: str  # cuda or cpu
    visible: str | None = None  # value of CUDA_VISIBLE_DEVICES for the worker; None leaves it unchanged


@dataclass
class Worker:
    """A worker process and the number of its run."""

    process: SpawnProcess
    pipe: Connection
    place: WorkerDevice
    run: int | None = None

    def assign(self, run: int, spec: "RunSpec") -> None:
        """Send a run to the worker."""
        self.run = run
        with suppress(OSError):  # the worker is dead: reading from its pipe will show that
            self.pipe.send((run, spec))

    def stop(self, seconds: float) -> None:
        """Wait for the process to exit, then kill it: a process that hangs in a driver would keep its GPU."""
        self.pipe.close()
        self.process.join(max(seconds, 0))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def refuse_in_import() -> None:
    """Exit if this process is a worker that is importing the user's script, which would start workers again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(UNGUARDED)


@dataclass(eq=False)
class WorkerPool:
    """The workers of one sweep."""

    queue: RunQueue
    training: dict[str, Any]  # arguments of `train`
    to_fill: set[str] = field(default_factory=set)  # GPUs that get more workers once a run shows how many fit
    workers: list[Worker] = field(default_factory=list)
    stillborn: int = 0  # workers in a row that died before they began a run

    @property
    def working(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.run is not None]

    def start(self, place: WorkerDevice) -> None:
        """Start a worker."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, str(self.queue.out), {**self.training, "device": place.device})
        process = context.Process(target=worker_main, args=arguments, daemon=True)
        # A terminal sends Ctrl-C to all processes; workers ignore it and stop when this process tells them to. Start
        # the resource tracker first, because its start would unblock the signal.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with visible_gpus(place.visible):
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self.workers.append(Worker(process, ours, place))

    def assign_runs(self) -> None:
        """Give waiting runs to idle workers."""
        for worker in self.workers:
            if worker.run is None and self.queue.waiting:
                run = self.queue.waiting.popleft()
                worker.assign(run, self.queue.specs[run])

    def receive(self, worker: Worker) -> None:
        """Handle one message of a worker."""
        message = None
        with suppress(EOFError, OSError):
            message = worker.pipe.recv()
        if message is None:
            self.replace_dead(worker)
            return
        run, event, value = message
        if event in ("prepare", "features", "step"):
            self.queue.on_event(run, event, value)
            if event == "step" and value > (self.queue.specs[run].eval_every or 0):
                self.fill(worker.place)
            return
        worker.run = None
        self.queue.record(run, event, value)
        if event == "crashed":  # a crash may leave the process and its GPU in any state
            worker.stop(GRACE / 6)
            self.replace(worker)

    def fill(self, place: WorkerDevice) -> None:
        """Start more workers on a GPU after a run was trained and evaluated there: then its memory use is known."""
        if place.visible not in self.to_fill:
            return
        from aidgn.data.row_cache import usable_cores  # imports NumPy, which `aidgn sweep --help` does not need

        self.to_fill.remove(place.visible)
        gpus = len({worker.place.visible for worker in self.workers})
        for _ in range(min(count_runs(place.visible, gpus, usable_cores()) - 1, len(self.queue.waiting))):
            self.start(place)

    def replace_dead(self, worker: Worker) -> None:
        """Record the death of a worker and start another."""
        worker.process.join()
        worker.pipe.close()
        run = worker.run
        assert run is not None
        if worker.process.exitcode == UNGUARDED:
            raise AidgnError(
                "Worker processes import the script that started them, and this script trains when it is imported. Put "
                'its calls of aidgn below `if __name__ == "__main__":`.'
            )
        error = f"its process died (exit code {worker.process.exitcode})"
        began = journal.record_death(self.queue.specs[run], self.queue.out, error, worker.process.pid)
        self.stillborn = 0 if began else self.stillborn + 1
        if self.stillborn > MAX_STILLBORN:
            raise AidgnError(f"Worker processes end before they begin a run; the last: {error}.")
        self.queue.record_failure(run, error)
        self.replace(worker)

    def replace(self, worker: Worker) -> None:
        """Start another worker on the device of one that is gone, if runs are left."""
        self.workers.remove(worker)
        if not self.queue.empty:
            self.start(worker.place)

    def stop(self) -> None:
        """Let all workers save their runs and exit."""
        for worker in self.working:
            if worker.process.is_alive():
                worker.process.terminate()
        for worker in self.workers:
            worker.pipe.close()
        until = time.monotonic() + GRACE
        for worker in self.workers:
            worker.stop(until - time.monotonic())


@dataclass
class LocalLauncher(Launcher):
    """Train in worker processes on this machine: one per GPU; on the CPU one per core, or one for large images."""

    share_gpus: bool = option(
        "Train several runs at a time on each GPU by NVIDIA's MPS: --workers in all, or as many as the memory "
        "of the GPUs and the cores of this machine hold, up to four on each.",
        default=False,
    )

    def workers_here(self, specs: "Sequence[RunSpec]", device: str) -> int:
        """Return how many runs are trained at a time."""
        return len(choose_places(device, self.workers, specs))

    def train(self, queue: RunQueue, device: str, training: dict[str, Any]) -> None:
        """Train the runs. A worker that dies is replaced and its run continued."""
        with start_mps() if self.share_gpus else nullcontext(False) as shared:
            places = choose_places(device, self.workers, queue.specs)
            to_fill = {place.visible for place in places if place.visible} if shared and not self.workers else set()
            self.train_in(WorkerPool(queue, training, to_fill), places)

    def train_in(self, pool: WorkerPool, places: Sequence[WorkerDevice]) -> None:
        """Train the runs of a pool; start a worker on each of these devices."""
        queue = pool.queue
        try:
            for place in places:
                pool.start(place)
                pool.assign_runs()
            while queue.busy or pool.working:
                by_pipe = {worker.pipe: worker for worker in pool.working}
                for pipe in wait(list(by_pipe), queue.seconds_to_wait()):
                    pool.receive(by_pipe[pipe])  # type: ignore[index]
                queue.requeue_busy()
                pool.assign_runs()
        finally:
            pool.stop()


def choose_places(device: str, workers: int | None, specs: "Sequence[RunSpec]") -> list[WorkerDevice]:
    """Return the device of every worker: the GPUs in turn, or the CPU, which one run on large images keeps busy."""
    import torch

    from aidgn.data.registry import SMALL_SIDE
    from aidgn.data.row_cache import usable_cores
    from aidgn.devices import choose_device

    chosen = choose_device(device)
    if chosen.type == "cpu":
        small = all(spec.trains_head or (spec.image_size or 0) <= SMALL_SIDE for spec in specs)
        default = usable_cores() if small else 1
        return [WorkerDevice("cpu")] * min(workers or default, len(specs))
    if chosen.type == "mps":
        return [WorkerDevice("mps")] * min(workers or 1, len(specs))
    numbers = [chosen.index] if chosen.index is not None else list(range(torch.cuda.device_count()))
    return share_gpus(numbers, workers, os.environ.get("CUDA_VISIBLE_DEVICES"))[: len(specs)]


def share_gpus(numbers: Sequence[int], workers: int | None, visible: str | None) -> list[WorkerDevice]:
    """Return the only GPU that each worker sees. `numbers` count within CUDA_VISIBLE_DEVICES, if it is set."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    gpus = [names[number] if number < len(names) else str(number) for number in numbers]
    return [WorkerDevice("cuda", gpus[i % len(gpus)]) for i in range(workers or len(gpus))]


@contextmanager
def visible_gpus(gpus: str | None) -> Iterator[None]:
    """Set CUDA_VISIBLE_DEVICES for processes started in the block: it has no effect once CUDA has started."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    try:
        yield
    finally:
        if gpus is not None and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def worker_main(pipe: Connection, out: str, training: dict[str, Any]) -> None:
    """Train the runs that arrive over the pipe, until it closes, a run crashes or the sweep is interrupted."""
    threading.Thread(target=watch_parent, daemon=True).start()
    log.addFilter(_OncePerWorker())
    outcome = ""
    while outcome not in ("crashed", "interrupted"):
        try:
            number, spec = pipe.recv()
        except (EOFError, OSError):
            return

        def send(event: str, value: Any, number: int = number) -> None:
            with suppress(OSError):
                pipe.send((number, event, value))

        outcome, text = journal.attempt(spec, out, on_event=send, **training)
        if outcome != "interrupted":
            send(outcome, text)


class _OncePerWorker(logging.Filter):
    """Let each warning through once: many runs often give the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        is_new = record.getMessage() not in self.seen
        self.seen.add(record.getMessage())
        return is_new


def watch_parent() -> None:
    """Save the run in progress and exit when the parent process ends, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    until = time.monotonic() + GRACE
    while time.monotonic() < until:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # a run is in progress and was not stopped yet
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    os._exit(1)  # the run hangs
