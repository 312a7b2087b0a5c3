"""Featurisers against the libraries' own networks: timm's and torchvision's modules, unfolded, are the reference."""

import copy
import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import save_file
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional as F

from aidgn.backbones.fused_resnet import (
    FoldedConv2d,
    FusedBlock,
    FusedReLU,
    MaxPoolFunction,
    PoolingFirst,
    convolution_relu,
    product_relu,
    then_relu,
    unfuse,
)
from aidgn.backbones.registry import (
    DEFAULT,
    SMALL,
    create,
    fold,
    freeze,
    freeze_folded,
    says_stride_first,
    stem_convolution,
    unfold,
    weights_identity,
)
from aidgn.errors import AidgnError
from aidgn.training.featurizer import Featurizer

# The metadata of the ResNet-50 of He et al. (2015) as it is handed around: strides as in their paper.
HE2015 = {
    "architecture": "resnet50",
    "keys": "torchvision",
    "downsample": "stride on the 1x1 conv (layer2-4, block 0: conv1.stride=2, conv2.stride=1)",
}


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


# The small network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (28, 3), (32, 4), (64, 3)])
def test_small_gives_features_image_by_image(size: int, channels: int) -> None:
    net = create(SMALL, in_channels=channels)
    x = torch.rand(5, channels, size, size)
    features = net(x)
    assert features.shape == (5, net.num_features)
    torch.testing.assert_close(features[2:3], net(x[2:3]))  # no image sees another
    assert fold(net) == 0


def test_features_of_small_may_take_any_norm() -> None:
    net = create(SMALL)
    before = net(images(28))
    last = [layer for layer in net.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        last.weight *= 10
        assert last.bias is not None
        last.bias *= 10
    torch.testing.assert_close(net(images(28)), 10 * before)


# Networks of the libraries, weights of files --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "resnet10t.c3_in1k",
        "mobilenetv3_small_050.lamb_in1k",
        "vit_tiny_patch16_224",
        "torchvision/resnet18",
        "torchvision/mobilenet_v3_small",
    ],
)
def test_num_features_is_what_comes_out(name: str) -> None:
    net = create(name, weights="none")
    assert net.eval()(images(224, count=1)).shape == (1, net.num_features)


@pytest.mark.parametrize("kind", ["safetensors", "half", "pth", "checkpoint", "without counters"])
@pytest.mark.parametrize("name", ["resnet18.tv_in1k", "torchvision/resnet18"])
def test_weights_of_a_file(name: str, kind: str, tmp_path: Path) -> None:
    net = plain(name, num_classes=1000)
    tensors = dict(net.state_dict())
    path = tmp_path / ("weights.safetensors" if kind in ("safetensors", "half") else "weights.pth")
    if kind == "half":
        tensors = {key: tensor.half() if tensor.ndim > 1 else tensor for key, tensor in tensors.items()}
        net.load_state_dict(tensors)
    if kind == "without counters":
        tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith("num_batches_tracked")}
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save({"epoch": 90, "state_dict": tensors} if kind == "checkpoint" else tensors, path)
    net.fc = nn.Identity()
    featuriser = create(name, weights=path)
    assert all(parameter.dtype == torch.float32 for parameter in featuriser.parameters())
    torch.testing.assert_close(featuriser(images()), net(images()), rtol=0, atol=0)


def test_additional_channels_start_as_the_first(tmp_path: Path) -> None:
    for name in ("resnet10t.c3_in1k", "torchvision/resnet18"):
        reference = plain(name)
        save_file(reference.state_dict(), tmp_path / "weights.safetensors")
        net = create(name, weights=tmp_path / "weights.safetensors", in_channels=5)
        first, old = (
            next(layer for layer in each.modules() if isinstance(layer, nn.Conv2d)) for each in (net, reference)
        )
        x, extra = images(), torch.randn(3, 2, 32, 32)
        kernel = old.weight[:, [0, 1, 2, 0, 0]]
        expected = F.conv2d(torch.cat([x, extra], 1), kernel, None, old.stride, old.padding)
        torch.testing.assert_close(first(torch.cat([x, extra], 1)), expected)
        # Additional channels of zeros change nothing.
        torch.testing.assert_close(net(torch.cat([x, 0 * extra], 1)), reference(x), rtol=1e-4, atol=1e-4)
    weight = create(SMALL, in_channels=4).state_dict()["layers.0.weight"]
    assert weight.shape[1] == 4 and torch.equal(weight[:, 3], weight[:, 0])


