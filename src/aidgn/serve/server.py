"""Run the web application: the socket, the time limit for request headers, and the end of the process."""

import asyncio
import ipaddress
import json
import logging
import resource
import signal
import socket
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from aidgn.errors import AidgnError

HEADER_SECONDS = 10.0


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


def run_server(app: ASGIApp, bound: socket.socket, header_seconds: float = HEADER_SECONDS) -> None:
    """Serve an application until SIGINT, SIGTERM or SIGHUP.

    Args:
        app: The application, from `create_app`.
        bound: The socket, from `listen`.
        header_seconds: Time for the header of a request.
    """

    class Protocol(HeaderTimeoutProtocol):
        seconds = header_seconds

    # The application limits requests. A limit on connections would lock everyone out once someone holds that many.
    config = uvicorn.Config(
        app,
        http=Protocol,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
    )
    server = PatientServer(config)
    with suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal closes; `nohup` ignores the signal
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run(sockets=[bound])


class PatientServer(uvicorn.Server):
    """Finish cleaning up, which takes seconds at most, when a second Ctrl-C arrives."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)


class HeaderTimeoutProtocol(H11Protocol):
    """HTTP that closes connections whose request header does not arrive in time, and reports errors as JSON."""

    seconds = HEADER_SECONDS
    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.expect_header()

    def on_response_complete(self) -> None:
        self.expect_header()
        super().on_response_complete()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:  # the header is complete
            self.cancel_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self.cancel_deadline()
        super().connection_lost(exc)

    def expect_header(self) -> None:
        self.cancel_deadline()
        self.deadline = self.loop.call_later(self.seconds, self.transport.close)

    def cancel_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"error": {"status": 400, "message": msg}}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
