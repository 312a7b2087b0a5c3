"""An algorithm of your own: one class in one file.

aidgn train digits --algorithm examples/own_algorithm.py:SmoothNorms --target ink
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, join, split
from aidgn.algorithms.search_space import SearchSpace, log_uniform, uniform


class SmoothNorms(Algorithm):
    """loss = CE over all samples against smoothed labels + norm_weight * variance over domains of log mean |f(x)|

    Smoothed labels keep the classifier from being too sure of itself on the domains it knows; the penalty keeps the
    domains' features at one scale, so that an unseen domain's are more likely to be at it too."""

    title = "label smoothing, and features of the same size in all domains"
    min_domains = 2  # a variance over domains needs two
    search_space: ClassVar[SearchSpace] = {  # name: (default, what a random search draws from and what is valid)
        **COMMON,
        "smoothing": (0.1, uniform(0, 0.2, most=1.0)),
        "norm_weight": (1.0, log_uniform(-2, 1)),
    }

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)  # one (x, y) per source domain; all of them go through the network at once
        z = self.features(x)
        risk = cross_entropy(self.classifier(z), y, label_smoothing=self.number("smoothing"))
        norms = torch.stack([each.norm(dim=1).mean() for each in split(z, minibatches)])
        penalty = norms.log().var()
        return {"loss": risk + self.number("norm_weight") * penalty, "risk": risk, "penalty": penalty}
