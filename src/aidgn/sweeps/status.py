"""Read the status of a sweep from its folder alone, in any process on any machine that sees the folder."""

from collections import Counter
from dataclasses import dataclass, field
from shlex import quote

from aidgn.errors import AidgnError, plural, some
from aidgn.runs.folder import RunFolder
from aidgn.sweeps.journal import FAILURES, last_line
from aidgn.sweeps.store import PlannedRun, SweepFolder
from aidgn.sweeps.timing import Speeds, in_words


@dataclass
class Status:
    """The status of a sweep."""

    total: int  # number of runs
    counts: Counter[str]  # runs by status: done, running, failed, left
    workers: Counter[str] = field(default_factory=Counter)  # runs in progress by machine
    # Runs that were set aside, with the last error and the number of failed attempts
    failed: list[tuple[PlannedRun, str, int]] = field(default_factory=list)
    steps_per_second: float | None = None  # speed of all workers together, None if unknown
    seconds_left: float | None = None  # time until all runs are done, None if unknown
    unknown: str = ""  # why the time left is unknown
    fraction: float = 0.0  # share of all steps that are done

    @property
    def over(self) -> bool:
        """Whether nothing is left to train."""
        return not self.counts["left"] and not self.counts["running"]

    @property
    def time_left(self) -> str:
        """The time left in words."""
        return self.unknown or f"about {in_words(self.seconds_left or 0)}"


def read_status(folder: SweepFolder) -> Status:
    """Read the status of a sweep."""
    runs, retries = folder.planned()
    if not runs:
        return _status_without_plan(folder)
    statuses = folder.statuses(runs, retries)
    status = Status(len(runs), Counter(run_status.kind for run_status in statuses))
    speeds = Speeds(runs, statuses, here=False)
    unknown_speeds = steps_done = steps_left = 0
    steps_per_second = 0.0
    for run, run_status in zip(runs, statuses, strict=True):
        attempts = run_status.history.attempts
        if run_status.kind == "failed":
            failed_attempts = sum(attempt.kind in FAILURES for attempt in attempts)
            status.failed.append((run, run_status.history.error, failed_attempts))
        running = run_status.history.running if run_status.kind == "running" else None
        if running is not None:
            status.workers[running.host] += 1
            seconds = speeds.seconds_per_step(run)
            if seconds:
                steps_per_second += 1 / seconds
            unknown_speeds += seconds is None
        reached = min(max((attempt.step for attempt in attempts), default=0), run.steps)
        if run_status.kind == "done":
            reached = run.steps
        steps_done += reached
        if run_status.kind != "failed":  # a run that was set aside is not tried again
            steps_left += run.steps - reached
    total = sum(run.steps for run in runs)
    status.fraction = steps_done / total if total else 1.0
    status.steps_per_second = steps_per_second or None
    if status.over:
        status.seconds_left = 0.0
    elif not status.workers:
        status.unknown = "unknown: no process is at work; the sweep's command continues it"
    elif not steps_per_second or unknown_speeds:
        status.unknown = "unknown until a run has been evaluated twice"
    else:
        status.seconds_left = steps_left / steps_per_second
    return status


def _status_without_plan(folder: SweepFolder) -> Status:
    """Return the status of runs that no sweep planned: they are finished or not."""
    if not folder.path.is_dir():
        raise AidgnError(f"The folder {folder.path} does not exist.")
    if RunFolder(folder.path).exists:
        raise AidgnError(f"{folder.path} is a run, not a sweep. Give the folder around it, {folder.path.parent}.")
    # A folder without a log is the model of a run, copied from the run's folder.
    names = [
        name
        for name in folder.run_folders()
        if folder.identity(name) and RunFolder(folder.path / name).log_file.exists()
    ]
    if not names:
        runs = RunFolder.find(folder.path, "*/*", "*/*/*")
        sweeps = {sweep.path for sweep in SweepFolder.find(folder.path, "*", "*/*")}
        deeper = sorted(sweeps | {run.path.parent for run in runs if run.log_file.exists()})
        advice = ". Give the folder that `aidgn sweep` was given as --out."
        if deeper:
            advice = f", but folders in it do: {some(deeper, 5)}. Give one of them."
        raise AidgnError(f"{folder.path} has no runs and no plan of a sweep{advice}")
    done = sum(RunFolder(folder.path / name).finished for name in names)
    return Status(
        len(names),
        Counter(done=done, left=len(names) - done),
        unknown="unknown: these runs were not planned by a sweep",
    )


def describe_status(status: Status, folder: SweepFolder, shown: int = 10) -> list[str]:
    """Return the status in lines of text, with at most `shown` failed runs."""
    counts = status.counts
    machines = ", ".join(f"{number} on {host}" for host, number in sorted(status.workers.items()))
    text = [
        f"{folder.path}: {plural(status.total, 'run')}"
        + (f", {status.fraction:.0%} of the steps" if status.fraction else ""),
        f"  done       {counts['done']:>6}",
        f"  running    {counts['running']:>6}" + (f"   {machines}" if machines else ""),
        f"  failed     {counts['failed']:>6}",
        f"  left       {counts['left']:>6}",
    ]
    if not status.over:
        speed = f"{status.steps_per_second:.3g} steps/s" if status.steps_per_second else "unknown"
        text += [f"  speed      {speed}", f"  time left  {status.time_left}"]
    if status.failed:
        text.append(f"Set aside; `aidgn sweep {quote(str(folder.yaml))} --retry-failed` tries them again:")
        for run, error, attempts in status.failed[:shown]:
            text.append(f"  {run}, {plural(attempts, 'attempt')}: {last_line(error)}")
        if len(status.failed) > shown:
            text.append(f"  and {len(status.failed) - shown} more; --all shows them")
    return text
