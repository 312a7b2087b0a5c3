"""Train runs as jobs of a SLURM cluster, in job arrays with one job per run, submitted by submitit.

The launcher submits jobs and watches them. It may be stopped and started again: jobs go on without it, and runs with a
job in the queue are not submitted twice.

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
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from aidgn.errors import AidgnError, Interrupted, ParameterError
from aidgn.files import write_text
from aidgn.runs.options import option
from aidgn.sweeps import journal, names
from aidgn.sweeps.launchers.base import BUSY_SECONDS, ClusterLauncher, RunQueue

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec

POLL = 10.0  # seconds between two checks of the queue
TIME_LIMIT = "1-00:00:00"
WARNING = 120  # seconds before the end of its time limit, a job is told to save and queue again


@dataclass
class SlurmLauncher(ClusterLauncher):
    """Train in jobs of a SLURM cluster, at most `workers` of an array at a time.

    A job that is preempted or reaches its time limit saves its run, is queued again and continues.
    """

    partition: str | None = option("Partition of the jobs.", metavar="NAME")
    time_limit: str = option("Time limit of each job", TIME_LIMIT, default_help=TIME_LIMIT, metavar="[D-]H:MM:SS")
    slurm: tuple[str, ...] = option(
        "Any other option of sbatch, such as account=ours; repeatable.", (), metavar="NAME=VALUE"
    )

    def check(self) -> None:
        """Raise an error if SLURM or submitit is missing, or the options cannot be used."""
        super().check()
        self.parameters(1)
        for program in ("sbatch", "squeue"):
            if shutil.which(program) is None:
                raise AidgnError(
                    f"--launcher slurm needs {program}, which is not on this machine. Run the same command on "
                    "a login node of the cluster."
                )
        if find_spec("submitit") is None:
            raise AidgnError("--launcher slurm needs submitit, which is not installed: pip install 'aidgn[slurm]'.")

    def parameters(self, gpus: float) -> dict[str, Any]:
        """Return the parameters of submitit.

        Args:
            gpus: GPUs of a job if `gpus_per_run` is not set.
        """
        gpus = gpus if self.gpus_per_run is None else self.gpus_per_run
        if gpus % 1:
            raise ParameterError("gpus_per_run", gpus, "a whole number: jobs of SLURM do not share GPUs")
        more = dict(_name_and_value(setting) for setting in self.slurm)
        parameters = {
            "time": _minutes(self.time_limit),
            "cpus_per_task": self.cpus_per_run or (4 if gpus else 1),
            "array_parallelism": self.workers or 1000,
            "signal_delay_s": WARNING,
            "stderr_to_stdout": True,
            "additional_parameters": {"requeue": True, **more},
        }
        parameters |= {"partition": self.partition} if self.partition else {}
        parameters |= {"gpus_per_node": int(gpus)} if gpus else {}
        return parameters

    def train(self, queue: RunQueue, device: str, training: dict[str, Any]) -> None:
        """Train the runs: submit their jobs and watch them."""
        parameters = self.parameters(0 if device.startswith("cpu") else 1)
        out = Path(queue.out).resolve()
        training = {**training, "device": "cuda" if "gpus_per_node" in parameters else "cpu"}
        tasks = [Task(spec, str(out), training, str(Path.cwd())) for spec in queue.specs]
        jobs = JobQueue(out / names.SLURM, parameters)
        watch = JobWatch(queue, jobs)
        try:
            while watch.left:
                to_submit = watch.update()
                if to_submit:
                    jobs.submit([watch.keys[run] for run in to_submit], [tasks[run] for run in to_submit])
                if watch.left:
                    time.sleep(POLL)
        except KeyboardInterrupt:
            queued = ",".join(sorted(jobs.queued or ()))
            if not queued:
                raise Interrupted("Stopped.") from None
            raise Interrupted(
                "Stopped watching; the jobs go on. The same command watches again, "
                f"`scancel --name={queued}` ends them."
            ) from None


class JobWatch:
    """Watch the jobs of the runs of one call."""

    def __init__(self, queue: RunQueue, jobs: "JobQueue"):
        self.queue = queue
        self.jobs = jobs
        self.keys = [spec.key() for spec in queue.specs]
        self.left = set(range(len(queue.specs)))
        self.attempts_before: dict[int, int] = {}  # for each run with a job, attempts that had ended before the job
        self.missed: dict[int, int] = {}  # how often a run's job was not found in the queue
        self.lost: dict[int, int] = {}  # jobs that ended without progress

    def update(self) -> list[int]:
        """Read the queue and the journals; return the runs to submit."""
        from aidgn.runs.folder import RunFolder

        live = self.jobs.live()
        if live is None:
            return []
        out = Path(self.queue.out)
        to_submit = []
        for run in sorted(self.left):
            history = journal.history(out, self.keys[run])
            if self.keys[run] in live:
                ended = sum(attempt.kind is not None for attempt in history.attempts)
                self.attempts_before.setdefault(run, ended)
                self.missed[run] = 0
                if history.attempts and history.attempts[-1].kind is None:
                    self.queue.on_event(run, "step", history.attempts[-1].step)
            elif history.folder and RunFolder(out / history.folder).finished:
                self.left.discard(run)
                self.queue.on_event(run, "done", str(out / history.folder))
            elif run not in self.attempts_before:
                to_submit.append(run)
            else:
                self.missed[run] += 1
                # A file server may show the end of a run late, so the job must be missing twice.
                if self.missed[run] >= 2 and self.should_resubmit(run, history):
                    to_submit.append(run)
        for run in to_submit:
            self.attempts_before[run] = len(journal.history(out, self.keys[run]).attempts)
            self.missed[run] = 0
        return to_submit

    def should_resubmit(self, run: int, history: journal.History) -> bool:
        """Record the end of a job that left its run unfinished; return whether to submit the run again."""
        queue = self.queue
        is_new = len(history.attempts) > self.attempts_before[run]
        last = history.attempts[-1] if is_new else None
        error = f"its job ended; {self.jobs.log_of(self.keys[run])} may say why"
        if last and last.kind == "stop":
            raise AidgnError(last.what)
        if last and last.kind is None:
            journal.record_death(queue.specs[run], queue.out, error)
        elif last and last.kind in ("failed", "crashed"):
            error = last.what
        elif not last or last.step <= (last.first or 0):  # it was cancelled, or did not start
            self.lost[run] = self.lost.get(run, 0) + 1
        again = self.lost.get(run, 0) <= queue.retries
        queue.record_failure(run, error, again)
        if run in queue.failed:
            self.left.discard(run)
        return run in self.left


class JobQueue:
    """The job arrays of a sweep, of this call and of earlier ones."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any]):
        self.folder = folder
        self.parameters = parameters
        self.arrays: dict[str, list[str]] = {}  # keys of the runs, by name of the array
        for path in sorted(folder.glob("aidgn-*.json"), key=lambda path: path.stat().st_mtime):
            self.arrays[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        self.queued: set[str] | None = None  # names of arrays that were in the queue at the last check

    def live(self) -> set[str] | None:
        """Return the keys of runs with a job in the queue; None while SLURM does not answer."""
        answer = subprocess.run(
            ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%j|%K"],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode and self.queued is None:
            errors = answer.stderr.strip().splitlines() or ["squeue failed"]
            raise AidgnError(f"SLURM does not answer: {errors[-1]}")
        if answer.returncode:
            return None  # it may answer again
        live: set[str] = set()
        self.queued = set()
        for line in answer.stdout.split():
            name, _, index = line.partition("|")
            if name in self.arrays:
                self.queued.add(name)
                live.add(self.arrays[name][int(index) if index.isdecimal() else 0])
        return live

    def submit(self, keys: list[str], tasks: "list[Task]") -> None:
        """Submit runs as job arrays."""
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
                errors = [line for line in str(error).splitlines() if line.startswith("sbatch:")] or [str(error)]
                raise AidgnError("SLURM did not take the jobs: " + " ".join(errors)) from None
            self.queued = {*(self.queued or ()), name}

    def log_of(self, key: str) -> Path:
        """Return the newest log of a run's jobs."""
        name = next(name for name in reversed(self.arrays) if key in self.arrays[name])
        index = self.arrays[name].index(key)
        pattern = f"*_{index}_*_log.out" if len(self.arrays[name]) > 1 else "*_log.out"
        return next(iter((self.folder / name).glob(pattern)), self.folder / name)


def _max_array_size() -> int:
    settings = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=False).stdout
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", settings, re.MULTILINE)
    return max(min(int(size[1]) - 1, 1000), 1) if size else 1000


def _minutes(limit: str) -> int:
    """Convert a time in one of sbatch's forms (minutes, m:s, h:m:s, days-h, days-h:m, days-h:m:s); round up."""
    days, dash, rest = limit.strip().rpartition("-")
    parts = [int(part) if part.isdecimal() else -1 for part in (*([days] if dash else []), *rest.split(":"))]
    units: tuple[float, ...] = (1, 1 / 60)
    if dash:
        units = (1440, 60, 1, 1 / 60)
    elif len(parts) == 3:
        units = (60, 1, 1 / 60)
    minutes = math.ceil(sum(part * unit for part, unit in zip(parts, units, strict=False)))
    if min(parts) < 0 or len(parts) > len(units) or minutes < 1:
        raise ParameterError("time_limit", limit, "minutes, hours:minutes:seconds or days-hours, such as 1-12")
    return minutes


def _name_and_value(setting: str) -> tuple[str, str | bool]:
    name, separator, value = setting.lstrip("-").partition("=")
    if not name.strip():
        raise ParameterError("slurm", setting, "NAME=VALUE, such as account=ours")
    return name.strip(), value.strip() if separator else True


@dataclass
class Task:
    """A run as a job: a call trains the run."""

    spec: "RunSpec"
    out: str
    training: dict[str, Any]
    folder: str

    def __call__(self) -> str:
        os.chdir(self.folder)  # relative paths mean the same as for the user
        requeue = signal.getsignal(signal.SIGUSR2)  # of submitit, which ends this process
        warned = threading.Event()

        def save_first(_number: int, _frame: object) -> None:
            warned.set()
            os.kill(os.getpid(), signal.SIGTERM)  # the run saves its state and ends

        signal.signal(signal.SIGUSR2, save_first)
        outcome = "busy"
        while outcome == "busy" and not warned.is_set():
            outcome, text = journal.attempt(self.spec, self.out, **self.training)
            print(outcome, text, flush=True)
            if outcome == "busy":  # the process of an earlier job, on another node, is about to end
                time.sleep(BUSY_SECONDS)
        if warned.is_set() and outcome in ("interrupted", "busy") and callable(requeue):
            requeue(signal.SIGUSR2, None)
        return outcome

    def checkpoint(self) -> Any:
        """Return the task for submitit to run when the job is queued again. The state is in the run's folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
