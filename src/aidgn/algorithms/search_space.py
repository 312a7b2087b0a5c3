"""Hyper-parameters: what values one may take, its default, and the distribution that a random search draws from."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aidgn.errors import AidgnError, did_you_mean

Value = float | int | str | None


@dataclass(frozen=True)
class Distribution:
    """A search distribution (`draw`, described by `text`) and the values that make sense at all."""

    text: str
    draw: Callable[[np.random.Generator], Value]
    kind: type = float
    least: float = 0.0
    most: float = math.inf
    above: bool = False  # strictly above `least`
    below: bool = False  # strictly below `most`
    options: tuple[Value, ...] | None = None  # the only values that are possible
    optional: bool = False  # None is a value

    def __post_init__(self) -> None:
        if self.kind not in (float, int, str):
            raise AidgnError(
                f"A hyper-parameter is a number or a word (kind float, int or str), not "
                f"{self.kind.__name__}; for yes and no give 0 and 1, or words."
            )

    def check(self, owner: str, name: str, value: Any) -> Value:
        """`value` as this hyper-parameter's type, or an error that says what was expected."""
        if self.optional and (value is None or str(value).lower() == "none"):
            return None
        expected = self.expected()
        try:
            if self.kind is not str and isinstance(value, bool | np.bool_):
                raise ValueError
            typed = self.kind(value)
            if self.kind is int and float(value) != typed:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise AidgnError(f"{owner}: {name}={value} is not {expected}.") from None
        if self.options is not None:
            inside = typed in self.options
        elif self.kind is str:
            inside = True
        else:
            inside = (
                math.isfinite(typed)
                and self.least <= typed <= self.most
                and not (self.above and typed == self.least)
                and not (self.below and typed == self.most)
            )
        if not inside:
            raise AidgnError(f"{owner}: {name}={value} is out of range, expected {expected}.")
        return typed

    def expected(self) -> str:
        if self.options is not None:
            return "one of " + ", ".join(map(str, self.options))
        words = {float: "a number", int: "a whole number", str: "a word"}[self.kind]
        if self.kind is not str:
            words += f" {'above' if self.above else 'of at least'} {self.least:g}"
            words += f" and {'below' if self.below else 'at most'} {self.most:g}" if self.most < math.inf else ""
        return words + (" or none" if self.optional else "")


def uniform(low: float, high: float, **valid: Any) -> Distribution:
    return Distribution(
        f"U[{low:g}, {high:g}]", lambda rng: float(rng.uniform(low, high)), **{"least": min(low, 0.0), **valid}
    )


def log_uniform(low: float, high: float, **valid: Any) -> Distribution:
    """10 to the power of a uniform exponent."""
    return Distribution(f"10^U[{low:g}, {high:g}]", lambda rng: float(10 ** rng.uniform(low, high)), **valid)


def floor_power(base: int, low: float, high: float, **valid: Any) -> Distribution:
    """The whole part of `base` to the power of a uniform exponent."""
    return Distribution(
        f"floor({base}^U[{low:g}, {high:g}])", lambda rng: int(base ** rng.uniform(low, high)), kind=int, **valid
    )


def floor_uniform(low: float, high: float, **valid: Any) -> Distribution:
    return Distribution(
        f"floor(U[{low:g}, {high:g}])",
        lambda rng: math.floor(rng.uniform(low, high)),
        kind=int,
        **{"least": min(low, 0.0), **valid},
    )


def one_of(*values: Value, **valid: Any) -> Distribution:
    """Of words no others are possible; numbers may be any between the bounds, whole if all of these are."""
    return Distribution(
        "{" + ", ".join(map(str, values)) + "}",
        lambda rng: values[int(rng.integers(len(values)))],
        **{**_suiting(values), **valid},
    )


def fixed(value: Value, **valid: Any) -> Distribution:
    """Not searched: every draw is `value`."""
    return Distribution("fixed", lambda rng: value, **{**_suiting([value]), **valid})


def _suiting(values: Sequence[Value]) -> dict[str, Any]:
    """What follows from values that are possible."""
    known = [value for value in values if value is not None]
    optional = {"optional": True} if len(known) < len(values) else {}
    if any(isinstance(value, bool) for value in known):
        return {"kind": bool}
    if any(isinstance(value, str) for value in known):
        return {"kind": str, "options": tuple(known), **optional}
    kind = int if known and all(isinstance(value, int) for value in known) else float
    return {"kind": kind, "least": min([0.0, *known]), **optional}  # type: ignore[list-item]


SearchSpace = Mapping[str, tuple[Value, Distribution]]


def resolve(owner: str, space: SearchSpace, given: Mapping[str, Any]) -> dict[str, Value]:
    """Defaults of `space` with `given` over them, every value checked."""
    for name in given:
        if name not in space:
            raise AidgnError(
                f"{owner} has no hyper-parameter {name}.{did_you_mean(name, space)} It has: {', '.join(space)}."
            )
    return {
        name: distribution.check(owner, name, given.get(name, default))
        for name, (default, distribution) in space.items()
    }


def draw_all(space: SearchSpace, *identity: object) -> dict[str, Value]:
    """One random draw of every hyper-parameter; each depends on `identity` and its own name only."""
    values = {}
    for name, (_, distribution) in space.items():
        digest = hashlib.sha256("|".join(map(str, (*identity, name))).encode()).digest()
        values[name] = distribution.draw(np.random.default_rng(int.from_bytes(digest[:8], "big")))
    return values
