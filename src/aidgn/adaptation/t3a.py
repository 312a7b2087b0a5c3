"""Test-time template adjuster (T3A): class directions from the most certain features seen so far, without gradients."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from aidgn.adaptation.common import check_classifier, compute_features, entropy, evaluation_mode
from aidgn.algorithms.base import Algorithm
from aidgn.errors import AidgnError, ParameterError
from aidgn.objective import class_vectors, normalized


class T3A:
    """logits = z . d_c,   d_c = normalised sum of s / |s| over the supports s of class c

    Supports start as the classifier's weight vectors; each batch first adds its features. The trained classifier gives
    a support its label and entropy. Each class keeps the supports of lowest entropy, the earlier of equals. A class
    without support has d_c = 0. Iwasawa & Matsuo, NeurIPS 2021.

    Args:
        algorithm: Trained algorithm with a linear or angular classifier; it is not changed.
        filter_k: Supports to keep per class; "all" or None keeps all of them.
    """

    def __init__(self, algorithm: Algorithm, filter_k: int | Literal["all"] | None = 20):
        check_classifier(algorithm)
        if filter_k not in (None, "all") and (not isinstance(filter_k, int) or filter_k < 1):
            raise ParameterError("filter_k", repr(filter_k), 'a whole number of at least 1, or "all"')
        self.algorithm = algorithm
        self.filter_k = None if filter_k == "all" else filter_k
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all batches."""
        weight = weight_vectors(self.algorithm.classifier)
        self.num_classes = len(weight)
        self.supports = weight.new_empty(0, weight.shape[1])  # of length 1
        self.labels = torch.empty(0, dtype=torch.long, device=weight.device)
        self.entropies = weight.new_empty(0)
        self.add(weight)

    def predict(self, x: Tensor) -> Tensor:
        """Adapt to a batch of images and return its logits."""
        return self.predict_features(compute_features(self.algorithm, x))

    @torch.no_grad()
    def predict_features(self, z: Tensor) -> Tensor:
        """Adapt to a batch of features and return its logits."""
        self.add(z)
        if self.filter_k is not None:
            self.filter(self.filter_k)
        sums = one_hot(self.labels, self.num_classes).to(z.dtype).T @ self.supports
        if self.filter_k is None:  # the sums replace the supports, so that memory does not grow
            self.supports, self.labels = sums, torch.arange(self.num_classes, device=z.device)
            self.entropies = self.entropies.new_zeros(self.num_classes)
        return z @ normalized(sums, dim=1).T

    def add(self, z: Tensor) -> None:
        """Add features to the supports."""
        with evaluation_mode(self.algorithm.classifier):
            logits = self.algorithm.classifier(z)
        self.supports = torch.cat([self.supports, normalized(z, dim=1)])
        self.labels = torch.cat([self.labels, logits.argmax(1)])
        self.entropies = torch.cat([self.entropies, entropy(logits)])

    def filter(self, k: int) -> None:
        """Keep the k supports of lowest entropy in each class."""
        order = self.entropies.argsort(stable=True)
        order = order[self.labels[order].argsort(stable=True)]  # by class, then entropy, then arrival
        counts = one_hot(self.labels, self.num_classes).sum(0)
        first = counts.cumsum(0) - counts  # where each class starts
        rank = torch.arange(len(order), device=order.device) - first[self.labels[order]]
        kept = order[rank < k]
        self.supports, self.labels, self.entropies = self.supports[kept], self.labels[kept], self.entropies[kept]


def weight_vectors(classifier: nn.Module) -> Tensor:
    """Return one weight vector per class, [C, n]."""
    vectors = class_vectors(classifier)
    if vectors is None:
        raise AidgnError(
            f"T3A needs one weight vector per class, as nn.Linear or AngularClassifier has, but the classifier is a "
            f"{type(classifier).__name__}. Tent-C takes any classifier."
        )
    return vectors.T
