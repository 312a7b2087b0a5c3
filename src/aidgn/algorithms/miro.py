"""MIRO: stay near the pretrained network at every stage, most where it varies least."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, join
from aidgn.algorithms.search_space import fixed, one_of
from aidgn.backbones.stages import StageComparison, stage_widths

FIRST_VARIANCE, MIN_VARIANCE = 0.1, 1e-5


class MIRO(Algorithm):
    """loss = CE over all samples + ld sum over stages s of  1/2 mean ( (f_s - f0_s)^2 / v_s + log v_s )

    f_s is the output of stage s of the network, f0_s that of the frozen network with its initial weights, the means are
    over samples, positions and channels. The variances v_s = softplus(b_s) + 1e-5, one per channel, start at 0.1 and
    learn with lr_mult times the rate. The stages of a ResNet are its stem and its four layers of blocks. A network that
    starts from random weights stays near these."""

    title = "stay near the pretrained network at every stage"
    passes = 4 / 3  # a forward pass of the pretrained network
    paper = "Cha et al., ECCV 2022"
    search_space = {
        **COMMON,
        "ld": (0.1, one_of(0.01, 0.1)),  # the authors' values for five data sets
        "lr_mult": (10.0, fixed(10.0, above=True)),
    }

    @property
    def network(self) -> nn.Module:
        """The featurizer's network, without precision and compiled code."""
        return getattr(self.featurizer, "network", self.featurizer)

    def build(self) -> None:
        first = math.log(math.expm1(FIRST_VARIANCE - MIN_VARIANCE))
        self.encoders = nn.ParameterList(
            nn.Parameter(torch.full((width,), first)) for width in stage_widths(self.network)
        )

    def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        encoders = self.adam([self.encoders])
        for group in encoders.param_groups:
            group["initial_lr"] *= self.hparams.lr_mult
            group["lr"] *= self.hparams.lr_mult
        return {"main": self.adam([self.featurizer, self.classifier]), "encoders": encoders}

    @cached_property
    def compare(self) -> Callable[[Tensor], Tensor]:
        """Compute features, and distances from a frozen copy of the network as it is at the first access.

        Created lazily: inference needs no copy.
        """
        featurizer: Any = self.featurizer
        if not hasattr(featurizer, "compare_stages"):
            return StageComparison(self.network)
        # A featurizer with a precision and compiled code runs both networks in the same.
        return partial(featurizer.run, featurizer.compare_stages())

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        _ = self.compare  # copies the initial weights, before those of the state replace them
        super().load_training_state(state)

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        z, *distances = self.compare(x).split([self.num_features, *map(len, self.encoders)], dim=1)
        risk = self.cross_entropy(self.classifier(self.dropout(z)), y)
        variances = [softplus(encoder) + MIN_VARIANCE for encoder in self.encoders]
        penalty = torch.stack(
            [
                (distance / variance + variance.log()).mean() / 2
                for distance, variance in zip(distances, variances, strict=True)
            ]
        ).sum()
        return {"loss": risk + self.hparams.ld * penalty, "risk": risk, "penalty": penalty}
