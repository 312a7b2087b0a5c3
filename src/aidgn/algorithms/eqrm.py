"""Empirical quantile risk minimisation: minimise a risk that most domains will stay below."""

from statistics import NormalDist

import torch
from torch import Tensor

from aidgn.algorithms.annealed import Annealed
from aidgn.algorithms.base import COMMON, Minibatches
from aidgn.algorithms.search_space import log_uniform, uniform

PARTS = 16  # subintervals per round of the search for the quantile
ROUNDS = 8  # 16^8 subintervals, as 32 bisections give, with a quarter of the kernels


class EQRM(Annealed):
    """loss = the eqrm_quantile quantile of a Gaussian kernel density estimate of CE_1 .. CE_N

    with bandwidth 1.06 std(CE) N^(-1/5) (Silverman's rule for a normal density). In the first eqrm_burnin_iters updates
    the loss is mean_d CE_d; then Adam starts from zero with rate eqrm_lr."""

    title = "minimise a quantile of the domains' risks instead of their mean"
    paper = "Eastwood et al., NeurIPS 2022"
    trains_on_features = True
    min_domains = 2
    anneal = "eqrm_burnin_iters"
    search_space = {
        **COMMON,
        "eqrm_quantile": (0.75, uniform(0.5, 0.99, most=1.0, above=True, below=True)),
        "eqrm_burnin_iters": (2500, log_uniform(2.5, 3.5)),
        "eqrm_lr": (1e-6, log_uniform(-7, -5, above=True)),
    }

    def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        rate = "eqrm_lr" if self.updates >= self.anneal_updates else "lr"
        return {"main": self.adam([self.featurizer, self.classifier], lr=rate)}

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        domain_risks = self.risks(self.forward_per_domain(self.predict, [x for x, _ in minibatches]), minibatches)
        loss = quantile(domain_risks, self.hparams.eqrm_quantile) if self.annealed else domain_risks.mean()
        return {"loss": loss, "risk": domain_risks.mean()}


def quantile(values: Tensor, alpha: float) -> Tensor:
    """Return the alpha-quantile of the Gaussian kernel density estimate of some values.

    The search divides the interval between the quantiles of the outer two kernels. The gradient is DomainBed's: that
    of a fixed point between the two ends.
    """
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
