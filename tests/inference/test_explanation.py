"""Heatmaps: Grad-CAM by hand on a tiny network, a transformer, and a planted patch that must be found."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn

from aidgn import backbones
from aidgn.algorithms import Algorithm, create
from aidgn.analysis.label_errors import DoubtfulLabel
from aidgn.cli.predict import predict as predict_command
from aidgn.data import load_dataset
from aidgn.data.cache import prepare
from aidgn.errors import AidgnError
from aidgn.fitting.pictures import explain_doubts
from aidgn.inference import Ensemble, Model, load_model
from aidgn.inference.explanation import explain, paint
from aidgn.training import RunSpec, train
from aidgn.training.featurizer import Featurizer

SIDE, PATCH = 32, 8


class Tiny(nn.Module):
    """A convolution whose outputs are averaged over positions."""

    num_features = 3

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 3, 4, stride=4), nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(x))


def model_of(network: nn.Module, size: int = SIDE) -> Model:
    algorithm: Algorithm = create("ERM", Featurizer(network, "float32"), 2, 2)
    return Model(algorithm, "ERM", ["cat", "dog"], ["a", "b"], size, torch.device("cpu"))


def noise(number: int, size: int = SIDE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 255, (size, size, 3), np.uint8)


def enlarge(positions: torch.Tensor, size: int = SIDE) -> np.ndarray:
    """What is positive, from 0 to 1, stretched to the size of the input."""
    positive = (positions.clamp(min=0) / positions.max())[None, None]
    return torch.nn.functional.interpolate(positive, (size, size), mode="bilinear")[0, 0].numpy()


def test_it_is_grad_cam_by_hand() -> None:
    torch.manual_seed(0)
    network = Tiny()
    model = model_of(network)
    pictures = [noise(0), noise(1)]
    maps = explain(model, pictures, [1, 0])
    x = model.inputs(pictures)
    for picture, label, heat in zip(x, (1, 0), maps, strict=True):
        channels = network.conv(picture[None])[0].detach()  # [3, 8, 8]
        # The log odds of one of two classes are (w - v) . P mean(A), w and v the classes: a derivative for all places.
        classes = model.network.classifier.weight
        weights = (classes[label] - classes[1 - label]) @ network.pool[2].weight
        np.testing.assert_allclose(heat, enlarge(torch.tensordot(weights.detach(), channels, 1)), atol=1e-5)


class Normed(Tiny):
    """The same with a layer norm of each position before the average, which ignores the length of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def test_a_norm_of_positions_is_not_explained_away() -> None:
    torch.manual_seed(0)
    network = Normed()
    model = model_of(network)
    (heat,) = explain(model, [noise(0)], [1])
    normed = network.norm(network.conv(model.inputs([noise(0)])).permute(0, 2, 3, 1))[0].detach()  # [8, 8, 3]
    classes = model.network.classifier.weight
    weights = (classes[1] - classes[0]) @ network.pool[2].weight
    np.testing.assert_allclose(heat, enlarge(normed @ weights.detach()), atol=1e-5)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_tokens_of_a_transformer_have_positions(pool: str) -> None:
    import timm

    torch.manual_seed(0)
    network = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, depth=3, global_pool=pool, num_classes=0
    )
    model = model_of(network, 64)
    heat = explain(model, [noise(0, 64)])[0]
    tokens: dict[str, torch.Tensor] = {}
    # Patch tokens of the last block do not reach a class token, and those that enter it do by a norm alone.
    layer = network.blocks[2].norm1 if pool == "token" else network.blocks[2]
    layer.register_forward_hook(lambda module, inputs, output: tokens.update(output=output))
    logits = model.network.predict(model.inputs([noise(0, 64)]).requires_grad_())
    (gradient,) = torch.autograd.grad((logits[0, 0] - logits[0, 1]).abs(), tokens["output"])
    expected = (gradient * tokens["output"]).sum(-1)[0, -64:].reshape(8, 8).detach()
    np.testing.assert_allclose(heat, enlarge(expected, 64), atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "efficientnet_lite0",
        "torchvision/mobilenet_v3_small",
        "swin_tiny_patch4_window7_224",
        "coatnet_nano_rw_224",
    ],
)
def test_families_of_networks_have_a_map(name: str) -> None:
    torch.manual_seed(0)
    size = 224 if name.endswith("224") else 64
    network = backbones.create(name, weights="none", in_channels=3, freeze_bn=True, image_size=size)
    model = model_of(network, size)
    pictures = [noise(0, size), noise(1, size)]
    maps = explain(model, pictures)
    assert maps.shape == (2, size, size) and np.isfinite(maps).all() and (maps.max(axis=(1, 2)) > 0.5).all()
    if backbones.fold(network):  # as in models that `load_model` gives, on a GPU with constant weights
        backbones.freeze_folded(network, torch.float32)
        np.testing.assert_allclose(explain(model, pictures), maps, atol=1e-4)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    """Pictures of noise with a red (cat) or a blue (dog) patch somewhere, and a model that has learnt them."""
    root = tmp_path_factory.mktemp("patched")
    random = np.random.default_rng(0)
    for number in range(150):
        picture = random.integers(60, 140, (SIDE, SIDE, 3), np.uint8)
        top, left = random.integers(0, SIDE - PATCH, 2)
        label = number % 2
        picture[top : top + PATCH, left : left + PATCH] = ((230, 20, 20), (20, 20, 230))[label]
        folder = root / "photos" / f"site{number % 3}" / ("cat", "dog")[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number}-{top}-{left}.png")
    settings = {"backbone": "small", "image_size": SIDE, "hyper_parameters": {"batch_size": 16, "lr": 3e-3}}
    spec = RunSpec(str(root / "photos"), "ERM", "site0", steps=120, eval_every=60, **settings)
    return root, load_model(train(spec, root / "runs", device="cpu"), device="cpu")


