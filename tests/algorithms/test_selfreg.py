"""SelfReg against loops over samples, with the projection's batch norm written out."""

import copy
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aidgn.errors import AidgnError


def naive_norm(rows, norm):
    mean = sum(rows) / len(rows)
    variance = sum((row - mean) ** 2 for row in rows) / len(rows)
    return [norm.weight * (row - mean) / torch.sqrt(variance + norm.eps) + norm.bias for row in rows]


def naive_projection(layers, z):
    first, norm1, _, second, norm2, _, third, norm3 = layers
    rows = [torch.clamp(row, min=0) for row in naive_norm([first(row) for row in z], norm1)]
    rows = [torch.clamp(row, min=0) for row in naive_norm([second(row) for row in rows], norm2)]
    return naive_norm([third(row) for row in rows], norm3)


def squares(a, b):
    return sum(((p - q) ** 2).mean() for p, q in zip(a, b, strict=True)) / len(a)


def test_updates(toy: SimpleNamespace) -> None:
    algorithm = toy.make("SelfReg")
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    projection = copy.deepcopy(algorithm.projection)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)

    def naive(minibatches):
        share = np.random.beta(0.5, 0.5)
        x, y = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
        z = f(x)
        o, h = g(z), naive_projection(projection, z)
        p, q = algorithm.draw_partners(y).tolist(), algorithm.draw_partners(y).tolist()
        assert y[p].tolist() == y[q].tolist() == y.tolist()
        mixed_o = [share * o[i] + (1 - share) * o[j] for i, j in zip(p, q, strict=True)]
        mixed_h = [share * h[i] + (1 - share) * h[j] for i, j in zip(p, q, strict=True)]
        same = squares(o, [o[i] for i in p]) + 0.3 * squares(z, [h[i] for i in p])
        mixed = squares(o, mixed_o) + 0.3 * squares(z, mixed_h)
        risk = toy.cross_entropy(o, y)
        loss = risk + min(risk.item(), 1.0) * (share * same + (1 - share) * mixed)
        adam.step(loss)
        return loss

    before = copy.deepcopy(dict(algorithm.projection.named_parameters()))
    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])
    for name, weight in algorithm.projection.named_parameters():
        assert torch.equal(weight, before[name]), name


def test_partners_are_permutations_within_classes(toy: SimpleNamespace) -> None:
    algorithm, y = toy.make("SelfReg"), torch.tensor([300, 1, 300, 300, 0, 1])
    torch.manual_seed(0)
    drawn = Counter(tuple(algorithm.draw_partners(y).tolist()) for _ in range(3000))
    assert len(drawn) == 12  # 3! 2! 1!
    assert all(sorted(partners) == list(range(6)) and torch.equal(y[list(partners)], y) for partners in drawn)
    assert max(drawn.values()) < 1.4 * min(drawn.values())


def test_batch_norm_needs_two_samples(toy: SimpleNamespace) -> None:
    with pytest.raises(AidgnError):
        toy.make("SelfReg").update(toy.batches(0, sizes=(1, 4, 4)))
