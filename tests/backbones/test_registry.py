"""Backbones by name and their weights, against the networks of timm and torchvision."""

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from aidgn.backbones import (
    DEFAULT,
    SMALL,
    Preprocessing,
    WeightsError,
    choose_image_size,
    create,
    fold,
    is_stride_first,
    list_backbones,
    preprocessing,
    try_forward,
    weights_identity,
)
from aidgn.backbones.input_size import set_input_size
from aidgn.data import transforms as aug
from aidgn.data.transforms import build_transforms
from aidgn.errors import AidgnError, ParameterError, UnknownNameError

# The metadata of the ResNet-50 of He et al. (2015) as it is handed around: strides as in their paper.
HE2015 = {
    "architecture": "resnet50",
    "keys": "torchvision",
    "downsample": "stride on the 1x1 conv (layer2-4, block 0: conv1.stride=2, conv2.stride=1)",
}


# The small network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (28, 3), (32, 4), (64, 3)])
def test_small_gives_features_image_by_image(size: int, channels: int) -> None:
    net = create(SMALL, in_channels=channels)
    x = torch.rand(5, channels, size, size)
    features = net(x)
    assert features.shape == (5, net.num_features)
    torch.testing.assert_close(features[2:3], net(x[2:3]))  # no image sees another
    assert fold(net) == 0


def test_features_of_small_may_take_any_norm(images: Callable[..., Tensor]) -> None:
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
def test_num_features_is_the_output_width(name: str, images: Callable[..., Tensor]) -> None:
    net = create(name, weights="none")
    assert net.eval()(images(224, count=1)).shape == (1, net.num_features)


@pytest.mark.parametrize("kind", ["safetensors", "half", "pth", "checkpoint", "without counters"])
@pytest.mark.parametrize("name", ["resnet18.tv_in1k", "torchvision/resnet18"])
def test_weights_of_a_file(
    name: str, kind: str, tmp_path: Path, plain: Callable[..., nn.Module], images: Callable[..., Tensor]
) -> None:
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
    featurizer = create(name, weights=path)
    assert all(parameter.dtype == torch.float32 for parameter in featurizer.parameters())
    torch.testing.assert_close(featurizer(images()), net(images()), rtol=0, atol=0)


def test_additional_channels_start_as_the_first(
    tmp_path: Path, plain: Callable[..., nn.Module], images: Callable[..., Tensor]
) -> None:
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


def check_he2015(path: Path, size: int, images: Callable[..., Tensor]) -> None:
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


def test_stride_of_he2015_is_read_from_the_file(
    tmp_path: Path, plain: Callable[..., nn.Module], images: Callable[..., Tensor]
) -> None:
    tensors = plain("torchvision/resnet50", num_classes=1000).state_dict()
    tensors = {key: tensor.half() if tensor.ndim > 1 else tensor for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "weights.safetensors", HE2015)
    check_he2015(tmp_path / "weights.safetensors", 64, images)
    with pytest.raises(WeightsError, match="holds weights of resnet50, not of resnet101"):
        create("resnet101.tv_in1k", weights=tmp_path / "weights.safetensors")
    save_file(tensors, tmp_path / "weights.safetensors")
    net = create(DEFAULT, weights=tmp_path / "weights.safetensors")
    assert net.get_submodule("layer2.0.conv2").stride == (2, 2)


def test_published_he2015_weights(images: Callable[..., Tensor]) -> None:
    path = os.environ.get("AIDGN_WEIGHTS_HE2015")
    if not path:
        pytest.skip("the weights are not here: AIDGN_WEIGHTS_HE2015 names the ResNet-50 file of He et al. (2015)")
    check_he2015(Path(path), 224, images)


# What people get wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("resnet5.tv_in1k", "resnet50.tv_in1k"),
        ("resnet50.tv_in2k", "resnet50.tv_in1k"),
        ("torchvision/resnet5", "torchvision/resnet50"),
        ("torchvision/squeezenet1_0", ""),
        ("smal", "small"),
    ],
)
def test_unknown_names(name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"Did you mean {nearest}" if nearest else None) as caught:
        create(name, weights="none")
    assert caught.value.name == name and DEFAULT in caught.value.known


@pytest.mark.parametrize(
    ("name", "weights", "parameter", "expected"),
    [
        ("resnet50", "hub", "backbone", "resnet50.tv_in1k"),
        ("small", "hub", "weights", "none"),
        ("resnet18.tv_in1k", "nowhere.pth", "weights", "exists"),
    ],
)
def test_wrong_weights(name: str, weights: str, parameter: str, expected: str) -> None:
    with pytest.raises(ParameterError) as caught:
        create(name, weights=weights)
    assert caught.value.parameter == parameter and expected in caught.value.expected


def test_too_few_channels() -> None:
    with pytest.raises(ParameterError) as caught:
        create("resnet18.tv_in1k", weights="none", in_channels=1)
    assert (caught.value.parameter, caught.value.value) == ("in_channels", 1)


