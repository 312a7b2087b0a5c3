"""Read the files of a request within the limits of size and time."""

import asyncio
import time
from collections.abc import AsyncGenerator

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from aidgn.serve.engine import Limits
from aidgn.serve.errors import RequestError

MIN_RATE = 10_000  # bytes per second of a request body
BODY_GRACE = 5.0  # seconds before the rate counts


async def read_form(request: Request, limits: Limits) -> FormData:
    """Read the files of a request within its limits; large files go to disk."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise RequestError(
            415, "Send the pictures as multipart/form-data, each as a part `images`: curl -F images=@photo.jpg ..."
        )
    most = limits.megabytes * 1_000_000
    too_large = RequestError(413, f"The request is larger than {limits.megabytes} MB. Send fewer or smaller pictures.")

    async def stream() -> AsyncGenerator[bytes, None]:
        began = time.monotonic()
        received = 0
        parts = aiter(request.stream())
        while received <= 2 * most:  # read on beyond the limit, so that the sender gets to see the answer
            allowed = began + BODY_GRACE + received / MIN_RATE - time.monotonic()
            try:
                async with asyncio.timeout(allowed):
                    part = await anext(parts, None)
            except TimeoutError:
                message = f"The request arrives at less than {MIN_RATE // 1000} kB per second."
                raise RequestError(408, message) from None
            if part is None:
                break
            received += len(part)
            if received <= most:
                yield part
        if received > most:
            raise too_large

    if int(request.headers.get("content-length") or 0) > 2 * most:
        raise too_large
    body = stream()
    try:
        return await MultiPartParser(request.headers, body, max_files=limits.images, max_fields=10).parse()
    except (MultiPartException, ValueError) as error:
        async for _ in body:
            pass
        message = str(getattr(error, "message", error))
        if "Too many files" in message:
            raise RequestError(413, f"A request may have {limits.images} pictures. Send them in several.") from None
        raise RequestError(422, f"The request is not valid multipart/form-data: {message}") from None
