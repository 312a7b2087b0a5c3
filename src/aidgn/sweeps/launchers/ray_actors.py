"""The actors of a sweep on Ray: some train run after run, one passes events to the launcher."""

import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aidgn.sweeps import journal

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec


class ProgressActor:
    """Collect events of workers, and tell workers when to stop. If this actor is lost, only the display suffers."""

    def __init__(self) -> None:
        self.events: dict[int, tuple[str, Any]] = {}
        self.stopped = False

    def tell(self, run: int, event: str, value: Any) -> bool:
        """Store the last event of a run; return whether to stop."""
        self.events[run] = (event, value)
        return self.stopped

    def take(self) -> list[tuple[int, str, Any]]:
        """Return the events since the last call."""
        events = self.events
        self.events = {}
        return [(run, *event) for run, event in events.items()]

    def stop(self) -> None:
        """Tell workers to stop."""
        self.stopped = True

    def stopping(self) -> bool:
        """Return whether to stop."""
        return self.stopped


class TrainingActor:
    """A process on a node that loads data and compiled code once and trains run after run."""

    def __init__(
        self, out: str, training: dict[str, Any], progress: str, folder: str, environment: dict[str, str]
    ) -> None:
        with suppress(OSError):
            os.chdir(folder)  # relative paths mean the same as for the user
        os.environ.update(environment)
        self.out = out
        self.training = training
        self.progress = progress
        self.run: int | None = None
        self.event: tuple[Any, ...] | None = None
        threading.Thread(target=self.report, daemon=True).start()

    def ready(self) -> tuple[str, str]:
        """Return the node of this process."""
        import ray

        return "ready", ray.get_runtime_context().get_node_id()

    def train(self, run: int, spec: "RunSpec") -> tuple[str, str]:
        """Make one attempt at a run."""

        def on_event(*event: Any) -> None:
            self.event = event

        self.run = run
        try:
            return journal.attempt(spec, self.out, on_event=on_event, **self.training)
        finally:
            self.run = None
            self.event = None

    def report(self) -> None:
        """Report the last event twice a second; save and end the run when the sweep stops."""
        import ray

        actor: Any = None
        while True:
            time.sleep(0.5)
            run = self.run
            event = self.event
            self.event = None
            try:
                actor = actor or ray.get_actor(self.progress)
                answer = actor.stopping.remote() if run is None or event is None else actor.tell.remote(run, *event)
                stopped = ray.get(answer, timeout=10)
            except Exception:
                continue  # Ray is restarting the actor
            if stopped and self.run is not None:
                os.kill(os.getpid(), signal.SIGTERM)
                return