def test_preprocessing_is_that_of_the_library() -> None:
    """The numbers are those that timm and torchvision publish for these weights."""
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert preprocessing(DEFAULT) == Preprocessing(*imagenet, "bilinear", (224, 224))
    assert preprocessing("vit_base_patch16_224.augreg_in21k") == Preprocessing(
        (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", (224, 224)
    )
    assert preprocessing("torchvision/efficientnet_b3") == Preprocessing(*imagenet, "bicubic", (300, 300))
    assert preprocessing(SMALL).input_size == (28, 28)
    with pytest.raises(UnknownNameError):
        preprocessing("resnet5")
    assert {SMALL, DEFAULT, "torchvision/resnet50"} <= set(list_backbones())


FAMILIES = (
    "resnet50.tv_in1k",
    "vit_base_patch16_224.augreg_in21k",
    "vit_small_patch14_dinov2.lvd142m",
    "vit_small_patch16_dinov3.lvd1689m",
    "vit_base_patch16_clip_224.openai",
    "vit_base_patch16_siglip_224.webli",
    "eva02_tiny_patch14_224.mim_in22k",
    "swin_tiny_patch4_window7_224.ms_in1k",
    "convnext_tiny.fb_in22k",
    "maxvit_tiny_tf_224.in1k",
    "tf_efficientnet_lite0.in1k",
    "mobilenetv3_large_100.ra_in1k",
    "regnety_016.tv2_in1k",
    "resnext50_32x4d.a1h_in1k",
    "beit_base_patch16_224.in22k_ft_in22k",
    "deit_tiny_patch16_224.fb_in1k",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_images_are_prepared_as_timm_does(name: str) -> None:
    """Without timm's crop of the middle. timm rounds to whole grey levels twice, after resizing rows and columns."""
    import timm

    config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    ours = preprocessing(name)
    assert (*ours.mean, *ours.std) == (*config["mean"], *config["std"]) and (3, *ours.input_size) == config[
        "input_size"
    ]
    size = 64
    config |= {"input_size": (3, size, size), "crop_pct": 1.0, "crop_mode": "squash"}
    transform = timm.data.create_transform(**config, is_training=False)
    _, clean = build_transforms(size, True, False, ours.transform_settings())
    for height, width in ((97, 150), (40, 51)):
        pixels = torch.randint(70, 186, (1, height, width, 3), dtype=torch.uint8)  # timm clamps twice, we do once
        expected = transform(Image.fromarray(pixels[0].numpy()))
        levels = (clean(pixels, torch.tensor([[height, width, height, width]]))[0] - expected).abs() * 255
        assert (levels * torch.tensor(ours.std)[:, None, None]).max() < 2


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, ((0.5,) * 3, (0.5,) * 3, "bicubic")),
        ({"input": "RGB in [0,1], ImageNet mean/std"}, (aug.MEAN, aug.STD, "bicubic")),
        ({"mean": "[0.1, 0.2, 0.3]", "std": "[1, 2, 3]"}, ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0), "bicubic")),
        ({"interpolation": "bilinear"}, ((0.5,) * 3, (0.5,) * 3, "bilinear")),
    ],
)
def test_metadata_of_a_file_decide(metadata: dict[str, str], expected: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(1)}, path, metadata)
    ours = preprocessing("tf_efficientnet_lite0", path)
    assert (ours.mean, ours.std, ours.interpolation) == expected


@pytest.mark.parametrize(
    "metadata",
    [{"mean": "0.5"}, {"mean": "[1, 2"}, {"std": "[0, 1, 1]"}, {"std": "[NaN, 1, 1]"}, {"interpolation": "lanczos"}],
)
def test_metadata_that_cannot_be_used(metadata: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(1)}, path, metadata)
    with pytest.raises(WeightsError, match=r"weights\.safetensors"):
        preprocessing("resnet18", path)


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
    with pytest.raises(WeightsError, match="refused"):
        create("resnet10t.c3_in1k", weights=path)
    assert not trace.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("damage", ["half", "empty", "text"])
