"""Stopping a run between two steps, with everything saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets, so that a run ends between two steps; the second one kills."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before: dict[int, Any] = {}

    def stop(number: int, _frame: object) -> None:
        stopped.set()
        signal.signal(number, before[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for key, handler in before.items():
            signal.signal(key, handler)
