"""URM against a reference with the discriminator's losses written out, sample by sample."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch


def naive_loss(discriminator, rows, noise: bool):
    """Mean of -log sigmoid(h) for noise, of -log(1 - sigmoid(h)) for features."""
    sign = 1 if noise else -1
    return sum(torch.log1p(torch.exp(-sign * discriminator(row)[0])) for row in rows) / len(rows)


@pytest.mark.parametrize(("output", "layers"), [("tanh", 1), ("relu", 3), ("sigmoid", 1)])
def test_updates(toy: SimpleNamespace, output: str, layers: int) -> None:
    given = {"urm_adv_lambda": 0.4, "urm_discriminator_lr": 3e-3, "urm_discriminator_hidden_layers": layers}
    algorithm = toy.make("URM", urm_generator_output=output, **given)
    f, g, h = (copy.deepcopy(part) for part in (algorithm.featurizer, algorithm.classifier, algorithm.discriminator))
    assert [layer.in_features for layer in h[::2]] == [toy.FEATURES] + [100] * (layers + 1)
    main = toy.Adam([*f.parameters(), *g.parameters()], lr=1e-2, weight_decay=1e-3)
    adversary = toy.Adam(h.parameters(), lr=3e-3, weight_decay=1e-3)
    activation = {
        "tanh": lambda v: (torch.exp(v) - torch.exp(-v)) / (torch.exp(v) + torch.exp(-v)),
        "relu": lambda v: torch.clamp(v, min=0),
        "sigmoid": lambda v: 1 / (1 + torch.exp(-v)),
    }[output]

    def naive(minibatches):
        x, y = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
        z = activation(f(x))
        loss = toy.cross_entropy(g(z), y) + 0.4 * naive_loss(h, z, noise=True)
        uniform = torch.rand(z.shape, dtype=torch.float64)
        noise = 2 * uniform - 1 if output == "tanh" else uniform
        main.step(loss)
        adversary.step(naive_loss(h, noise, noise=True) + 0.4 * naive_loss(h, z.detach(), noise=False))
        return loss

    pairs = [(algorithm.featurizer, f), (algorithm.classifier, g), (algorithm.discriminator, h)]
    toy.follow(algorithm, naive, pairs)


def test_predictions_use_the_activation(toy: SimpleNamespace) -> None:
    algorithm = toy.make("URM").eval()
    x = torch.randn(4, toy.INPUTS, dtype=torch.float64)
    expected = [[math.tanh(value) for value in row] for row in algorithm.featurizer(x).tolist()]
    torch.testing.assert_close(algorithm.features(x), torch.tensor(expected, dtype=torch.float64))
