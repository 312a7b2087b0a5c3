"""An algorithm of your own: one class in one file.

`aidgn train digits --algorithm examples/own_algorithm.py:SmoothNorms --target ink`
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aidgn.algorithms import COMMON, Algorithm, Minibatches, join, log_uniform, split, uniform


class SmoothNorms(Algorithm):
    """loss = CE against smoothed labels + norm_weight * variance over domains of log mean |f(x)|

    Smoothed labels make the classifier less confident on the source domains. The penalty gives the features of all
    domains the same scale, so that the features of an unseen domain are more likely to have it too.
    """

    title = "label smoothing, and features of one scale in all domains"
    min_domains = 2  # a variance over domains needs two
    search_space = {  # name: (default, search distribution with the valid range)
        **COMMON,
        "smoothing": (0.1, uniform(0, 0.2, most=1.0)),
        "norm_weight": (1.0, log_uniform(-2, 1)),
    }

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)  # one (x, y) per source domain; the network sees all of them at once
        z = self.features(x)
        risk = cross_entropy(self.classifier(z), y, label_smoothing=self.hparams.smoothing)
        norms = torch.stack([domain.norm(dim=1).mean() for domain in split(z, minibatches)])
        penalty = norms.log().var()
        return {"loss": risk + self.hparams.norm_weight * penalty, "risk": risk, "penalty": penalty}
