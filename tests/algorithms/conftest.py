"""A small network in float64, batches of uneven sizes, and Adam written out: what the naive references are built of."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aidgn.algorithms import Algorithm, create

SIZES = (5, 3, 4)  # samples of the three source domains
CLASSES, FEATURES, INPUTS = 4, 5, 6
# Settings under which everything that can change in a few updates does.
BUSY = {
    "IRM": {"irm_penalty_anneal_iters": 3},
    "VREx": {"vrex_penalty_anneal_iters": 3},
    "Fishr": {"penalty_anneal_iters": 3},
    "EQRM": {"eqrm_burnin_iters": 3, "eqrm_lr": 1e-3},
    "DANN": {"grad_penalty": 0.1, "mlp_dropout": 0.1},
    "CDANN": {"grad_penalty": 0.1, "d_steps_per_g_step": 2},
    "MTL": {"mtl_ema": 0.5},
}


class Network(nn.Sequential):
    num_features = FEATURES


class NaiveAdam:
    """Kingma & Ba's algorithm 1, parameter by parameter, with weight decay added to the gradient."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
    ):
        self.parameters, self.lr, self.weight_decay, self.betas = list(parameters), lr, weight_decay, betas
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.t = 0

    def step(self, loss_or_gradients: Tensor | Sequence[Tensor]) -> None:
        """One step down a loss, or by given gradients."""
        gradients = (
            torch.autograd.grad(loss_or_gradients, self.parameters)
            if isinstance(loss_or_gradients, Tensor)
            else loss_or_gradients
        )
        self.t += 1
        with torch.no_grad():
            for k, (p, g) in enumerate(zip(self.parameters, gradients, strict=True)):
                g = g + self.weight_decay * p
                self.m[k] = self.betas[0] * self.m[k] + (1 - self.betas[0]) * g
                self.v[k] = self.betas[1] * self.v[k] + (1 - self.betas[1]) * g * g
                m = self.m[k] / (1 - self.betas[0] ** self.t)
                v = self.v[k] / (1 - self.betas[1] ** self.t)
                p -= self.lr * m / (v.sqrt() + 1e-8)


def batches(step: int, sizes: Sequence[int] = SIZES, shape: Sequence[int] = (INPUTS,)) -> list[tuple[Tensor, Tensor]]:
    """One (x, y) per domain; the domains differ in mean."""
    generator = torch.Generator().manual_seed(100 + step)
    return [
        (
            torch.randn(n, *shape, generator=generator, dtype=torch.float64) + 0.3 * d,
            torch.randint(CLASSES, (n,), generator=generator),
        )
        for d, n in enumerate(sizes)
    ]


def network() -> nn.Module:
    torch.manual_seed(7)
    return Network(nn.Linear(INPUTS, 7), nn.Tanh(), nn.Linear(7, FEATURES), nn.ReLU())


def image_network(channels: int) -> nn.Module:
    torch.manual_seed(7)
    return Network(nn.Conv2d(channels, FEATURES, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def make(name: str, featurizer: nn.Module | None = None, domains: int = 3, **hyper_parameters: Any) -> Algorithm:
    """The algorithm in float64, in training mode, with a rate that moves the weights visibly."""
    given = {"lr": 1e-2, "weight_decay": 1e-3, **hyper_parameters}
    return create(name, featurizer or network(), CLASSES, domains, **given).double().train()


def seed(step: int) -> None:
    torch.manual_seed(step)
    np.random.seed(step)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean over samples of -log softmax(logits)_y, sample by sample."""
    total = torch.zeros((), dtype=logits.dtype)
    for row, label in zip(logits, y.tolist(), strict=True):
        total = total - torch.log(torch.exp(row[label] - row.max()) / torch.exp(row - row.max()).sum())
    return total / len(y)


def same_weights(module: nn.Module, reference: nn.Module, rtol: float = 1e-9) -> None:
    mine, theirs = module.state_dict(), reference.state_dict()
    assert mine.keys() == theirs.keys()
    for key in mine:
        torch.testing.assert_close(
            mine[key], theirs[key], rtol=rtol, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
        )


def follow(
    algorithm: Algorithm,
    naive_update: Callable[[list[tuple[Tensor, Tensor]]], Tensor],
    pairs: Sequence[tuple[nn.Module, nn.Module]],
    steps: int = 4,
    shape: Sequence[int] = (INPUTS,),
) -> None:
    """Both take the same updates on the same batches from the same seeds: equal losses, equal weights after each."""
    for step in range(steps):
        minibatches = batches(step, shape=shape)
        before = [p.detach().clone() for p in algorithm.parameters()]
        seed(step)
        terms = algorithm.update(minibatches)
        assert all(value.ndim == 0 and not value.requires_grad for value in terms.values())
        seed(step)
        expected = naive_update(minibatches)
        torch.testing.assert_close(terms["loss"], expected.detach(), rtol=1e-9, atol=1e-12)
        for mine, theirs in pairs:
            same_weights(mine, theirs)
        assert any(not torch.equal(p, q) for p, q in zip(algorithm.parameters(), before, strict=True))


@pytest.fixture
def toy() -> SimpleNamespace:
    return SimpleNamespace(
        SIZES=SIZES,
        CLASSES=CLASSES,
        FEATURES=FEATURES,
        INPUTS=INPUTS,
        BUSY=BUSY,
        Network=Network,
        Adam=NaiveAdam,
        batches=batches,
        network=network,
        image_network=image_network,
        make=make,
        seed=seed,
        cross_entropy=cross_entropy,
        same_weights=same_weights,
        follow=follow,
    )
