"""Forecast the time of runs from the speed of other runs of the sweep."""

import socket
import statistics
from collections import defaultdict
from collections.abc import Iterable

from aidgn.sweeps.store import PlannedRun, RunStatus


class Speeds:
    """Median seconds per step, evaluations included, of the runs of a sweep.

    Args:
        runs: The planned runs.
        statuses: The status of each.
        here: Whether to use only runs of this machine.
    """

    def __init__(self, runs: Iterable[PlannedRun], statuses: Iterable[RunStatus], here: bool = True):
        seconds: dict[tuple[str, ...], list[float]] = defaultdict(list)
        for run, status in zip(runs, statuses, strict=True):
            for attempt in status.history.attempts:
                if attempt.step_seconds and (not here or attempt.host == socket.gethostname()):
                    seconds[run.dataset, run.algorithm].append(attempt.step_seconds)
                    seconds[run.dataset,].append(attempt.step_seconds)
        self.medians = {key: statistics.median(values) for key, values in seconds.items()}

    def seconds_per_step(self, run: PlannedRun) -> float | None:
        """Return the seconds of the run's algorithm on its data set, else of all algorithms there; None if unknown."""
        return self.medians.get((run.dataset, run.algorithm), self.medians.get((run.dataset,)))

    def total(self, runs: Iterable[PlannedRun]) -> float | None:
        """Return the seconds that one worker needs for these runs, None if that is unknown."""
        total = 0.0
        for run in runs:
            step = self.seconds_per_step(run)
            if step is None:
                return None
            total += run.steps * step
        return total


def in_words(seconds: float) -> str:
    """Return a duration such as '45 s', '12 min', '3 h 20 min' or '310 hours'."""
    if seconds < 99.5:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / 3600:.0f} hours"
