"""Representation self-challenging: mute the features that decide most, and decide again."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, join
from aidgn.algorithms.search_space import uniform


class RSC(Algorithm):
    """loss = CE(g(f(x) with features muted), y)

    Per sample, the features are muted whose gradient d logit_y / d f(x) is at or above its (1 - rsc_f_drop_factor)
    percentile; the muting is kept for the samples whose probability of the true class drops most by it, at or above
    the (1 - rsc_b_drop_factor) percentile of the drops. Percentiles are interpolated linearly."""

    title = "mute the features that decide most, and decide again"
    paper = "Huang et al., ECCV 2020"
    search_space = {
        **COMMON,
        "rsc_f_drop_factor": (1 / 3, uniform(0, 0.5, most=1.0)),
        "rsc_b_drop_factor": (1 / 3, uniform(0, 0.5, most=1.0)),
    }
    classifier: nn.Linear

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        z = self.features(x)
        return {"loss": self.cross_entropy(self.classifier(z * self.mask(z.detach(), y)), y)}

    @torch.no_grad()
    def mask(self, z: Tensor, y: Tensor) -> Tensor:
        """Return 1 for features to keep, 0 for features to mute."""
        gradient = self.classifier.weight  # row c is d logit_c / d f(x), for every sample
        keep = (gradient < percentile(gradient, 1 - self.hparams.rsc_f_drop_factor).unsqueeze(1))[y]
        drop = self.probability(z, y) - self.probability(z * keep, y)
        return keep | (drop < percentile(drop, 1 - self.hparams.rsc_b_drop_factor)).unsqueeze(1)

    def probability(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the probability of the true class."""
        return softmax(self.classifier(z), dim=1).gather(1, y.unsqueeze(1)).squeeze(1)


def percentile(values: Tensor, share: float) -> Tensor:
    """Return the value below which `share` of the values along the last dimension lie, interpolated linearly."""
    ordered = values.sort(dim=-1).values
    rank = share * (values.shape[-1] - 1)
    below, above = ordered[..., math.floor(rank)], ordered[..., math.ceil(rank)]
    return torch.lerp(below, above, rank - math.floor(rank))
