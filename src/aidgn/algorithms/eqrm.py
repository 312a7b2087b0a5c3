"""Empirical quantile risk minimisation: minimise a risk that most domains will stay below."""

from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from aidgn.algorithms.annealed import Annealed
from aidgn.algorithms.base import COMMON, Minibatches, risks
from aidgn.algorithms.search_space import SearchSpace, log_uniform, uniform

PARTS, ROUNDS = 16, 8  # the quantile is found as by 32 bisections, in a quarter of the kernels


class EQRM(Annealed):
    """loss = the eqrm_quantile quantile of a Gaussian kernel density estimate of CE_1 .. CE_N

    with bandwidth 1.06 std(CE) N^(-1/5) (Silverman's rule for a normal density). In the first eqrm_burnin_iters updates
    the loss is mean_d CE_d; then Adam starts anew with rate eqrm_lr."""

    title = "minimise a quantile of the domains' risks instead of their mean"
    paper = "Eastwood et al., NeurIPS 2022"
    min_domains = 2
    anneal = "eqrm_burnin_iters"
    search_space: ClassVar[SearchSpace] = {
        **COMMON,
        "eqrm_quantile": (0.75, uniform(0.5, 0.99, most=1.0, above=True, below=True)),
        "eqrm_burnin_iters": (2500, log_uniform(2.5, 3.5)),
        "eqrm_lr": (1e-6, log_uniform(-7, -5, above=True)),
    }

    def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        rate = "eqrm_lr" if self.updates >= self.anneal_updates else "lr"
        return {"main": self.adam([self.featurizer, self.classifier], lr=rate)}

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        each = risks(self.apart(self.predict, [x for x, _ in minibatches]), minibatches)
        loss = quantile(each, self.number("eqrm_quantile")) if self.annealed else each.mean()
        return {"loss": loss, "risk": each.mean()}


def quantile(values: Tensor, alpha: float) -> Tensor:
    """The alpha-quantile of the Gaussian kernel density estimate of `values`, by dividing between those of the outer
    two kernels. Its gradient is, as DomainBed's, that of the point found on the line between these two ends."""
    bandwidth = 1.06 * values.std() * len(values) ** -0.2
    reach = bandwidth * NormalDist().inv_cdf(alpha)
    low, high = values.min() + reach, values.max() + reach
    with torch.no_grad():
        share, width = torch.zeros_like(low), 1.0
        borders, h = torch.arange(1, PARTS, dtype=low.dtype, device=low.device), bandwidth.clamp_min(1e-12)
        for _ in range(ROUNDS):
            width /= PARTS
            places = torch.lerp(low, high, share + width * borders).unsqueeze(1)
            share = share + width * (torch.special.ndtr((places - values) / h).mean(1) <= alpha).sum()
    return torch.lerp(low, high, share + width / 2)
