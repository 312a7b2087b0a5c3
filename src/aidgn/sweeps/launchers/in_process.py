"""Train runs one after another in this process: for runs of a second or two, which a worker's start would outlast."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aidgn.errors import AidgnError, Interrupted
from aidgn.sweeps import journal
from aidgn.sweeps.launchers.base import RETRIES, OnEvent, RunQueue

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec


class InProcessLauncher:
    """This process, which keeps images and features in memory from run to run."""

    def check(self) -> None:
        """Raise an error if the launcher cannot be used; this one always can."""

    def workers_here(self, specs: "Sequence[RunSpec]", device: str) -> int:
        """Return how many runs are trained at a time."""
        return 1

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
        """Train every run; see `Launcher.run`.

        Raises:
            Interrupted: A signal stopped a run, which is saved.
            AidgnError: No run can go on, for example because the disk is full.
        """
        queue = RunQueue(specs, out, retries, on_event)
        while not queue.empty:
            if not queue.waiting:
                time.sleep(queue.seconds_to_wait() or 0)
                queue.requeue_busy()
                continue
            number = queue.waiting.popleft()

            def report(phase: str, done: int, total: int, record: Any, number: int = number) -> None:
                if record is not None or done % 10 == 0:
                    on_event(number, *(("step", done) if phase == "train" else (phase, (done, total))))

            outcome, text = journal.attempt(specs[number], out, device=device, on_progress=report, **training)
            if outcome == "interrupted":
                raise Interrupted(text)
            if outcome == "stop":
                raise AidgnError(text)
            queue.record(number, outcome, text)
        return queue.failed
