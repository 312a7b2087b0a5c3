"""Mixup against a pair-by-pair reference with the same draws."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aidgn.algorithms.base import random_cycle
from aidgn.errors import AidgnError


def test_updates(toy: SimpleNamespace) -> None:
    algorithm = toy.make("Mixup", mixup_alpha=0.7)
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    adam = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)

    def naive(minibatches):
        order = torch.randperm(3).tolist()
        loss = torch.zeros((), dtype=torch.float64)
        for k in range(3):
            (x_i, y_i), (x_j, y_j) = minibatches[order[k]], minibatches[order[(k + 1) % 3]]
            n = min(len(y_i), len(y_j))
            share = np.random.beta(0.7, 0.7)
            logits = g(f(share * x_i[:n] + (1 - share) * x_j[:n]))
            loss = loss + share * toy.cross_entropy(logits, y_i[:n]) + (1 - share) * toy.cross_entropy(logits, y_j[:n])
        adam.step(loss / 3)
        return loss / 3

    toy.follow(algorithm, naive, [(algorithm.featurizer, f), (algorithm.classifier, g)])


def test_every_domain_is_first_once_and_second_once() -> None:
    seen = set()
    for step in range(50):
        torch.manual_seed(step)
        pairs = random_cycle(4)
        assert sorted(i for i, _ in pairs) == sorted(j for _, j in pairs) == [0, 1, 2, 3]
        assert all(i != j for i, j in pairs)
        seen.update(pairs)
    assert len(seen) == 12  # every ordered pair comes up


def test_needs_two_domains(toy: SimpleNamespace) -> None:
    with pytest.raises(AidgnError, match="at least 2 source domains"):
        toy.make("Mixup", domains=1)
