"""Small algorithms in float64 after some updates, target features, and Adam written out for the naive references."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aidgn.algorithms import ALGORITHMS, Algorithm, create
from aidgn.backbones import fold, freeze

CLASSES, FEATURES, SIZE = 4, 5, 8


class Network(nn.Sequential):
    num_features = FEATURES


def network(channels: int = 3) -> nn.Module:
    """Two convolutions with batch norm, whose statistics are not the identity."""
    net = Network(
        nn.Conv2d(channels, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, FEATURES, 3),
        nn.BatchNorm2d(FEATURES),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None and layer.running_var is not None
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.5, 2)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.3)
    return net


def images(n: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, SIZE, SIZE, generator=generator, dtype=torch.float64) + shift


def trained(name: str, frozen: bool = True, updates: int = 2, **hyper_parameters: Any) -> Algorithm:
    """The algorithm after some updates, in float64 and training mode; its network folded as in a run."""
    torch.manual_seed(3)
    net = network(3 + ALGORITHMS[name].extra_channels)
    if frozen:
        freeze(net)
        assert fold(net) == 2
    given = {"lr": 1e-2, **({"kappa": 8.0} if name.startswith("AIDGN") else {}), **hyper_parameters}
    algorithm = create(name, net, CLASSES, 2, **given).double().train()
    generator = torch.Generator().manual_seed(4)
    for step in range(updates):
        algorithm.update(
            [
                (
                    images(6, seed=10 * step + domain, shift=0.2 * domain),
                    torch.randint(CLASSES, (6,), generator=generator),
                )
                for domain in range(2)
            ]
        )
    algorithm.zero_grad()
    return algorithm


def logits(classifier: nn.Module, z: Sequence[Tensor]) -> list[Tensor]:
    """w_c . z + b_c, or kappa w_c . z / |w_c||z| for AIDGN, class by class and entry by entry."""
    weight: Any = classifier.weight
    if hasattr(classifier, "kappa"):
        kappa: Any = classifier.kappa
        length = sum(a * a for a in z) ** 0.5
        return [
            kappa
            * sum(a * b for a, b in zip(weight[:, c], z, strict=True))
            / (sum(a * a for a in weight[:, c]) ** 0.5 * length)
            for c in range(weight.shape[1])
        ]
    bias: Any = classifier.bias
    return [sum((a * b for a, b in zip(weight[c], z, strict=True)), bias[c]) for c in range(len(weight))]


def entropy(values: Sequence[Tensor]) -> Tensor:
    """- sum p log p, class by class."""
    exponentials = [torch.exp(value) for value in values]
    probabilities = [each / sum(exponentials) for each in exponentials]
    return -sum((p * torch.log(p) for p in probabilities), torch.zeros((), dtype=torch.float64))


class NaiveAdam:
    """Kingma & Ba's algorithm 1, parameter by parameter."""

    def __init__(self, parameters: Sequence[Tensor], lr: float):
        self.parameters, self.lr, self.t = parameters, lr, 0
        self.m, self.v = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]

    def step(self, loss: Tensor) -> None:
        self.t += 1
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            for k, (p, g) in enumerate(zip(self.parameters, gradients, strict=True)):
                self.m[k] = 0.9 * self.m[k] + 0.1 * g
                self.v[k] = 0.999 * self.v[k] + 0.001 * g * g
                p -= self.lr * self.m[k] / (1 - 0.9**self.t) / ((self.v[k] / (1 - 0.999**self.t)).sqrt() + 1e-8)


@pytest.fixture
def toy() -> SimpleNamespace:
    return SimpleNamespace(
        CLASSES=CLASSES,
        FEATURES=FEATURES,
        images=images,
        trained=trained,
        logits=logits,
        entropy=entropy,
        Adam=NaiveAdam,
    )
