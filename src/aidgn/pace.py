"""Forecast how long work will take, from the work done so far; unknown until enough is done.

The first unit of work also loads and compiles, so time is measured from its end. Evaluations interrupt training steps
regularly, so whole cycles of steps and their evaluation are measured.
"""

import heapq
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec

FORECAST_AFTER = 5.0  # seconds of measured work
STEADY = 1.3  # the halves of the measured work must be as fast as each other up to this factor,
STEADY_AFTER = 20.0  # unless there is so much of it: a busy machine is never steady
CYCLE_SECONDS = 60.0  # work without the end of a cycle for so long is measured without it
WINDOW = 60.0  # seconds over which a speed is measured: other programs come and go
SAMPLE_SECONDS = 0.5  # between samples
RECENT = 20  # runs whose time between steps is measured
MANY = 200  # waiting runs that are not assigned to workers one by one

Sample = tuple[float, float]  # time, units done
Piece = tuple[float, float, float]  # time at the end, units, seconds


class Pace:
    """The speed of one piece of work whose units take about the same time."""

    def __init__(self) -> None:
        self.first: float | None = None  # units done when the work began
        self.samples: deque[Sample] = deque()
        self.latest: Sample = (0.0, 0.0)

    def add(self, now: float, done: float, cycle_end: bool = True) -> None:
        """Add the units done so far.

        Args:
            now: The time.
            done: Units done.
            cycle_end: Whether a cycle of units, and of what follows them, is complete.
        """
        if self.first is None:
            self.first = done
        if done <= self.first:
            return
        self.latest = now, done
        if not self.samples:
            self.samples.append(self.latest)
        elif cycle_end and now - self.samples[-1][0] >= SAMPLE_SECONDS:
            self.samples.append(self.latest)
            while len(self.samples) > 2 and now - self.samples[1][0] >= WINDOW:
                self.samples.popleft()

    @property
    def speed(self) -> float | None:
        """Units per second; None while too little is known."""
        if not self.samples:
            return None
        (began, before), (ended, after) = self.samples[0], self._measured_until()
        seconds = ended - began
        if seconds < FORECAST_AFTER or after <= before or (seconds < STEADY_AFTER and not self._is_steady()):
            return None
        return (after - before) / seconds

    def _is_steady(self) -> bool:
        samples = list(self.samples)
        pieces = [(b[0], b[1] - a[1], b[0] - a[0]) for a, b in pairwise(samples)]
        return are_steady(pieces)

    def seconds_left(self, total: float | None) -> float | None:
        """Return the time until `total` units are done, from the latest ones; None while that is unknown."""
        speed = self.speed
        if total is None or speed is None:
            return None
        time, done = self._measured_until()
        return max((total - done) / speed - (self.latest[0] - time), 0.0)

    def _measured_until(self) -> Sample:
        """Return the end of the latest cycle, or the latest unit if no cycle has ended for a minute."""
        if len(self.samples) == 1 and self.latest[0] - self.samples[0][0] >= CYCLE_SECONDS:
            return self.latest
        return self.samples[-1]


def are_steady(pieces: Sequence[Piece]) -> bool:
    """Return whether the first and the second half of some pieces of work were about as fast as each other."""
    if len(pieces) < 2:
        return False
    middle = sum(seconds for _, _, seconds in pieces) / 2
    halves = [[0.0, 0.0], [0.0, 0.0]]
    passed = 0.0
    for _, units, seconds in pieces:
        half = halves[passed + seconds / 2 >= middle]
        half[0] += units
        half[1] += seconds
        passed += seconds
    if not all(units and seconds for units, seconds in halves):
        return False
    ratio = halves[0][0] / halves[0][1] * halves[1][1] / halves[1][0]
    return 1 / STEADY <= ratio <= STEADY


@dataclass
class RunPace:
    """A run in progress.

    Args:
        first: Step at which it was first seen.
        mark: Time and step of the latest end of a cycle, at first of its first step; None before that.
        latest: Time and step of the latest event.
    """

    first: int
    mark: tuple[float, int] | None = None
    latest: tuple[float, int] = (0.0, 0)


@dataclass
class Measured:
    """Cycles of the runs of one algorithm on one data set: the time at their end, steps, seconds."""

    cycles: deque[Piece] = field(default_factory=deque)

    def add(self, now: float, steps: int, seconds: float) -> None:
        self.cycles.append((now, steps, seconds))
        while len(self.cycles) > 1 and now - self.cycles[0][0] >= WINDOW:
            self.cycles.popleft()

    @property
    def is_steady(self) -> bool:
        return are_steady(self.cycles)

    @property
    def seconds_per_step(self) -> float:
        return sum(seconds for _, _, seconds in self.cycles) / sum(steps for _, steps, _ in self.cycles)


