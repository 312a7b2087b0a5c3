"""Representation self-challenging: mute the features that the decision rests on most, and decide again."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, join
from aidgn.algorithms.search_space import SearchSpace, uniform


class RSC(Algorithm):
    """loss = CE(g(f(x) with features muted), y)

    Per sample, the features are muted whose gradient d logit_y / d f(x) is at or above its (1 - rsc_f_drop_factor)
    percentile; the muting is kept for the samples whose probability of the true class drops most by it, at or above
    the (1 - rsc_b_drop_factor) percentile of the drops. Percentiles are interpolated linearly."""

    title = "mute the features that the decision rests on most, and decide again"
    paper = "Huang et al., ECCV 2020"
    search_space: ClassVar[SearchSpace] = {
        **COMMON,
        "rsc_f_drop_factor": (1 / 3, uniform(0, 0.5, most=1.0)),
        "rsc_b_drop_factor": (1 / 3, uniform(0, 0.5, most=1.0)),
    }
    classifier: nn.Linear

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        z = self.features(x)
        return {"loss": cross_entropy(self.classifier(z * self.kept(z.detach(), y)), y)}

    @torch.no_grad()
    def kept(self, z: Tensor, y: Tensor) -> Tensor:
        """1 for the features to keep, 0 for those to mute."""
        gradient = self.classifier.weight  # row c is d logit_c / d f(x), for every sample
        keep = (gradient < percentile(gradient, 1 - self.number("rsc_f_drop_factor")).unsqueeze(1))[y]
        probability, muted = (
            softmax(self.classifier(each), dim=1).gather(1, y.unsqueeze(1)).squeeze(1) for each in (z, z * keep)
        )
        drop = probability - muted
        return keep | (drop < percentile(drop, 1 - self.number("rsc_b_drop_factor"))).unsqueeze(1)


def percentile(values: Tensor, share: float) -> Tensor:
    """The value that `share` of the values along the last dimension lie below, interpolated linearly between two."""
    ordered = values.sort(dim=-1).values
    rank = share * (values.shape[-1] - 1)
    below, above = ordered[..., math.floor(rank)], ordered[..., math.ceil(rank)]
    return torch.lerp(below, above, rank - math.floor(rank))
