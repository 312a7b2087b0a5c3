"""Networks of timm and torchvision in their own evaluation mode, the reference for our versions of them."""

from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from aidgn.backbones import create


def randomise(net: nn.Module) -> nn.Module:
    """Statistics, scales and shifts as after a training, so that no batch norm is the identity."""
    generator = torch.Generator().manual_seed(0)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None and layer.running_var is not None
            layer.running_mean.normal_(0, 0.3, generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
            nn.init.uniform_(layer.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(layer.bias, 0, 0.3, generator=generator)
    return net


def plain(name: str, num_classes: int = 0) -> nn.Module:
    """The library's network in its own evaluation mode, by its own means."""
    torch.manual_seed(1)
    if name.startswith("torchvision/"):
        net = torchvision.models.get_model(name.removeprefix("torchvision/"), weights=None)
        if num_classes == 0:
            net.fc = nn.Identity()
        return randomise(net).eval()
    return randomise(timm.create_model(name, pretrained=False, num_classes=num_classes)).eval()


def images(size: int = 32, count: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(2), dtype=dtype)


def frozen_like(reference: nn.Module, name: str) -> nn.Module:
    net = create(name, weights="none").to(next(reference.parameters()).dtype)
    net.load_state_dict(reference.state_dict())
    return net.train()


@pytest.fixture(name="plain")
def _plain() -> Callable[..., nn.Module]:
    return plain


@pytest.fixture(name="images")
def _images() -> Callable[..., Tensor]:
    return images


@pytest.fixture(name="randomise")
def _randomise() -> Callable[[nn.Module], nn.Module]:
    return randomise


@pytest.fixture(name="frozen_like")
def _frozen_like() -> Callable[[nn.Module, str], nn.Module]:
    return frozen_like
