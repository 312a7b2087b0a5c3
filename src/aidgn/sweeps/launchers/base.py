"""The interface of launchers, their common options, and the queue of runs.

A launcher reports events with a run's number, a kind and a value:

    "prepare"   images are decoded; (done, total)
    "features"  features of a frozen network are computed; (done, total)
    "step"      steps done
    "retry"     the run failed and is tried again; the reason
    "done"      the run's folder
    "failed"    the run is set aside; the reason
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aidgn.errors import AidgnError
from aidgn.runs.options import declared_options, option
from aidgn.sweeps import journal

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec

RETRIES = 2  # attempts at a run after its first one failed
BUSY_SECONDS = 20.0  # before a run that another process is training is tried again

OnEvent = Callable[[int, str, Any], None]


@dataclass
class Launcher(ABC):
    """Train many runs. Launchers are dataclasses, whose fields are options of the command line."""

    workers: int | None = option(
        "Number of worker processes; more workers than GPUs share the GPUs",
        default_help="one per GPU; on the CPU one per core, or one for large images; with ray as many as there is room "
        "for; with slurm no limit",
        minimum=1,
    )

    def check(self) -> None:
        """Raise an error if this machine lacks what the launcher needs, or an option has an invalid value."""
        for entry in declared_options(type(self)):
            entry.convert(getattr(self, entry.name))

    def workers_here(self, specs: "Sequence[RunSpec]", device: str) -> int:
        """Return how many runs are trained at a time, or 1 if that is not known before the start."""
        return self.workers or 1

    def run(
        self,
        specs: "Sequence[RunSpec]",
        out: str | Path,
        *,
        on_event: OnEvent = lambda *_: None,
        retries: int = RETRIES,
        device: str = "auto",
        **training: Any,
    ) -> dict[int, str]:
        """Train every run that is not finished; return the errors of runs that were set aside, by number.

        Args:
            specs: The resolved runs.
            out: Folder of the sweep.
            on_event: Called with every event.
            retries: How often a run that fails is tried again.
            device: cuda, cuda:1, mps or cpu.
            training: Further arguments of `aidgn.training.train`.
        """
        self.check()
        queue = RunQueue(specs, out, retries, on_event)
        if specs:
            self.train(queue, device, training)
        return queue.failed

    @abstractmethod
    def train(self, queue: "RunQueue", device: str, training: dict[str, Any]) -> None:
        """Train the runs of a queue until none is left."""


@dataclass
class ClusterLauncher(Launcher):
    """A launcher whose workers are on other machines."""

    gpus_per_run: float | None = option(
        "GPUs of each worker; with ray, 0.25 lets four workers share one GPU.", minimum=0
    )
    cpus_per_run: int | None = option("CPUs of each worker.", minimum=1)


@dataclass(eq=False)
class RunQueue:
    """The runs of a launcher with workers: waiting, busy elsewhere, or set aside."""

    specs: "Sequence[RunSpec]"
    out: str | Path
    retries: int
    on_event: OnEvent
    busy: list[tuple[float, int]] = field(default_factory=list)  # runs of other processes, with the time to try again
    failed: dict[int, str] = field(default_factory=dict)  # errors of runs that were set aside

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.specs)))

    @property
    def empty(self) -> bool:
        """Whether no run waits for a worker."""
        return not self.waiting and not self.busy

    def record_failure(self, run: int, error: str, again: bool = True) -> None:
        """Queue the run again, or set it aside if it failed too often or is not to be tried again."""
        if again and journal.should_retry(self.specs[run], self.out, self.retries):
            self.waiting.appendleft(run)
            self.on_event(run, "retry", error)
        else:
            self.failed[run] = error
            self.on_event(run, "failed", error)

    def record(self, run: int, outcome: str, text: str) -> None:
        """Handle the outcome of an attempt; raise an error if the outcome concerns all runs."""
        if outcome == "stop":
            raise AidgnError(text)
        if outcome == "done":
            self.on_event(run, outcome, text)
        elif outcome == "busy":
            self.busy.append((time.monotonic() + BUSY_SECONDS, run))
        else:
            self.record_failure(run, text)

    def seconds_to_wait(self) -> float | None:
        """Return the time until the next busy run is due, None if there is none."""
        return max(min(self.busy)[0] - time.monotonic(), 0) if self.busy else None

    def requeue_busy(self) -> None:
        """Move busy runs whose time has come to the waiting ones."""
        now = time.monotonic()
        self.waiting.extend(run for due, run in self.busy if due <= now)
        self.busy = [(due, run) for due, run in self.busy if due > now]
