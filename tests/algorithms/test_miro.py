"""MIRO against a reference that runs the layers one by one, and sums over positions and channels in loops."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aidgn.training.featurizer import Featurizer


def naive_penalty(outputs, targets, encoders):
    """Sum over stages of the mean over every entry of ((f - f0)^2 / v + log v) / 2; axis 1 has the channels."""
    total = torch.zeros((), dtype=torch.float64)
    for output, target, encoder in zip(outputs, targets, encoders, strict=True):
        terms = []
        for channel in range(output.shape[1]):
            variance = torch.log(1 + torch.exp(encoder[channel])) + 1e-5
            squares = (output[:, channel] - target[:, channel]) ** 2
            terms.append((squares / variance + torch.log(variance)).flatten())
        total = total + torch.cat(terms).mean() / 2
    return total


def follow(toy: SimpleNamespace, algorithm, network, stages, shape) -> None:
    """`stages` of the network map x to the outputs of all stages, the last output to features."""
    f, g = copy.deepcopy(network), copy.deepcopy(algorithm.classifier)
    oracle = copy.deepcopy(network)
    encoders = [torch.nn.Parameter(encoder.detach().clone()) for encoder in algorithm.encoders]
    main = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)
    fast = toy.Adam(encoders, lr=7e-2, weight_decay=1e-3)

    def naive(minibatches):
        x, y = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
        outputs, z = stages(f, x)
        penalty = naive_penalty(outputs, stages(oracle, x)[0], encoders)
        loss = toy.cross_entropy(g(z), y) + 0.8 * penalty
        gradients = torch.autograd.grad(loss, [*main.parameters, *encoders])
        main.step(gradients[: -len(encoders)])
        fast.step(gradients[-len(encoders) :])
        return loss

    toy.follow(algorithm, naive, [(network, f), (algorithm.classifier, g)], shape=shape)
    for mine, theirs in zip(algorithm.encoders, encoders, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_updates(toy: SimpleNamespace) -> None:
    algorithm = toy.make("MIRO", ld=0.8, lr_mult=7)
    assert [len(encoder) for encoder in algorithm.encoders] == [7, toy.FEATURES]
    variance = math.log(1 + math.exp(algorithm.encoders[0][0].item())) + 1e-5
    assert variance == pytest.approx(0.1, rel=1e-6)

    def stages(network, x):
        hidden = torch.tanh(network[0](x))
        z = torch.relu(network[2](hidden))
        return [hidden, z], z

    follow(toy, algorithm, algorithm.featurizer, stages, (toy.INPUTS,))


@pytest.mark.parametrize("wrapped", [False, True])
def test_updates_of_a_network_with_images(toy: SimpleNamespace, wrapped: bool) -> None:
    torch.manual_seed(2)
    layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, toy.FEATURES, 2), nn.Tanh()]
    network = toy.Network(nn.Sequential(*layers[:3]), *layers[3:], nn.AdaptiveAvgPool2d(1), nn.Flatten())
    algorithm = toy.make("MIRO", Featurizer(network, "float32") if wrapped else network, ld=0.8, lr_mult=7)
    assert [len(encoder) for encoder in algorithm.encoders] == [4, toy.FEATURES]

    def stages(net, x):
        first = net[0](x)
        z = torch.tanh(net[1](first)).mean((2, 3))
        return [first, z], z

    follow(toy, algorithm, network, stages, (3, 6, 6))


def test_the_frozen_network_keeps_the_initial_weights(toy: SimpleNamespace) -> None:
    algorithm = toy.make("MIRO")
    before = copy.deepcopy(algorithm.featurizer.state_dict())
    for step in range(2):
        algorithm.update(toy.batches(step))
    torch.testing.assert_close(algorithm.compare.oracle.state_dict(), before, rtol=0, atol=0)
    assert {key.split(".")[0] for key in algorithm.state_dict()} == {"featurizer", "classifier", "encoders"}


def test_a_copy_trains_alone(toy: SimpleNamespace) -> None:
    algorithm = toy.make("MIRO", Featurizer(toy.image_network(3).double(), "float32"))
    first, second = (toy.batches(step, shape=(3, 6, 6)) for step in range(2))
    algorithm.update(first)
    other, before = copy.deepcopy(algorithm), copy.deepcopy(algorithm.state_dict())
    other.update(second)
    torch.testing.assert_close(algorithm.state_dict(), before, rtol=0, atol=0)
    algorithm.update(second)
    torch.testing.assert_close(algorithm.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_the_first_penalty_is_that_of_equal_networks(toy: SimpleNamespace) -> None:
    """Half the logarithm of the first variance, 0.1, for each of two stages."""
    terms = toy.make("MIRO").update(toy.batches(0))
    assert float(terms["penalty"]) == pytest.approx(math.log(0.1), rel=1e-4)