def test_damaged_file(suffix: str, damage: str, tmp_path: Path, plain: Callable[..., nn.Module]) -> None:
    path = tmp_path / f"weights{suffix}"
    tensors = plain("resnet10t").state_dict()
    save_file(tensors, path) if suffix == ".safetensors" else torch.save(tensors, path)
    content = {"half": path.read_bytes()[: path.stat().st_size // 2], "empty": b"", "text": b"<!doctype html>\n" * 9}
    path.write_bytes(content[damage])
    with pytest.raises(WeightsError, match=f"weights{suffix}"):
        create("resnet10t.c3_in1k", weights=path)


@pytest.mark.parametrize("content", [{"epoch": 3}, torch.zeros(3), {}, [torch.zeros(3)]])
def test_file_without_weights(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match="does not hold"):
        create("resnet10t.c3_in1k", weights=tmp_path / "weights.pt")


def test_other_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "weights.ckpt").write_bytes(b"")
    with pytest.raises(ParameterError) as caught:
        create("resnet10t.c3_in1k", weights=tmp_path / "weights.ckpt")
    assert caught.value.parameter == "weights" and ".safetensors" in caught.value.expected


def test_weights_of_another_architecture(tmp_path: Path, plain: Callable[..., nn.Module]) -> None:
    path = tmp_path / "weights.safetensors"
    # All that resnet18 has, in its shapes, and more.
    save_file(plain("torchvision/resnet34", num_classes=1000).state_dict(), path)
    with pytest.raises(WeightsError, match=r"does not have \(layer1\.2"):
        create("resnet18.tv_in1k", weights=path)
    with pytest.raises(WeightsError, match="318 tensors"):
        create(DEFAULT, weights=path)
    tensors = plain("resnet18", num_classes=1000).state_dict()
    del tensors["layer1.0.conv1.weight"]
    tensors["bn1.bias"] = torch.zeros(7)
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"layer1\.0\.conv1\.weight.*bn1\.bias is \[7\] instead of \[64\]"):
        create("resnet18.tv_in1k", weights=path)


@pytest.mark.parametrize("offline", ["1", "0"])
def test_unreachable_hub(offline: str, tmp_path: Path) -> None:
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
        assert name in line and "hub" in line and "file" in line


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
    with pytest.raises(ParameterError, match="weights"):
        weights_identity(DEFAULT, tmp_path / "none.pth")


def test_is_stride_first_reads_metadata(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "he.safetensors", metadata=HE2015)
    save_file({"a": torch.zeros(1)}, tmp_path / "tv.safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "tv.pth")
    assert is_stride_first(DEFAULT, tmp_path / "he.safetensors")
    assert not any(
        is_stride_first(DEFAULT, weights)
        for weights in (tmp_path / "tv.safetensors", tmp_path / "tv.pth", "hub", "none", None)
    )


# Sizes of images ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("test_vit", 64), ("vit_tiny_patch16_224", 112)])
def test_other_sizes_are_those_of_timm(name: str, size: int, images: Callable[..., Tensor], tmp_path: Path) -> None:
    """timm resamples the weights of a file when it creates a network for other images; the file fits as published."""
    import timm

    torch.manual_seed(0)
    published = timm.create_model(name).state_dict()
    save_file(published, tmp_path / "weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors")}
    expected = timm.create_model(name, True, overlay, img_size=size).eval()
    expected.reset_classifier(0)
    ours = create(name, weights=tmp_path / "weights.safetensors", image_size=size).eval()
    torch.testing.assert_close(ours(images(size)), expected(images(size)))


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("vit_small_patch14_dinov2", 128, "a multiple of 14, such as 126, for"),
        ("levit_128s", 64, "224 for"),
        ("torchvision/vit_b_16", 64, "224 for"),
    ],
)
def test_sizes_that_do_not_fit(name: str, size: int, expected: str) -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(ParameterError) as caught:
        try_forward(name, size)
    assert caught.value.parameter == "image_size" and expected in caught.value.expected
    assert torch.equal(state, torch.random.get_rng_state())  # a trial changes no draw of the run


def test_the_size_is_chosen_by_the_network() -> None:
    assert choose_image_size(DEFAULT, 224) == choose_image_size("vit_small_patch14_dinov2", 224) == 224
    assert choose_image_size("vit_small_patch14_dinov2", 128) == 126
    assert choose_image_size("cait_xxs24_384", 224) == 384
    assert choose_image_size(SMALL, 28) == 28


def test_no_pooled_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.models.resnet.ResNet.forward", lambda self, x: self.forward_features(x))
    try_forward.cache_clear()
    with pytest.raises(AidgnError, match=r"resnet18 cannot be a backbone: .*\[1, 512, 2, 2\]"):
        try_forward("resnet18", 64)


def test_a_trial_reads_the_file(tmp_path: Path) -> None:
    save_file(create("test_resnet", weights="none").state_dict(), tmp_path / "weights.safetensors")
    try_forward("test_resnet", 64, tmp_path / "weights.safetensors")
    with pytest.raises(WeightsError, match="does not hold the weights of test_vit"):
        try_forward("test_vit", 64, tmp_path / "weights.safetensors")


def test_networks_for_any_size_keep_their_parameters() -> None:
    """Those that resample in every pass did so before sizes could be set: trained weights must go on fitting."""
    import timm

    native, other = (timm.create_model("test_vit", num_classes=0, dynamic_img_size=True) for _ in range(2))
    set_input_size(other, "test_vit", 64)
    assert {key: value.shape for key, value in native.state_dict().items()} == {
        key: value.shape for key, value in other.state_dict().items()
    }
