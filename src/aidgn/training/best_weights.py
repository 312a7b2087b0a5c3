"""The weights of the step that training-domain validation selects."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def copy_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a module's state_dict on the same device."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class BestWeights:
    """The best step so far: its number, its accuracy on the validation splits of the sources, and its weights.

    Args:
        keep_last: Keep the last step instead, for a run that trains on all images and has none left to validate with.
    """

    def __init__(self, keep_last: bool = False) -> None:
        self.keep_last = keep_last
        self.reason = "the last" if keep_last else "selected by training-domain validation"
        self.accuracy = -1.0
        self.step = 0
        self.weights: dict[str, Tensor] = {}

    def update(self, accuracy: float, step: int, module: nn.Module) -> None:
        """Keep the weights of the module if the step is better than all earlier ones."""
        if self.keep_last or accuracy > self.accuracy:
            self.accuracy, self.step, self.weights = accuracy, step, copy_weights(module)

    def state(self) -> dict[str, Any]:
        return {"best_accuracy": self.accuracy, "best_step": self.step, "best_weights": self.weights}

    def load_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.accuracy = state["best_accuracy"]
        self.step = state["best_step"]
        self.weights = {name: tensor.to(device) for name, tensor in state["best_weights"].items()}
