"""Decode uploaded files in a few processes, within limits, and classify them in batches in one thread.

At most `DECODED` decoded pictures wait for the network, whatever the number of requests.
"""

import asyncio
import base64
import contextlib
import io
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from aidgn.errors import AidgnError
from aidgn.inference.explanation import explain, paint
from aidgn.inference.model import Model
from aidgn.serve.decoding import Decoders
from aidgn.serve.errors import RequestError
from aidgn.serve.neighbors import LatentSpace

DECODED = 64
MONITORED = 500  # number of latest pictures that are compared with the training sites
BATCH = 32  # pictures that go through the network together


@dataclass(frozen=True)
class Limits:
    """Limits of one request and of all requests together."""

    megabytes: int = 32  # of a request
    images: int = 16  # in a request
    seconds: int = 30  # of a request
    requests: int = 8  # at a time
    waiting: int = 64  # requests being read or waiting for their turn; more get status 429
    megapixels: int = 64  # of a picture


class Waiting(NamedTuple):
    """A decoded picture that waits for the network, and whether the answer has a heatmap."""

    pixels: np.ndarray
    explain: bool
    future: Future[dict[str, Any]]


class Engine:
    """One model with its training images, used by any number of tasks of one event loop."""

    def __init__(self, model: Model, space: LatentSpace | None, limits: Limits, root_path: str = ""):
        self.model = model
        self.space = space
        self.limits = limits
        self.root_path = root_path
        self.decoders = Decoders(model.slot, limits.megapixels)
        self.room = asyncio.Semaphore(DECODED)
        self.monitor = model.site_monitor(MONITORED)
        self.queue: SimpleQueue[Waiting | None] = SimpleQueue()
        self.worker = threading.Thread(target=self.run_worker, name="model", daemon=True)
        self.worker.start()

    def close(self) -> None:
        self.decoders.close()
        self.queue.put(None)

    async def classify(self, path: Path, name: str, turn: asyncio.Semaphore, explain: bool = False) -> dict[str, Any]:
        """Classify the picture in a file, or report the error in it.

        Args:
            path: The file.
            name: Its name, for the answer.
            turn: Limits how many pictures of a request are decoded at a time, so that requests take turns.
            explain: Whether to add a heatmap that explains the label.
        """
        async with contextlib.AsyncExitStack() as until_answered:
            try:
                async with turn:
                    await until_answered.enter_async_context(self.room)
                    pixels = await self.decoders.decode(path)
            except RequestError as error:
                return {"name": name, "error": {"status": error.status, "message": error.message}}
            future: Future[dict[str, Any]] = Future()
            self.queue.put(Waiting(pixels, explain, future))
            answer: dict[str, Any] = await asyncio.wrap_future(future)
            return {"name": name, **answer}

    # In the thread -----------------------------------------------------------------------------------------------

    def run_worker(self) -> None:
        """Classify waiting pictures, up to a batch at a time, until `close`."""
        # If predictions depend on the other pictures of a batch, a batch must not mix requests.
        most = BATCH if self.model.network.group_size == 1 else 1
        while (first := self.queue.get()) is not None:
            batch = [first]
            with contextlib.suppress(Empty):
                while len(batch) < most:
                    if (more := self.queue.get_nowait()) is None:
                        self.queue.put(None)
                        break
                    batch.append(more)
            waiting = [picture for picture in batch if picture.future.set_running_or_notify_cancel()]
            if not waiting:  # the clients have left
                continue
            try:
                answers = self.answers(waiting)
            except BaseException as error:
                for picture in waiting:
                    picture.future.set_exception(error)
                continue
            for picture, answer in zip(waiting, answers, strict=True):
                picture.future.set_result(answer)

    def answers(self, pictures: Sequence[Waiting]) -> list[dict[str, Any]]:
        prediction = self.model.prediction(self.model.forward([picture.pixels for picture in pictures]))
        if self.monitor is not None and prediction.chances is not None:
            new = [not picture.explain for picture in pictures]  # the others were sent before
            features, logits = prediction.features.numpy(), prediction.logits.numpy()
            self.monitor.add(features[new], logits[new], prediction.chances[new])
        answers = []
        for i, probabilities in enumerate(prediction.probabilities.tolist()):
            answer: dict[str, Any] = {
                "label": prediction.labels[i],
                "probability": max(probabilities),
                "probabilities": dict(zip(prediction.classes, probabilities, strict=True)),
                "chance": None if prediction.chances is None else float(prediction.chances[i]),
                "warning": prediction.warnings[i] if prediction.warnings else None,
                "position": None,
                "nearest": [],
                "heatmap": self.draw_heatmap(pictures[i].pixels) if pictures[i].explain else None,
            }
            if self.space is not None:
                answer["position"], near = self.space.locate(prediction.features[i].numpy())
                answer["nearest"] = [
                    {
                        "index": index,
                        "class": self.model.classes[self.space.labels[index]],
                        "domain": self.model.domains[self.space.domains[index]],
                        "distance": distance,
                        "thumbnail": f"{self.root_path}/api/training/{index}" if self.space.dataset else None,
                    }
                    for index, distance in near
                ]
            answers.append(answer)
        return answers

    def draw_heatmap(self, pixels: np.ndarray) -> str | None:
        """Return the heatmap of a picture's label as a data: URI; None if the network has no positions."""
        try:
            (heat,) = explain(self.model, [pixels])
        except AidgnError:
            return None
        file = io.BytesIO()
        paint(pixels, heat).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
