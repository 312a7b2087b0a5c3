"""From pictures to predictions on a GPU, where there is one: everything that goes another way there."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from aidgn import backbones
from aidgn.data.decode_pool import FEW
from aidgn.inference import load_model
from aidgn.training import RunSpec, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains of two classes, bright and dark, in sizes below, at and above what is stored."""
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(2 * FEW + 10):
        place = folder / f"site {number % 3}" / ("bright", "dark")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 120, (*random.integers(20, 60, 2), 3)) + 120 * (number % 2 == 0)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.jpg")
    return folder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backbone", ["resnet18", "torchvision/resnet50"])
def test_from_training_to_prediction(pictures: Path, tmp_path: Path, device: str, backbone: str) -> None:
    weights = tmp_path / "weights.safetensors"  # a network with statistics that are frozen and folded
    net = backbones.create(backbone, weights="none")
    save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, weights)
    spec = RunSpec(
        str(pictures),
        "AIDGN",
        "site 2",
        backbone=backbone,
        weights=str(weights),
        image_size=32,
        steps=6,
        eval_every=3,
        hyper_parameters={"batch_size": 8},
    )
    run = train(spec, tmp_path / "runs", device=device)
    files: list[str | Path] = [*sorted(map(str, pictures.rglob("*.jpg")))]
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"nothing")

    here, there = load_model(run, "cpu"), load_model(run, device)
    wanted, found, told = here.predict(files), there.predict(files), []
    # bfloat16 has 8 bits: what follows from its rounding stays within 3 %.
    length = wanted.features.norm(dim=1)
    assert ((found.features - wanted.features).norm(dim=1) < 0.03 * length).all()
    np.testing.assert_allclose(found.features.norm(dim=1), length, rtol=0.03)
    assert found.warnings is not None and wanted.warnings is not None
    assert (
        np.mean(
            [(mine is None) == (other is None) for mine, other in zip(found.warnings, wanted.warnings, strict=True)]
        )
        > 0.9
    )

    names, labels = [], []  # decoded by processes, with one that cannot be
    for kept, part in there.batches([*files[:70], broken, *files[70:]], lambda image, _: told.append(image)):
        names += kept
        labels += part.labels
    assert told == [broken] and names == files and labels == found.labels
    with closing(there.batches(files * 4)) as batches:  # ended while the device still computes
        next(iter(batches))
