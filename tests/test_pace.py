"""Forecasts from simulated work whose whole course is known: each must hold within the factor 1.5."""

import heapq
from dataclasses import dataclass

import pytest

from aidgn.pace import FORECAST_AFTER, Pace, SweepPace
from aidgn.runs.spec import RunSpec

HOLDS = 1.5  # the factor between a time told and the time it took


def within(told: float, true: float) -> bool:
    return true / HOLDS <= told <= true * HOLDS


def test_units_after_a_slow_first_one() -> None:
    pace = Pace()
    told = []
    for unit in range(101):
        now = 0.0 if unit == 0 else 40.0 + unit  # the first takes 41 s, the others one
        pace.add(now, unit)
        left = pace.seconds_left(100)
        if left is not None:
            told.append((now, left, 140.0 - now))
    assert told[0][0] == 41 + FORECAST_AFTER
    for _, left, true in told:
        assert left == pytest.approx(true)


def test_steps_with_evaluations_are_measured_by_whole_cycles() -> None:
    """100 steps of 0.1 s, then 20 s of evaluation: the steps alone would forecast a third."""
    pace = Pace()
    now, end, told = 0.0, 10 * (100 * 0.1 + 20), []
    pace.add(now, 0, False)
    for step in range(1, 1001):
        now += 0.1
        cycle_end = step % 100 == 0
        now += 20 if cycle_end else 0
        pace.add(now, step, cycle_end)
        left = pace.seconds_left(1000)
        if left is not None and step < 1000:
            told.append((left, end - now))
    assert told[0][1] == pytest.approx(9 * 30)
    assert all(within(left, true) for left, true in told if true > 30)


def test_unfinished_cycle_is_measured_after_a_minute() -> None:
    pace = Pace()
    for second in range(63):
        pace.add(float(second), second, False)
        assert (pace.speed is None) == (second < 61)
    assert pace.seconds_left(162) == pytest.approx(100)


def test_a_speed_is_that_of_the_last_minute() -> None:
    pace = Pace()
    for second in range(200):
        pace.add(float(second), 100 * second)
    for second in range(200, 262):
        pace.add(float(second), 20_000 + second)
    assert pace.speed == pytest.approx(1, rel=0.2)


def test_an_unknown_total_has_no_time_left() -> None:
    pace = Pace()
    for second in range(20):
        pace.add(float(second), second)
    assert pace.speed == pytest.approx(1) and pace.seconds_left(None) is None


@dataclass
class Simulated:
    """Runs on workers: seconds to start, per step, per evaluation and to end."""

    seconds: list[float]  # per step, by run
    steps: int = 300
    eval_every: int = 50
    workers: int = 2
    compilation: float = 15.0  # before the first step of a worker
    start: float = 0.5
    evaluation: float = 1.0
    end: float = 0.5

    def forecasts(self) -> list[tuple[float, float]]:
        """Return every forecast with the time that was left."""
        algorithms = [f"A{seconds}" for seconds in self.seconds]
        specs = [
            RunSpec("digits", name, ("ink",), trial=number, steps=self.steps, eval_every=self.eval_every)
            for number, name in enumerate(algorithms)
        ]
        free = [(0.0, worker) for worker in range(self.workers)]
        events: list[tuple[float, int, str, int]] = []
        new = set(range(self.workers))
        for number, seconds in enumerate(self.seconds):
            now, worker = heapq.heappop(free)
            now += self.start
            events.append((now, number, "step", 0))
            now += self.compilation if worker in new else 0.0
            new.discard(worker)
            for step in range(1, self.steps + 1):
                now += seconds
                if step % self.eval_every == 0:
                    now += self.evaluation
                events.append((now, number, "step", step))
            now += self.end
            events.append((now, number, "done", 0))
            heapq.heappush(free, (now, worker))
        events.sort()
        over = events[-1][0]
        pace, told = SweepPace(specs), []
        for now, number, event, step in events:
            if event == "step":
                pace.add_step(now, number, step)
            else:
                pace.add_end(now, number, True)
            left = pace.seconds_left(now)
            if left is not None:
                told.append((left, over - now))
        return told


@pytest.mark.parametrize(
    ("seconds", "workers"),
    [
        ([0.1] * 24, 2),
        ([0.1] * 3, 2),  # the last run is alone, while the speed of both workers is known
        ([0.1] * 5, 4),
        ([0.1, 0.2] * 8, 2),
        ([0.1] * 6 + [0.15] * 6, 2),  # a slower algorithm comes later
        ([0.02] * 250, 3),  # too many to assign one by one
    ],
)
def test_runs_on_workers(seconds: list[float], workers: int) -> None:
    told = Simulated(seconds, workers=workers).forecasts()
    assert len(told) > 100
    assert all(within(left, true) for left, true in told if true > 5)


def test_sweep_without_evaluations_is_measured_after_a_minute() -> None:
    told = Simulated([1.0], steps=500, eval_every=500, workers=1).forecasts()
    assert told[0][1] <= 500.5 - 60 and within(*told[0])


def test_a_run_that_is_set_aside_takes_no_more_time() -> None:
    specs = [RunSpec("digits", "ERM", ("ink",), trial=trial, steps=100, eval_every=10) for trial in range(2)]
    pace = SweepPace(specs)
    for second in range(21):
        pace.add_step(float(second), 0, second)
    assert pace.seconds_left(20.0) == pytest.approx(80 + 100)
    pace.add_end(20.0, 0, False)
    assert pace.seconds_left(20.0) == pytest.approx(100)


def test_a_run_that_is_tried_again_starts_over() -> None:
    specs = [RunSpec("digits", "ERM", ("ink",), steps=100, eval_every=10)]
    pace = SweepPace(specs)
    for second in range(51):
        pace.add_step(float(second), 0, second)
    assert pace.seconds_left(50.0) == pytest.approx(50)
    pace.restart(0)
    assert pace.seconds_left(50.0) == pytest.approx(100)


def test_waiting_algorithm_is_slower_by_its_passes() -> None:
    specs = [RunSpec("digits", name, ("ink",), steps=100, eval_every=10) for name in ("ERM", "SagNet")]
    pace = SweepPace(specs, {"SagNet": 7 / 3})
    for second in range(51):
        pace.add_step(float(second), 0, second)
    assert pace.seconds_left(50.0) == pytest.approx(50 + 100 * 7 / 3)
