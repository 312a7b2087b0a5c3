"""Who may use the server: its own page and programs, but no page of another site."""

import base64
import hashlib
import ipaddress
import re
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aidgn.serve.errors import error_response


class SameOriginMiddleware:
    """Answer requests of the server's own page and of programs, and forbid other pages to use the answers.

    A foreign page can make a browser send requests to this server, under a foreign name (DNS rebinding) or under its
    own (cross-site requests). Host reveals the first: it must be an address or a name of this machine. Origin and
    Sec-Fetch-Site reveal the second.
    """

    def __init__(self, app: ASGIApp, host: str, policy: str):
        self.app = app
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}
        self.headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for key, value in self.headers.items():
                    headers[key] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        reason = self.find_objection(scope, Headers(scope=scope))
        if reason:
            await error_response(403, reason)(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)

    def find_objection(self, scope: Scope, headers: Headers) -> str | None:
        given = headers.get("host", "")
        name = re.sub(r":\d*$", "", given).strip("[]").lower()
        if name not in self.names and not is_address(name):
            return "Use the address of this server or the name of its machine, not another name."
        if headers.get("origin", f"{scope['scheme']}://{given}") != f"{scope['scheme']}://{given}":
            return "Pages of other sites may not use this server."
        if scope["path"].startswith("/api/") and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "Pages of other sites may not use this server."
        return None


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def content_security_policy(page: str) -> str:
    """Return a policy that allows only the page's own style and script, and no requests to other servers."""

    def digest(tag: str) -> str:
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; img-src 'self' "
        "blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
