"""Run the web application: the socket, the time limit for request headers, and the end of the process."""

import asyncio
import ipaddress
import json
import logging
import resource
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from aidgn.errors import AidgnError
from aidgn.serve.admission import network_of
from aidgn.serve.errors import RETRY_SECONDS

HEADER_SECONDS = 10.0
STOP_SECONDS = 10  # time for pending requests when the server is told to stop
WRITE_SECONDS = 30.0  # time for a client to read the answer
MAX_CONNECTIONS = 256  # connections of one address; with more, those that send nothing are closed


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to an address; port 0 takes a free one."""
    try:
        [family, socket_type, *_, address], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, socket_type)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise AidgnError(
            f"Port {port} of {host} cannot be used: {error.strerror}. Choose another with --port or --host; "
            "--port 0 takes a free one."
        ) from None
    return bound


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_address() -> str:
    """Return the address of this machine in its network; localhost if it is in none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # chooses the network; sends nothing
        except OSError:
            return "localhost"
        return str(probe.getsockname()[0])


def run_server(
    app: ASGIApp, bound: socket.socket, proxies: Sequence[str] = (), header_seconds: float = HEADER_SECONDS
) -> None:
    """Serve an application until SIGINT, SIGTERM or SIGHUP; answer pending requests before the end.

    Args:
        app: The application, from `create_app`.
        bound: The socket, from `listen`.
        proxies: Addresses and networks of proxies.
        header_seconds: Time for the header of a request.
    """

    class Protocol(PatientProtocol):
        seconds = header_seconds
        shared = tuple(map(ipaddress.ip_network, proxies))

    # The application limits requests. A limit on connections would lock everyone out once someone holds that many.
    config = uvicorn.Config(
        app,
        http=Protocol,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=[str(network) for network in Protocol.shared],
        timeout_keep_alive=5,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = PatientServer(config)
    with suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (signal.SIGTERM, signal.SIGHUP):  # the terminal closes; `nohup` ignores the signal
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, server.handle_exit)
    server.run(sockets=[bound])


class PatientServer(uvicorn.Server):
    """Finish cleaning up, which takes seconds at most, when a second Ctrl-C arrives."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)


class PatientProtocol(H11Protocol):
    """HTTP with limited time for the header, for the rest of a refused request and for reading the answer.

    If an address other than a proxy has more than `MAX_CONNECTIONS`, its connections that have sent no header for a
    second are closed. Errors are JSON.
    """

    seconds = HEADER_SECONDS
    shared: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()  # proxies
    deadline: asyncio.TimerHandle | None = None
    waiting_since: float | None = None  # for a header
    refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.network = network_of(self.client[0] if self.client else "")
        self.expect_header()
        mine = [other for other in self.connections if getattr(other, "network", None) == self.network]
        if len(mine) > MAX_CONNECTIONS and not self.is_proxy():
            now = self.loop.time()
            for other in mine:
                assert isinstance(other, PatientProtocol)
                if other.waiting_since is not None and now - other.waiting_since > 1:
                    other.refuse(429, f"There are more than {MAX_CONNECTIONS} connections from this address.")

    def is_proxy(self) -> bool:
        return self.client is not None and any(ipaddress.ip_address(self.client[0]) in net for net in self.shared)

    def data_received(self, data: bytes) -> None:
        if not self.refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):  # the application has the request
            self.set_deadline(None)
            self.waiting_since = None

    def on_response_complete(self) -> None:
        self.expect_header()  # also the end of a body that nobody reads
        super().on_response_complete()

    def expect_header(self) -> None:
        self.waiting_since = self.loop.time()
        self.set_deadline(self.seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self.set_deadline(None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.set_deadline(WRITE_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.set_deadline(None if self.waiting_since is None else self.seconds)

    def set_deadline(self, seconds: float | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = None if seconds is None else self.loop.call_later(seconds, self.end)

    def end(self) -> None:
        """Close a connection that took too long."""
        if self.flow.write_paused:  # the client does not read
            self.transport.abort()
        elif self.conn.our_state is h11.IDLE and self.conn.trailing_data[0] and not self.refused:
            self.refuse(408, f"The header of the request was not complete after {self.seconds:g} seconds.")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, msg)

    def refuse(self, status: int, message: str) -> None:
        """Answer instead of the application, and close soon. Closing at once could lose the answer."""
        self.refused = True
        self.waiting_since = None
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": {"status": status, "message": message}}).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
            headers += [("connection", "close"), ("cache-control", "no-store")]
            headers += [("retry-after", RETRY_SECONDS)] if status == 429 else []
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.write_eof()
        self.set_deadline(1)
