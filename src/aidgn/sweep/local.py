"""Runs in worker processes on this machine: each worker loads data and compiled code once and takes run after run."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    context = multiprocessing.get_context("spawn")
    waiting, attempts, failed = list(range(len(specs)))[::-1], [0] * len(specs), {}
    cores = max(1, (os.cpu_count() or 1) // workers)

    def start() -> Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, str(out), cores, options), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def assign(worker: Worker) -> None:
        worker.run = waiting.pop() if waiting else None
        if worker.run is not None:
            attempts[worker.run] += 1
            worker.pipe.send((worker.run, specs[worker.run]))

    crew = [start() for _ in range(min(workers, len(specs)))]
    try:
        for worker in crew:
            assign(worker)
        while busy := [worker for worker in crew if worker.run is not None]:
            for ready in wait([worker.pipe for worker in busy]):
                worker = next(worker for worker in busy if worker.pipe is ready)
                assert worker.run is not None
                try:
                    run, kind, what = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    run, code = worker.run, worker.process.exitcode
                    crew.remove(worker)
                    if attempts[run] < ATTEMPTS:
                        waiting.append(run)
                    else:
                        failed[run] = f"its process died {ATTEMPTS} times (exit code {code})"
                        on_event(run, "failed", failed[run])
                    if waiting:
                        crew.append(start())
                        assign(crew[-1])
                    continue
                if kind == "failed":
                    failed[run] = what
                on_event(run, kind, what)
                if kind != "step":
                    assign(worker)
    finally:
        for worker in crew:
            worker.pipe.close()
        for worker in crew:
            if worker.run is not None and worker.process.pid and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGTERM)  # saves its state, then ends
        for worker in crew:
            worker.process.join(timeout=30)
    return failed


def _work(pipe: Connection, out: str, cores: int, options: dict[str, Any]) -> None:
    import torch

    from aidgn.training.run import Interrupted, train

    torch.set_num_threads(cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    while True:
        try:
            number, spec = pipe.recv()
        except EOFError:
            return

        def report(what: str, done: int, total: int, record: Any, number: int = number) -> None:
            if what == "train" and (record is not None or done % 10 == 0):
                pipe.send((number, "step", done))

        try:
            answer = number, "done", str(train(spec, out, on_progress=report, **options))
        except (Interrupted, BrokenPipeError):
            return  # the parent wants no more, or is gone; what was trained is saved
        except UserError as error:
            answer = number, "failed", str(error)
        except Exception:
            answer = number, "failed", traceback.format_exc()
        with suppress(BrokenPipeError):
            pipe.send(answer)
