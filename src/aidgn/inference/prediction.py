"""The results of a model: outputs of its network and predictions."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for N images.

    Attributes:
        labels: The most probable class of each image.
        probabilities: float64 [N, C], in the order of `classes`, calibrated for unseen sites if the model can.
        classes: Names of the classes.
        logits: float32 [N, C], on the CPU.
        features: float32 [N, n], on the CPU: input of the classifier.
        warnings: A reason to doubt the label of each image, or None; None if the model cannot warn.
        chances: Chance that each label is right, float64 [N]; None if it was not measured on unseen sites.
    """

    labels: list[str]
    probabilities: np.ndarray
    classes: list[str]
    logits: Tensor
    features: Tensor
    warnings: list[str | None] | None = None
    chances: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def top(self, k: int) -> list[list[tuple[str, float]]]:
        """Return the k most probable classes of each image with their probabilities, most probable first."""
        order = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :k]
        values = np.take_along_axis(self.probabilities, order, axis=1)
        return [
            [(self.classes[c], p) for c, p in zip(row, ps, strict=True)]
            for row, ps in zip(order.tolist(), values.tolist(), strict=True)
        ]


class Outputs(NamedTuple):
    """Outputs of the network for N images, on the CPU."""

    features: Tensor  # float32 [N, n]
    logits: Tensor  # float32 [N, C]
    norms: Tensor  # norms of the features, float64 [N]
    angles: Tensor  # angles to the vector of the predicted class, float64 [N]


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Compute the softmax of logits / temperature along axis 1 in float64.

    PyTorch's softmax wakes a thread on every core, and each waits 10 ms for more work: a fifth of the cost of
    predicting from files.
    """
    with np.errstate(invalid="ignore"):  # infinite logits give NaN, as in PyTorch
        return special.softmax(logits.astype(np.float64) / temperature, axis=1)
