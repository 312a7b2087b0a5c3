"""Maximum mean discrepancy: match the distributions of the domains' features by a kernel."""

import torch
from torch import Tensor
from torch.nn.functional import pdist

from aidgn.algorithms.batches import Minibatches, domain_ids
from aidgn.algorithms.coral import CORAL

SCALES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


class MMD(CORAL):
    """loss = mean_d CE_d + mmd_gamma mean over pairs of domains of  K_ii + K_jj - 2 K_ij

    K_ij is the mean of k(z, z') over all z of domain i and z' of domain j (each with itself included),
    k(z, z') = sum over s in 0.001, 0.01 .. 1000 of exp(-s |z - z'|^2)."""

    title = "match the distributions of the domains' features by a kernel"
    paper = "Li et al., CVPR 2018"
    trains_on_features = True
    min_batch = 1

    def distance(self, z: Tensor, minibatches: Minibatches) -> Tensor:
        # A matrix product, |z|^2 + |z'|^2 - 2 z.z', would have too few digits for s = 1000.
        squares = pdist(z).square()
        kernel = torch.stack([(-scale * squares).exp() for scale in SCALES]).sum(0)
        weights = self.coefficients(minibatches, z.dtype)
        first, second = torch.triu_indices(len(z), len(z), 1, device=z.device)
        return 2 * weights[first, second] @ kernel + len(SCALES) * weights.trace()

    def coefficients(self, minibatches: Minibatches, dtype: torch.dtype) -> Tensor:
        """Return the weight of each entry of the kernel matrix in the mean over pairs of domains.

        With n_d samples in domain d, sum_(i<j) (K_ii + K_jj - 2 K_ij) = N sum_d K_dd - sum_(d,e) K_de, and an entry of
        K_de has weight 1 / n_d n_e.
        """
        count = len(minibatches)
        ids = domain_ids(minibatches)
        weight = torch.cat([torch.full_like(y, 1 / len(y), dtype=dtype) for _, y in minibatches])
        same = (ids.unsqueeze(1) == ids.unsqueeze(0)).to(dtype)
        return torch.outer(weight, weight) * (count * same - 1) * (2 / (count * (count - 1)))
