"""Places for requests: shared among addresses, and lost by slow senders."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from aidgn.serve.admission import MIN_RATE, Admission, Admitted, network_of
from aidgn.serve.errors import RequestError


def run(scene: Callable[[Callable[..., Admitted]], Awaitable[None]], places: int) -> None:
    """Play a scene in which requests arrive: admit(address, seconds ago, bytes received, complete)."""

    async def play() -> None:
        admission = Admission(places)

        def admit(address: str, ago: float = 0, received: int = 0, complete: bool = False) -> Admitted:
            request = admission.admit(address, asyncio.timeout(60))
            request.timeout = FakeTimeout()  # type: ignore[assignment]
            request.began -= ago
            request.received = received
            request.complete = complete
            return request

        await scene(admit)

    asyncio.run(play())


class FakeTimeout:
    rescheduled = False

    def reschedule(self, when: float) -> None:
        self.rescheduled = when <= asyncio.get_running_loop().time()


def test_one_address_leaves_places_to_others() -> None:
    async def scene(admit: Callable[..., Admitted]) -> None:
        for _ in range(6):
            admit("10.0.0.1", complete=True)
        with pytest.raises(RequestError) as refused:
            admit("10.0.0.1")
        assert refused.value.status == 429
        admit("10.0.0.2", complete=True)
        admit("10.0.0.3", complete=True)
        with pytest.raises(RequestError):
            admit("10.0.0.4")

    run(scene, 8)


def test_the_slowest_sender_gives_way() -> None:
    async def scene(admit: Callable[..., Admitted]) -> None:
        fast = admit("10.0.0.1", ago=4, received=10 * MIN_RATE)
        slow = admit("10.0.0.1", ago=4, received=3 * MIN_RATE)
        slower = admit("10.0.0.2", ago=2, received=0)
        waiting = admit("10.0.0.2", ago=20, received=5, complete=True)
        requests = [fast, slow, slower, waiting]
        admit("10.0.0.3")
        assert [request.evicted for request in requests] == [False, False, True, False]
        admit("10.0.0.3")
        assert [request.evicted for request in requests] == [False, True, True, False]
        assert slow.timeout.rescheduled  # type: ignore[attr-defined]
        with pytest.raises(RequestError):  # nobody is slow
            admit("10.0.0.4")

    run(scene, 4)


def test_an_address_beyond_its_share_evicts_its_own() -> None:
    async def scene(admit: Callable[..., Admitted]) -> None:
        other = admit("2001:db8::1", ago=9)
        own = [admit(f"2001:db8:0:1::{number}", ago=number) for number in range(3)]  # one network
        admit("2001:db8:0:1::ffff")
        assert not other.evicted and [request.evicted for request in own] == [False, False, True]

    run(scene, 4)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.168.1.7", "192.168.1.7"),
        ("::ffff:192.168.1.7", "192.168.1.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_networks(address: str, network: str) -> None:
    assert network_of(address) == network
