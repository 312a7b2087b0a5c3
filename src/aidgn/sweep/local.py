"""Runs in worker processes on this machine: each worker loads data and compiled code once and takes run after run."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from aidgn.errors import UserError
from aidgn.training.spec import RunSpec

ATTEMPTS = 3  # times a run is started before it is set aside

# Run number; "step" with the steps done, "done" with its folder, "failed" with why.
OnEvent = Callable[[int, str, Any], None]


@dataclass
class Worker:
    process: SpawnProcess
    pipe: Connection
    run: int | None = None


def run_all(specs: Sequence[RunSpec], out: str | Path, *, workers: int, on_event: OnEvent = lambda *_: None,
            **options: Any) -> dict[int, str]:
    """Train every run; returns the errors of those that failed, by run number. Finished runs are not repeated.

    A worker that dies is replaced and its run continued, up to `ATTEMPTS` times."""
    if workers < 1:
        raise UserError(f"--workers is {workers}; expected a whole number of at least 1.")
    context = multiprocessing.get_context("spawn")
    waiting, attempts, failed = list(range(len(specs)))[::-1], [0] * len(specs), {}

    def start() -> Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, str(out), options), daemon=True)
        # A terminal's Ctrl-C goes to every process; the workers leave it to this one to say when to stop.
        resource_tracker.ensure_running()  # multiprocessing's own, whose start would unblock it again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return Worker(process, ours)

    def assign(worker: Worker) -> None:
        worker.run = waiting.pop() if waiting else None
        if worker.run is not None:
            attempts[worker.run] += 1
            with suppress(OSError):  # it has died: its pipe says so when it is read
                worker.pipe.send((worker.run, specs[worker.run]))

    def fail(run: int, why: str) -> None:
        failed[run] = why
        on_event(run, "failed", why)

    crew: list[Worker] = []
    try:
        for _ in range(min(workers, len(specs))):
            crew.append(start())
            assign(crew[-1])
        while busy := [worker for worker in crew if worker.run is not None]:
            for ready in wait([worker.pipe for worker in busy]):
                worker = next(worker for worker in busy if worker.pipe is ready)
                assert worker.run is not None
                try:
                    run, kind, what = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    worker.pipe.close()
                    crew.remove(worker)
                    if worker.run not in failed and attempts[worker.run] < ATTEMPTS:
                        waiting.append(worker.run)
                    elif worker.run not in failed:
                        fail(worker.run, f"its process died {ATTEMPTS} times (exit code {worker.process.exitcode})")
                    if waiting:
                        crew.append(start())
                        assign(crew[-1])
                    continue
                if kind in ("failed", "crashed"):
                    fail(run, what)
                else:
                    on_event(run, kind, what)
                if kind in ("failed", "done"):
                    assign(worker)
    finally:
        for worker in crew:
            if worker.run is not None and worker.process.is_alive():
                worker.process.terminate()  # saves its state, then ends
            worker.pipe.close()
        for worker in crew:
            worker.process.join(timeout=30)
    return failed


def _work(pipe: Connection, out: str, options: dict[str, Any]) -> None:
    from aidgn.training.run import Interrupted, train

    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: tuple[int, str, Any] | None = None
    while answer is None or answer[1] != "crashed":  # what a crash leaves behind, on a GPU above all, is unknown
        try:
            number, spec = pipe.recv()
        except (EOFError, OSError):
            return

        def report(what: str, done: int, total: int, record: Any, number: int = number) -> None:
            if record is not None or done % 10 == 0:
                with suppress(OSError):
                    pipe.send((number, "step", done) if what == "train" else (number, "prepare", (done, total)))

        try:
            answer = number, "done", str(train(spec, out, on_progress=report, **options))
        except Interrupted:
            return
        except UserError as error:
            answer = number, "failed", str(error)
        except Exception:
            answer = number, "crashed", traceback.format_exc()
        with suppress(OSError):
            pipe.send(answer)


def _end_with_parent() -> None:
    """Once the parent is gone, however it ended, save the run in progress and end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
