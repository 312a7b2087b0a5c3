"""Fishr: equal variances of the classifier's gradients in all domains."""

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad, softmax

from aidgn.algorithms.annealed import AnnealedPenalty
from aidgn.algorithms.base import COMMON, Minibatches, join, split
from aidgn.algorithms.search_space import floor_uniform, log_uniform, uniform


class Fishr(AnnealedPenalty):
    """loss = mean_d CE_d + fishr_lambda mean_d mean (v_d - mean_d v_d)^2,   v_d <- ema v_d + (1 - ema) V_d

    V_d is the variance over the domain's samples of the gradient of their cross entropy with respect to every weight of
    the classifier, the inner mean is over these weights. v starts at 0 and enters the penalty divided by 1 - ema, so
    that the gradient, which passes through V, does not depend on ema. The penalty's weight is 0 in the first
    penalty_anneal_iters updates; then Adam starts from zero."""

    title = "equal variances of the classifier's gradients in all domains"
    paper = "Rame et al., ICML 2022"
    trains_on_features = True
    min_domains = 2
    min_batch = 2
    anneal, strength, first_weight = "penalty_anneal_iters", "fishr_lambda", 0.0
    search_space = {
        **COMMON,
        "fishr_lambda": (1000.0, log_uniform(1, 4)),
        "penalty_anneal_iters": (1500, floor_uniform(0, 5000)),
        "ema": (0.95, uniform(0.9, 0.99, most=1.0, below=True)),
    }
    variances: Tensor

    def build(self) -> None:
        self.register_buffer("variances", torch.zeros(self.num_domains, self.num_classes, self.num_features + 1))

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        z = self.features(x)
        logits = self.classifier(z)
        risk = self.risks(logits, minibatches).mean()
        ema = self.hparams.ema
        with torch.set_grad_enabled(self.annealed):
            gradients = split(classifier_gradients(z, logits, y), minibatches)
            smoothed = ema * self.variances + (1 - ema) * torch.stack([variance(domain) for domain in gradients])
            penalty = variance(smoothed / (1 - ema)).mean()
        self.variances.copy_(smoothed.detach())
        return {"loss": risk + self.weight * penalty, "risk": risk, "penalty": penalty}


def variance(values: Tensor) -> Tensor:
    """Return the variance over the first dimension; `Tensor.var` takes a CPU far longer."""
    return (values - values.mean(0)).square().mean(0)


def classifier_gradients(z: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Return d CE / d [weight, bias] of a linear classifier for every sample, [B, C, n + 1].

    The gradient is the outer product of softmax(logits) - one_hot(y) and [z, 1].
    """
    error = softmax(logits, dim=1) - one_hot(y, logits.shape[1])
    return error.unsqueeze(2) * pad(z, (0, 1), value=1.0).unsqueeze(1)
