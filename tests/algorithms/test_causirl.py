"""CausIRL against sums over samples of the two groups, drawn in the order of the domains."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch


def naive_coral(a, b):
    n = a.shape[1]
    means = [sum(x) / len(x) for x in (a, b)]
    covariances = [
        sum(torch.outer(row - mean, row - mean) for row in x) / (len(x) - 1)
        for x, mean in zip((a, b), means, strict=True)
    ]
    return ((means[0] - means[1]) ** 2).sum() / n + ((covariances[0] - covariances[1]) ** 2).sum() / n**2


def naive_mmd(a, b):
    def mean(x, y):
        kernel = [torch.exp(-(10.0**s) * ((p - q) ** 2).sum()) for p in x for q in y for s in range(-3, 4)]
        return sum(kernel) / (len(x) * len(y))

    return mean(a, a) + mean(b, b) - 2 * mean(a, b)


@pytest.mark.parametrize(("name", "distance"), [("CausIRL_CORAL", naive_coral), ("CausIRL_MMD", naive_mmd)])
def test_updates(toy: SimpleNamespace, name: str, distance) -> None:
    algorithm = toy.make(name, mmd_gamma=2.5)
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)
    sizes = []

    def naive(minibatches):
        first, second, risk = [], [], 0.0
        for x, y in minibatches:
            z = f(x)
            risk = risk + toy.cross_entropy(g(z), y) / 3
            cut = np.random.randint(0, len(y))
            first += z[:cut]
            second += z[cut:]
        sizes.append(len(first))
        loss = risk
        if len(first) > 1 and len(second) > 1:
            loss = risk + 2.5 * distance(torch.stack(first), torch.stack(second))
        adam.step(loss)
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])
    assert len(set(sizes)) > 1 and max(sizes) > 1


@pytest.mark.parametrize("name", ["CausIRL_CORAL", "CausIRL_MMD"])
def test_one_source_domain_and_groups_too_small(toy: SimpleNamespace, name: str) -> None:
    algorithm = toy.make(name, domains=1)
    (x, y), *_ = toy.batches(0)
    toy.seed(0)
    assert algorithm.update([(x[:1], y[:1])])["penalty"] == 0
    penalties = [float(algorithm.update([(x, y)])["penalty"]) for _ in range(8)]
    assert max(penalties) > 0 and np.isfinite(penalties).all()