def bottleneck_reference(tensors: dict[str, Tensor]) -> nn.Module:
    """torchvision's ResNet-50 with the stride where He et al. (2015) have it."""
    net = torchvision.models.resnet50()
    for layer in (net.layer2, net.layer3, net.layer4):
        layer[0].conv1 = nn.Conv2d(layer[0].conv1.in_channels, layer[0].conv1.out_channels, 1, stride=2, bias=False)
        width = layer[0].conv2.out_channels
        layer[0].conv2 = nn.Conv2d(width, width, 3, stride=1, padding=1, bias=False)
    net.load_state_dict(tensors)
    net.fc = nn.Identity()
    return net.eval()


def check_he2015(path: Path, size: int) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    nets = [create(name, weights=path) for name in (DEFAULT, "torchvision/resnet50")]
    for net in nets:
        for stage in ("layer2", "layer3", "layer4"):
            assert net.get_submodule(f"{stage}.0.conv1").stride == (2, 2)
            assert net.get_submodule(f"{stage}.0.conv2").stride == (1, 1)
    with torch.no_grad():
        expected = bottleneck_reference(tensors)(images(size, count=2))
        for net in nets:
            torch.testing.assert_close(net(images(size, count=2)), expected, rtol=1e-5, atol=1e-5)


def test_stride_of_he2015_is_read_from_the_file(tmp_path: Path) -> None:
    tensors = plain("torchvision/resnet50", num_classes=1000).state_dict()
    tensors = {key: tensor.half() if tensor.ndim > 1 else tensor for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "weights.safetensors", HE2015)
    check_he2015(tmp_path / "weights.safetensors", size=64)
    with pytest.raises(AidgnError, match="holds weights of resnet50, not of resnet101"):
        create("resnet101.tv_in1k", weights=tmp_path / "weights.safetensors")
    save_file(tensors, tmp_path / "weights.safetensors")
    net = create(DEFAULT, weights=tmp_path / "weights.safetensors")
    assert net.get_submodule("layer2.0.conv2").stride == (2, 2)


def test_he2015_itself() -> None:
    path = os.environ.get("AIDGN_WEIGHTS_HE2015")
    if not path:
        pytest.skip("the weights are not here: AIDGN_WEIGHTS_HE2015 names the ResNet-50 file of He et al. (2015)")
    check_he2015(Path(path), size=224)


# What people get wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("resnet5.tv_in1k", None, "Unknown backbone resnet5.tv_in1k.*Did you mean resnet50.tv_in1k"),
        ("resnet50.tv_in2k", "none", "Unknown backbone.*Did you mean resnet50.tv_in1k"),
        ("torchvision/resnet5", None, "Unknown backbone.*Did you mean torchvision/resnet50"),
        ("torchvision/squeezenet1_0", "none", "Unknown backbone"),
        ("smal", None, "Did you mean small"),
        ("resnet50", "hub", "does not say which weights.*resnet50.tv_in1k"),
        ("small", "hub", "trained from scratch"),
        ("resnet18.tv_in1k", "nowhere.pth", "nowhere.pth does not exist.*hub or none"),
    ],
)
def test_wrong_names(name: str, weights: str | None, message: str) -> None:
    with pytest.raises(AidgnError, match=message):
        create(name, weights=weights)


def test_too_few_channels() -> None:
    with pytest.raises(AidgnError, match=r"3 channels, not 1.*--backbone small"):
        create("resnet18.tv_in1k", weights="none", in_channels=1)


