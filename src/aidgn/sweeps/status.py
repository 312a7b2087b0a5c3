"""How a sweep stands, from its folder alone: any process on any machine that sees the folder may look."""

from collections import Counter
from dataclasses import dataclass, field
from shlex import quote

from aidgn.errors import AidgnError, plural, some
from aidgn.runs.folder import RunFolder
from aidgn.sweeps.journal import last_line
from aidgn.sweeps.store import PlannedRun, RunStatus, SweepFolder
from aidgn.sweeps.timing import Speeds, in_words


@dataclass
class Status:
    total: int
    counts: Counter[str]
    workers: dict[str, int] = field(default_factory=dict)  # runs in progress, by machine
    failed: list[tuple[PlannedRun, str, int]] = field(default_factory=list)  # run, error, attempts
    steps_per_second: float | None = None  # of all that are at work
    seconds_left: float | None = None
    unknown: str = ""  # why there is no time left
    fraction: float = 0.0  # of all steps that are done

    @property
    def over(self) -> bool:
        return not self.counts["left"] and not self.counts["running"]

    @property
    def time_left(self) -> str:
        return self.unknown or f"about {in_words(self.seconds_left or 0)}"


def look(folder: SweepFolder) -> Status:
    items, retries = folder.planned()
    if not items:
        return _without_plan(folder)
    states = folder.states(items, retries)
    status = Status(len(items), Counter(state.kind for state in states))
    speeds, rate, waiting, done, left = Speeds(items, states, here=False), 0.0, 0, 0, 0
    for item, state in zip(items, states, strict=True):
        if state.kind == "failed":
            attempts = [one for one in state.history.attempts if one.kind in ("failed", "crashed", "died")]
            status.failed.append((item, state.history.error, len(attempts)))
        one = state.history.running if state.kind == "running" else None
        if one is not None:
            status.workers[one.host] = status.workers.get(one.host, 0) + 1
            step = _step_seconds(state, speeds.step(item))
            rate += 1 / step if step else 0.0
            waiting += step is None
        reached = max((each.step for each in state.history.attempts), default=0)
        reached = item.steps if state.kind == "done" else min(reached, item.steps)
        done += reached
        left += item.steps - reached if state.kind != "failed" else 0  # one that was set aside is not tried again
    total = sum(item.steps for item in items)
    status.fraction = done / total if total else 1.0
    status.steps_per_second = rate or None
    if status.over:
        status.seconds_left = 0.0
    elif not status.workers:
        status.unknown = "unknown: no process is at work; the sweep's command continues it"
    elif not rate or waiting:
        status.unknown = "unknown until the first run has finished"
    else:
        status.seconds_left = left / rate
    return status


def _step_seconds(state: RunStatus, typical: float | None) -> float | None:
    """Seconds per step of a run in progress, by its own steps once they are enough, else by those of finished runs."""
    one = state.history.running
    if typical is None and one is not None and one.first is not None and one.step > one.first and one.when > one.began:
        return (one.when - one.began) / (one.step - one.first)
    return typical


def _without_plan(folder: SweepFolder) -> Status:
    """A folder of runs that no sweep has planned: what is finished and what is not, no more is known."""
    if not folder.path.is_dir():
        raise AidgnError(f"The folder {folder.path} does not exist.")
    if RunFolder(folder.path).exists:
        raise AidgnError(f"{folder.path} is a run, not a sweep. Give the folder around it, {folder.path.parent}.")
    # Without a log it is a model that was kept of a run.
    names = [
        name
        for name in folder.run_folders()
        if folder.identity(name) and RunFolder(folder.path / name).log_file.exists()
    ]
    if not names:
        runs = RunFolder.find(folder.path, "*/*", "*/*/*")
        planned = [path for depth in ("*", "*/*") for path in folder.path.glob(f"{depth}/.sweep/plan.json")]
        sweeps = {path.parent.parent for path in planned}
        deeper = sorted(sweeps | {run.path.parent for run in runs if run.log_file.exists()})
        raise AidgnError(
            f"{folder.path} has no runs and no plan of a sweep"
            + (
                f", but folders in it do: {some(deeper, 5)}. Give one of them."
                if deeper
                else ". Give the folder that `aidgn sweep` was given as --out."
            )
        )
    done = sum(RunFolder(folder.path / name).finished for name in names)
    return Status(
        len(names),
        Counter(done=done, left=len(names) - done),
        unknown="unknown: these runs were not planned by a sweep",
    )


def lines(status: Status, folder: SweepFolder, shown: int = 10) -> list[str]:
    """The status in words."""
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
        for item, error, attempts in status.failed[:shown]:
            text.append(f"  {item}, {plural(attempts, 'attempt')}: {last_line(error)}")
        if len(status.failed) > shown:
            text.append(f"  and {len(status.failed) - shown} more; --all shows them")
    return text
