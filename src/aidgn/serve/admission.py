"""Limit the requests that are read and answered at a time, so that no sender keeps others out."""

import asyncio
import ipaddress
import math
from dataclasses import dataclass, field

from aidgn.serve.errors import RequestError

MIN_RATE = 10_000  # bytes per second of a request body
BODY_GRACE = 5.0  # seconds before the rate counts
ADDRESS_SHARE = 3 / 4  # share of the places that one address may have
LATE = 0.1  # seconds behind the minimum rate after which a request loses its place to another


@dataclass(eq=False)
class Admitted:
    """A request with a place, from its header to its answer."""

    network: str  # its sender, from `network_of`
    timeout: asyncio.Timeout  # ends the request
    # Time of its header, by the clock of the event loop
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    received: int = 0  # bytes of its body so far
    complete: bool = False  # whether its body is complete
    evicted: bool = False  # whether it lost its place to another request

    @property
    def due(self) -> float:
        """Time at which a sender at the minimum rate would have sent the same number of bytes."""
        return self.began + self.received / MIN_RATE


class Admission:
    """The places of a server.

    If all places are taken, or all places of one address, a new request takes the place of the request that arrives
    most slowly. If none is slow, the new request is refused.
    """

    def __init__(self, places: int):
        self.places = places
        self.per_network = math.ceil(places * ADDRESS_SHARE)
        self.requests: set[Admitted] = set()

    def admit(self, address: str, timeout: asyncio.Timeout) -> Admitted:
        """Give a request a place, which `requests.discard` ends.

        Args:
            address: Address of the sender.
            timeout: Ends the request if it loses its place.
        """
        request = Admitted(network_of(address), timeout)
        rivals = [other for other in self.requests if other.network == request.network]
        if len(rivals) < self.per_network:
            rivals = list(self.requests)
            if len(rivals) < self.places:
                self.requests.add(request)
                return request
        slowest = min((other for other in rivals if not other.complete), key=lambda other: other.due, default=None)
        if slowest is None or request.began - slowest.due < LATE:
            raise RequestError(429, f"{len(rivals)} requests are here already. Try again in a few seconds.")
        slowest.evicted = True
        slowest.timeout.reschedule(request.began)
        self.requests.discard(slowest)
        self.requests.add(request)
        return request


def network_of(address: str) -> str:
    """Return the network of one sender: an IPv4 address, or the first half of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket, a test
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
        return str(parsed.ipv4_mapped)
    return address
