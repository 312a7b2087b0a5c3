"""Runs as jobs of a SLURM cluster, one per run in job arrays, submitted by submitit.

The launcher submits and watches. It may be stopped and started again: jobs go on without it, and what is queued is
found by its name and not submitted twice.

    SWEEP/.sweep/slurm/<name>.json    the runs of an array in the order of its indices, written before it is submitted
    SWEEP/.sweep/slurm/<name>/        submitit's files and the logs of the jobs
"""

import getpass
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from aidgn.errors import AidgnError, Interrupted
from aidgn.files import write_text
from aidgn.runs.folder import RunFolder
from aidgn.runs.spec import RunSpec
from aidgn.sweeps import journal as attempts
from aidgn.sweeps.launchers.local import PATIENCE, RETRIES, OnEvent

POLL = 10.0  # seconds between two looks at the queue
TIME_LIMIT = "1-00:00:00"
WARNING = 120  # seconds before its time is up that a job is told, to save and to queue again


def check() -> None:
    """Whether SLURM and submitit are here, to be said before anything is prepared for them."""
    for program in ("sbatch", "squeue"):
        if shutil.which(program) is None:
            raise AidgnError(
                f"--launcher slurm needs {program}, which is not on this machine. Run the same command on "
                "a login node of the cluster."
            )
    if find_spec("submitit") is None:
        raise AidgnError("--launcher slurm needs submitit, which is not installed: pip install 'aidgn[slurm]'.")


def run_all(
    specs: Sequence[RunSpec],
    out: str | Path,
    *,
    on_event: OnEvent = lambda *_: None,
    retries: int = RETRIES,
    workers: int | None = None,
    cpus_per_run: int | None = None,
    gpus_per_run: float | None = None,
    partition: str | None = None,
    time_limit: str = TIME_LIMIT,
    slurm: Sequence[str] = (),
    device: str = "auto",
    **options: Any,
) -> dict[int, str]:
    """Train every run; returns the errors of those that were set aside, by run number. Finished runs are not repeated.

    At most `workers` jobs of an array run at once. A job that is preempted or whose time is up saves its run, is
    queued again and goes on."""
    gpus = gpus_per_run if gpus_per_run is not None else 0 if device.startswith("cpu") else 1
    if gpus % 1 or gpus < 0:
        raise AidgnError(f"--gpus-per-run is {gpus:g}; expected a whole number: SLURM's jobs do not share GPUs.")
    if workers is not None and workers < 1:
        raise AidgnError(f"--workers is {workers}; expected a whole number of at least 1.")
    more = dict(_name_and_value(setting) for setting in slurm)
    parameters = {
        "time": _minutes(time_limit),
        "cpus_per_task": cpus_per_run or (4 if gpus else 1),
        "array_parallelism": workers or 1000,
        "signal_delay_s": WARNING,
        "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True, **more},
    }
    parameters |= {"partition": partition} if partition else {}
    parameters |= {"gpus_per_node": int(gpus)} if gpus else {}
    if not specs:
        return {}
    check()
    out = Path(out).resolve()
    queue = Queue(out / ".sweep" / "slurm", parameters)
    tasks = [_Task(spec, str(out), {**options, "device": "cuda" if gpus else "cpu"}, str(Path.cwd())) for spec in specs]
    keys = [spec.key() for spec in specs]
    failed: dict[int, str] = {}
    left = set(range(len(specs)))
    known: dict[int, int] = {}  # of runs that were in the queue: attempts that had ended before
    gone: dict[int, int] = {}  # how often they were looked for in the queue in vain
    lost: dict[int, int] = {}  # jobs that ended without having come to anything

    def ended(run: int, history: attempts.History) -> bool:
        """A job of this run has left the queue, the run not being finished. Whether to submit it again."""
        last = history.attempts[-1] if len(history.attempts) > known[run] else None
        if last and last.kind == "stop":
            raise AidgnError(last.what)
        why = f"its job ended; {queue.log_of(keys[run])} may say why"
        if last and last.kind is None:
            attempts.died(specs[run], out, why)
        elif last and last.kind in ("failed", "crashed"):
            why = last.what
        elif not last or last.step <= (last.first or 0):  # it was cancelled, or did not come to start
            lost[run] = lost.get(run, 0) + 1
        again = attempts.should_retry(specs[run], out, retries) and lost.get(run, 0) <= retries
        on_event(run, "retry" if again else "failed", why)
        if not again:
            failed[run] = why
            left.discard(run)
        return again

    try:
        while left:
            live, to_submit = queue.live(), []
            for run in sorted(left) if live is not None else ():
                history = attempts.history(out, keys[run])
                if live is not None and keys[run] in live:
                    known.setdefault(run, sum(one.kind is not None for one in history.attempts))
                    gone[run] = 0
                    if history.attempts and history.attempts[-1].kind is None:
                        on_event(run, "step", history.attempts[-1].step)
                elif history.folder and RunFolder(out / history.folder).finished:
                    left.discard(run)
                    on_event(run, "done", str(out / history.folder))
                elif run not in known:
                    to_submit.append(run)
                else:
                    gone[run] += 1
                    if gone[run] >= 2 and ended(run, history):  # once may be a file server's delay
                        to_submit.append(run)
            for run in to_submit:
                known[run], gone[run] = len(attempts.history(out, keys[run]).attempts), 0
            if to_submit:
                queue.submit([keys[run] for run in to_submit], [tasks[run] for run in to_submit])
            if left:
                time.sleep(POLL)
    except KeyboardInterrupt:
        names = ",".join(sorted(queue.queued or ()))
        raise Interrupted(
            f"Stopped watching; the jobs go on. The same command watches again, `scancel --name={names}` ends them."
            if names
            else "Stopped."
        ) from None
    return failed


