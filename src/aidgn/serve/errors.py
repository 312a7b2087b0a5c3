"""Turn errors of requests into JSON objects with a message."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

RETRY_SECONDS = "3"  # before a client of a busy server tries again


class RequestError(Exception):
    """A request that the server refuses.

    Args:
        status: HTTP status of the answer.
        message: Reason, as a sentence.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
        self.message = message


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    if status in (429, 503):
        headers = {"Retry-After": RETRY_SECONDS}
    return JSONResponse({"error": {"status": status, "message": message}}, status, headers)


def on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error.status, error.message)


def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: "There is nothing here; /api/schema lists all paths.",
        405: f"{request.method} is not possible here; /api/schema lists the methods.",
    }
    return error_response(error.status_code, messages.get(error.status_code, error.detail))


def on_failure(_: Request, error: Exception) -> Response:
    return error_response(500, f"The server failed ({type(error).__name__}). Its terminal shows the error.")
