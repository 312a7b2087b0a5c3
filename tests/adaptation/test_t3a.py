"""T3A against supports kept in plain lists, sorted and summed one by one in float64."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aidgn.adaptation import T3A
from aidgn.algorithms import Algorithm


class Naive:
    def __init__(self, toy: SimpleNamespace, algorithm: Algorithm, k: int | None):
        self.toy, self.classifier, self.k = toy, algorithm.classifier, k
        weight: Any = algorithm.classifier.state_dict()["weight"]
        self.supports: list[tuple[int, float, list[float]]] = []  # label, entropy, vector; in order of arrival
        for c in range(toy.CLASSES):
            self.add(weight[:, c] if hasattr(self.classifier, "kappa") else weight[c])

    def add(self, z: Tensor) -> None:
        logits = [value.item() for value in self.toy.logits(self.classifier, z)]
        self.supports.append((logits.index(max(logits)), self.toy.entropy(torch.tensor(logits)).item(), z.tolist()))

    def of(self, label: int) -> list[tuple[int, float, list[float]]]:
        return sorted((s for s in self.supports if s[0] == label), key=lambda s: s[1])[: self.k]

    def predict(self, batch: Tensor) -> list[list[float]]:
        for z in batch:
            self.add(z)
        directions = []
        for c in range(self.toy.CLASSES):
            total = [0.0] * batch.shape[1]
            for _, _, vector in self.of(c):
                length = math.sqrt(sum(a * a for a in vector))
                total = [t + a / length for t, a in zip(total, vector, strict=True)]
            length = math.sqrt(sum(t * t for t in total)) or 1.0
            directions.append([t / length for t in total])
        return [
            [sum(a * d for a, d in zip(z.tolist(), direction, strict=True)) for direction in directions] for z in batch
        ]


def stream(toy: SimpleNamespace, sizes: tuple[int, ...]) -> list[Tensor]:
    """Features of all directions and norms."""
    generator = torch.Generator().manual_seed(1)
    return [3 * torch.randn(n, toy.FEATURES, generator=generator, dtype=torch.float64) for n in sizes]


@pytest.mark.parametrize("k", [1, 5, 20, 50, 100, None, "all"])
@pytest.mark.parametrize("name", ["ERM", "AIDGN"])
def test_like_naive(toy: SimpleNamespace, name: str, k: Any) -> None:
    algorithm = toy.trained(name)
    with torch.no_grad():
        algorithm.classifier.weight.mul_(3)  # weight vectors of various certainty
    ours, naive = T3A(algorithm, filter_k=k), Naive(toy, algorithm, None if k == "all" else k)
    for z in stream(toy, (32, 32, 32, 32, 7)):
        expected = torch.tensor(naive.predict(z), dtype=torch.float64)
        torch.testing.assert_close(ours.predict_features(z), expected, rtol=1e-10, atol=1e-10)
    by_class = [len([s for s in naive.supports if s[0] == c]) for c in range(toy.CLASSES)]
    assert max(by_class) > 20  # so that the smaller K leave some out
    if ours.filter_k is not None:
        assert torch.bincount(ours.labels, minlength=toy.CLASSES).tolist() == [min(n, k) for n in by_class]


def test_the_variants_of_k_differ(toy: SimpleNamespace) -> None:
    algorithm = toy.trained("ERM")
    found = []
    for k in (1, 5, 20, None):
        adaptation = T3A(algorithm, filter_k=k)
        found.append([adaptation.predict_features(z) for z in stream(toy, (32, 32, 32, 32))][-1])
    for i in range(4):
        for j in range(i):
            assert (found[i] - found[j]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["ERM", "AIDGN"])
@pytest.mark.parametrize("k", [1, 20, None])
def test_a_class_nobody_is_predicted_as_keeps_its_weight_vector(toy: SimpleNamespace, name: str, k: int | None) -> None:
    algorithm = toy.trained(name)
    with torch.no_grad():
        algorithm.classifier.weight.mul_(3)  # so that ERM's bias does not decide
    adaptation = T3A(algorithm, filter_k=k)
    weight = adaptation.supports.clone()  # normalised, one per class
    z = stream(toy, (64,))[0]
    z = z[algorithm.classifier(z).argmax(1) != 2]
    assert set(algorithm.classifier(z).argmax(1).tolist()) == {0, 1, 3}
    found = adaptation.predict_features(z)
    own = algorithm.classifier.weight[:, 2] if name == "AIDGN" else algorithm.classifier.weight[2]
    torch.testing.assert_close(found[:, 2], (z @ own / own.norm()).detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weight[2], (own / own.norm()).detach(), rtol=1e-12, atol=0)


def test_bias_decides_the_label_of_a_weight_vector(toy: SimpleNamespace) -> None:
    """A weight vector that the classifier takes for another class supports that one; a class without any has logits
    of 0 until a feature is predicted as it."""
    algorithm = toy.trained("ERM")
    with torch.no_grad():
        algorithm.classifier.bias.copy_(torch.tensor([0.0, 50.0, 0.0, 0.0]))
    ours, naive = T3A(algorithm, filter_k=5), Naive(toy, algorithm, 5)
    assert ours.labels.tolist() == [1, 1, 1, 1]
    z = stream(toy, (6,))[0]
    found = ours.predict_features(z)
    torch.testing.assert_close(found, torch.tensor(naive.predict(z), dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert (found[:, [0, 2, 3]] == 0).all() and (found[:, 1] != 0).all()
    strong = 1000 * algorithm.classifier.weight[3:].detach()
    assert algorithm.classifier(strong).argmax().item() == 3
    found = ours.predict_features(strong)
    torch.testing.assert_close(found, torch.tensor(naive.predict(strong), dtype=torch.float64), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[0, 3], strong.norm())


def test_the_earlier_of_equal_supports_stays(toy: SimpleNamespace) -> None:
    """Features so certain that their entropy is 0 to the last bit: with K = 1 the first one decides for good."""
    algorithm = toy.trained("ERM")
    with torch.no_grad():
        algorithm.classifier.weight.copy_(1000 * torch.eye(toy.CLASSES, toy.FEATURES))
        algorithm.classifier.bias.zero_()
    adaptation = T3A(algorithm, filter_k=1)
    z = torch.eye(toy.FEATURES, dtype=torch.float64)[: toy.CLASSES] * 5 + 0.5
    assert (algorithm.classifier(z).softmax(1).max(1).values == 1).all()
    torch.testing.assert_close(adaptation.predict_features(z), z[:, : toy.CLASSES])  # the weight vectors came first


def test_zero_features_are_no_direction(toy: SimpleNamespace) -> None:
    adaptation = T3A(toy.trained("AIDGN"), filter_k=None)
    z = torch.cat([torch.zeros(3, toy.FEATURES, dtype=torch.float64), *stream(toy, (4,))])
    found, without = adaptation.predict_features(z), T3A(adaptation.algorithm, filter_k=None).predict_features(z[3:])
    assert (found[:3] == 0).all()
    torch.testing.assert_close(found[3:], without)
