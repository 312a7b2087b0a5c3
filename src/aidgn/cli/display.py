"""Progress on the terminal: a live bar where there is one, a line now and then where there is not."""

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

    from aidgn.training import RunSpec


UNITS = {
    "decoding images": "images",
    "reading images": "images",
    "training": "steps",
    "downloading": "MB",
    "predicting": "images",
    "computing features": "images",
    "adapting": "settings",
    "looking inside": "runs",
    "making thumbnails": "images",
    "verifying": "files",
}
NARROW = 72  # columns: below, the bar and words give way to the numbers


class Output(Console):
    """A console that leaves to the command line what to do where nobody reads any more; rich would end with 1."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


class Display:
    """A live bar, shown while the block lasts."""

    progress: "Progress"

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()


class RunDisplay(Display):
    """Shows the parts of one piece of work, each with speed and time left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.live = sys.stderr.isatty()
        console = Output(stderr=True)
        bar, note = ([BarColumn()], [TextColumn("{task.fields[note]}")]) if console.width >= NARROW else ([], [])
        self.progress = Progress(
            TextColumn("{task.description}"),
            *bar,
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            *note,
            console=console,
            disable=not self.live,
        )
        self.tasks: dict[str, Any] = {}
        self.began: dict[str, tuple[float, int]] = {}
        self.done: dict[str, int] = {}
        self.said = time.monotonic()

    def run(self, what: str, done: int, total: int, record: Mapping[str, Any] | None) -> None:
        """For `train` as its `on_progress`."""
        self.update({"prepare": "decoding images", "train": "training"}[what], done, total, record)

    def update(self, what: str, done: int, total: int | None, record: Mapping[str, Any] | None = None) -> None:
        now = time.monotonic()
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(what, total=total, speed="", note="")
            self.began[what] = (now, done)
        elif done < self.done[what]:  # the same work for another run
            self.progress.reset(self.tasks[what])
            self.began[what] = (now, done)
        self.done[what] = done
        began, first = self.began[what]
        speed = (done - first) / (now - began) if now > began else 0.0
        fields = {"speed": f"{rate(speed)} {UNITS[what]}/s"} | ({"note": describe(record)} if record else {})
        self.progress.update(self.tasks[what], completed=done, total=total, **fields)  # type: ignore[arg-type]
        if not self.live and done != total and now - self.said > 10:
            self.said = now
            of = f" of {total}" if total else ""
            left = f", {(total - done) / speed:.0f} s left" if total and speed else ""
            fast = f", {fields['speed']}" if speed else ""
            print(f"{what}: {done}{of} {UNITS[what]}{fast}{left}", file=sys.stderr, flush=True)


class SweepDisplay(Display):
    """Shows many runs as one bar; give `update` to a launcher as `on_event`."""

    def __init__(self, specs: "Sequence[RunSpec]", done_before: int = 0) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.specs, self.live, self.done_before = specs, sys.stderr.isatty(), done_before
        self.steps: dict[int, int] = {}  # by run
        self.done = 0
        self.folders: dict[int, str] = {}
        self.began = self.said = time.monotonic()
        self.before: int | None = None  # steps that were done already, which say nothing about the speed
        console = Output(stderr=True)
        what = [TextColumn("{task.description:<32}"), BarColumn()] if console.width >= NARROW else []
        self.progress = Progress(
            *what,
            TextColumn("{task.fields[runs]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not self.live,
        )
        self.total = sum(int(spec.steps or 0) for spec in specs)
        self.task = self.progress.add_task("starting", total=self.total, runs=self.runs(), left="")

    def runs(self) -> str:
        return f"{self.done_before + len(self.folders)}/{self.done_before + len(self.specs)} runs"

    def update(self, number: int, kind: str, what: Any) -> None:
        from aidgn.sweeps.journal import last_line
        from aidgn.sweeps.timing import in_words

        spec = self.specs[number]
        doing = f"{spec.algorithm}, " + (f"{', '.join(spec.target)} unseen" if spec.target else "all domains")
        if kind in ("step", "done", "failed"):  # of a run that was set aside nothing is left to do
            now_done = what if kind == "step" else int(spec.steps or 0)
            self.done += now_done - self.steps.get(number, 0)
            if kind == "step" and self.before is not None and number not in self.steps:  # where it begins or continues
                self.before += now_done
            self.steps[number] = now_done
        if kind == "done":
            self.folders[number] = what
        if kind in ("retry", "failed"):
            then = "tried again" if kind == "retry" else "set aside"
            text = f"{spec.algorithm}, {', '.join(spec.target)} unseen, trial {spec.trial}, draw {spec.draw}, {then}: "
            self.progress.console.print(text + last_line(what), highlight=False, markup=False, soft_wrap=True)
        now = time.monotonic()
        if kind == "step" and self.before is None:
            self.before, self.began = self.done, now
        if kind == "prepare":
            doing = f"decoding images, {what[0]} of {what[1]}"
        speed = (self.done - (self.before or 0)) / max(now - self.began, 1e-9)
        left = "starting" if speed <= 0 else f"{in_words((self.total - self.done) / speed)} left"
        left = left if self.done < self.total else "all steps done"
        self.progress.update(self.task, completed=self.done, runs=self.runs(), description=doing, left=left)
        if not self.live and now - self.said > 10:
            self.said = now
            text = doing if kind == "prepare" else f"{self.done / self.total:.0%}, {rate(speed)} steps/s, {left}"
            print(f"{self.runs()}, {text}", file=sys.stderr, flush=True)


def wide_console(columns: int) -> Output:
    """Standard output for tables: as wide as the terminal; where there is none, of so many columns."""
    return Output() if sys.stdout.isatty() else Output(width=columns, height=25)  # no height: TERM=dumb makes it 80


def rate(speed: float) -> str:
    """Three digits of a speed: '4,940', '12.3', '0.052'."""
    return f"{speed:,.0f}" if speed >= 999.5 else f"{speed:.3g}"


def describe(record: Mapping[str, Any]) -> str:
    """'validation 97.1 %, chalk 78.3 %' of a record."""
    args = record["args"]
    targets = [f"{args['domains'][i]} {record[f'env{i}_in_acc']:.1%}" for i in args["test_envs"]]
    return ", ".join([f"validation {validation(record):.1%}", *targets])


def validation(record: Mapping[str, Any]) -> float:
    """The mean accuracy on the source domains' out splits."""
    args = record["args"]
    sources = [i for i in range(len(args["domains"])) if i not in args["test_envs"]]
    return sum(record[f"env{i}_out_acc"] for i in sources) / len(sources)


def selected(records: "Sequence[Mapping[str, Any]]") -> Mapping[str, Any]:
    """Of a run's records the one that training-domain validation believes: the first of the highest."""
    return max(records, key=lambda record: (validation(record), -record["step"]))