class SweepPace:
    """The time left of many runs, by assigning those that wait to workers.

    Runs of an algorithm that has not begun are taken to be as fast as the others, by the passes of an update. Towards
    the end fewer runs are left than workers, so that the time left is not the work left divided by the speed.

    Args:
        specs: The runs.
        passes: Forward and backward passes of an update by the name of the algorithm, 1 for others.
    """

    def __init__(self, specs: "Sequence[RunSpec]", passes: Mapping[str, float] = {}):
        self.specs = specs
        self.passes = passes
        self.steps = [int(spec.steps or 0) for spec in specs]
        self.keys = [(spec.dataset, str(spec.algorithm)) for spec in specs]
        self.active: dict[int, RunPace] = {}
        self.over: set[int] = set()  # done or set aside
        self.measured: dict[tuple[str, str], Measured] = {}
        self.idle_since: deque[float] = deque()  # when runs ended whose workers have not begun the next
        self.starts: deque[float] = deque(maxlen=RECENT)  # seconds from the end of a run to the first step of the next
        self.ends: deque[float] = deque(maxlen=RECENT)  # seconds from the last step of a run to its end
        self.workers = 1
        self.began: float | None = None  # time of the first step of all

    def add_step(self, now: float, number: int, step: int) -> None:
        """Take note that a run has done so many steps."""
        run = self.active.setdefault(number, RunPace(step))
        self.workers = max(self.workers, len(self.active))
        run.latest = now, step
        if run.mark is None:
            if step > run.first:
                run.mark = now, step
                self.began = now if self.began is None else self.began
                if self.idle_since:
                    self.starts.append(now - self.idle_since.popleft())
            return
        time, before = run.mark
        cycle = int(self.specs[number].eval_every or 1)
        if step // cycle > before // cycle or step >= self.steps[number] > before:
            self.measured.setdefault(self.keys[number], Measured()).add(now, step - before, now - time)
            run.mark = now, step

    def add_end(self, now: float, number: int, done: bool) -> None:
        """Take note that a run is done or set aside."""
        run = self.active.pop(number, None)
        self.over.add(number)
        if run is not None and run.mark is not None:
            self.idle_since.append(now)
            if done:
                self.ends.append(now - run.latest[0])

    def restart(self, number: int) -> None:
        """Take note that a run is tried again."""
        self.active.pop(number, None)

    def seconds_left(self, now: float) -> float | None:
        """Return the time until all runs are done; None while that is unknown."""
        if self.began is None or now - self.began < FORECAST_AFTER:
            return None
        if now - self.began < STEADY_AFTER and not all(measured.is_steady for measured in self.measured.values()):
            return None
        seconds = self._seconds_per_step(now)
        if seconds is None:
            return None
        start, end = (statistics.fmean(times) if times else 0.0 for times in (self.starts, self.ends))
        busy = []
        for number, run in self.active.items():
            time, step = run.mark or (now, run.first)
            busy.append(max((self.steps[number] - step) * seconds(number) - (now - time), 0.0) + end)
        busy = heapq.nlargest(self.workers, busy) + [0.0] * (self.workers - len(busy))
        waiting = [
            start + steps * seconds(number) + end
            for number, steps in enumerate(self.steps)
            if number not in self.over and number not in self.active
        ]
        if len(waiting) > MANY:
            return (sum(busy) + sum(waiting)) / self.workers
        heapq.heapify(busy)
        for duration in waiting:
            heapq.heappush(busy, heapq.heappop(busy) + duration)
        return max(busy)

    def _seconds_per_step(self, now: float) -> Callable[[int], float] | None:
        """Return the function from the number of a run to its seconds per step; None while nothing is measured."""
        known = {key: measured.seconds_per_step for key, measured in self.measured.items()}
        if not known:
            assert self.began is not None
            steps = sum(run.latest[1] - run.mark[1] for run in self.active.values() if run.mark)
            elapsed = sum(run.latest[0] - run.mark[0] for run in self.active.values() if run.mark)
            if not steps or now - self.began < CYCLE_SECONDS:
                return None
            return lambda number: elapsed / steps
        for number, run in self.active.items():  # the first cycle of an algorithm may take long
            if self.keys[number] in known or run.mark is None:
                continue
            seconds_so_far, steps_so_far = run.latest[0] - run.mark[0], run.latest[1] - run.mark[1]
            if seconds_so_far >= FORECAST_AFTER and steps_so_far > 0:
                known[self.keys[number]] = seconds_so_far / steps_so_far
        per_pass = {key: value / self.passes.get(key[1], 1.0) for key, value in known.items()}
        typical = statistics.fmean(per_pass.values())
        by_dataset: dict[str, list[float]] = {}
        for (dataset, _), value in per_pass.items():
            by_dataset.setdefault(dataset, []).append(value)

        def seconds(number: int) -> float:
            key = self.keys[number]
            if key in known:
                return known[key]
            one_pass = statistics.fmean(by_dataset[key[0]]) if key[0] in by_dataset else typical
            return one_pass * self.passes.get(key[1], 1.0)

        return seconds
