"""Standard output and standard error that show control characters in names as codes."""

import logging
import sys
from typing import Any, TextIO, cast

from aidgn.escape import for_terminal

log = logging.getLogger("aidgn")  # of all modules


class SafeStream:
    """A text stream that shows control characters as codes, see `for_terminal`.

    Args:
        stream: The stream, which writes codes for colours and cursor movements if it is used directly.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(for_terminal(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class SafeLog(logging.Filter):
    """Show control characters in log messages as codes, in every process that may write to the terminal."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = for_terminal(record.getMessage())
        record.args = ()
        return True


def protect_streams() -> None:
    """Show control characters as codes in everything that this process prints, tracebacks included."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))


def direct(stream: TextIO) -> TextIO:
    """Return the stream behind a `SafeStream`, for codes of colours, and for output that programs read."""
    return cast(TextIO, getattr(stream, "stream", stream)) if isinstance(stream, SafeStream) else stream
