"""Weight averaging, an option of any algorithm: the averaged weights are what is evaluated, selected and saved."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aidgn.errors import AidgnError

Weights = list[Tensor]


class SMA:
    """`sma`: the uniform average of the weights after every step from `start` on (Arpit et al., NeurIPS 2022)."""

    needs_validation_loss = False
    start = 100

    def __init__(self, module: nn.Module):
        self.parameters: Weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.count = 0  # weights in the average
        self.average = copies(self.parameters)

    @classmethod
    def begins(cls, eval_every: int) -> int:
        """The step after which the average is one of several steps, at the earliest."""
        return cls.start

    def after_step(self, step: int) -> None:
        self.count = self.count + 1 if step > self.start else 1
        fold_in(self.average, self.parameters, 1 / self.count)

    def after_evaluation(self, validation_loss: float) -> None:
        pass

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module with the averaged weights."""
        with torch.no_grad():
            trained = copies(self.parameters)
            torch._foreach_copy_(self.parameters, self.average)
            try:
                yield
            finally:
                torch._foreach_copy_(self.parameters, trained)

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "average": self.average}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        torch._foreach_copy_(self.average, to_device(state["average"], self.parameters))


class SWAD(SMA):
    """`swad`: the uniform average over every step from the start to the end of the validation-loss valley (Cha et al.,
    NeurIPS 2021). With the losses l_1, l_2, .. of the evaluations, it starts at the first t where l_t is the least of
    l_t .. l_(t + n_converge - 1), whose mean is the valley's loss, and ends before the first t from which n_tolerance
    losses in a row exceed (1 + tolerance) times that. Before it starts, the weights are those of the last step.
    """

    needs_validation_loss = True
    n_converge, n_tolerance, tolerance = 3, 6, 0.3

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.segment, self.segment_count = copies(self.parameters), 0  # the average since the last evaluation
        self.waiting: list[dict[str, Any]] = []  # segments of which it is not known yet whether they are in the valley
        self.limit: float | None = None  # of the loss inside the valley
        self.ended = False

    @classmethod
    def begins(cls, eval_every: int) -> int:
        return (cls.n_converge - 1) * eval_every

    def after_step(self, step: int) -> None:
        self.segment_count += 1
        fold_in(self.segment, self.parameters, 1 / self.segment_count)
        if self.limit is None:
            fold_in(self.average, self.parameters, 1.0)

    def after_evaluation(self, validation_loss: float) -> None:
        self.waiting.append({"loss": validation_loss, "weights": copies(self.segment), "count": self.segment_count})
        self.segment_count = 0
        if self.ended:
            self.waiting.clear()
            return
        if self.limit is None:
            del self.waiting[: -self.n_converge]
            losses = [segment["loss"] for segment in self.waiting]
            if len(losses) < self.n_converge or losses[0] != min(losses):
                return
            self.limit, self.count = (1 + self.tolerance) * sum(losses) / len(losses), 0
        inside = max((n for n, segment in enumerate(self.waiting, 1) if segment["loss"] <= self.limit), default=0)
        for segment in self.waiting[:inside]:
            self.count += segment["count"]
            fold_in(self.average, segment["weights"], segment["count"] / self.count)
        del self.waiting[:inside]
        self.ended = len(self.waiting) >= self.n_tolerance

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "segment": self.segment,
            "segment_count": self.segment_count,
            "waiting": self.waiting,
            "limit": self.limit,
            "ended": self.ended,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        torch._foreach_copy_(self.segment, to_device(state["segment"], self.parameters))
        self.segment_count, self.limit, self.ended = state["segment_count"], state["limit"], state["ended"]
        self.waiting = [{**one, "weights": to_device(one["weights"], self.parameters)} for one in state["waiting"]]


AVERAGES: dict[str, type[SMA]] = {"sma": SMA, "swad": SWAD}


def find_average(name: str) -> type[SMA]:
    """`sma`, `swad`, or `sma:N`, which averages from step N on."""
    if name in AVERAGES:
        return AVERAGES[name]
    if not re.fullmatch("sma:[1-9][0-9]*", name):
        raise AidgnError(
            f"--average {name} is not one of {', '.join(AVERAGES)}, or sma:N with the step N from which on to average."
        )
    return type(name, (SMA,), {"start": int(name[4:])})


def copies(weights: Weights) -> Weights:
    return [weight.detach().clone() for weight in weights]


def fold_in(average: Weights, weights: Weights, share: float) -> None:
    """average <- (1 - share) average + share weights."""
    torch._foreach_lerp_(average, [weight.detach() for weight in weights], share)


def to_device(weights: Weights, like: Weights) -> Weights:
    return [weight.to(parameter.device) for weight, parameter in zip(weights, like, strict=True)]
