"""Stage outputs of folded and fused networks against those of the plain ones, in float64."""

import copy

import pytest
import torch
from torch import nn

from aidgn import backbones
from aidgn.backbones.stages import StageComparison, list_stages, stage_widths


def moved(network: nn.Module) -> nn.Module:
    """Move the weights a little."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return network


def create(name: str) -> nn.Module:
    torch.manual_seed(0)
    network = backbones.create(name, weights="none", freeze_bn=False)
    generator = torch.Generator().manual_seed(1)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):  # as if trained
            layer.running_mean.normal_(0, 0.1, generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
    return network.double()


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("resnet18.tv_in1k", [64, 64, 128, 256, 512]),
        ("torchvision/resnet18", [64, 64, 128, 256, 512]),
        ("efficientnet_lite0.ra_in1k", [16, 24, 40, 112, 320]),
        ("convnext_atto.d2_in1k", [40, 80, 160, 320]),
    ],
)
def test_distances_are_those_of_the_plain_network(name: str, widths: list[int]) -> None:
    plain = create(name).eval()
    folded = copy.deepcopy(plain)
    backbones.freeze(folded)
    backbones.fold(folded)
    assert stage_widths(folded) == widths
    comparison = StageComparison(folded)
    moved(folded)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)

    stages = list_stages(plain)
    outputs: list[list[torch.Tensor]] = []
    for network in (moved(copy.deepcopy(plain)), plain):
        seen: list[torch.Tensor] = []
        for stage in stages:
            network.get_submodule(stage).register_forward_hook(lambda _, __, y, seen=seen: seen.append(y.detach()))
        features = network(x)
        outputs.append([*seen, features] if network is not plain else seen)
    *changed, features = outputs[0]
    expected = [((a - b) ** 2).mean((2, 3)) for a, b in zip(changed, outputs[1], strict=True)]
    torch.testing.assert_close(comparison(x), torch.cat([features, *expected], 1), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("small", [16, 32, 1024, 128]),
        ("vit_tiny_patch16_224.augreg_in21k", [192] * 5),
        ("swin_tiny_patch4_window7_224.ms_in1k", [96, 192, 384, 768]),
        ("torchvision/efficientnet_b0", [32, 24, 80, 192, 1280]),
    ],
)
def test_networks_of_other_shapes(name: str, widths: list[int]) -> None:
    network = backbones.create(name, weights="none").eval()
    assert stage_widths(network) == widths
    comparison = StageComparison(network)
    x = torch.randn(2, 3, *(28, 28) if name == "small" else (224, 224))
    with torch.no_grad():
        rows = comparison(x)
        assert rows.shape == (2, network.num_features + sum(widths))
        assert rows[:, network.num_features :].max() < 1e-10
        moved(network)
        assert (comparison(x)[:, network.num_features :].mean(0) > 0).float().mean() > 0.9


def test_five_stages_of_many_and_norms_start_none() -> None:
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(12)]
    assert list_stages(nn.Sequential(*blocks)) == ["1", "3", "6", "8", "11"]
    network = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)))
    assert list_stages(network) == ["0.2", "0.3"]
