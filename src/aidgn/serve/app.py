"""The web application: its routes, and the requests that they answer."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import aidgn
from aidgn import hub
from aidgn.data.images import FORMAT_NAMES
from aidgn.errors import AidgnError
from aidgn.files import for_json, temporary_folder
from aidgn.inference import Model, find_model, load_model
from aidgn.runs.folder import RunFolder
from aidgn.serve.access import Access, AccessMiddleware, content_security_policy
from aidgn.serve.admission import LATE, Admission, Admitted
from aidgn.serve.decoding import FAST_DECODERS, OTHER_MODES_SHARE
from aidgn.serve.engine import Engine, Limits
from aidgn.serve.errors import RequestError, on_failure, on_http_error, on_request_error
from aidgn.serve.form import read_form
from aidgn.serve.metrics import Metrics, MetricsMiddleware
from aidgn.serve.neighbors import LatentSpace, build_latent_space

PAGE = Path(__file__).with_name("page.html")
INTERFACE = Path(__file__).with_name("openapi.yaml")
WAITS = 6  # times that a request waits `LATE` seconds for a place; others that wait may take the first free one


def create_app(
    model: Model,
    space: LatentSpace | None = None,
    limits: Limits | None = None,
    *,
    name: str = "model",
    access: Access | None = None,
    note: str | None = None,
) -> Starlette:
    """Create the application for one model.

    Args:
        model: From `aidgn.load_model`.
        space: Training images for the map and the nearest neighbours, from `build_latent_space`.
        limits: Limits of requests.
        name: Name of the model on the page.
        access: The addresses and the token of the server.
        note: Reason for a missing `space`, shown on the page.
    """
    access = access or Access()
    server = Server(model, space, limits or Limits(), name, note, access.root_path)
    page = PAGE.read_text(encoding="utf-8")
    app = Starlette(
        lifespan=server.lifespan,
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_error, Exception: on_failure},
        routes=[
            Route("/", lambda _: HTMLResponse(page)),
            Route("/api/predict", server.predict, methods=["POST"]),
            Route("/api/model", server.describe_model),
            Route("/api/site", server.describe_site),
            Route("/api/training/{index}", server.send_thumbnail),
            Route("/api/schema", lambda _: JSONResponse(describe_interface(server.limits))),
            Route("/api/health", server.health),
            Route("/metrics", server.metrics.send),
        ],
    )
    app.add_middleware(AccessMiddleware, access=access, policy=content_security_policy(page))
    app.add_middleware(MetricsMiddleware, metrics=server.metrics)
    return app


def load_app(
    model: str | Path,
    *,
    access: Access | None = None,
    data: str | Path | None = None,
    map_images: int = 500,
    algorithm: str | None = None,
    device: str = "auto",
    limits: Limits | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> Starlette:
    """Load a model with its training images and create the application for it.

    Args:
        model: The folder of a finished run or of `aidgn fit`, an exported .safetensors file, or hf://user/name.
        access: The addresses and the token of the server.
        data: Folder of the training images, if they have moved.
        map_images: Number of training images on the map; 0: no map.
        algorithm: path/to/file.py:Class of a custom algorithm.
        device: Device of the model.
        limits: Limits of requests.
        on_progress: Receives a description, the number of images so far and their total.
        on_warning: Receives the reason if there can be no map.
    """
    path = find_model(model)
    loaded = load_model(path, device, algorithm)
    space = None
    note = None
    if map_images:
        try:
            space = build_latent_space(path, loaded, map_images, data, on_progress)
        except AidgnError as error:
            if data is not None:
                raise
            note = "they are not available; the server's terminal says why."  # the reason may name local folders
            if on_warning:
                on_warning(f"No map of training images: {error}")
    return create_app(loaded, space, limits, name=name_model(model), access=access, note=note)


def name_model(path: str | Path) -> str:
    """Return the name of a model's folder or file, skipping names that all models have."""
    if hub.is_address(path):
        return hub.parse(str(path))[0]
    path = Path(path).resolve()
    while path.name in ("model", RunFolder(path).model.name, RunFolder(path).export.name):
        path = path.parent
    return path.name.removesuffix(".safetensors")


def describe_interface(limits: Limits) -> dict[str, Any]:
    """Return the description of the JSON endpoint in OpenAPI, for people and for generators of clients."""
    other_megapixels = f"{limits.megapixels * OTHER_MODES_SHARE:g}"
    values = {"version": aidgn.__version__, "formats": FORMAT_NAMES, "other_megapixels": other_megapixels}
    text = Template(INTERFACE.read_text(encoding="utf-8")).substitute(values, **asdict(limits))
    return {**yaml.safe_load(text), "x-limits": asdict(limits)}


