"""Stop a run between two steps, with everything saved; save often enough that a crash loses little."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SAVE_SECONDS = 60.0  # a crash loses at most this much work; less where saving takes under 2 % of the time


class SaveTimer:
    """Tell when to save: after so many seconds, or sooner where saving takes under 2 % of the time."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.interval = seconds
        self.saved = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self.saved > self.interval

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the time that saving takes."""
        began = time.monotonic()
        yield
        self.saved = time.monotonic()
        self.interval = min(self.seconds, 50 * (self.saved - began))


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets; the second has its usual effect.

    Signals reach the main thread only, so that in other threads the event stays unset.
    """
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    previous: dict[int, Any] = {}

    def stop(number: int, _frame: object) -> None:
        stopped.set()
        signal.signal(number, previous[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for restored, handler in previous.items():
            signal.signal(restored, handler)
