"""Base classes of algorithms whose objective changes during training: IRM, VREx and Fishr, and EQRM."""

import math
from typing import ClassVar

from torch import Tensor

from aidgn.algorithms.base import Algorithm, Minibatches


class Annealed(Algorithm):
    """An algorithm that trains another objective in its first updates.

    When the objective changes, Adam starts again from zero, because its moments do not fit the new gradients.
    """

    anneal: ClassVar[str]  # hyper-parameter with the number of updates before the full objective

    @property
    def anneal_updates(self) -> int:
        """Number of updates before the full objective."""
        return math.ceil(getattr(self.hparams, self.anneal))

    @property
    def annealed(self) -> bool:
        """Whether the current update has the full objective."""
        return self.updates > self.anneal_updates

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        if self.updates in (0, self.anneal_updates):  # before `updates` counts this one: EQRM's rate depends on it
            self.optimizers = self.build_optimizers()
        return super().update(minibatches)


class AnnealedPenalty(Annealed):
    """An algorithm with a penalty whose weight changes after the first updates."""

    strength: ClassVar[str]  # hyper-parameter with the weight
    first_weight: ClassVar[float] = 1.0  # weight in the first updates

    @property
    def weight(self) -> float:
        """Weight of the penalty in the current update."""
        return getattr(self.hparams, self.strength) if self.annealed else self.first_weight
