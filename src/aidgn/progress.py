"""Show the progress of long work on standard error: a bar in a terminal or notebook, else a line every ten seconds."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from threading import Timer
from typing import IO, TYPE_CHECKING, Any, NoReturn, Self, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment

from aidgn.escape import for_terminal
from aidgn.pace import FORECAST_AFTER, WINDOW, Pace, SweepPace
from aidgn.runs.accuracy_key import accuracy_key
from aidgn.sweeps.journal import last_line
from aidgn.sweeps.timing import in_words
from aidgn.terminal import direct

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec

BAR_AFTER = 2.0  # seconds; shorter work shows no bar
FORECAST_SECONDS = 1.0  # between forecasts of a sweep, which may have thousands of runs
LINE_EVERY = 10.0  # seconds between lines if there is no terminal
NARROW = 72  # columns; a narrower terminal shows numbers without a bar
UNITS = {
    "decoding images": "images",
    "reading images": "images",
    "comparing images": "images",
    "comparing sites": "pairs",
    "training": "steps",
    "downloading": "MB",
    "evaluating": "images",
    "predicting": "images",
    "computing features": "images",
    "adapting": "settings",
    "analysing features": "runs",
    "making thumbnails": "images",
    "verifying": "files",
    "writing pages": "files",
    "measuring runs": "runs",
    "adding runs": "runs",
}


PHASES = {"prepare": "decoding images", "features": "computing features", "train": "training"}  # phases of a run


class Output(Console):
    """A console that shows control characters in text as codes, which rich passes on.

    It raises BrokenPipeError if the reader is gone; rich would exit with code 1.
    """

    @property
    def file(self) -> IO[str]:
        return direct(cast(TextIO, super().file))

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(for_terminal(segment.text), segment.style)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def wide_console(columns: int) -> Output:
    """Return standard output, as wide as the terminal; with this number of columns if there is no terminal."""
    return Output() if sys.stdout.isatty() else Output(width=columns, height=25)  # no height: TERM=dumb makes it 80


class Display:
    """A bar that appears when its block has lasted two seconds.

    Args:
        columns: Columns of the bar.
        wide_columns: Columns that a narrow terminal leaves out, by their position.
        enabled: Whether anything is shown.
    """

    def __init__(
        self, columns: Sequence[ProgressColumn], wide_columns: Mapping[int, ProgressColumn], enabled: bool = True
    ):
        console = Output(stderr=True)
        in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None
        self.live = enabled and (in_notebook or sys.stderr.isatty())
        self.enabled = enabled
        shown = list(columns)
        if console.width >= NARROW:
            for position, column in sorted(wide_columns.items()):
                shown.insert(position, column)
        self.bar = Progress(*shown, console=console, disable=not self.live)
        self.last_line = time.monotonic()
        self._timer = Timer(BAR_AFTER, self.bar.start)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if self.live:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self._timer.cancel()
            self._timer.join()
        self.bar.stop()

    def print_line(self, compose: Callable[[], str]) -> None:
        """Print a line if there is no bar and the last line is ten seconds old."""
        now = time.monotonic()
        if self.enabled and not self.live and now - self.last_line > LINE_EVERY:
            self.last_line = now
            print(compose(), file=sys.stderr, flush=True)


class RunDisplay(Display):
    """Show the parts of one piece of work, each with speed and time left."""

    def __init__(self, enabled: bool = True) -> None:
        columns = [
            plain_column("{task.description}"),
            MofNCompleteColumn(),
            plain_column("{task.fields[speed]}"),
            plain_column("{task.fields[left]}"),
        ]
        super().__init__(columns, {1: BarColumn(), 5: plain_column("{task.fields[note]}")}, enabled)
        self.tasks: dict[str, TaskID] = {}
        self.paces: dict[str, Pace] = {}
        self.done: dict[str, int] = {}
        self.seconds_left: dict[str, float | None] = {}  # as shown, by part; None where it is too early to tell

    def run(self, part: str, done: int, total: int, record: Mapping[str, Any] | None) -> None:
        """Show the progress of `aidgn.training.train`, as its `on_progress`."""
        self.update(PHASES[part], done, total, record, cycle_end=part != "train" or record is not None)

    def update(
        self,
        work: str,
        done: int,
        total: int | None,
        record: Mapping[str, Any] | None = None,
        cycle_end: bool = True,
    ) -> None:
        """Show the progress of a part.

        Args:
            work: The part, a key of `UNITS`.
            done: Units done.
            total: Units to do, if known.
            record: A new record of the run, whose accuracies are shown.
            cycle_end: Whether a cycle of units that take different times is complete, such as the steps up to an
                evaluation and the evaluation.
        """
        if work not in self.tasks:
            self.tasks[work] = self.bar.add_task(work, total=total, speed="", left="", note="")
            self.paces[work] = Pace()
        elif done < self.done[work]:  # the same work for another run
            self.bar.reset(self.tasks[work])
            self.paces[work] = Pace()
        self.done[work] = done
        pace = self.paces[work]
        pace.add(time.monotonic(), done, cycle_end)
        speed = pace.speed
        seconds = self.seconds_left[work] = pace.seconds_left(total)
        left = f"{in_words(seconds)} left" if seconds is not None and done != total else ""
        fields = {"speed": f"{rate(speed)} {UNITS[work]}/s" if speed else "", "left": left}
        if record:
            fields["note"] = describe(record)
        self.bar.update(self.tasks[work], completed=done, total=total, **fields)  # type: ignore[arg-type]
        if done == total:
            return

        def line() -> str:
            of_total = f" of {total}" if total else ""
            return ", ".join(filter(None, (f"{work}: {done}{of_total} {UNITS[work]}", fields["speed"], left)))

        self.print_line(line)


class SweepDisplay(Display):
    """Show many runs as one bar; `update` is a launcher's `on_event`.

    Args:
        specs: The runs.
        done_before: Runs that are counted as done and are not among `specs`.
        enabled: Whether anything is shown.
    """

    def __init__(self, specs: "Sequence[RunSpec]", done_before: int = 0, enabled: bool = True) -> None:
        columns = [plain_column("{task.fields[runs]}"), TimeElapsedColumn(), plain_column("{task.fields[left]}")]
        super().__init__(columns, {0: plain_column("{task.description:<32}"), 1: BarColumn()}, enabled)
        self.specs = specs
        self.done_before = done_before
        self.folders: dict[int, str] = {}  # of finished runs, by number
        self.steps: dict[int, int] = {}  # steps done, by number
        self.preparing: dict[str, tuple[int, Pace]] = {}  # number done and pace, by event
        self.total = sum(int(spec.steps or 0) for spec in specs)
        self.earlier_steps = 0  # done by an earlier call; they say nothing about the speed
        self.samples: deque[tuple[float, int]] = deque()  # time and steps of this call, from its first step on
        self.pace = SweepPace(specs, count_passes(specs))
        self.forecast_at = 0.0  # time of the latest forecast
        self.seconds_left: float | None = None  # of training, at that time; None while it is too early to tell
        self.task = self.bar.add_task("starting", total=self.total, runs=self.runs(), left="")

    def runs(self) -> str:
        return f"{self.done_before + len(self.folders)}/{self.done_before + len(self.specs)} runs"

    def update(self, number: int, event: str, value: Any) -> None:
        """Show an event of a launcher.

        Args:
            number: The run.
            event: "prepare" or "features" with (done, total), "step" with the steps done, "retry" with the error,
                "done" with the folder, "failed" with the error.
            value: Value of the event.
        """
        spec = self.specs[number]
        now = time.monotonic()
        if event == "step":
            if number not in self.steps:
                self.earlier_steps += value
            self.steps[number] = value
            self.pace.add_step(now, number, value)
        if event == "retry":
            self.pace.restart(number)
        if event in ("done", "failed"):
            self.pace.add_end(now, number, event == "done")
        if event == "done":
            self.steps[number] = int(spec.steps or 0)
        if event == "failed":  # its remaining steps are not left to do, and are no progress
            self.total -= int(spec.steps or 0) - self.steps.setdefault(number, 0)
        if event == "done":
            self.folders[number] = value
        if event in ("retry", "failed") and self.enabled:
            self._print_error(spec, event, value)
        activity = f"{spec.algorithm}, " + (f"{', '.join(spec.target)} unseen" if spec.target else "all domains")
        preparing = event in ("prepare", "features")
        if preparing:
            activity = f"{PHASES[event]}, {value[0]} of {value[1]}{self._time_left(event, *value)}"
        done = sum(self.steps.values())
        speed, left = self._estimate(done)
        self.bar.update(self.task, completed=done, total=self.total, runs=self.runs(), description=activity, left=left)

        def line() -> str:
            if preparing:
                return f"{self.runs()}, {activity}"
            return (
                f"{self.runs()}, {done / max(self.total, 1):.0%}, {f'{rate(speed)} steps/s, ' if speed else ''}{left}"
            )

        self.print_line(line)

    def _time_left(self, event: str, done: int, total: int) -> str:
        """Return the time left of a phase before training in words; "" while it is unknown."""
        before, pace = self.preparing.get(event, (total + 1, Pace()))
        if before > done:  # the first, or the same for another run
            pace = Pace()
        self.preparing[event] = (done, pace)
        pace.add(time.monotonic(), done)
        seconds = pace.seconds_left(total)
        return "" if seconds is None else f", {in_words(seconds)} left"

    def _estimate(self, done: int) -> tuple[float, str]:
        """Return the steps per second of the last minute, 0 while unknown, and the time left in words."""
        now, steps = time.monotonic(), done - self.earlier_steps
        if steps > 0 and (not self.samples or now - self.samples[-1][0] >= 1):
            self.samples.append((now, steps))
        while len(self.samples) > 2 and now - self.samples[1][0] >= WINDOW:
            self.samples.popleft()
        began, before = self.samples[0] if self.samples else (now, steps)
        speed = (steps - before) / (now - began) if now - began >= FORECAST_AFTER else 0.0
        if done >= self.total:
            return speed, "all steps done"
        if now - self.forecast_at >= FORECAST_SECONDS or self.seconds_left is None:
            self.forecast_at = now
            self.seconds_left = self.pace.seconds_left(now)
        if self.seconds_left is None:
            return speed, "time left unknown"
        return speed, f"{in_words(max(self.seconds_left - (now - self.forecast_at), 0))} left"

    def _print_error(self, spec: "RunSpec", event: str, error: str) -> None:
        outcome = "tried again" if event == "retry" else "set aside"
        text = f"{spec.algorithm}, {', '.join(spec.target)} unseen, trial {spec.trial}, draw {spec.draw}, {outcome}: "
        self.bar.console.print(text + last_line(error), highlight=False, markup=False, soft_wrap=True)


def count_passes(specs: "Sequence[RunSpec]") -> dict[str, float]:
    """Return the passes of an update by the name of the algorithm."""
    from aidgn.algorithms import find

    return {name: find(name).passes for name in {str(spec.algorithm) for spec in specs}}


def plain_column(text: str) -> TextColumn:
    """Return a column of text whose values may hold brackets, as names of domains do."""
    return TextColumn(text, markup=False)


def rate(speed: float) -> str:
    """Format a speed with three digits: '4,940', '12.3', '0.052'."""
    return f"{speed:,.0f}" if speed >= 999.5 else f"{speed:.3g}"


def describe(record: Mapping[str, Any]) -> str:
    """Format the accuracies of a record: 'validation 97.1 %, chalk 78.3 %'."""
    domains, targets = record["args"]["domains"], record["args"]["test_envs"]
    sources = [record[accuracy_key(i, "out")] for i in range(len(domains)) if i not in targets]
    validation = sum(sources) / len(sources)
    texts = [f"{domains[i]} {record[accuracy_key(i, 'in')]:.1%}" for i in targets]
    return ", ".join([f"validation {validation:.1%}", *texts])
