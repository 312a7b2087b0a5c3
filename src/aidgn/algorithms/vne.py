"""Von Neumann entropy of the features as a regulariser, for the losses of ERM and AIDGN."""

import torch
from torch import Tensor

from aidgn.algorithms.aidgn import AIDGN
from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, join
from aidgn.algorithms.search_space import SearchSpace, one_of
from aidgn.objective import in_full_precision, no_autocast, normalized

# The authors advise |vne_coef| <= 0.5 and batches of at least 32 samples. The search range is ours; it has both signs.
COEFFICIENT: SearchSpace = {"vne_coef": (0.01, one_of(-0.1, -0.01, 0.01, 0.1, least=-1.0))}
MIN_EIGENVALUE = 1e-12  # eigenvalues below this count as zero


class VNE(Algorithm):
    """loss = CE over all samples - vne_coef S,   S = - sum_j lambda_j log lambda_j

    lambda are the eigenvalues of mean_i z_i z_i' / |z_i|^2, the autocorrelation of the unit features; they sum to 1.
    vne_coef above 0 spreads the features over more directions, below 0 over fewer."""

    title = "spread unit features over more directions, or fewer"
    paper = "Kim et al., CVPR 2023"
    trains_on_features = True
    search_space = {**COMMON, **COEFFICIENT}

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        z = self.features(x)
        risk = self.cross_entropy(self.classifier(z), y)
        entropy = von_neumann_entropy(z)
        return {"loss": risk - self.hparams.vne_coef * entropy, "risk": risk, "entropy": entropy}


class AIDGNVNE(AIDGN):
    """loss = the loss of AIDGN - vne_coef S,   S = - sum_j lambda_j log lambda_j

    lambda are the eigenvalues of mean_i z_i z_i' / |z_i|^2, the autocorrelation of the unit features that AIDGN
    classifies by; they sum to 1. vne_coef above 0 spreads the directions, below 0 draws them together."""

    display_name = "AIDGN-VNE"
    title = "AIDGN's loss, and the von Neumann entropy of its unit features"
    paper = "a combination of Jin et al., IJCAI 2022, with Kim et al., CVPR 2023"
    search_space = {**AIDGN.search_space, **COEFFICIENT}

    def feature_terms(self, z: Tensor, minibatches: Minibatches) -> dict[str, Tensor]:
        terms = super().feature_terms(z, minibatches)
        entropy = von_neumann_entropy(z)
        return {**terms, "loss": terms["loss"] - self.hparams.vne_coef * entropy, "entropy": entropy}


def von_neumann_entropy(z: Tensor) -> Tensor:
    """Return the von Neumann entropy of the autocorrelation of unit features.

    The matrix of products of samples has the same non-zero eigenvalues; the smaller of the two matrices is used.

    Args:
        z: Features [B, n], of any norm.
    """
    z, _ = in_full_precision(z, z)
    with no_autocast(z):
        unit = normalized(z, dim=1)
        products = unit @ unit.T if len(z) <= z.shape[1] else unit.T @ unit
        return torch.special.entr(torch.linalg.eigvalsh(products / len(z)).clamp_min(MIN_EIGENVALUE)).sum()
