"""DANN and CDANN against a reference with two optimisers, sample by sample."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

from aidgn.algorithms import ALGORITHMS, create


@pytest.mark.parametrize("d_steps", [1, 2])
@pytest.mark.parametrize("grad_penalty", [0.0, 0.4])
@pytest.mark.parametrize("name", ["DANN", "CDANN"])
def test_updates(toy: SimpleNamespace, name: str, grad_penalty: float, d_steps: int) -> None:
    algorithm = toy.make(
        name,
        dann_lambda=0.7,
        grad_penalty=grad_penalty,
        d_steps_per_g_step=d_steps,
        mlp_width=6,
        mlp_depth=4,
        lr_g=1e-2,
        lr_d=2e-2,
        weight_decay_g=1e-3,
        weight_decay_d=2e-3,
        beta1=0.3,
    )
    f, g = copy.deepcopy(algorithm.featurizer), copy.deepcopy(algorithm.classifier)
    h = copy.deepcopy(algorithm.discriminator)
    layers = [layer for layer in h if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(5, 6), (6, 6), (6, 6), (6, 3)]
    embedding = copy.deepcopy(algorithm.class_embeddings) if name == "CDANN" else None
    own = [*h.parameters(), *(embedding.parameters() if embedding else [])]
    network_adam = toy.Adam([*f.parameters(), *g.parameters()], 1e-2, 1e-3, (0.3, 0.9))
    discriminator_adam = toy.Adam(own, 2e-2, 2e-3, (0.3, 0.9))
    t = 0

    def discriminator_loss(z, y):
        total, penalty = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        position = 0
        for domain, n in enumerate(toy.SIZES):
            for k in range(position, position + n):
                seen = z[k] + embedding.weight[y[k]] if embedding else z[k] + 0
                hidden = seen
                for layer in layers[:-1]:
                    hidden = relu(layer.weight @ hidden + layer.bias)
                logits = layers[-1].weight @ hidden + layers[-1].bias
                loss = -torch.log(torch.exp(logits[domain]) / torch.exp(logits).sum())
                share = 1 / len(y) if name == "DANN" else 1 / (int((y == y[k]).sum()) * toy.CLASSES)
                total = total + share * loss
                (gradient,) = torch.autograd.grad(loss, seen, create_graph=True)
                penalty = penalty + (gradient**2).sum() / len(y)
            position += n
        return total + grad_penalty * penalty

    def naive(minibatches):
        nonlocal t
        t += 1
        x, y = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
        z = f(x)
        d_loss = discriminator_loss(z, y)
        if t % (1 + d_steps) < d_steps:
            discriminator_adam.step(d_loss)
            return d_loss
        loss = toy.cross_entropy(g(z), y) - 0.7 * d_loss
        network_adam.step(loss)
        return loss

    pairs = [(algorithm.featurizer, f), (algorithm.classifier, g), (algorithm.discriminator, h)]
    if embedding:
        pairs.append((algorithm.class_embeddings, embedding))
    toy.follow(algorithm, naive, pairs, steps=5)


@pytest.mark.parametrize("name", ["DANN", "CDANN"])
def test_the_two_sides_pull_apart(toy: SimpleNamespace, name: str) -> None:
    """On one batch the discriminator's updates lower its loss and, with a large dann_lambda, the network's raise it."""
    algorithm = toy.make(name, dann_lambda=50.0, lr_g=1e-3, lr_d=1e-3, d_steps_per_g_step=1)
    minibatches = toy.batches(0, sizes=(20, 20, 20))
    x, y = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
    domains = torch.arange(3).repeat_interleave(20)

    def loss() -> float:
        with torch.no_grad():
            return float(algorithm.discriminator_loss(algorithm.features(x), y, domains))

    changes = []
    for _ in range(8):
        before = loss()
        weights = [p.clone() for p in (*algorithm.featurizer.parameters(), *algorithm.discriminator.parameters())]
        algorithm.update(minibatches)
        changes.append(loss() - before)
        now = [*algorithm.featurizer.parameters(), *algorithm.discriminator.parameters()]
        moved = [not torch.equal(p, q) for p, q in zip(now, weights, strict=True)]
        assert any(moved[:4]) != any(moved[4:])  # one side at a time
    assert all(change > 0 for change in changes[0::2])  # update 1, 3 ..: the network's
    assert all(change < 0 for change in changes[1::2])  # update 2, 4 ..: the discriminator's


def test_rates_follow_lr_where_they_are_not_given(toy: SimpleNamespace) -> None:
    algorithm = create("DANN", toy.network(), 4, 3, lr=1e-3, weight_decay=1e-4, lr_d=7e-3)
    groups = {name: optimizer.param_groups[0] for name, optimizer in algorithm.optimizers.items()}
    rates = {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()}
    assert rates == {"main": (1e-3, 1e-4), "discriminator": (7e-3, 0.0)}
    drawn = ALGORITHMS["CDANN"].sample("PACS", 0, 3)
    algorithm = create("CDANN", toy.network(), 4, 3, **drawn)
    assert algorithm.hyper_parameters == drawn
    small = ALGORITHMS["DANN"].sample("RotatedMNIST", 0, 0)
    assert (small["lr_g"], small["lr_d"], small["lr"], small["weight_decay_g"]) == (1e-3, 1e-3, 1e-3, 0.0)


def test_cdann_classes_absent_from_the_batch_do_not_matter(toy: SimpleNamespace) -> None:
    algorithm = toy.make("CDANN")
    each, y = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 2, 2])
    assert float(algorithm.reduce(each, y)) == pytest.approx((1.5 + 3.5) / toy.CLASSES)
