"""Algorithms that begin late: IRM, VREx and Fishr with a penalty's weight, EQRM with a quantile."""

import math
from typing import ClassVar

from torch import Tensor

from aidgn.algorithms.base import Algorithm, Minibatches


class Annealed(Algorithm):
    """The first updates, as many as the hyper-parameter `anneal` says, train with another objective; then Adam starts
    anew, as the moments it has gathered do not fit the new gradients."""

    anneal: ClassVar[str]

    @property
    def anneal_updates(self) -> int:
        return math.ceil(self.number(self.anneal))

    @property
    def annealed(self) -> bool:
        """Whether the update being made has the full objective."""
        return self.updates > self.anneal_updates

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        if self.updates in (0, self.anneal_updates):  # before the update is counted, as EQRM's rate goes by the count
            self.optimizers = self.build_optimizers()
        return super().update(minibatches)


class AnnealedPenalty(Annealed):
    """The weight of a penalty is `first_weight` in the first updates, then the hyper-parameter `strength`."""

    strength: ClassVar[str]
    first_weight: ClassVar[float] = 1.0

    @property
    def weight(self) -> float:
        return self.number(self.strength) if self.annealed else self.first_weight
