"""From uploaded files to answers: decoded by a few threads, each under limits, and classified in batches by one.

However many requests come, at most `DECODERS` files are being decoded, of the large ones one, and at most
`DECODED` small decoded pictures wait for the network.
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
from aidgn.inference import image_stream as streaming
from aidgn.inference.model import Model
from aidgn.serve.neighbors import LatentSpace

DECODERS = 2
DECODED = 64
BATCH = 32  # pictures that go through the network together
LARGE = 4_000_000  # pixels; decoded one after the other
# Modes that need few bytes a pixel on their way to RGB. Of others, with transparency or 16-bit grey, fewer are taken.
LEAN = ("1", "L", "P", "RGB", "CMYK", "YCbCr")
OTHERS = 1 / 4  # of the pixels


@dataclass(frozen=True)
class Limits:
    """What one request, and all together, may ask for."""

    megabytes: int = 32  # of a request
    images: int = 16  # in a request
    seconds: int = 30  # from its beginning to the answer
    requests: int = 8  # in work at a time
    waiting: int = 64  # for their turn; more are sent away
    megapixels: int = 64  # of a picture


class RequestError(Exception):
    """An answer that is not what was asked for: an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class Engine:
    """One model and its training images, for any number of tasks of one event loop."""

    def __init__(self, model: Model, space: LatentSpace | None, limits: Limits):
        self.model, self.space, self.limits = model, space, limits
        self.pool = ThreadPoolExecutor(DECODERS, "decoder")
        self.room = asyncio.Semaphore(DECODED)
        self.large = threading.Lock()
        self.queue: SimpleQueue[tuple[np.ndarray, Future[dict[str, Any]]] | None] = SimpleQueue()
        self.worker = threading.Thread(target=self.work, name="model", daemon=True)
        self.worker.start()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.queue.put(None)

    async def classify(self, path: Path, name: str) -> dict[str, Any]:
        """What the model says of the picture in a file, or what is wrong with it."""
        async with self.room:
            try:
                pixels = await asyncio.get_running_loop().run_in_executor(self.pool, self.decode, path)
            except RequestError as refusal:
                return {"name": name, "error": {"status": refusal.status, "message": refusal.sentence}}
            future: Future[dict[str, Any]] = Future()
            self.queue.put((pixels, future))
            answer: dict[str, Any] = await asyncio.wrap_future(future)
            return {"name": name, **answer}

    # In threads --------------------------------------------------------------------------------------------------

    def decode(self, path: Path) -> np.ndarray:
        """Pixels as `aidgn predict` reads them, once the header says that they are not too many."""
        try:
            with open_image(path) as image:
                pixels = image.width * image.height
                lean = image.mode in LEAN and "transparency" not in image.info
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
        most = self.limits.megapixels * (1 if lean else OTHERS)
        if pixels > most * 1e6:
            raise RequestError(
                413,
                f"This picture has too many pixels ({size}): up to {most:g} million are taken"
                f"{'' if lean else ' with transparency or 16-bit grey'}. Make it smaller.",
            )
        with self.large if pixels > LARGE else contextlib.nullcontext():
            [found] = streaming.decode([path], self.model.slot)
        if isinstance(found, AidgnError):
            raise RequestError(422, str(found).replace(str(path), "This picture"))
        return found

    def work(self) -> None:
        """Take what waits, up to a batch of it, through the network, until told to stop."""
        # Where a prediction depends on the pictures beside it, those of others must not be among them.
        most = BATCH if self.model.network.group_size == 1 else 1
        while (first := self.queue.get()) is not None:
            taken = [first]
            with contextlib.suppress(Empty):
                while len(taken) < most:
                    if (more := self.queue.get_nowait()) is None:
                        self.queue.put(None)
                        break
                    taken.append(more)
            waiting = [(pixels, future) for pixels, future in taken if future.set_running_or_notify_cancel()]
            if not waiting:  # whoever asked has gone
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
        found = self.model.prediction(self.model.forward(pictures))
        answers = []
        for i, (label, probabilities) in enumerate(zip(found.labels, found.probabilities.tolist(), strict=True)):
            answer: dict[str, Any] = {
                "label": label,
                "probability": max(probabilities),
                "probabilities": dict(zip(found.classes, probabilities, strict=True)),
                "warning": found.warnings[i] if found.warnings else None,
                "position": None,
                "nearest": [],
            }
            if self.space is not None:
                answer["position"], near = self.space.around(found.features[i].numpy())
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
