"""A small network of every family: trained, continued, evaluated, predicting and exported, all of it or a part."""

import os
import signal
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from aidgn.data import load_dataset
from aidgn.errors import Interrupted
from aidgn.inference import load_model
from aidgn.inference.export import export
from aidgn.training import RunSpec, train

# Name and image size, another than that of the weights where the network allows it.
QUICK = {"test_vit": 64, "test_convnext": 64}
FAMILIES = {
    "vit_tiny_patch16_224": 64,
    "vit_small_patch14_dinov2": 56,
    "vit_small_patch16_dinov3": 64,
    "vit_base_patch32_clip_224": 64,
    "vit_base_patch32_siglip_256": 64,
    "eva02_tiny_patch14_224": 56,
    "swin_tiny_patch4_window7_224": 64,
    "swinv2_cr_tiny_224": 64,
    "swinv2_tiny_window8_256": 64,
    "convnext_atto": 64,
    "convnextv2_atto": 64,
    "maxvit_tiny_tf_224": 64,
    "efficientnet_b0": 64,
    "tf_efficientnet_lite0": 64,
    "mobilenetv3_small_050": 64,
    "regnety_002": 64,
    "resnext50_32x4d": 64,
    "beit_base_patch16_224": 64,
    "deit_tiny_patch16_224": 64,
    "deit_tiny_distilled_patch16_224": 64,
    "torchvision/resnet18": 64,
    "torchvision/swin_v2_t": 64,
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three domains of ten pictures."""
    root = tmp_path_factory.mktemp("photos")
    digits = load_dataset("digits")
    assert digits.pixels is not None
    for number in range(30):
        path = root / "abc"[number % 3] / "xy"[number // 3 % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.pixels[number]).resize((70, 64)).save(path)
    return str(root)


def random_weights(name: str, folder: Path) -> Path:
    """Save a file with random weights as they are published: of the whole network, at its size."""
    from torchvision import models

    torch.manual_seed(0)
    if name.startswith("torchvision/"):
        network = models.get_model(name.removeprefix("torchvision/"), weights=None)
    else:
        network = timm.create_model(name, pretrained=False)
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def interrupt_at_first_step(phase: str, done: int, total: int, record: object) -> None:
    if phase == "train" and done == 0:
        os.kill(os.getpid(), signal.SIGTERM)


def check_family(name: str, size: int, photos: str, tmp_path: Path, onnx: bool) -> None:
    weights = random_weights(name, tmp_path)
    cache = tmp_path / "cache"
    settings = {"backbone": name, "weights": str(weights), "image_size": size, "steps": 2, "eval_every": 2}
    spec = RunSpec(photos, "AIDGN", "a", hyper_parameters={"batch_size": 2}, **settings)  # type: ignore[arg-type]
    run = train(spec, tmp_path / "whole", device="cpu", cache_dir=cache)
    with pytest.raises(Interrupted):
        train(spec, tmp_path / "parts", device="cpu", cache_dir=cache, on_progress=interrupt_at_first_step)
    continued = train(spec, tmp_path / "parts", device="cpu", cache_dir=cache)
    ours, theirs = (load_file(folder / "last.safetensors") for folder in (run, continued))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)

    model = load_model(run, "cpu")
    pixels = load_dataset("digits").pixels
    assert pixels is not None
    with torch.no_grad():
        together = model.logits(pixels[:3])
        torch.testing.assert_close(together[1:2], model.logits(pixels[1:2]), atol=1e-3, rtol=1e-3)
    assert together.isfinite().all()
    if onnx:
        export(run, tmp_path / "exported")  # raises unless onnxruntime agrees
        assert (tmp_path / "exported" / "model.onnx").exists()

    frozen = load_file(weights)
    for part in ("last-stage", "head"):
        spec = RunSpec(photos, "AIDGN", "a", train_only=part, hyper_parameters={"batch_size": 2}, **settings)  # type: ignore[arg-type]
        run = train(spec, tmp_path / part, device="cpu", cache_dir=cache)
        trained = load_file(run / "last.safetensors")
        assert load_model(run, "cpu").logits(pixels[:3]).isfinite().all()
        changed = {
            key
            for key, value in trained.items()
            if (before := frozen.get(key.removeprefix("featurizer.network."))) is not None
            and before.shape == value.shape
            and not torch.equal(before, value)
        }
        assert not changed if part == "head" else 0 < len(changed) < 0.7 * len(frozen)


@pytest.mark.parametrize("name", QUICK)
def test_small_networks(name: str, photos: str, tmp_path: Path) -> None:
    check_family(name, QUICK[name], photos, tmp_path, onnx=name == "test_vit")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, photos: str, tmp_path: Path) -> None:
    check_family(name, FAMILIES[name], photos, tmp_path, onnx=True)
