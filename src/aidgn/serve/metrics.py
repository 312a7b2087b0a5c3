"""Metrics for Prometheus: requests, their time, predicted classes, warnings, and the process."""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREDICT = "/api/predict"


class Metrics:
    """The metrics of one server.

    Args:
        model: Name of the model.
        version: Version of aidgn.
        working: Returns the number of requests whose pictures are classified now.
        waiting: Returns the number of requests that arrive or wait for their turn.
    """

    def __init__(self, model: str, version: str, working: Callable[[], int], waiting: Callable[[], int]):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def make(metric_type: Any, name: str, text: str, *labels: str) -> Any:
            return metric_type(name, text, labels, registry=self.registry)

        self.answers = make(Counter, "aidgn_predict_requests", "Answers of POST /api/predict by status.", "status")
        self.seconds = make(Histogram, "aidgn_predict_seconds", "Time from the header of a request to its answer.")
        self.pictures = make(Counter, "aidgn_pictures", "Classified pictures by predicted class.", "class")
        self.warnings = make(Counter, "aidgn_warnings", "Pictures that got a warning.")
        make(Gauge, "aidgn_working", "Requests whose pictures are classified now.").set_function(working)
        make(Gauge, "aidgn_waiting", "Requests that arrive or wait for their turn.").set_function(waiting)
        make(Gauge, "aidgn_model", "1; the labels name the model.", "name", "version").labels(model, version).set(1)

    def count_picture(self, answer: dict[str, Any]) -> None:
        """Count an answer for one picture, unless it is an error."""
        if "error" not in answer:
            self.pictures.labels(answer["label"]).inc()
            self.warnings.inc(answer["warning"] is not None)

    def send(self, _: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class MetricsMiddleware:
    """Count answers and their time."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.answers.labels(message["status"]).inc()
                self.metrics.seconds.observe(time.perf_counter() - began)
            await send(message)

        counted = scope["type"] == "http" and scope["path"].endswith(PREDICT)
        await self.app(scope, receive, send_and_count if counted else send)
