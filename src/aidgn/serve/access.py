"""Control access to the server: allow its own page and programs, with the token if there is one, no other pages."""

import base64
import hashlib
import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aidgn.errors import AidgnError
from aidgn.serve.errors import error_response

HEALTH = "/api/health"  # needs no token: it tells load balancers how busy the server is, and nothing else
LOGIN = """<!doctype html>
<html lang="en"><meta name="viewport" content="width=device-width"><title>aidgn</title>
<form method="get"><h1>A token, please</h1><p>The server's terminal or its administrator knows the token.</p>
<label>Token <input name="token" type="password" autofocus required></label> <button>Open</button></form></html>"""


@dataclass(frozen=True)
class Access:
    """The addresses of the server, and the token that it asks for."""

    # Host names that requests may use, in addition to IP addresses and the name of this machine
    hosts: tuple[str, ...] = ()
    root_path: str = ""  # path under which a proxy offers the server, such as /aidgn
    # Addresses and networks of proxies, whose X-Forwarded-For and X-Forwarded-Proto name the client
    proxies: tuple[str, ...] = ()
    token: str | None = None  # secret of the clients; None for none

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(/[\w.~-]+)*", self.root_path, re.ASCII) or f"{self.root_path}/".startswith("/api/"):
            raise AidgnError(f"--root-path {self.root_path} is not a path like /aidgn, or begins with /api.")
        for host in self.hosts:
            if not re.fullmatch(r"[\w.-]+", host, re.ASCII) and not is_address(host):
                raise AidgnError(f"--allow-host {host} is not a name like www.example.org, without scheme and port.")
        for proxy in self.proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise AidgnError(f"--trust-proxy needs an address or a network such as 10.0.0.0/8: {error}.") from None
        if self.token is not None and not re.fullmatch(r"[\w.~-]{16,}", self.token, re.ASCII):
            raise AidgnError("--token needs at least 16 characters: letters, digits, and any of - _ . ~")


class AccessMiddleware:
    """Answer requests of the server's page and of programs, and forbid other pages to use the answers.

    A foreign page can make a browser send requests to this server, under a foreign name (DNS rebinding) or under its
    own (cross-site requests). Host reveals the first: it must be an address or a name of this machine. Origin and
    Sec-Fetch-Site reveal the second.

    Programs send the token as `Authorization: Bearer TOKEN`. A browser opens /?token=TOKEN once and gets a cookie.
    """

    def __init__(self, app: ASGIApp, access: Access, policy: str):
        self.app = app
        self.access = access
        self.names = {"localhost", socket.gethostname().lower(), *(host.lower() for host in access.hosts)}
        # Servers on other ports of the machine share cookies, so each has another name for its cookie.
        self.cookie = f"aidgn-{hashlib.sha256((access.token or '').encode()).hexdigest()[:8]}"
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

        root = self.access.root_path
        path = scope["path"]
        if path == root or path.startswith(f"{root}/"):  # a proxy may or may not remove the root
            path = path.removeprefix(root)
        scope = {**scope, "path": root + path, "root_path": root}
        request = Request(scope)
        answer = self.find_objection(request, path) or self.check_token(request, path)
        if not answer and not path:  # the page's addresses are relative
            answer = RedirectResponse(f"{root}/", 303)
        await (answer or self.app)(scope, receive, send_with_headers)

    def find_objection(self, request: Request, path: str) -> Response | None:
        """Return an answer for requests under a foreign name or from a foreign page."""
        headers = request.headers
        scheme = request.scope["scheme"]
        host = headers.get("host", "").removesuffix(":443" if scheme == "https" else ":80")
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if name not in self.names and not is_address(name):
            message = "Use the address of this server or the name of its machine; --allow-host allows other names."
            return error_response(403, message)
        own_origin = f"{scheme}://{host}"
        foreign = path.startswith("/api/") and headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
        if foreign or headers.get("origin", own_origin) != own_origin:
            return error_response(403, "Pages of other sites may not use this server.")
        return None

    def check_token(self, request: Request, path: str) -> Response | None:
        """Return an answer that sets the cookie, or that asks for the token; None for requests that have it."""
        token = self.access.token
        if token is None or path == HEALTH:
            return None

        def is_token(text: str) -> bool:
            return secrets.compare_digest(text.encode(), token.encode())

        root = self.access.root_path
        is_page = path in ("", "/")
        if is_page and is_token(request.query_params.get("token", "")):
            answer = RedirectResponse(f"{root}/", 303)  # the address without the token
            secure = request.scope["scheme"] == "https"
            answer.set_cookie(self.cookie, token, path=root or "/", secure=secure, httponly=True, samesite="lax")
            return answer
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if is_token(request.cookies.get(self.cookie, "")) or (scheme.lower() == "bearer" and is_token(credentials)):
            return None
        if is_page:
            return HTMLResponse(LOGIN, 401)
        message = "This server needs its token: send the header Authorization: Bearer TOKEN."
        return error_response(401, message, {"WWW-Authenticate": "Bearer"})


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
        "blob: data:; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
