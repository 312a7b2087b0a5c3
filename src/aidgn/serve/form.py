"""Read the files of a request within the limits of size and time."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from aidgn.serve.admission import BODY_GRACE, MIN_RATE, Admitted
from aidgn.serve.engine import Limits
from aidgn.serve.errors import RequestError


async def read_form(request: Request, limits: Limits, admitted: Admitted) -> FormData:
    """Read the files of a request within its limits; large files go to disk."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise RequestError(
            415, "Send the pictures as multipart/form-data, each as a part `images`: curl -F images=@photo.jpg ..."
        )
    most = limits.megabytes * 1_000_000
    too_large = RequestError(413, f"The request is larger than {limits.megabytes} MB. Send fewer or smaller pictures.")

    async def stream() -> AsyncGenerator[bytes, None]:
        parts = aiter(request.stream())
        while True:
            try:
                async with asyncio.timeout_at(admitted.due + BODY_GRACE):
                    part = await anext(parts, None)
            except TimeoutError:
                if admitted.evicted:
                    raise
                message = f"The request arrives at less than {MIN_RATE // 1000} kB per second."
                raise RequestError(408, message) from None
            if part is None:
                return
            admitted.received += len(part)
            if admitted.received > most:
                raise too_large
            yield part

    if int(request.headers.get("content-length") or 0) > most:
        raise too_large
    try:
        return await MultiPartParser(request.headers, stream(), max_files=limits.images, max_fields=10).parse()
    except (MultiPartException, ValueError) as error:
        message = str(getattr(error, "message", error))
        if "Too many files" in message:
            raise RequestError(413, f"A request may have {limits.images} pictures. Send them in several.") from None
        raise RequestError(422, f"The request is not valid multipart/form-data: {message}") from None
