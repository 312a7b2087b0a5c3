"""What is shown of many runs while they train: the speed, the time left, and when it is too early to tell."""

from collections.abc import Callable, Sequence

import pytest

from aidgn import progress
from aidgn.progress import RunDisplay, SweepDisplay
from aidgn.runs.spec import RunSpec

Show = Callable[[Sequence[tuple[float, int, str, object]]], str]


@pytest.fixture
def last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    def show(events: Sequence[tuple[float, int, str, object]]) -> str:
        """Return the line after events (second, number, event, value) of two runs of 1000 steps."""
        now = [0.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
        specs = [RunSpec("digits", "ERM", (target,), steps=1000) for target in ("ink", "chalk")]
        with SweepDisplay(specs) as display:
            for second, number, event, value in events:
                now[0] = second
                display.last_line = float("-inf")
                display.update(number, event, value)
        return capsys.readouterr().err.splitlines()[-1]

    return show


def steps(start: float, stop: float, per_second: float, number: int = 0) -> list[tuple[float, int, str, object]]:
    """One event a second, from the first step at `start` on."""
    seconds = int(stop - start)
    return [(start + second, number, "step", 1 + int(second * per_second)) for second in range(seconds + 1)]


def test_compiling_before_the_first_step_is_no_speed(last_line: Show) -> None:
    assert last_line([(0, 0, "step", 0), (40, 0, "step", 1)]) == "0/2 runs, 0%, time left unknown"
    events = [(0.0, 0, "step", 0), *steps(40, 50, 20)]
    assert last_line(events) == "0/2 runs, 10%, 20 steps/s, 90 s left"  # 1799 of 2000 steps, at 20 a second


def test_the_speed_is_that_of_the_last_minute(last_line: Show) -> None:
    slow = [(float(second), 0, "step", second) for second in range(1, 200)]
    fast = [(200.0 + second, 0, "step", 200 + 5 * second) for second in range(61)]
    assert last_line([*slow, *fast]).startswith("0/2 runs, 25%, 5 steps/s, ")


def test_steps_of_an_earlier_call_are_no_speed(last_line: Show) -> None:
    resumed = [(0.0, 0, "step", 900), (1.0, 1, "step", 800)]
    assert last_line(resumed) == "0/2 runs, 85%, time left unknown"
    later = [(10.0 + second, 0, "step", 901 + second) for second in range(11)]
    assert last_line([*resumed, *later]).startswith("0/2 runs, 86%, 1 steps/s, ")


def test_no_time_is_left_when_all_is_done(last_line: Show) -> None:
    events = [*steps(0, 49, 20), (50.0, 0, "done", "a"), (60.0, 1, "step", 1), (70.0, 1, "done", "b")]
    assert last_line(events).endswith("steps/s, all steps done")


def test_a_failed_run_is_no_progress(last_line: Show) -> None:
    line = last_line([(0.0, 0, "step", 0), (1.0, 0, "failed", "no luck"), (2.0, 1, "step", 500)])
    assert line.startswith("0/2 runs, 50%, ")


def test_images_that_are_ready_at_once_are_shown() -> None:
    with SweepDisplay([RunSpec("digits", "ERM", ("ink",), steps=4)], enabled=False) as display:
        display.update(0, "prepare", (150, 150))
        assert display.preparing["prepare"][0] == 150


def test_steps_before_the_first_evaluation_are_no_forecast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 steps take a second, and the evaluation after them nine."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    record = {"args": {"domains": ["a", "b"], "test_envs": [0]}, "env0_in_acc": 0.5, "env1_out_acc": 0.5}
    told = []
    with RunDisplay() as display:
        for step in range(101):
            evaluated = step > 0 and step % 10 == 0
            now[0] += 9.1 if evaluated else 0.1
            display.last_line = float("-inf")
            display.run("train", step, 100, record if evaluated else None)
            told.append(display.seconds_left["training"])
    assert told[:20] == [None] * 20  # one cycle may be fast by chance, two alike are not
    assert told[20] == pytest.approx(80, rel=0.1) and told[95] == pytest.approx(10 - 0.5, rel=0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[19] == "training: 19 of 100 steps" and lines[20].endswith(" left")
