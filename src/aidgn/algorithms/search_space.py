"""Hyper-parameters: their valid values, defaults, and the distributions that a random search samples from."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aidgn.data.registry import DATASETS, SMALL_SIDE
from aidgn.errors import AidgnError, UnknownNameError, clip

Value = float | int | str | None


class HyperParameterError(AidgnError):
    """A hyper-parameter has a value that cannot be used.

    Args:
        owner: Name of the algorithm.
        name: Name of the hyper-parameter.
        value: The value that was given.
        expected: Description of valid values, such as "a number above 0".
        out_of_range: Whether the value has the right type.
    """

    def __init__(self, owner: str, name: str, value: object, expected: str, out_of_range: bool = False):
        problem = f"is out of range, expected {expected}" if out_of_range else f"is not {expected}"
        super().__init__(f"{owner}: {name}={clip(value)} {problem}.")
        self.name = name
        self.value = value
        self.expected = expected


@dataclass(frozen=True)
class Distribution:
    """A search distribution of a hyper-parameter, and the values that are valid at all.

    Args:
        text: The distribution in words or symbols, for tables.
        sample: Draws a value with a generator.
        kind: Type of the values: float, int or str.
        least: Smallest valid number.
        most: Largest valid number.
        above: Whether numbers must be strictly above `least`.
        below: Whether numbers must be strictly below `most`.
        options: The only valid values; None allows all within the bounds.
        optional: Whether None is valid.
        words: Words that are valid instead of a number.
    """

    text: str
    sample: Callable[[np.random.Generator], Value]
    kind: type = float
    least: float = 0.0
    most: float = math.inf
    above: bool = False
    below: bool = False
    options: tuple[Value, ...] | None = None
    optional: bool = False
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in (float, int, str):
            raise AidgnError(
                f"A hyper-parameter is a number or a word (kind float, int or str), not {self.kind.__name__}; for yes "
                "and no give 0 and 1, or words."
            )

    def __str__(self) -> str:
        return self.text

    def check(self, owner: str, name: str, value: Any) -> Value:
        """Check a value and return it in the type of this hyper-parameter.

        Args:
            owner: Name of the algorithm, for the message.
            name: Name of the hyper-parameter, for the message.
            value: A value, or its text.

        Raises:
            HyperParameterError: The value is not valid.
        """
        if self.optional and (value is None or str(value).lower() == "none"):
            return None
        if value in self.words:
            return str(value)
        try:
            if self.kind is not str and isinstance(value, bool | np.bool_):
                raise ValueError
            typed = self.kind(value)
            if self.kind is int and float(value) != typed:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise HyperParameterError(owner, name, value, self.expected()) from None
        if not self._contains(typed):
            raise HyperParameterError(owner, name, value, self.expected(), out_of_range=True)
        return typed

    def _contains(self, value: Any) -> bool:
        if self.options is not None:
            return value in self.options
        if self.kind is str:
            return True
        above_least = value > self.least if self.above else value >= self.least
        below_most = value < self.most if self.below else value <= self.most
        return math.isfinite(value) and above_least and below_most

    def expected(self) -> str:
        """Describe the valid values."""
        if self.options is not None:
            return "one of " + ", ".join(map(str, self.options))
        text = {float: "a number", int: "a whole number", str: "a word"}[self.kind]
        if self.kind is not str:
            text += f" above {self.least:g}" if self.above else f" of at least {self.least:g}"
            if self.most < math.inf:
                text += f" and below {self.most:g}" if self.below else f" and at most {self.most:g}"
        return " or ".join([text, *self.words, *(["none"] if self.optional else [])])


def uniform(low: float, high: float, **valid: Any) -> Distribution:
    """Sample uniformly from low to high.

    The range limits only the search. A user's values may be larger, unless `valid` has `most` or other bounds of
    `Distribution`. The other functions have the same argument.
    """
    valid = {"least": min(low, 0.0), **valid}
    return Distribution(f"U[{low:g}, {high:g}]", lambda rng: float(rng.uniform(low, high)), **valid)


def log_uniform(low: float, high: float, **valid: Any) -> Distribution:
    """Sample 10 to the power of a uniform exponent."""
    return Distribution(f"10^U[{low:g}, {high:g}]", lambda rng: float(10 ** rng.uniform(low, high)), **valid)


def floor_power(base: int, low: float, high: float, **valid: Any) -> Distribution:
    """Sample the integer part of `base` to the power of a uniform exponent."""
    text = f"floor({base}^U[{low:g}, {high:g}])"
    return Distribution(text, lambda rng: int(base ** rng.uniform(low, high)), kind=int, **valid)


def floor_uniform(low: float, high: float, **valid: Any) -> Distribution:
    """Sample the largest integer below a uniform number."""
    valid = {"least": min(low, 0.0), **valid}
    return Distribution(
        f"floor(U[{low:g}, {high:g}])", lambda rng: math.floor(rng.uniform(low, high)), kind=int, **valid
    )


def one_of(*values: Value, **valid: Any) -> Distribution:
    """Sample one of some values.

    Strings must be one of `values`; numbers may be any within the bounds, integers if all `values` are.
    """
    text = "{" + ", ".join(map(str, values)) + "}"
    return Distribution(text, lambda rng: values[int(rng.integers(len(values)))], **{**_infer_valid(values), **valid})


def fixed(value: Value, **valid: Any) -> Distribution:
    """Do not search: every sample is `value`."""
    return Distribution("fixed", lambda rng: value, **{**_infer_valid([value]), **valid})


def _infer_valid(values: Sequence[Value]) -> dict[str, Any]:
    """Infer type and bounds from values that are valid."""
    known = [value for value in values if value is not None]
    optional = {"optional": True} if len(known) < len(values) else {}
    if any(isinstance(value, bool) for value in known):
        return {"kind": bool}
    if any(isinstance(value, str) for value in known):
        return {"kind": str, "options": tuple(known), **optional}
    kind = int if known and all(isinstance(value, int) for value in known) else float
    return {"kind": kind, "least": min([0.0, *known]), **optional}  # type: ignore[list-item]


SearchSpace = Mapping[str, tuple[Value, Distribution]]  # default and distribution by name

RATE = log_uniform(-5, -3.5, above=True)
SMALL_RATE = log_uniform(-4.5, -2.5, above=True)
# A classifier on frozen features needs a larger rate: with EfficientNet-Lite0 on a tenth of PACS, accuracy on held-out
# images of the sources is close to its final value after 500 steps with rates of 1e-3 and more, but not with 5e-5.
HEAD_RATE = (3e-3, log_uniform(-3.5, -2, above=True))
COMMON: SearchSpace = {
    "lr": (5e-5, RATE),
    "batch_size": (32, floor_power(2, 3, 5.5, least=1)),
    "weight_decay": (0.0, log_uniform(-6, -2)),
    "resnet_dropout": (0.0, one_of(0.0, 0.1, 0.5, most=1.0, below=True)),
}
COMMON_SMALL: SearchSpace = {  # DomainBed's
    "lr": (1e-3, SMALL_RATE),
    "batch_size": (64, floor_power(2, 3, 9, least=1)),
    "weight_decay": (0.0, fixed(0.0)),
    "resnet_dropout": (0.0, fixed(0.0, most=1.0, below=True)),  # these networks have none
}


def adapt_space(
    space: SearchSpace, small_images: SearchSpace, dataset: str, small: bool | None, head: bool
) -> SearchSpace:
    """Return an algorithm's search space for a data set, with the arguments of `Algorithm.space`."""
    adapted = dict(space)
    if small or (small is None and dataset in DATASETS and DATASETS[dataset].image_size <= SMALL_SIDE):
        adapted.update({name: entry for name, entry in COMMON_SMALL.items() if adapted[name] == COMMON[name]})
        adapted.update({name: entry for name, entry in small_images.items() if name in adapted})
    if dataset == "DomainNet" and space["batch_size"] == COMMON["batch_size"]:
        adapted["batch_size"] = (32, floor_power(2, 3, 5, least=1))
    if head:
        adapted["lr"] = HEAD_RATE
    return adapted


def resolve(owner: str, space: SearchSpace, values: Mapping[str, Any]) -> dict[str, Value]:
    """Check values of hyper-parameters, and return them with the defaults of the others."""
    for name in values:
        if name not in space:
            raise UnknownNameError("hyper-parameter", name, space, f"{owner} has: {', '.join(space)}.")
    return {
        name: distribution.check(owner, name, values.get(name, default))
        for name, (default, distribution) in space.items()
    }


def sample_space(space: SearchSpace, *seed: object) -> dict[str, Value]:
    """Sample every hyper-parameter. Each value depends on `seed` and its own name only."""
    values = {}
    for name, (_, distribution) in space.items():
        digest = hashlib.sha256("|".join(map(str, (*seed, name))).encode()).digest()
        values[name] = distribution.sample(np.random.default_rng(int.from_bytes(digest[:8], "big")))
    return values
