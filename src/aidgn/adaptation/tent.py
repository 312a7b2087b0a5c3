"""Tent: minimise the entropy of predictions on test batches.

Tent adapts the backbone's batch norms (Wang et al., ICLR 2021), TentC the classifier and TentBN a batch norm before it
(Iwasawa & Matsuo, NeurIPS 2021).
"""

import copy
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from aidgn.adaptation.common import check_classifier, compute_features, entropy
from aidgn.algorithms.base import Algorithm
from aidgn.backbones import unfold
from aidgn.errors import AidgnError, ParameterError


class EntropyMinimization:
    """Minimise the mean entropy of the logits of each batch with Adam.

    The prediction is the last logits; the step that follows serves the next batch.

    Args:
        algorithm: Trained algorithm; a copy of it adapts.
        rate: Factor of the training's learning rate.
        updates: Steps per batch.
    """

    min_batch: ClassVar[int] = 1
    network: Callable[[Tensor], Tensor]  # the copy that adapts, from a batch to logits
    parameters: list[nn.Parameter]  # the parameters that adapt

    def __init__(self, algorithm: Algorithm, rate: float = 1.0, updates: int = 1):
        check_classifier(algorithm)
        if not 0 < rate < math.inf:
            raise ParameterError("rate", rate, "a number above 0, by which the learning rate is multiplied")
        if not isinstance(updates, int) or updates < 1:
            raise ParameterError("updates", updates, "a whole number of at least 1")
        self.algorithm = algorithm
        self.rate = rate
        self.updates = updates
        self.reset()

    def build(self) -> None:
        """Set `network` and `parameters` to their state after the training."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all batches."""
        self.build()
        self.optimizer = torch.optim.Adam(self.parameters, lr=self.rate * self.algorithm.number("lr"))

    @torch.enable_grad()  # whatever the caller's mode
    def minimize(self, batch: Tensor) -> Tensor:
        """Adapt to a batch of the network's inputs and return its logits."""
        if len(batch) < self.min_batch:
            raise AidgnError(
                f"{type(self).__name__} needs at least {self.min_batch} images per batch, but the batch has "
                f"{len(batch)}. `aidgn.adaptation.batches` makes batches that fit."
            )
        for _ in range(self.updates):
            self.optimizer.zero_grad()
            logits = self.network(batch.detach())
            entropy(logits).mean().backward()
            self.optimizer.step()
        return logits.detach()


class TentC(EntropyMinimization):
    """Adapt the classifier's parameters."""

    def build(self) -> None:
        self.network = copy.deepcopy(self.algorithm.classifier).eval().requires_grad_()
        self.parameters = list(self.network.parameters())

    def predict(self, x: Tensor) -> Tensor:
        return self.predict_features(compute_features(self.algorithm, x))

    def predict_features(self, z: Tensor) -> Tensor:
        return self.minimize(z)


class TentBN(TentC):
    """Adapt scale and shift of a batch norm before the classifier. The batch norm uses the statistics of the batch."""

    min_batch = 2

    def build(self) -> None:
        classifier = copy.deepcopy(self.algorithm.classifier).eval().requires_grad_(False)
        # MTL's classifier takes more values than the featurizer gives: the domain's mean is one half of its input.
        widths = [layer.in_features for layer in classifier.modules() if hasattr(layer, "in_features")]
        width = int(widths[0]) if widths else self.algorithm.num_features  # type: ignore[arg-type]
        weight = next(classifier.parameters())
        norm = nn.BatchNorm1d(width, track_running_stats=False, device=weight.device, dtype=weight.dtype)
        self.network, self.parameters = nn.Sequential(norm, classifier), list(norm.parameters())


class Tent(EntropyMinimization):
    """Adapt scale and shift of every BatchNorm2d of the backbone, with the statistics of the batch.

    Statistics from the training are not used.
    """

    min_batch = 2

    def build(self) -> None:
        # The copy needs no optimizers, which hold two more tensors per parameter.
        copied = copy.deepcopy(self.algorithm, {id(self.algorithm.optimizers): {}}).eval().requires_grad_(False)
        unfold(copied.featurizer)
        self.parameters = []
        for layer in copied.featurizer.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.track_running_stats = False
                layer.running_mean = None
                layer.running_var = None
                self.parameters += layer.parameters(recurse=False)
        for parameter in self.parameters:
            parameter.requires_grad_()
        if not self.parameters:
            raise AidgnError(
                "Tent adapts the scales and shifts of the backbone's BatchNorm2d, but this backbone has none. Use "
                "Tent-C or Tent-BN."
            )
        self.network = copied.predict

    def predict(self, x: Tensor) -> Tensor:
        return self.minimize(x)