def test_the_planted_patch_is_found(patched: tuple[Path, Model]) -> None:
    root, model = patched
    files = sorted((root / "photos" / "site0").glob("*/*.png"))
    prediction = model.predict(files)
    right = [i for i, file in enumerate(files) if prediction.labels[i] == file.parent.name]
    assert len(right) > 0.95 * len(files)
    maps = explain(model, [np.asarray(Image.open(file)) for file in files])
    hits = []
    for i in right:
        top, left = (int(part) for part in files[i].stem.split("-")[1:])
        y, x = np.unravel_index(maps[i].argmax(), (SIDE, SIDE))
        margin = 3  # half a position of the layer
        hits.append(top - margin <= y < top + PATCH + margin and left - margin <= x < left + PATCH + margin)
    assert np.mean(hits) > 0.9  # by chance, a fifth


def test_predict_writes_a_heatmap_for_each_row(patched: tuple[Path, Model], tmp_path: Path) -> None:
    root, model = patched
    files = sorted((root / "photos" / "site0").glob("*/*.png"))[:3]
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    run = next((root / "runs").iterdir())
    arguments = [str(run), str(broken), *map(str, files), "--explain", str(tmp_path / "maps"), "--device", "cpu"]
    found = CliRunner().invoke(predict_command, arguments, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    written = sorted((tmp_path / "maps").iterdir())
    assert [path.name for path in written] == [f"{i + 1:05d}-{file.stem}.png" for i, file in enumerate(files)]
    for path, file in zip(written, files, strict=True):
        both, original = np.asarray(Image.open(path)), np.asarray(Image.open(file))
        assert both.shape == (SIDE, 2 * SIDE, 3) and np.array_equal(both[:, :SIDE], original)
        heat = explain(model, [original])[0]
        assert np.array_equal(both[:, SIDE:], np.asarray(paint(original, heat)))


def test_a_cold_place_is_grey_and_a_hot_one_has_its_colour() -> None:
    picture = np.full((4, 8, 3), (200, 100, 50), np.uint8)
    heat = np.zeros((4, 8), np.float32)
    heat[:, 4:] = 1
    painted = np.asarray(paint(picture, heat)).astype(int)
    assert (np.ptp(painted[:, 0], axis=-1) == 0).all() and painted[0, 7, 0] - painted[0, 7, 2] > 100


def test_doubtful_pictures_show_what_speaks_for_the_other_class(patched: tuple[Path, Model]) -> None:
    root, model = patched
    decoded = prepare(load_dataset(root / "photos").with_image_size(SIDE))
    file = next(file for file in decoded.dataset.files if file.startswith("site0/cat"))
    doubt = DoubtfulLabel(file, "site0", "cat", "dog", 0.1, 0.8)
    run = str(next((root / "runs").iterdir()))
    found = explain_doubts([doubt], {"site0": run}, decoded, "cpu", "ERM")
    pixels = np.asarray(Image.open(root / "photos" / file))
    expected = paint(pixels, explain(model, [pixels], [1])[0])
    assert list(found) == [file] and np.array_equal(np.asarray(found[file]), np.asarray(expected))
    assert not np.array_equal(np.asarray(expected), np.asarray(paint(pixels, explain(model, [pixels], [0])[0])))


def test_several_models_have_no_heatmap(patched: tuple[Path, Model]) -> None:
    _, model = patched
    with pytest.raises(AidgnError):
        explain(Ensemble([model, model]), [noise(0)])