@dataclass(eq=False)
class Server:
    """Answer the requests for one model, a limited number at a time."""

    model: Model
    space: LatentSpace | None
    limits: Limits
    name: str
    note: str | None
    root_path: str
    working: int = 0  # requests whose pictures are classified now

    def __post_init__(self) -> None:
        self.admission = Admission(self.limits.waiting + self.limits.requests)
        self.metrics = Metrics(self.name, aidgn.__version__, lambda: self.working, self.count_waiting)

    def count_waiting(self) -> int:
        return len(self.admission.requests) - self.working

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.turn = asyncio.Semaphore(self.limits.requests)
        self.engine = Engine(self.model, self.space, self.limits, self.root_path)
        with temporary_folder("aidgn-serve-") as self.folder:
            yield
            self.engine.close()

    async def predict(self, request: Request) -> Response:
        began = time.monotonic()
        explain = request.query_params.get("explain") == "1"
        images = None
        admitted = None
        try:
            async with asyncio.timeout(self.limits.seconds) as timeout, AsyncExitStack() as cleanup:
                admitted = await self.admit(request, timeout)
                cleanup.callback(self.admission.requests.discard, admitted)
                form = await read_form(request, self.limits, admitted)
                cleanup.push_async_callback(form.close)
                admitted.complete = True
                images = await self.run_until_disconnect(request, self.classify(form, explain))
        except TimeoutError:
            raise self.timeout_error(admitted) from None
        except ClientDisconnect:
            pass
        if images is None:
            return Response(status_code=499)  # the client has left
        for image in [] if explain else images:  # such pictures were sent before
            self.metrics.count_picture(image)
        errors = [image["error"]["status"] for image in images if "error" in image]
        status = errors[0] if len(errors) == len(images) else 200
        return JSONResponse({"images": images, "seconds": round(time.monotonic() - began, 3)}, status)

    async def admit(self, request: Request, timeout: asyncio.Timeout) -> Admitted:
        """Give a request a place. If all are taken, wait until the slow requests can be recognised."""
        address = request.client.host if request.client else ""
        for _ in range(WAITS):
            with suppress(RequestError):
                return self.admission.admit(address, timeout)
            await asyncio.sleep(LATE)
        return self.admission.admit(address, timeout)

    def timeout_error(self, admitted: Admitted | None) -> RequestError:
        if admitted is None or admitted.complete:
            message = f"There was no answer within {self.limits.seconds} seconds. Try again later, or send fewer"
            return RequestError(503, f"{message} or smaller pictures.")
        if admitted.evicted:
            return RequestError(429, "Others took the place of this request, which arrived slowly. Try again later.")
        return RequestError(408, f"The request was not complete after {self.limits.seconds} seconds.")

    async def classify(self, form: FormData, explain: bool) -> list[dict[str, Any]]:
        uploads = [value for key, value in form.multi_items() if isinstance(value, UploadFile)]
        if not uploads:
            raise RequestError(422, "There is no picture in the request: each is a part `images` with a file name.")
        async with self.turn:  # after reading, so that slow senders keep nobody waiting
            self.working += 1
            try:
                turn = asyncio.Semaphore(FAST_DECODERS)
                return await asyncio.gather(*(self.classify_file(upload, turn, explain) for upload in uploads))
            finally:
                self.working -= 1

    async def classify_file(self, upload: UploadFile, turn: asyncio.Semaphore, explain: bool) -> dict[str, Any]:
        """Classify an uploaded file. The sender's name of the file is only repeated in the answer."""
        name = upload.filename or "picture"
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            await asyncio.to_thread(shutil.copyfileobj, upload.file, file)
            file.flush()
            return await self.engine.classify(Path(file.name), name, turn, explain)

    async def run_until_disconnect(self, request: Request, work: Any) -> list[dict[str, Any]] | None:
        """Run `work`, and cancel it and return None if the client leaves first."""

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

    def describe_model(self, _: Request) -> Response:
        model, space = self.model, self.space
        points = None
        if space is not None:
            rows = zip(space.positions, space.labels, space.domains, strict=False)
            points = [
                [round(float(x), 4), round(float(y), 4), int(label), int(domain)] for (x, y), label, domain in rows
            ]
        return JSONResponse(
            {
                "name": self.name,
                "algorithm": model.algorithm,
                "classes": model.classes,
                "domains": model.domains,
                "image_size": model.image_size,
                "limits": asdict(self.limits),
                "false_alarms": model.novelty.false_alarm_rate(model.false_alarms) if model.novelty else None,
                "warned": model.expectations.mean("warned") if model.expectations else None,
                "expected": model.expectations.accuracies.describe() if model.expectations else None,
                "map": points,
                "compared": 0 if space is None else len(space.labels),
                "thumbnails": bool(space and space.dataset),
                "note": self.note,
            }
        )

    async def describe_site(self, _: Request) -> Response:
        """Say how the latest pictures of all requests compare with the training sites."""
        monitor = self.engine.monitor
        report = None if monitor is None else await asyncio.to_thread(monitor.report)
        return JSONResponse({"site": None if report is None else for_json(report.to_dict())})

    def send_thumbnail(self, request: Request) -> Response:
        index = request.path_params["index"]
        picture = None
        if self.space and len(index) < 10 and index.isascii() and index.isdecimal():
            picture = self.space.thumbnail(int(index))
        if picture is None:
            raise RequestError(404, "There is no picture of this training image.")
        return Response(picture, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "working": self.working, "waiting": self.count_waiting()})
