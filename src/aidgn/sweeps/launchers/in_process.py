"""Train runs one after another in this process, for runs of a second or two: starting a worker would take longer."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aidgn.errors import Interrupted
from aidgn.sweeps import journal
from aidgn.sweeps.launchers.base import Launcher, RunQueue

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec


class InProcessLauncher(Launcher):
    """Train in this process, which keeps images and features in memory from run to run."""

    def workers_here(self, specs: "Sequence[RunSpec]", device: str) -> int:
        return 1

    def train(self, queue: RunQueue, device: str, training: dict[str, Any]) -> None:
        """Train the runs; raise `Interrupted` after a signal stopped and saved one."""
        while not queue.empty:
            if not queue.waiting:
                time.sleep(queue.seconds_to_wait() or 0)
                queue.requeue_busy()
                continue
            run = queue.waiting.popleft()
            outcome, text = journal.attempt(
                queue.specs[run], queue.out, on_event=partial(queue.on_event, run), device=device, **training
            )
            if outcome == "interrupted":
                raise Interrupted(text)
            queue.record(run, outcome, text)
