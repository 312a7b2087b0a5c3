"""Frozen, folded and fused layers against the unfolded networks of timm and torchvision."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional as F

from aidgn.backbones import (
    create,
    fold,
    freeze,
    freeze_folded,
    stem_convolution,
    unfold,
    unfuse,
)
from aidgn.backbones.fused_resnet import (
    FoldedConv2d,
    FusedBlock,
    FusedReLU,
    PoolingFirst,
)
from aidgn.training.featurizer import Featurizer

Build = Callable[..., nn.Module]
Draw = Callable[..., Tensor]


def test_statistics_stay_frozen(plain: Build, images: Draw, frozen_like: Build) -> None:
    for name in ("resnet10t", "mobilenetv3_small_050"):
        reference = plain(name)
        net = frozen_like(reference, name)
        net(images()).sum().backward()
        torch.testing.assert_close(net(images()), reference(images()))
        for key, buffer in reference.named_buffers():
            assert torch.equal(net.get_buffer(key), buffer), key
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                assert layer.weight.grad is not None and layer.bias.grad is not None


def test_statistics_move_when_not_frozen(images: Draw) -> None:
    net = create("resnet10t", weights="none", freeze_bn=False).train()
    net(images())
    assert all(layer.num_batches_tracked == 1 for layer in net.modules() if isinstance(layer, nn.BatchNorm2d))
    assert fold(net) == 0


@pytest.mark.parametrize(
    ("name", "pairs"),
    [("resnet10t", 14), ("mobilenetv3_small_050", 34), ("efficientnet_lite0", 49), ("torchvision/resnet18", 20)],
)
def test_folding_keeps_outputs_and_gradients(
    name: str,
    pairs: int,
    plain: Build,
    images: Draw,
    frozen_like: Build,
) -> None:
    reference = plain(name).double()
    net = frozen_like(reference, name)
    assert fold(net) == pairs == sum(isinstance(layer, nn.BatchNorm2d) for layer in net.modules())
    assert fold(net.train()) == 0  # nothing is left to fold
    assert list(net.state_dict()) == list(reference.state_dict())
    assert [key for key, _ in net.named_parameters()] == [key for key, _ in reference.named_parameters()]
    gradients = []
    for each in (reference, net):
        x = images(64, count=2, dtype=torch.float64).requires_grad_()
        features = each(x)
        assert isinstance(features, Tensor)
        direction = torch.randn(features.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        (features * direction + features**2).sum().backward()
        gradients.append([("features", features), ("x", x.grad), *((k, p.grad) for k, p in each.named_parameters())])
    for (key, expected), (_, result) in zip(*gradients, strict=True):
        assert expected is not None and expected.abs().max() > 0, key
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11 * expected.abs().max().item(), msg=key)


@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv3_small_050"])
def test_unfolding_restores_the_network(
    name: str,
    plain: Build,
    images: Draw,
    frozen_like: Build,
) -> None:
    reference = plain(name)
    net = frozen_like(reference, name)
    kinds = [type(layer) for layer in net.modules()]
    pairs = fold(net)
    other = copy.deepcopy(net)
    unfold(other)
    assert [type(layer) for layer in other.modules()] == kinds
    assert torch.equal(other(images()), reference(images()))  # the same operations, so to the last bit
    assert not torch.equal(net(images()), reference(images()))  # while the original stays folded
    assert fold(other) == pairs > 0


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet50", 16),
        ("torchvision/resnet18", 8),
        ("resnet10t", 4),
        ("resnext26ts", 0),
        ("seresnet50", 0),
        ("resnetaa34d", 13),
        ("resnetblur18", 5),
        ("mobilenetv3_small_050", 0),
    ],
)
def test_only_plain_blocks_are_fused(
    name: str,
    blocks: int,
    plain: Build,
    images: Draw,
    frozen_like: Build,
) -> None:
    reference = plain(name).double()
    net = frozen_like(reference, name)
    fold(net)
    assert sum(isinstance(layer, FusedBlock) for layer in net.modules()) == blocks
    x = images(64, count=2, dtype=torch.float64)
    torch.testing.assert_close(net(x), reference(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", True),
        ("torchvision/resnet18", True),
        ("resnetblur18", True),
        ("resnet18d", True),
        ("efficientnet_lite0", False),
    ],
)
def test_pooling_comes_before_shift_and_relu(name: str, expected: bool, plain: Build, frozen_like: Build) -> None:
    net = frozen_like(plain(name), name)
    fold(net)
    pools = [layer for layer in net.modules() if isinstance(layer, PoolingFirst)]
    assert len(pools) == expected == sum(isinstance(layer, FusedReLU) for layer in net.modules())
    unfuse(net)
    assert not any(isinstance(layer, PoolingFirst | FusedReLU) for layer in net.modules())
    assert all(layer.adds_shift for layer in net.modules() if isinstance(layer, FoldedConv2d))


class HalfShortcut(nn.Module):
    """Ends with a convolution and its batch norm, but does more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.bn(self.conv(x))


