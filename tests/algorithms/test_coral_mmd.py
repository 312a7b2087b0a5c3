"""CORAL and MMD against sums over pairs of domains, samples and features."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aidgn.errors import AidgnError


def naive_coral(a, b):
    n = a.shape[1]
    means = [sum(x) / len(x) for x in (a, b)]
    covariances = [
        sum(torch.outer(row - mean, row - mean) for row in x) / (len(x) - 1)
        for x, mean in zip((a, b), means, strict=True)
    ]
    return ((means[0] - means[1]) ** 2).sum() / n + ((covariances[0] - covariances[1]) ** 2).sum() / n**2


def naive_mmd(a, b):
    def kernel(p, q):
        return sum(torch.exp(-(10.0**s) * ((p - q) ** 2).sum()) for s in range(-3, 4))

    def mean(x, y):
        return sum(kernel(p, q) for p in x for q in y) / (len(x) * len(y))

    return mean(a, a) + mean(b, b) - 2 * mean(a, b)


@pytest.mark.parametrize(("name", "distance"), [("CORAL", naive_coral), ("MMD", naive_mmd)])
def test_updates(toy: SimpleNamespace, name: str, distance) -> None:
    algorithm = toy.make(name, mmd_gamma=2.5)
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)

    def naive(minibatches):
        z = [f(x) for x, _ in minibatches]
        risk = sum(toy.cross_entropy(g(z_d), y) for z_d, (_, y) in zip(z, minibatches, strict=True)) / 3
        loss = risk + 2.5 * (distance(z[0], z[1]) + distance(z[0], z[2]) + distance(z[1], z[2])) / 3
        adam.step(loss)
        return loss

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])


@pytest.mark.parametrize("name", ["CORAL", "MMD"])
def test_the_penalty_is_zero_for_equal_distributions_only(toy: SimpleNamespace, name: str) -> None:
    algorithm = toy.make(name)
    z = torch.randn(6, toy.FEATURES, dtype=torch.float64)
    labels = [(None, torch.zeros(6, dtype=torch.long))] * 3
    shuffled = torch.cat([z, z[torch.randperm(6)], z[torch.randperm(6)]])
    assert abs(float(algorithm.distance(shuffled, labels))) < 1e-14
    assert float(algorithm.distance(torch.cat([z, z, z + 0.5]), labels)) > 1e-2
    assert float(algorithm.distance(torch.cat([z, z, 2 * z]), labels)) > 1e-2


def test_mmd_of_near_features_in_float32(toy: SimpleNamespace) -> None:
    """Features of norm 30 with differences of 1e-3: the kernel of s = 1000 must still see them."""
    algorithm = toy.make("MMD", domains=2)
    rng = np.random.default_rng(0)
    centre = rng.normal(size=toy.FEATURES) * 30
    a, b = (centre + 1e-3 * rng.normal(size=(4, toy.FEATURES)) for _ in range(2))
    labels = [(None, torch.zeros(4, dtype=torch.long))] * 2
    both = torch.from_numpy(np.concatenate([a, b])).float()
    expected = naive_mmd(both[:4].double(), both[4:].double())
    torch.testing.assert_close(algorithm.distance(both, labels).double(), expected, rtol=1e-2, atol=1e-7)


def test_covariance_needs_two_samples_and_pairs_two_domains(toy: SimpleNamespace) -> None:
    with pytest.raises(AidgnError, match="at least 2 samples"):
        toy.make("CORAL").update(toy.batches(0, sizes=(1, 4, 4)))
    toy.make("MMD").update(toy.batches(0, sizes=(1, 4, 4)))
    for name in ("CORAL", "MMD"):
        with pytest.raises(AidgnError, match="at least 2 source domains"):
            toy.make(name, domains=1)


def test_an_image_that_is_drawn_twice_has_a_gradient(toy: SimpleNamespace) -> None:
    """The root in a distance of zero has none."""
    algorithm = toy.make("MMD")
    z = torch.randn(6, 4, dtype=torch.float64)
    z[3] = z[0]
    z.requires_grad_()
    batches = [(z[part], torch.zeros(2, dtype=torch.long)) for part in (slice(0, 2), slice(2, 4), slice(4, 6))]
    algorithm.distance(z, batches).backward()
    wanted = z.detach().clone().requires_grad_()
    squares = (wanted.unsqueeze(1) - wanted).square().sum(2)
    kernel = sum((-scale * squares).exp() for scale in (0.001, 0.01, 0.1, 1, 10, 100, 1000))
    means = kernel.reshape(3, 2, 3, 2).mean((1, 3))
    (sum(means[i, i] + means[j, j] - 2 * means[i, j] for i, j in ((0, 1), (0, 2), (1, 2))) / 3).backward()
    torch.testing.assert_close(z.grad, wanted.grad)
