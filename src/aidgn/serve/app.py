"""The web application: who may ask, how much, and what they get. Every error is a JSON object with a sentence."""

import asyncio
import base64
import hashlib
import ipaddress
import re
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import FormData, Headers, MutableHeaders, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aidgn.inference.model import Model
from aidgn.serve.engine import Engine, Limits, RequestError
from aidgn.serve.neighbors import LatentSpace
from aidgn.serve.schema import schema

PAGE = Path(__file__).with_name("page.html")


def create_app(
    model: Model,
    space: LatentSpace | None = None,
    limits: Limits | None = None,
    *,
    name: str = "model",
    host: str = "127.0.0.1",
    note: str | None = None,
) -> Starlette:
    """The application for one model. host: the name or address it is bound to; note: why there is no `space`."""
    server = Server(model, space, limits or Limits(), name, note)
    page = PAGE.read_text(encoding="utf-8")
    app = Starlette(
        lifespan=server.lifespan,
        exception_handlers={RequestError: refused, HTTPException: http_error, Exception: failed},
        routes=[
            Route("/", lambda _: HTMLResponse(page)),
            Route("/api/predict", server.predict, methods=["POST"]),
            Route("/api/model", server.about),
            Route("/api/training/{index:int}", server.training),
            Route("/api/schema", lambda _: JSONResponse(schema(server.limits))),
            Route("/api/health", server.health),
        ],
    )
    app.add_middleware(SameOriginMiddleware, host=host, policy=policy(page))
    return app


class Server:
    """The requests of one model: how many are in work and wait, and their files."""

    def __init__(self, model: Model, space: LatentSpace | None, limits: Limits, name: str, note: str | None):
        self.model, self.space, self.limits, self.name, self.note = model, space, limits, name, note
        self.working = self.waiting = 0

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.turn = asyncio.Semaphore(self.limits.requests)
        self.engine = Engine(self.model, self.space, self.limits)
        with tempfile.TemporaryDirectory(prefix="aidgn-serve-", ignore_cleanup_errors=True) as folder:
            self.folder = Path(folder)
            yield
            self.engine.close()

    async def predict(self, request: Request) -> Response:
        began = time.monotonic()
        if self.waiting >= self.limits.waiting:
            raise RequestError(429, f"{self.waiting} requests are waiting already. Try again in a few seconds.")
        stage = "waiting"
        try:
            async with asyncio.timeout(self.limits.seconds):
                self.waiting += 1
                try:
                    await self.turn.acquire()
                finally:
                    self.waiting -= 1
                self.working += 1
                try:
                    stage = "reading"
                    form = await self.form(request)
                    stage = "working"
                    try:
                        images = await self.unless_gone(request, self.classify(form))
                    finally:
                        await form.close()
                finally:
                    self.working -= 1
                    self.turn.release()
        except TimeoutError:
            if stage == "reading":
                raise RequestError(408, f"The request was not complete after {self.limits.seconds} seconds.") from None
            raise RequestError(
                503,
                f"There was no answer within {self.limits.seconds} seconds. Try again later, or send "
                "fewer or smaller pictures.",
            ) from None
        except ClientDisconnect:
            images = None
        if images is None:
            return Response(status_code=499)  # nobody is there to read it
        errors = [image["error"]["status"] for image in images if "error" in image]
        status = errors[0] if len(errors) == len(images) else 200
        return JSONResponse({"images": images, "seconds": round(time.monotonic() - began, 3)}, status)

    async def form(self, request: Request) -> FormData:
        """The files of a request, spooled to disk; no more than the limits allow."""
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise RequestError(
                415, "Send the pictures as multipart/form-data, each as a part `images`: curl -F images=@photo.jpg ..."
            )
        most = self.limits.megabytes * 1_000_000
        too_large = RequestError(
            413, f"The request is larger than {self.limits.megabytes} MB. Send fewer or smaller pictures."
        )

        async def stream() -> AsyncGenerator[bytes, None]:
            received = 0
            async for part in request.stream():
                received += len(part)
                if received <= most:
                    yield part
                elif received > 2 * most:  # up to here it is read on, so that the sender gets to see the answer
                    break
            if received > most:
                raise too_large

        if int(request.headers.get("content-length") or 0) > 2 * most:
            raise too_large
        body = stream()
        try:
            return await MultiPartParser(request.headers, body, max_files=self.limits.images, max_fields=10).parse()
        except (MultiPartException, ValueError) as error:
            async for _ in body:
                pass
            message = str(getattr(error, "message", error))
            if "Too many files" in message:
                raise RequestError(
                    413, f"A request may have {self.limits.images} pictures. Send them in several."
                ) from None
            raise RequestError(422, f"The request is not sound multipart/form-data: {message}") from None

    async def classify(self, form: FormData) -> list[dict[str, Any]]:
        uploads = [value for key, value in form.multi_items() if isinstance(value, UploadFile)]
        if not uploads:
            raise RequestError(422, "There is no picture in the request: each is a part `images` with a file name.")
        return await asyncio.gather(*(self.one(upload) for upload in uploads))

    async def one(self, upload: UploadFile) -> dict[str, Any]:
        """The name that the sender gave is only ever sent back."""
        name = upload.filename or "picture"
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            await asyncio.to_thread(shutil.copyfileobj, upload.file, file)
            file.flush()
            return await self.engine.classify(Path(file.name), name)

    async def unless_gone(self, request: Request, work: Any) -> list[dict[str, Any]] | None:
        """The result of work, which ends when the client leaves; None if it has left."""

        async def left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        tasks = asyncio.ensure_future(work), asyncio.ensure_future(left())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()

    def about(self, _: Request) -> Response:
        model, space = self.model, self.space
        points = (
            None
            if space is None
            else [
                [round(float(x), 4), round(float(y), 4), int(label), int(domain)]
                for (x, y), label, domain in zip(space.places, space.labels, space.domains, strict=False)
            ]
        )
        return JSONResponse(
            {
                "name": self.name,
                "algorithm": model.algorithm,
                "classes": model.classes,
                "domains": model.domains,
                "image_size": model.image_size,
                "limits": asdict(self.limits),
                "false_alarms": model.novelty.rate(model.false_alarms) if model.novelty else None,
                "map": points,
                "compared": 0 if space is None else len(space.labels),
                "thumbnails": bool(space and space.dataset),
                "note": self.note,
            }
        )

    def training(self, request: Request) -> Response:
        found = self.space.thumbnail(request.path_params["index"]) if self.space else None
        if found is None:
            raise RequestError(404, "There is no picture of this training image.")
        return Response(found, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "working": self.working, "waiting": self.waiting})