def test_only_a_plain_shortcut_leaves_its_shift(images: Draw, randomise: Build) -> None:
    reference = randomise(torchvision.models.resnet.BasicBlock(3, 8, downsample=HalfShortcut())).double().eval()
    net = nn.Sequential(copy.deepcopy(reference))
    freeze(net)
    assert fold(net) == 3 and isinstance(net[0], FusedBlock)
    x = images(16, count=2, dtype=torch.float64)
    torch.testing.assert_close(net(x), reference(x))


def test_pickle_of_batch_norms_with_activations(plain: Build, images: Draw, frozen_like: Build) -> None:
    net = frozen_like(plain("mobilenetv3_small_050"), "mobilenetv3_small_050")
    for _ in range(2):
        copied = pickle.loads(pickle.dumps(net))
        assert [type(layer) for layer in copied.modules()] == [type(layer) for layer in net.modules()]
        assert torch.equal(copied.eval()(images()), net.eval()(images()))
        fold(net)


@pytest.mark.parametrize("name", ["resnet10t", "torchvision/resnet18"])
def test_a_folded_network_goes_to_another_process(
    name: str,
    tmp_path: Path,
    plain: Build,
    images: Draw,
    frozen_like: Build,
) -> None:
    reference = plain(name)
    net = frozen_like(reference, name)
    fold(net)
    (tmp_path / "net").write_bytes(pickle.dumps(net))
    torch.save(images(), tmp_path / "images")
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import pickle, torch; net = pickle.load(open('net', 'rb')); "
            "torch.save((net(torch.load('images')), type(net.layer1[0]).__name__), 'found')",
        ],
        cwd=tmp_path,
        check=True,
    )
    found, kind = torch.load(tmp_path / "found")
    torch.testing.assert_close(found, net(images()))
    assert kind == "FusedBlock"
    copied = pickle.loads(pickle.dumps(net))
    unfold(copied)
    assert torch.equal(copied(images()), reference(images()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_relus_inside_convolutions_on_cuda(
    compiled: bool,
    plain: Build,
    images: Draw,
    frozen_like: Build,
) -> None:
    """In bfloat16, against blocks as they were, in float32: as close to that as those in bfloat16."""
    reference = plain("resnet50").cuda()
    net = frozen_like(reference, "resnet50").cuda()
    fold(net)
    before = copy.deepcopy(net)
    unfuse(before)
    net, before = (
        Featurizer(each.to(memory_format=torch.channels_last), "bfloat16", compiled) for each in (net, before)
    )
    x, far = images(64, count=8).cuda(), []
    expected = reference(x)
    expected.square().sum().backward()
    for each in (net, before):
        features = each(x)
        features.square().sum().backward()
        gradients = [
            ((mine.grad - exact.grad).norm() / exact.grad.norm()).item()
            for mine, exact in zip(each.network.parameters(), reference.parameters(), strict=True)
        ]
        far.append([((features - expected).norm() / expected.norm()).item(), sum(gradients) / len(gradients)])
    assert all(mine < 1.2 * other < 0.3 for mine, other in zip(*far, strict=True)), far


def test_frozen_weights_equal_folding(plain: Build, images: Draw, frozen_like: Build) -> None:
    reference = plain("resnet18")
    net = frozen_like(reference, "resnet18")
    fold(net)
    freeze_folded(net, torch.float32)
    torch.testing.assert_close(net(images()), reference(images()))
    for layer in net.modules():
        if isinstance(layer, FoldedConv2d):
            assert layer.constants is not None and not layer.constants[0].requires_grad
    assert list(net.state_dict()) == list(reference.state_dict())
    convolution = next(layer for layer in net.modules() if isinstance(layer, FoldedConv2d))
    with torch.no_grad():
        convolution.weight.mul_(2)  # does not count any more
    torch.testing.assert_close(net(images()), reference(images()))
    unfold(net)
    with torch.no_grad():
        convolution.weight.mul_(0.5)
    assert torch.equal(net(images()), reference(images()))


class Awkward(nn.Module):
    """One pair that can be folded (with a bias and reflected borders) and four that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
        self.seen_twice, self.runs_twice, self.before = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.bare = nn.BatchNorm2d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.good(x)).tanh()
        y = self.seen_twice(x)
        x = self.norms[1](y) + y
        x = self.norms[2](self.runs_twice(self.runs_twice(x)))
        return self.bare(self.before(self.norms[3](x.tanh())))


class Untraceable(Awkward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


@pytest.mark.parametrize(("kind", "pairs"), [(Awkward, 1), (Untraceable, 0)])
def test_only_possible_pairs_are_folded(kind: type[nn.Module], pairs: int, images: Draw, randomise: Build) -> None:
    torch.manual_seed(0)
    reference = kind()
    for layer in reference.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.affine:
            randomise(layer)
    net = copy.deepcopy(reference)
    freeze(net)
    assert fold(net) == pairs
    torch.testing.assert_close(net.train()(images()), reference.eval()(images()))


@pytest.mark.parametrize("channels", [3, 4])
def test_stem_on_blocks_is_the_same_convolution(channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 22, 30, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(5, channels, 7, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
    plain, ours = F.conv2d(x, weight, bias, stride=2, padding=3), stem_convolution(x, weight, bias)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for expected, found in zip(
        torch.autograd.grad(plain.square().sum(), (x, weight, bias)),
        torch.autograd.grad(ours.square().sum(), (x, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_the_stem_of_a_resnet_is_recognised() -> None:
    net = create("torchvision/resnet18", weights="none")
    fold(net)
    assert net.conv1.is_stem  # type: ignore[union-attr]
    assert not net.layer2[0].conv1.is_stem  # type: ignore[index]


def test_copy_of_a_folded_network_is_independent(plain: Build, images: Draw, frozen_like: Build) -> None:
    reference = plain("resnet10t")
    net = frozen_like(reference, "resnet10t")
    fold(net)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(images()).abs().max() == 0
    torch.testing.assert_close(net(images()), reference(images()))


def test_folded_network_compiles_and_runs_in_bfloat16(images: Draw, randomise: Build) -> None:
    torch.manual_seed(0)
    reference = randomise(
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=8),
            BatchNormAct2d(8, act_layer=nn.SiLU),
            nn.Conv2d(8, 16, 1),
        )
    ).eval()
    net = copy.deepcopy(reference).train()
    freeze(net)
    assert fold(net) == 2
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    expected = reference(images())
    torch.testing.assert_close(compiled(images()), expected, rtol=1e-4, atol=1e-5)
    for each in (net, compiled):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = each(images())
        assert result.dtype == torch.bfloat16
        assert (result.float() - expected).norm() < 0.01 * expected.norm()
        result.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
