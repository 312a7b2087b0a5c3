"""Runs that are looked into at a time."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from aidgn.report.latent_view import _take_finished


def test_views_are_taken_in_order_and_counted_as_they_finish() -> None:
    reported: list[int] = []
    release = threading.Event()

    def view(number: int) -> dict[str, int]:
        if number == 0:
            release.wait()
        return {"number": number}

    with ThreadPoolExecutor(2) as pool:
        pending = deque(pool.submit(view, number) for number in range(3))
        for future in (pending[1], pending[2]):
            future.result()
        assert _take_finished(pending, 1, reported.append) == []  # the first is not finished
        assert len(pending) == 3 and not reported
        threading.Timer(0.1, release.set).start()
        assert _take_finished(pending, 0, reported.append) == [{"number": number} for number in range(3)]
        assert not pending and reported == [3]
