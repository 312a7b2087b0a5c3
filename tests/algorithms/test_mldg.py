"""MLDG against a reference that deep-copies the network for every inner step."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("n_meta_test", [None, 1, 2])
def test_updates(toy: SimpleNamespace, n_meta_test: int | None) -> None:
    algorithm = toy.make("MLDG", mldg_beta=0.7, n_meta_test=n_meta_test)
    network = copy.deepcopy(nn.Sequential(algorithm.featurizer, algorithm.classifier))
    adam = toy.Adam(network.parameters(), lr=1e-2, weight_decay=1e-3)

    def naive(minibatches):
        order = torch.randperm(3).tolist()
        if n_meta_test is None:
            pairs = [(order[0], order[1]), (order[1], order[2]), (order[2], order[0])]
        elif n_meta_test == 1:
            pairs = [(order[0], order[2]), (order[1], order[2])]
        else:
            pairs = [(order[0], order[1])]
        gradients = [torch.zeros_like(p) for p in network.parameters()]
        loss = torch.zeros((), dtype=torch.float64)
        for i, j in pairs:
            (x_i, y_i), (x_j, y_j) = minibatches[i], minibatches[j]
            n = min(len(y_i), len(y_j))
            inner = copy.deepcopy(network)
            train = toy.cross_entropy(inner(x_i[:n]), y_i[:n])
            grads_i = torch.autograd.grad(train, list(inner.parameters()))
            toy.Adam(inner.parameters(), lr=1e-2, weight_decay=1e-3).step(grads_i)
            test = toy.cross_entropy(inner(x_j[:n]), y_j[:n])
            grads_j = torch.autograd.grad(test, list(inner.parameters()))
            gradients = [total + (a + 0.7 * b) / 3 for total, a, b in zip(gradients, grads_i, grads_j, strict=True)]
            loss = loss + (train + 0.7 * test) / 3
        adam.step(gradients)
        return loss

    toy.follow(algorithm, naive, [(nn.Sequential(algorithm.featurizer, algorithm.classifier), network)])


def test_the_inner_step_leaves_the_outer_model_untouched(toy: SimpleNamespace) -> None:
    """With a rate of the outer Adam of zero nothing but the running statistics of the outer passes changes."""
    torch.manual_seed(0)
    featurizer = toy.Network(nn.Linear(toy.INPUTS, toy.FEATURES), nn.BatchNorm1d(toy.FEATURES), nn.ReLU())
    algorithm = toy.make("MLDG", featurizer)
    algorithm.optimizers["main"].param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(algorithm.state_dict())
    inputs = []
    reference = copy.deepcopy(algorithm.featurizer)
    algorithm.featurizer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].clone()))
    algorithm.update(toy.batches(0))
    for x in inputs[::2]:  # the passes with the outer weights
        reference(x)
    assert len(inputs) == 6
    for key, value in algorithm.state_dict().items():
        if "running" in key or "tracked" in key:
            expected = reference.state_dict()[key.removeprefix("featurizer.")]
            torch.testing.assert_close(value, expected)
            assert not torch.equal(value, before[key])
        else:
            assert torch.equal(value, before[key]), key


def test_meta_test_domains_are_at_most_all_but_one(toy: SimpleNamespace) -> None:
    algorithm = toy.make("MLDG", domains=2, n_meta_test=2)
    assert len(algorithm.pairs()) == 1
    assert toy.make("MLDG", n_meta_test="none").hyper_parameters["n_meta_test"] is None


def test_a_copy_goes_on_by_itself(toy: SimpleNamespace) -> None:
    algorithm = toy.make("MLDG")
    algorithm.update(toy.batches(0))
    other = copy.deepcopy(algorithm)
    before = copy.deepcopy(algorithm.state_dict())
    torch.manual_seed(1)
    other.update(toy.batches(1))
    torch.testing.assert_close(algorithm.state_dict(), before, rtol=0, atol=0)
    torch.manual_seed(1)
    algorithm.update(toy.batches(1))
    torch.testing.assert_close(algorithm.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert any(not torch.equal(value, before[key]) for key, value in other.state_dict().items())
