"""Weight averaging, an option of any algorithm: the averaged weights are evaluated, selected and saved."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from aidgn.errors import UnknownNameError

Weights = list[Tensor]


class WeightAverage(ABC):
    """An average of the weights that a module has during training.

    The trainer calls `after_step` after every step and `after_evaluation` at every evaluation, evaluates and saves
    inside `applied`, and puts `state` into its own state.

    Args:
        module: The module; only parameters with gradients are averaged.
        warm_start: Number of steps at the start that train the head alone and are not averaged.
    """

    needs_validation_loss = False  # whether `after_evaluation` uses the loss on the sources' validation splits

    def __init__(self, module: nn.Module, warm_start: int = 0):
        self.warm_start = warm_start
        self.parameters: Weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.average = _copy(self.parameters)
        self.count = 0  # weights in the average

    @abstractmethod
    def first_step(self, eval_every: int) -> int:
        """Return the earliest step after which the average may hold more than one step."""

    def after_step(self, step: int) -> None:
        """Update the average with the weights after a step of the run."""
        if step > self.warm_start:
            self.add(step - self.warm_start)
        else:
            _mix(self.average, self.parameters, 1.0)

    @abstractmethod
    def add(self, step: int) -> None:
        """Update the average with the weights after a step, counted from the end of the warm start."""

    def after_evaluation(self, validation_loss: float) -> None:  # noqa: B027
        """Update the average with the loss on the sources' validation splits."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the module the averaged weights inside the context."""
        with torch.no_grad():
            trained = _copy(self.parameters)
            torch._foreach_copy_(self.parameters, self.average)
            try:
                yield
            finally:
                torch._foreach_copy_(self.parameters, trained)

    def state(self) -> dict[str, Any]:
        """Return what `load_state` needs to continue."""
        return {"count": self.count, "average": self.average}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        torch._foreach_copy_(self.average, self._on_device(state["average"]))

    def _on_device(self, weights: Weights) -> Weights:
        return [weight.to(parameter.device) for weight, parameter in zip(weights, self.parameters, strict=True)]


class SMA(WeightAverage):
    """The uniform average of the weights after every step from `start` on (Arpit et al., NeurIPS 2022).

    Args:
        module: The module; only parameters with gradients are averaged.
        warm_start: Number of steps at the start that train the head alone.
        start: First step whose weights are averaged, counted from the end of the warm start.
    """

    start = 100

    def __init__(self, module: nn.Module, warm_start: int = 0, start: int | None = None):
        super().__init__(module, warm_start)
        self.start = start or self.start

    def first_step(self, eval_every: int) -> int:
        return self.warm_start + self.start

    def add(self, step: int) -> None:
        self.count = self.count + 1 if step > self.start else 1
        _mix(self.average, self.parameters, 1 / self.count)


class SWAD(WeightAverage):
    """The uniform average over every step of the valley of the validation loss (Cha et al., NeurIPS 2021).

    With the losses l_1, l_2, .. of the evaluations, the valley starts at the first t where l_t is the smallest of
    l_t .. l_(t + n_converge - 1). The mean of these is the loss of the valley. The valley ends before the first t from
    which on n_tolerance losses in a row exceed (1 + tolerance) times that loss. Until the valley starts, the weights
    are those of the last step.
    """

    needs_validation_loss = True
    n_converge, n_tolerance, tolerance = 3, 6, 0.3

    def __init__(self, module: nn.Module, warm_start: int = 0):
        super().__init__(module, warm_start)
        self.segment = _copy(self.parameters)  # the average since the last evaluation
        self.segment_count = 0
        self.waiting: list[dict[str, Any]] = []  # segments that may or may not belong to the valley
        self.limit: float | None = None  # largest loss inside the valley, once it has started
        self.ended = False

    def first_step(self, eval_every: int) -> int:
        return self.warm_start + (self.n_converge - 1) * eval_every

    def add(self, step: int) -> None:
        self.segment_count += 1
        _mix(self.segment, self.parameters, 1 / self.segment_count)
        if self.limit is None:
            _mix(self.average, self.parameters, 1.0)

    def after_evaluation(self, validation_loss: float) -> None:
        if self.segment_count == 0:  # within the warm start
            return
        self.waiting.append({"loss": validation_loss, "weights": _copy(self.segment), "count": self.segment_count})
        self.segment_count = 0
        if self.ended:
            self.waiting.clear()
            return
        if self.limit is None:
            del self.waiting[: -self.n_converge]
            losses = [segment["loss"] for segment in self.waiting]
            if len(losses) < self.n_converge or losses[0] != min(losses):
                return
            self.limit = (1 + self.tolerance) * sum(losses) / len(losses)
            self.count = 0
        inside = 0  # segments in the valley, which reaches to the last loss within the limit
        for number, segment in enumerate(self.waiting, 1):
            if segment["loss"] <= self.limit:
                inside = number
        for segment in self.waiting[:inside]:
            self.count += segment["count"]
            _mix(self.average, segment["weights"], segment["count"] / self.count)
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
        torch._foreach_copy_(self.segment, self._on_device(state["segment"]))
        self.segment_count = state["segment_count"]
        self.waiting = [{**segment, "weights": self._on_device(segment["weights"])} for segment in state["waiting"]]
        self.limit = state["limit"]
        self.ended = state["ended"]


AVERAGES: dict[str, type[WeightAverage]] = {"sma": SMA, "swad": SWAD}


def create_average(name: str, module: nn.Module, warm_start: int = 0) -> WeightAverage:
    """Create the average of this name: `sma`, `swad`, or `sma:N` from step N after the warm start on."""
    method, _, start = name.partition(":")
    if method not in AVERAGES:
        raise UnknownNameError("average", name, AVERAGES)
    return SMA(module, warm_start, int(start)) if start else AVERAGES[method](module, warm_start)


def applied(average: WeightAverage | None) -> AbstractContextManager[None]:
    """Give the module of an average the averaged weights inside the context; change nothing for None."""
    return average.applied() if average else nullcontext()


def _copy(weights: Weights) -> Weights:
    return [weight.detach().clone() for weight in weights]


def _mix(average: Weights, weights: Weights, share: float) -> None:
    """Set average <- (1 - share) average + share weights."""
    torch._foreach_lerp_(average, [weight.detach() for weight in weights], share)