class Malicious:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_malicious_pickle_is_refused(form: str, tmp_path: Path) -> None:
    path, trace = tmp_path / "weights.pth", tmp_path / "executed"
    if form == "pickle":
        path.write_bytes(pickle.dumps({"conv1.weight": Malicious(trace)}))
    else:
        torch.save({"conv1.weight": Malicious(trace)}, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(AidgnError, match=r"weights\.pth was refused: .* could run any code"):
        create("resnet10t.c3_in1k", weights=path)
    assert not trace.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("damage", ["half", "empty", "text"])
def test_damaged_file(suffix: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / f"weights{suffix}"
    tensors = plain("resnet10t").state_dict()
    save_file(tensors, path) if suffix == ".safetensors" else torch.save(tensors, path)
    content = {"half": path.read_bytes()[: path.stat().st_size // 2], "empty": b"", "text": b"<!doctype html>\n" * 9}
    path.write_bytes(content[damage])
    with pytest.raises(AidgnError, match=f"weights{suffix} (is not a complete file of weights|was refused)"):
        create("resnet10t.c3_in1k", weights=path)


@pytest.mark.parametrize("content", [{"epoch": 3}, torch.zeros(3), {}, [torch.zeros(3)]])
def test_file_without_weights(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(AidgnError, match="does not hold weights"):
        create("resnet10t.c3_in1k", weights=tmp_path / "weights.pt")


def test_other_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "weights.ckpt").write_bytes(b"")
    with pytest.raises(AidgnError, match=r"must end in \.safetensors, \.pth, \.pt or \.bin"):
        create("resnet10t.c3_in1k", weights=tmp_path / "weights.ckpt")


def test_weights_of_another_architecture(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    # All that resnet18 has, in its shapes, and more.
    save_file(plain("torchvision/resnet34", num_classes=1000).state_dict(), path)
    with pytest.raises(AidgnError, match=r"does not hold the weights of resnet18.* that it does not have \(layer1.2"):
        create("resnet18.tv_in1k", weights=path)
    with pytest.raises(
        AidgnError, match=r"which has 318 tensors: \d+ missing \(.*\d+ of another shape \(.* instead of"
    ):
        create(DEFAULT, weights=path)
    tensors = plain("resnet18", num_classes=1000).state_dict()
    del tensors["layer1.0.conv1.weight"]
    tensors["bn1.bias"] = torch.zeros(7)
    save_file(tensors, path)
    with pytest.raises(
        AidgnError,
        match=r"1 missing \(layer1.0.conv1.weight\), "
        r"1 of another shape \(bn1.bias is \[7\] instead of \[64\]\)",
    ):
        create("resnet18.tv_in1k", weights=path)


@pytest.mark.parametrize("offline", ["1", "0"])
def test_hub_out_of_reach(offline: str, tmp_path: Path) -> None:
    """Said at once: without word of it being offline, the hub's own library would try again for a minute."""
    code = """if True:
        from aidgn.backbones.registry import create
        from aidgn.errors import AidgnError
        for name in ("resnet18.tv_in1k", "torchvision/resnet18"):
            try:
                create(name)
            except AidgnError as error:
                print(error)
        """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": offline,
        "HF_HOME": str(tmp_path),
        "TORCH_HOME": str(tmp_path),
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("Downloading")]
    for line, name in zip(lines, ("resnet18.tv_in1k", "torchvision/resnet18"), strict=True):
        assert line.startswith(f"The weights of {name} could not be fetched from the hub")
        assert "--weights FILE" in line


def test_identity_of_weights(tmp_path: Path) -> None:
    assert weights_identity(SMALL, None) == weights_identity(DEFAULT, "none") == "none"
    assert weights_identity(DEFAULT, None) == weights_identity(DEFAULT, "hub") == "hub"
    identities = []
    for folder, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.pth").write_bytes(content)
        identities.append(weights_identity(DEFAULT, tmp_path / folder / "mine.pth"))
    assert identities[0] == identities[1] == f"mine-{hashlib.sha256(b'1').hexdigest()[:8]}" != identities[2]
    assert weights_identity(DEFAULT, str(tmp_path / "a" / "mine.pth")) == identities[0]
    with pytest.raises(AidgnError, match="does not exist"):
        weights_identity(DEFAULT, tmp_path / "none.pth")


def test_what_a_file_says_of_its_strides(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "he.safetensors", metadata=HE2015)
    save_file({"a": torch.zeros(1)}, tmp_path / "tv.safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "tv.pth")
    assert says_stride_first(DEFAULT, tmp_path / "he.safetensors")
    assert not any(
        says_stride_first(DEFAULT, weights)
        for weights in (tmp_path / "tv.safetensors", tmp_path / "tv.pth", "hub", "none", None)
    )


# Frozen and folded batch norm -----------------------------------------------------------------------------------------


def featuriser_like(reference: nn.Module, name: str) -> nn.Module:
    net = create(name, weights="none").to(next(reference.parameters()).dtype)
    net.load_state_dict(reference.state_dict())
    return net.train()


def test_statistics_stay_frozen() -> None:
    for name in ("resnet10t", "mobilenetv3_small_050"):
        reference = plain(name)
        net = featuriser_like(reference, name)
        net(images()).sum().backward()
        torch.testing.assert_close(net(images()), reference(images()))
        for key, buffer in reference.named_buffers():
            assert torch.equal(net.get_buffer(key), buffer), key
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                assert layer.weight.grad is not None and layer.bias.grad is not None


def test_statistics_move_when_not_frozen() -> None:
    net = create("resnet10t", weights="none", freeze_bn=False).train()
    net(images())
    assert all(layer.num_batches_tracked == 1 for layer in net.modules() if isinstance(layer, nn.BatchNorm2d))
    assert fold(net) == 0


@pytest.mark.parametrize(
    ("name", "pairs"),
    [("resnet10t", 14), ("mobilenetv3_small_050", 34), ("efficientnet_lite0", 49), ("torchvision/resnet18", 20)],
)
def test_folding_changes_neither_outputs_nor_gradients(name: str, pairs: int) -> None:
    reference = plain(name).double()
    net = featuriser_like(reference, name)
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
    for (key, expected), (_, got) in zip(*gradients, strict=True):
        assert expected is not None and expected.abs().max() > 0, key
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11 * expected.abs().max().item(), msg=key)


@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv3_small_050"])
def test_unfolding_gives_the_network_before_folding(name: str) -> None:
    reference = plain(name)
    net = featuriser_like(reference, name)
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
def test_only_plain_blocks_take_their_relus_in(name: str, blocks: int) -> None:
    reference = plain(name).double()
    net = featuriser_like(reference, name)
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
def test_pooling_comes_before_shift_and_relu(name: str, expected: bool) -> None:
    net = featuriser_like(plain(name), name)
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


def test_only_a_plain_shortcut_leaves_its_shift_to_the_block() -> None:
    reference = randomise(torchvision.models.resnet.BasicBlock(3, 8, downsample=HalfShortcut())).double().eval()
    net = copy.deepcopy(reference)
    freeze(net)
    assert fold(net) == 3 and isinstance(net, FusedBlock)
    x = images(16, count=2, dtype=torch.float64)
    torch.testing.assert_close(net(x), reference(x))


def test_a_network_with_activations_in_its_batch_norms_can_be_pickled() -> None:
    net = featuriser_like(plain("mobilenetv3_small_050"), "mobilenetv3_small_050")
    for _ in range(2):
        copied = pickle.loads(pickle.dumps(net))
        assert [type(layer) for layer in copied.modules()] == [type(layer) for layer in net.modules()]
        assert torch.equal(copied.eval()(images()), net.eval()(images()))
        fold(net)


@pytest.mark.parametrize("ties", [False, True])
def test_halved_is_pooling(ties: bool) -> None:
    drawn = torch.randn(2, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = (drawn.round() if ties else drawn).contiguous(memory_format=torch.channels_last)
    x, y = drawn.clone().requires_grad_(), drawn.clone().requires_grad_()
    found, wanted = MaxPoolFunction.apply(x), F.max_pool2d(y, 3, 2, 1)
    assert torch.equal(found, wanted)
    gradient = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found.backward(gradient)
    wanted.backward(gradient)
    torch.testing.assert_close(x.grad, y.grad)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["resnet10t", "torchvision/resnet18"])
def test_a_folded_network_goes_to_another_process(name: str, tmp_path: Path) -> None:
    reference = plain(name)
    net = featuriser_like(reference, name)
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
    assert kind == "FusedBasicBlock"
    copied = pickle.loads(pickle.dumps(net))
    unfold(copied)
    assert torch.equal(copied(images()), reference(images()))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("with_shortcut", [False, True])
def test_convolution_with_relu_and_its_gradients(stride: int, with_shortcut: bool) -> None:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    generator = torch.Generator().manual_seed(0)
    shortcut = drawn(2, 4, 6 // stride, 6 // stride) if with_shortcut else None
    arguments = drawn(2, 3, 6, 6), drawn(4, 3, 3, 3), drawn(4), shortcut, [stride] * 2, [1, 1], [1, 1]
    expected = F.conv2d(*arguments[:3], stride, 1)
    expected = (expected if shortcut is None else expected + shortcut).clamp(min=0)
    torch.testing.assert_close(convolution_relu(*arguments), expected)
    assert torch.autograd.gradcheck(convolution_relu, arguments)
    torch.library.opcheck(convolution_relu, arguments)  # what torch.compile is told of it is true
    frozen = [each.detach() if isinstance(each, Tensor) and i == 1 else each for i, each in enumerate(arguments)]
    convolution_relu(*frozen).sum().backward()
    assert arguments[1].grad is None and arguments[0].grad is not None


def test_which_convolutions_keep_the_size() -> None:
    def keeps(*arguments: int, **options: int) -> bool:
        layer = nn.Conv2d(*arguments, **options)
        layer.__class__ = FoldedConv2d
        x = torch.zeros(1, layer.in_channels, 9, 9)
        assert not layer.keeps_size or layer._conv_forward(x, layer.weight, None).shape[2:] == x.shape[2:]
        return layer.keeps_size

    assert keeps(4, 8, 1) and keeps(4, 4, 3, padding=1) and keeps(4, 4, 3, padding=2, dilation=2)
    assert not any(
        (
            keeps(4, 8, 1, stride=2),
            keeps(4, 8, 1, padding=1),
            keeps(4, 8, 3, padding=1),
            keeps(4, 4, 3),
            keeps(4, 4, 3, padding=1, stride=2),
            keeps(4, 4, 2),
        )
    )


def test_one_by_one_convolution_as_a_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((2, 5, 3, 4), (7, 5, 1, 1), (7,))
    )
    x = x.contiguous(memory_format=torch.channels_last)
    found = product_relu(x, weight, bias)
    torch.testing.assert_close(found, F.conv2d(x, weight, bias).relu())
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_lay_in_memory_before_does_not_count() -> None:
    for channels, out, kernel, shortcut in ((64, 64, 3, False), (256, 64, 1, False), (64, 256, 1, True)):
        x, weight, bias, added = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((8, channels, 28, 28), (out, channels, kernel, kernel), (out,), (8, out, 28, 28))
        )
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        del_me = [torch.full((1 << 22,), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
        del del_me
        found = then_relu(x, weight, bias, added if shortcut else None, [1, 1], [kernel // 2] * 2, [1, 1])
        wanted = F.conv2d(x.float(), weight.float(), bias.float(), padding=kernel // 2) + (added if shortcut else 0)
        assert found.isfinite().all()
        assert (found - wanted.relu()).norm() < 0.01 * wanted.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_relus_inside_convolutions_on_cuda(compiled: bool) -> None:
    """In bfloat16, against blocks as they were, in float32: as close to that as those in bfloat16."""
    reference = plain("resnet50").cuda()
    net = featuriser_like(reference, "resnet50").cuda()
    fold(net)
    before = copy.deepcopy(net)
    unfuse(before)
    net, before = (
        Featurizer(each.to(memory_format=torch.channels_last), "bfloat16", compiled) for each in (net, before)
    )
    x, far = images(64, count=8).cuda(), []
    wanted = reference(x)
    wanted.square().sum().backward()
    for each in (net, before):
        features = each(x)
        features.square().sum().backward()
        gradients = [
            ((mine.grad - exact.grad).norm() / exact.grad.norm()).item()
            for mine, exact in zip(each.network.parameters(), reference.parameters(), strict=True)
        ]
        far.append([((features - wanted).norm() / wanted.norm()).item(), sum(gradients) / len(gradients)])
    assert all(mine < 1.2 * other < 0.3 for mine, other in zip(*far, strict=True)), far


def test_settled_weights_are_what_folding_gives() -> None:
    reference = plain("resnet18")
    net = featuriser_like(reference, "resnet18")
    fold(net)
    freeze_folded(net, torch.float32)
    torch.testing.assert_close(net(images()), reference(images()))
    for settled in net.modules():
        if isinstance(settled, FoldedConv2d):
            assert settled.settled is not None and not settled.settled[0].requires_grad
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
def test_only_pairs_that_can_be_are_folded(kind: type[nn.Module], pairs: int) -> None:
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


def test_copy_of_a_folded_network_is_independent() -> None:
    reference = plain("resnet10t")
    net = featuriser_like(reference, "resnet10t")
    fold(net)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(images()).abs().max() == 0
    torch.testing.assert_close(net(images()), reference(images()))


def test_folded_network_compiles_and_runs_in_bfloat16() -> None:
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
            got = each(images())
        assert got.dtype == torch.bfloat16
        assert (got.float() - expected).norm() < 0.01 * expected.norm()
        got.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
