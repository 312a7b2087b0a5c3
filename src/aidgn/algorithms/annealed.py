"""Algorithms with a penalty that gets its weight late: IRM, VREx, Fishr and, with a quantile in its place, EQRM."""

import math
from typing import ClassVar

from torch import Tensor

from aidgn.algorithms.base import Algorithm, Minibatches


class Annealed(Algorithm):
    """The first updates, as many as the hyper-parameter `anneal` says, train with a first weight; then the weight is
    the hyper-parameter `strength`, and Adam starts anew, as the moments it has gathered do not fit the new gradients.
    """

    anneal: ClassVar[str]
    strength: ClassVar[str]
    first_weight: ClassVar[float] = 1.0

    @property
    def anneal_updates(self) -> int:
        return math.ceil(self.number(self.anneal))

    @property
    def annealed(self) -> bool:
        """Whether the update being made has the full weight."""
        return self.updates > self.anneal_updates

    @property
    def weight(self) -> float:
        return self.number(self.strength) if self.annealed else self.first_weight

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        if self.updates == self.anneal_updates:
            self.optimizers = self.build_optimizers()
        return super().update(minibatches)
