"""Invariant risk minimisation: one classifier on top of the features should be optimal in every domain at once."""

import torch
from torch import Tensor
from torch.nn.functional import softmax

from aidgn.algorithms.annealed import AnnealedPenalty
from aidgn.algorithms.base import COMMON, Minibatches, join, split
from aidgn.algorithms.search_space import floor_power, log_uniform


class IRM(AnnealedPenalty):
    """loss = mean_d CE_d + irm_lambda mean_d P_d,   P_d = g_d(even samples) g_d(odd samples),

    g_d = d CE_d(s * logits) / d s at s = 1: P_d is an unbiased estimate of the squared gradient of the domain's risk
    with respect to a factor on the classifier. The weight is 1 in the first irm_penalty_anneal_iters updates; then
    Adam starts from zero."""

    title = "one classifier that is optimal in every domain, by a penalty on its gradient"
    paper = "Arjovsky et al., arXiv:1907.02893, 2019"
    trains_on_features = True
    min_batch = 2
    anneal, strength = "irm_penalty_anneal_iters", "irm_lambda"
    search_space = {
        **COMMON,
        "irm_lambda": (100.0, log_uniform(-1, 5)),
        "irm_penalty_anneal_iters": (500, floor_power(10, 0, 4)),
    }

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        logits = self.predict(x)
        risk = self.risks(logits, minibatches).mean()
        gradients = split(scale_gradients(logits, y), minibatches)
        penalty = torch.stack([domain[::2].mean() * domain[1::2].mean() for domain in gradients]).mean()
        return {"loss": risk + self.weight * penalty, "risk": risk, "penalty": penalty}


def scale_gradients(logits: Tensor, y: Tensor) -> Tensor:
    """Return d CE(s * logits, y) / d s at s = 1 for every sample.

    It is the mean logit under the softmax minus the logit of the true class.
    """
    return (softmax(logits, dim=1) * logits).sum(1) - logits.gather(1, y.unsqueeze(1)).squeeze(1)
