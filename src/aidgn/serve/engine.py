"""Decode uploaded files in a few threads, within limits, and classify them in batches in one thread.

Whatever the number of requests, at most `DECODERS` files are decoded at a time, among them one large file, and at most
`DECODED` decoded pictures wait for the network.
"""

import asyncio
import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from PIL import Image

from aidgn.data.images import FORMAT_NAMES, open_image
from aidgn.errors import AidgnError
from aidgn.inference import image_stream
from aidgn.inference.model import Model
from aidgn.serve.errors import RequestError
from aidgn.serve.neighbors import LatentSpace

DECODERS = 2
DECODED = 64
BATCH = 32  # pictures that go through the network together
LARGE = 4_000_000  # pixels; decoded one after the other
# Modes that need few bytes per pixel on their way to RGB. Other modes, such as transparency, have a lower limit.
LEAN_MODES = ("1", "L", "P", "RGB", "CMYK", "YCbCr")
OTHER_MODES_SHARE = 1 / 4  # share of the pixel limit for other modes


@dataclass(frozen=True)
class Limits:
    """Limits of one request and of all requests together."""

    megabytes: int = 32  # of a request
    images: int = 16  # in a request
    seconds: int = 30  # of a request
    requests: int = 8  # at a time
    waiting: int = 64  # requests being read or waiting for their turn; more get status 429
    megapixels: int = 64  # of a picture


class Engine:
    """One model and its training images, for any number of tasks of one event loop."""

    def __init__(self, model: Model, space: LatentSpace | None, limits: Limits):
        self.model, self.space, self.limits = model, space, limits
        self.pool = ThreadPoolExecutor(DECODERS, "decoder")
        self.room = asyncio.Semaphore(DECODED)
        self.large = threading.Lock()
        self.queue: SimpleQueue[tuple[np.ndarray, Future[dict[str, Any]]] | None] = SimpleQueue()
        self.worker = threading.Thread(target=self.run_worker, name="model", daemon=True)
        self.worker.start()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.queue.put(None)

    async def classify(self, path: Path, name: str) -> dict[str, Any]:
        """Classify the picture in a file, or report the error in it."""
        async with self.room:
            try:
                pixels = await asyncio.get_running_loop().run_in_executor(self.pool, self.decode, path)
            except RequestError as error:
                return {"name": name, "error": {"status": error.status, "message": error.message}}
            future: Future[dict[str, Any]] = Future()
            self.queue.put((pixels, future))
            answer: dict[str, Any] = await asyncio.wrap_future(future)
            return {"name": name, **answer}

    # In threads --------------------------------------------------------------------------------------------------

    def decode(self, path: Path) -> np.ndarray:
        """Decode a file as `aidgn predict` does, after checking the number of pixels in its header."""
        try:
            with open_image(path) as image:
                pixels = image.width * image.height
                lean = image.mode in LEAN_MODES and "transparency" not in image.info
                size = f"{image.width:,} x {image.height:,}"
        except Image.UnidentifiedImageError:
            if not path.stat().st_size:
                raise RequestError(415, "This file is empty (0 bytes).") from None
            raise RequestError(
                415,
                f"This is not a picture: its content is not {FORMAT_NAMES}, whatever its name says.",
            ) from None
        except Image.DecompressionBombError:
            pixels, lean, size = 1 << 62, True, "by far"
        except Exception as error:  # decoders fail on damaged files with exceptions of every kind
            raise RequestError(422, f"This picture is damaged: {str(error) or type(error).__name__}.") from None
        most = self.limits.megapixels * (1 if lean else OTHER_MODES_SHARE)
        if pixels > most * 1e6:
            raise RequestError(
                413,
                f"This picture has too many pixels ({size}): up to {most:g} million are taken"
                f"{'' if lean else ' with transparency or 16-bit grey'}. Make it smaller.",
            )
        with self.large if pixels > LARGE else contextlib.nullcontext():
            [pixels_or_error] = image_stream.decode([path], self.model.slot)
        if isinstance(pixels_or_error, AidgnError):
            raise RequestError(422, str(pixels_or_error).replace(str(path), "This picture"))
        return pixels_or_error

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
            waiting = [(pixels, future) for pixels, future in batch if future.set_running_or_notify_cancel()]
            if not waiting:  # the clients have left
                continue
            try:
                answers = self.answers([pixels for pixels, _ in waiting])
            except BaseException as error:
                for _, future in waiting:
                    future.set_exception(error)
                continue
            for (_, future), answer in zip(waiting, answers, strict=True):
                future.set_result(answer)

    def answers(self, pictures: list[np.ndarray]) -> list[dict[str, Any]]:
        prediction = self.model.prediction(self.model.forward(pictures))
        answers = []
        for i, probabilities in enumerate(prediction.probabilities.tolist()):
            answer: dict[str, Any] = {
                "label": prediction.labels[i],
                "probability": max(probabilities),
                "probabilities": dict(zip(prediction.classes, probabilities, strict=True)),
                "warning": prediction.warnings[i] if prediction.warnings else None,
                "position": None,
                "nearest": [],
            }
            if self.space is not None:
                answer["position"], near = self.space.locate(prediction.features[i].numpy())
                answer["nearest"] = [
                    {
                        "index": index,
                        "class": self.model.classes[self.space.labels[index]],
                        "domain": self.model.domains[self.space.domains[index]],
                        "distance": distance,
                        "thumbnail": f"/api/training/{index}" if self.space.dataset else None,
                    }
                    for index, distance in near
                ]
            answers.append(answer)
        return answers
