"""Tent, test entropy minimisation, of three parts: the classifier, a batch norm before it, or the backbone's batch
norms. Wang et al., ICLR 2021; the first two as in Iwasawa & Matsuo, NeurIPS 2021."""

import copy
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from aidgn.adaptation.common import check, entropy, features
from aidgn.algorithms.base import Algorithm
from aidgn.backbones import unfold
from aidgn.errors import AidgnError


class EntropyMinimization:
    """On each batch, `updates` times: logits, then a step of Adam down their mean entropy H, with `rate` times the
    learning rate of the training. The last logits are the prediction; the step that follows serves the next batch.
    """

    min_batch: ClassVar[int] = 1  # images it needs
    network: Callable[[Tensor], Tensor]  # the copy that adapts, from a batch to logits
    parameters: list[nn.Parameter]  # what of it adapts

    def __init__(self, algorithm: Algorithm, rate: float = 1.0, updates: int = 1):
        check(algorithm)
        if not 0 < rate < math.inf:
            raise AidgnError(f"rate multiplies the training's learning rate and must be above 0; got {rate}.")
        if not isinstance(updates, int) or updates < 1:
            raise AidgnError(f"updates per batch must be a whole number, at least 1; got {updates}.")
        self.algorithm, self.rate, self.updates = algorithm, rate, updates
        self.reset()

    def build(self) -> None:
        """Set `network` and `parameters` as they are after the training."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all batches."""
        self.build()
        self.optimizer = torch.optim.Adam(self.parameters, lr=self.rate * self.algorithm.number("lr"))

    @torch.enable_grad()  # whatever the caller's mode
    def minimize(self, batch: Tensor) -> Tensor:
        if len(batch) < self.min_batch:
            raise AidgnError(
                f"{type(self).__name__} needs at least {self.min_batch} images per batch, got "
                f"{len(batch)}. `aidgn.adaptation.batches` makes batches that fit."
            )
        for _ in range(self.updates):
            self.optimizer.zero_grad()
            logits = self.network(batch.detach())
            entropy(logits).mean().backward()
            self.optimizer.step()
        return logits.detach()


class TentC(EntropyMinimization):
    """Adapts the classifier's parameters."""

    def build(self) -> None:
        self.network = copy.deepcopy(self.algorithm.classifier).eval().requires_grad_()
        self.parameters = list(self.network.parameters())

    def predict(self, x: Tensor) -> Tensor:
        return self.predict_features(features(self.algorithm, x))

    def predict_features(self, z: Tensor) -> Tensor:
        return self.minimize(z)


class TentBN(TentC):
    """Adapts scale and shift of a batch norm in front of the classifier, which normalises each feature by its mean and
    variance over the batch."""

    min_batch = 2

    def build(self) -> None:
        classifier = copy.deepcopy(self.algorithm.classifier).eval().requires_grad_(False)
        # Not always the featuriser's number: MTL's classifier sees the domain's mean beside the features.
        width = next(
            (
                int(layer.in_features)  # type: ignore[arg-type]
                for layer in classifier.modules()
                if hasattr(layer, "in_features")
            ),
            self.algorithm.num_features,
        )
        like = next(classifier.parameters())
        norm = nn.BatchNorm1d(width, track_running_stats=False, device=like.device, dtype=like.dtype)
        self.network, self.parameters = nn.Sequential(norm, classifier), list(norm.parameters())


class Tent(EntropyMinimization):
    """Adapts scale and shift of every BatchNorm2d of the backbone, which normalises by the batch's statistics instead
    of those of the training."""

    min_batch = 2

    def build(self) -> None:
        # Without the optimisers, which hold two tensors more for each parameter.
        copied = copy.deepcopy(self.algorithm, {id(self.algorithm.optimizers): {}}).eval().requires_grad_(False)
        unfold(copied.featurizer)
        self.parameters = []
        for layer in copied.featurizer.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
                self.parameters += layer.parameters(recurse=False)
        for parameter in self.parameters:
            parameter.requires_grad_()
        if not self.parameters:
            raise AidgnError(
                "Tent adapts the scales and shifts of the backbone's BatchNorm2d, and this backbone has "
                "none. Tent-C and Tent-BN do without."
            )
        self.network = copied.predict

    def predict(self, x: Tensor) -> Tensor:
        return self.minimize(x)
