"""CausIRL: features whose distribution does not depend on how the domains are mixed."""

import numpy as np
import torch
from torch import Tensor

from aidgn.algorithms.batches import Minibatches, split
from aidgn.algorithms.coral import CORAL
from aidgn.algorithms.mmd import MMD


class CausIRLCORAL(CORAL):
    """loss = mean_d CE_d + mmd_gamma ( mean (m_1 - m_2)^2 + mean (C_1 - C_2)^2 )

    The batch of every domain is cut in two at a random place. Group 1 has the first parts of all domains, group 2 the
    second parts. m_g and C_g are the mean and the covariance of the group's features; the means are over the entries. A
    group of fewer than two samples gives no penalty. With one source domain the groups are two parts of the domain."""

    display_name = "CausIRL_CORAL"
    title = "match the means and covariances of random mixtures of the domains"
    paper = "Chevalley et al., arXiv:2206.11646, 2022"
    trains_on_features = True
    min_domains = 1
    min_batch = 1

    def distance(self, z: Tensor, minibatches: Minibatches) -> Tensor:
        parts: tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]] = ([], [])
        for features, (_, y) in zip(split(z, minibatches), minibatches, strict=True):
            cut = np.random.randint(len(y))
            parts[0].append((features[:cut], y[:cut]))
            parts[1].append((features[cut:], y[cut:]))
        groups = [(torch.cat([features for features, _ in group]), torch.cat([y for _, y in group])) for group in parts]
        if min(len(y) for _, y in groups) < 2:
            return z.new_zeros(())
        return super().distance(torch.cat([features for features, _ in groups]), groups)


class CausIRLMMD(CausIRLCORAL, MMD):
    """loss = mean_d CE_d + mmd_gamma ( K_11 + K_22 - 2 K_12 )

    K_gh is the mean of MMD's kernel over all pairs of a sample of group g and a sample of group h, each with itself
    included. The two groups are those of CausIRL_CORAL: random first and second parts of every domain's batch."""

    display_name = "CausIRL_MMD"
    title = "match random mixtures of the domains by a kernel"