# Who may ask ----------------------------------------------------------------------------------------------------------


class SameOriginMiddleware:
    """Answers only pages of its own, and says in every answer that no other page may use it.

    A foreign page can make the browser ask this server, by its own name for it (DNS rebinding) or by ours (cross-site
    requests). The first shows in Host, which must be an address or a name of this machine, the second in Origin and
    Sec-Fetch-Site."""

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

        reason = self.objection(scope, Headers(scope=scope))
        if reason:
            await error_response(403, reason)(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)

    def objection(self, scope: Scope, headers: Headers) -> str | None:
        given = headers.get("host", "")
        name = re.sub(r":\d*$", "", given).strip("[]").lower()
        if name not in self.names and not is_address(name):
            return "This server is asked for by its address or by the name of its machine, not by another name."
        if headers.get("origin", f"{scope['scheme']}://{given}") != f"{scope['scheme']}://{given}":
            return "Pages of other sites may not ask this server."
        if scope["path"].startswith("/api/") and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "Pages of other sites may not ask this server."
        return None


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def policy(page: str) -> str:
    """A content security policy under which only the page's own style and script run, and nothing is fetched from
    elsewhere."""

    def digest(tag: str) -> str:
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; img-src 'self' "
        "blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


# Errors ---------------------------------------------------------------------------------------------------------------


def error_response(status: int, message: str) -> JSONResponse:
    headers = {"Retry-After": "3"} if status in (429, 503) else None
    return JSONResponse({"error": {"status": status, "message": message}}, status, headers)


def refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error.status, error.sentence)


def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(
        error.status_code,
        {
            404: "There is nothing here; /api/schema says what there is.",
            405: f"{request.method} is not possible here; /api/schema says what is.",
        }.get(error.status_code, error.detail),
    )


def failed(_: Request, error: Exception) -> Response:
    return error_response(500, f"The server failed ({type(error).__name__}). What happened is on its terminal.")
