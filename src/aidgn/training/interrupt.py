"""Stop a run between two steps, with everything saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Give an event that the first Ctrl-C or SIGTERM sets; the second has its usual effect.

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
