"""Test-time template adjuster: class directions from the most certain features met so far, without any gradient."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from aidgn.adaptation.common import check, entropy, evaluating, features
from aidgn.algorithms.base import Algorithm, class_vectors
from aidgn.errors import AidgnError
from aidgn.objective import normalized


class T3A:
    """logits = z . d_c,   d_c = normalised sum of s / |s| over the supports s of class c

    Supports start as the classifier's weight vectors; each batch first adds its features. A support has the label and
    the entropy that the trained classifier gives it; per class the `filter_k` of lowest entropy stay, the earlier of
    equals ("all" or None: all stay). A class without support has d_c = 0. Iwasawa & Matsuo, NeurIPS 2021.
    """

    def __init__(self, algorithm: Algorithm, filter_k: int | Literal["all"] | None = 20):
        check(algorithm)
        if filter_k not in (None, "all") and (not isinstance(filter_k, int) or filter_k < 1):
            raise AidgnError(
                f'filter_k must be a whole number of supports per class, at least 1, or "all"; got {filter_k!r}.'
            )
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
        return self.predict_features(features(self.algorithm, x))

    @torch.no_grad()
    def predict_features(self, z: Tensor) -> Tensor:
        self.add(z)
        if self.filter_k is not None:
            self.filter(self.filter_k)
        sums = one_hot(self.labels, self.num_classes).to(z.dtype).T @ self.supports
        if self.filter_k is None:  # nothing will be left out, so the sums stand for all, and do not grow
            self.supports, self.labels = sums, torch.arange(self.num_classes, device=z.device)
            self.entropies = self.entropies.new_zeros(self.num_classes)
        return z @ normalized(sums, dim=1).T

    def add(self, z: Tensor) -> None:
        with evaluating(self.algorithm.classifier):
            logits = self.algorithm.classifier(z)
        self.supports = torch.cat([self.supports, normalized(z, dim=1)])
        self.labels = torch.cat([self.labels, logits.argmax(1)])
        self.entropies = torch.cat([self.entropies, entropy(logits)])

    def filter(self, k: int) -> None:
        """Of each class, the k supports of lowest entropy."""
        order = self.entropies.argsort(stable=True)
        order = order[self.labels[order].argsort(stable=True)]  # by class, then entropy, then arrival
        counts = one_hot(self.labels, self.num_classes).sum(0)
        first = counts.cumsum(0) - counts  # where each class begins
        rank = torch.arange(len(order), device=order.device) - first[self.labels[order]]
        kept = order[rank < k]
        self.supports, self.labels, self.entropies = self.supports[kept], self.labels[kept], self.entropies[kept]


def weight_vectors(classifier: nn.Module) -> Tensor:
    """One vector per class, [C, n]."""
    vectors = class_vectors(classifier)
    if vectors is not None:
        return vectors.T
    raise AidgnError(
        f"T3A starts from one weight vector per class, which a classifier {type(classifier).__name__} does "
        "not have: it needs nn.Linear or AngularClassifier. Tent-C takes any classifier."
    )
