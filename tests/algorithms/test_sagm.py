"""SAM and SAGM against references that copy the network to the point nearby, weight by weight."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aidgn.algorithms import Algorithm
from aidgn.objective import aidgn_loss

RHO = 0.3


def naive_step(network: nn.Module, loss_of, rho: float, alpha: float, share: float):
    """The loss, and the gradient of each weight."""
    loss = loss_of(network)
    here = torch.autograd.grad(loss, list(network.parameters()))
    length = math.sqrt(sum(float(g) ** 2 for gradient in here for g in gradient.flatten()))
    moved = copy.deepcopy(network)
    with torch.no_grad():
        for weight, gradient in zip(moved.parameters(), here, strict=True):
            weight.copy_(weight + rho * gradient / length - alpha * gradient)
    nearby = torch.autograd.grad(loss_of(moved), list(moved.parameters()))
    return loss, [share * a + (1 - share) * b for a, b in zip(here, nearby, strict=True)]


def follow(toy: SimpleNamespace, algorithm: Algorithm, loss_of, alpha: float, share: float) -> None:
    network = copy.deepcopy(nn.ModuleList([algorithm.featurizer, algorithm.classifier]))
    adam = toy.Adam(network.parameters(), lr=1e-2, weight_decay=1e-3)

    def naive(minibatches):
        x = torch.cat([x for x, _ in minibatches])
        y = torch.cat([y for _, y in minibatches])
        loss, gradients = naive_step(network, lambda net: loss_of(net, x, y), RHO, alpha, share)
        adam.step(gradients)
        return loss

    toy.follow(algorithm, naive, [(nn.ModuleList([algorithm.featurizer, algorithm.classifier]), network)])


@pytest.mark.parametrize(
    ("name", "given", "alpha", "share"), [("SAM", {}, 0.0, 0.0), ("SAGM", {"alpha": 0.05}, 0.05, 0.5)]
)
def test_updates(toy: SimpleNamespace, name: str, given: dict[str, float], alpha: float, share: float) -> None:
    algorithm = toy.make(name, rho=RHO, **given)
    follow(toy, algorithm, lambda net, x, y: toy.cross_entropy(net[1](net[0](x)), y), alpha, share)


def test_updates_of_aidgn(toy: SimpleNamespace) -> None:
    algorithm = toy.make("AIDGN-SAGM", rho=RHO, alpha=0.05, kappa=8.0, gamma=0.05, mu_star=3.0, eta=0.2)
    domains = torch.tensor([0] * 5 + [1] * 3 + [2] * 4)

    def loss_of(net, x, y):
        return aidgn_loss(net[0](x), y, domains, net[1].weight, kappa=8.0, gamma=0.05, mu_star=3.0, eta=0.2).total

    follow(toy, algorithm, loss_of, 0.05, 0.5)


def test_running_statistics_follow_the_first_pass(toy: SimpleNamespace) -> None:
    norm = nn.BatchNorm1d(toy.FEATURES, momentum=0.25)
    algorithm, seen = toy.make("SAGM", toy.Network(*toy.network(), norm)), []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    algorithm.update(toy.batches(0))
    assert len(seen) == 2 and not torch.equal(*seen)
    torch.testing.assert_close(norm.running_mean, 0.25 * seen[0].mean(0))


def test_the_move_is_undone_to_the_bit(toy: SimpleNamespace) -> None:
    algorithm = toy.make("SAM", rho=0.1).float()
    algorithm.optimizers["main"].param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(algorithm.state_dict())
    algorithm.update([(x.float(), y) for x, y in toy.batches(0)])
    torch.testing.assert_close(algorithm.state_dict(), before, rtol=0, atol=0)


def test_a_copy_moves_its_own_weights(toy: SimpleNamespace) -> None:
    algorithm = toy.make("SAGM")
    algorithm.update(toy.batches(0))
    other = copy.deepcopy(algorithm)
    before = copy.deepcopy(algorithm.state_dict())
    other.update(toy.batches(1))
    torch.testing.assert_close(algorithm.state_dict(), before, rtol=0, atol=0)
    algorithm.update(toy.batches(1))
    torch.testing.assert_close(algorithm.state_dict(), other.state_dict(), rtol=0, atol=0)
