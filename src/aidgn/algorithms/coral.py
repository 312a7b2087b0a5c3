"""Deep CORAL: match the means and covariances of the domains' features."""

import torch
from torch import Tensor

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, split
from aidgn.algorithms.search_space import log_uniform


class CORAL(Algorithm):
    """loss = mean_d CE_d + mmd_gamma mean over pairs of domains of  ( mean (m_i - m_j)^2 + mean (C_i - C_j)^2 )

    m_d and C_d are the mean and the covariance (n - 1 in the denominator) of the domain's features in the batch; the
    inner means are over the entries."""

    title = "match the means and covariances of the domains' features"
    paper = "Sun & Saenko, ECCV workshops 2016"
    trains_on_features = True
    min_domains = 2
    min_batch = 2
    search_space = {**COMMON, "mmd_gamma": (1.0, log_uniform(-1, 1))}

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        z = self.forward_per_domain(self.features, [x for x, _ in minibatches])
        risk = self.risks(self.classifier(z), minibatches).mean()
        penalty = self.distance(z, minibatches)
        return {"loss": risk + self.hparams.mmd_gamma * penalty, "risk": risk, "penalty": penalty}

    def distance(self, z: Tensor, minibatches: Minibatches) -> Tensor:
        """Return the mean distance between the features z of two domains."""
        domains = split(z, minibatches)
        means = torch.stack([domain.mean(0) for domain in domains])
        covariances = torch.stack([covariance(domain) for domain in domains])
        return mean_square_of_pairs(means) + mean_square_of_pairs(covariances)


def covariance(z: Tensor) -> Tensor:
    centred = z - z.mean(0)
    return centred.T @ centred / (len(z) - 1)


def mean_square_of_pairs(values: Tensor) -> Tensor:
    """Return the mean over pairs i < j of the mean of (values_i - values_j)^2, which is twice the variance over i."""
    # Not `var`: over a few values it takes a CPU longer than the rest of CORAL.
    return 2 / (len(values) - 1) * (values - values.mean(0)).square().sum(0).mean()
