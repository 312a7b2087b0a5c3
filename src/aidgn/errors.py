"""The exceptions whose message users see without a traceback, and helpers that format messages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any


class AidgnError(Exception):
    """A mistake that the user can correct. The message names the file or option at fault and says what to do."""

    exit_code = 2

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and attributes: arguments of subclasses differ, and errors pass between processes."""
        return _rebuild, (type(self), str(self), self.__dict__)


def _rebuild(error_type: type[AidgnError], message: str, attributes: dict[str, Any]) -> AidgnError:
    error = error_type.__new__(error_type, message)
    error.__dict__.update(attributes)
    return error


UserError = AidgnError  # the name in 0.1.0, kept for custom algorithms


class ParameterError(AidgnError):
    """A parameter has a value that cannot be used.

    Args:
        parameter: Name in the Python interface, such as `eval_every`. The command line prints `--eval-every`.
        value: The value that was given.
        expected: Description of valid values, such as "a whole number of at least 1".
    """

    def __init__(self, parameter: str, value: object, expected: str):
        super().__init__(f"{parameter} is {clip(value)}; expected {expected}.")
        self.parameter = parameter
        self.value = value
        self.expected = expected


class UnknownNameError(AidgnError):
    """A name is unknown.

    Args:
        kind: Kind of thing that has a name, such as "algorithm".
        name: The name that was given.
        known: Names that exist.
        advice: A sentence that says how to list or give names.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], advice: str = ""):
        names = list(known)
        super().__init__(f"There is no {kind} {clip(name)}.{did_you_mean(name, names)} {advice}".rstrip())
        self.kind = kind
        self.name = name
        self.known = names


class FormatError(AidgnError):
    """The format of a picture cannot be read here. The message continues after the name of the file."""


class Interrupted(AidgnError):
    """Ctrl-C or SIGTERM stopped the training after it was saved; the same command continues it."""

    exit_code = 130


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean X?' for the nearest known name, or '' if none is near."""
    names = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f" Did you mean {names[near[0]]}?" if near else ""


def some(things: Iterable[object], most: int = 3, separator: str = ", ") -> str:
    """List the first few things and the number of the others, or all things inside `lists_uncut`."""
    names = [str(thing) for thing in things]
    most = len(names) if _uncut.get() else most
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


_uncut = ContextVar("uncut", default=False)


@contextmanager
def lists_uncut(uncut: bool = True) -> Iterator[None]:
    """Let `some` list everything inside the context."""
    token = _uncut.set(uncut)
    try:
        yield
    finally:
        _uncut.reset(token)


def plural(number: int, word: str) -> str:
    """Return '1 run', '2 runs'."""
    return f"{number} {word}" + "s" * (number != 1)


def short(value: object) -> str:
    """Format a number without needless digits, and anything else as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def clip(value: object, most: int = 200) -> str:
    """Return a value as text for a message, cut to a length."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to write such a number
        return "a number with thousands of digits"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def amount(size: float) -> str:
    """Format a number of bytes with a suitable unit."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