class Queue:
    """The job arrays of a sweep: those submitted here and those of earlier calls."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any]):
        self.folder, self.parameters = folder, parameters
        self.arrays: dict[str, list[str]] = {}  # keys of the runs, by name of the array
        for path in sorted(folder.glob("aidgn-*.json"), key=lambda path: path.stat().st_mtime):
            self.arrays[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        self.queued: set[str] | None = None  # names of arrays in the queue when it was last looked at

    def live(self) -> set[str] | None:
        """The keys of runs with a job in the queue; None when SLURM has stopped to answer, for it may do so again."""
        asked = subprocess.run(
            ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%j|%K"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode and self.queued is None:
            why = asked.stderr.strip().splitlines() or ["squeue failed"]
            raise AidgnError(f"SLURM does not answer: {why[-1]}")
        if asked.returncode:
            return None
        live: set[str] = set()
        self.queued = set()
        for line in asked.stdout.split():
            name, _, index = line.partition("|")
            if name in self.arrays:
                self.queued.add(name)
                live.add(self.arrays[name][int(index) if index.isdecimal() else 0])
        return live

    def submit(self, keys: list[str], tasks: "list[_Task]") -> None:
        import submitit

        size = _max_array_size()
        for start in range(0, len(keys), size):
            name = f"aidgn-{token_hex(4)}"
            self.arrays[name] = keys[start : start + size]
            record = self.folder / f"{name}.json"
            write_text(record, json.dumps(self.arrays[name]) + "\n")
            try:
                executor = submitit.SlurmExecutor(folder=self.folder / name, max_num_timeout=1000)
                executor.update_parameters(job_name=name, **self.parameters)
                with executor.batch():
                    for task in tasks[start : start + size]:
                        executor.submit(task)
            except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
                record.unlink()
                del self.arrays[name]
                said = [line for line in str(error).splitlines() if line.startswith("sbatch:")] or [str(error)]
                raise AidgnError("SLURM did not take the jobs: " + " ".join(said)) from None
            self.queued = {*(self.queued or ()), name}

    def log_of(self, key: str) -> Path:
        """The newest log of a run's jobs."""
        name = next(name for name in reversed(self.arrays) if key in self.arrays[name])
        index = self.arrays[name].index(key)
        pattern = f"*_{index}_*_log.out" if len(self.arrays[name]) > 1 else "*_log.out"
        return next(iter((self.folder / name).glob(pattern)), self.folder / name)


def _max_array_size() -> int:
    said = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", said, re.MULTILINE)
    return max(min(int(found[1]) - 1, 1000), 1) if found else 1000


def _minutes(limit: str) -> int:
    """Of what sbatch takes: minutes, m:s, h:m:s, days-h, days-h:m, days-h:m:s; rounded up."""
    days, dash, rest = limit.strip().rpartition("-")
    parts = [int(part) if part.isdecimal() else -1 for part in (*([days] if dash else []), *rest.split(":"))]
    units = (1440, 60, 1, 1 / 60) if dash else (60, 1, 1 / 60) if len(parts) == 3 else (1, 1 / 60)
    minutes = math.ceil(sum(part * unit for part, unit in zip(parts, units, strict=False)))
    if min(parts) < 0 or len(parts) > len(units) or minutes < 1:
        raise AidgnError(
            f"--time-limit {limit} is not a time; expected minutes, hours:minutes:seconds or days-hours, such as 1-12."
        )
    return minutes


def _name_and_value(setting: str) -> tuple[str, str | bool]:
    name, separator, value = setting.lstrip("-").partition("=")
    if not name.strip():
        raise AidgnError(f"--slurm {setting} is not of the form NAME=VALUE, for example --slurm account=ours.")
    return name.strip(), value.strip() if separator else True


@dataclass
class _Task:
    """What a job does."""

    spec: RunSpec
    out: str
    options: dict[str, Any]
    where: str

    def __call__(self) -> str:
        os.chdir(self.where)  # so that relative paths mean what they mean to the user
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's, which ends this process
        warned = threading.Event()

        def save_first(_number: int, _frame: object) -> None:
            warned.set()
            os.kill(os.getpid(), signal.SIGTERM)  # the run saves its state and ends

        signal.signal(signal.SIGUSR2, save_first)
        kind, what = "busy", ""
        while kind == "busy" and not warned.is_set():
            kind, what = attempts.attempt(self.spec, self.out, **self.options)
            if kind == "busy":  # the process of an earlier job, on another node, is about to end
                time.sleep(PATIENCE)
        print(kind, what, flush=True)
        if warned.is_set() and kind in ("interrupted", "busy") and callable(requeue):
            requeue(signal.SIGUSR2, None)
        return kind

    def checkpoint(self) -> Any:
        """For submitit: what to run when the job is queued again. The state is in the run's folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
