"""Fish against a reference that copies the network for the walk and keeps Adam's moments."""

import copy
from types import SimpleNamespace

import torch
from torch import nn


def test_updates(toy: SimpleNamespace) -> None:
    algorithm = toy.make("Fish", meta_lr=0.3)
    network = copy.deepcopy(nn.Sequential(algorithm.featurizer, algorithm.classifier))
    walker = copy.deepcopy(network)
    adam = toy.Adam(walker.parameters(), lr=1e-2, weight_decay=1e-3)

    def naive(minibatches):
        walker.load_state_dict(network.state_dict())
        losses = []
        for x, y in minibatches:
            losses.append(toy.cross_entropy(walker(x), y))
            adam.step(losses[-1])
        with torch.no_grad():
            for weight, end in zip(network.parameters(), walker.parameters(), strict=True):
                weight.copy_(weight + 0.3 * (end - weight))
        return sum(losses) / 3

    toy.follow(algorithm, naive, [(nn.Sequential(algorithm.featurizer, algorithm.classifier), network)])


def test_statistics_and_weights_move_by_the_same_share(toy: SimpleNamespace) -> None:
    norm = nn.BatchNorm1d(toy.FEATURES, momentum=0.25)
    algorithm, seen = toy.make("Fish", toy.Network(*toy.network(), norm), meta_lr=0.1), []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    algorithm.update(toy.batches(0))
    end = torch.zeros(toy.FEATURES, dtype=torch.float64)
    for z in seen:
        end = 0.75 * end + 0.25 * z.mean(0)
    assert len(seen) == 3
    torch.testing.assert_close(norm.running_mean, 0.1 * end)
    assert norm.num_batches_tracked == 3


def test_the_whole_walk_is_adam_domain_by_domain(toy: SimpleNamespace) -> None:
    algorithm = toy.make("Fish", meta_lr=1.0)
    network = copy.deepcopy(nn.Sequential(algorithm.featurizer, algorithm.classifier))
    adam = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-3)
    for step in range(2):
        algorithm.update(toy.batches(step))
        for x, y in toy.batches(step):
            adam.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            adam.step()
    toy.same_weights(nn.Sequential(algorithm.featurizer, algorithm.classifier), network)


def test_a_copy_walks_alone(toy: SimpleNamespace) -> None:
    algorithm = toy.make("Fish")
    algorithm.update(toy.batches(0))
    other, before = copy.deepcopy(algorithm), copy.deepcopy(algorithm.state_dict())
    other.update(toy.batches(1))
    torch.testing.assert_close(algorithm.state_dict(), before, rtol=0, atol=0)
    algorithm.update(toy.batches(1))
    torch.testing.assert_close(algorithm.state_dict(), other.state_dict(), rtol=0, atol=0)
