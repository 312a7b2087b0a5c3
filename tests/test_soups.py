"""Soups against averages written out naively, and what they refuse."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import aidgn
from aidgn import backbones
from aidgn.algorithms import create
from aidgn.data import load_dataset
from aidgn.data.splits import train_val_indices
from aidgn.errors import AidgnError
from aidgn.inference import Model, load_model
from aidgn.runs.folder import RunFolder
from aidgn.runs.reader import read_runs
from aidgn.soups import Mixer, Validation, average_weights, check_shared_start, soup

DigitsRun = Callable[..., Path]
DIGITS = load_dataset("digits")
VALIDATION = [
    DIGITS.indices(d)[train_val_indices(len(DIGITS.indices(d)), 0, d)[1]]
    for d, name in enumerate(DIGITS.domains)
    if name != "chalk"
]


@pytest.fixture(scope="module")
def runs(digits_run: DigitsRun, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("runs")
    return [
        digits_run(out, "ERM", steps=steps, eval_every=steps, draw=draw, hyper_parameters={"lr": lr, "batch_size": 16})
        for steps, draw, lr in ((30, 0, 2e-3), (30, 1, 3e-3), (4, 2, 1e-3))
    ]


def validation_accuracy(model: Model) -> float:
    shares = []
    for rows in VALIDATION:
        labels = model.predict(DIGITS.pixels[rows]).labels
        shares.append(
            np.mean([DIGITS.classes[y] == label for y, label in zip(DIGITS.labels[rows], labels, strict=True)])
        )
    return float(np.mean(shares))


def naive_soup(runs: list[Path]) -> Model:
    """The first run's model with the mean of the weights."""
    model = load_model(runs[0], "cpu")
    tensors = [load_file(run / "model.safetensors") for run in runs]
    state = {name: torch.stack([t[name].double() for t in tensors]).mean(0).float() for name in tensors[0]}
    model.network.load_state_dict(state)
    return model


def test_uniform_soup_is_the_mean_of_weights(runs: list[Path], tmp_path: Path) -> None:
    made = aidgn.soup(runs, tmp_path / "soup", device="cpu")
    expected, model = naive_soup(runs), made.model("cpu")
    x = DIGITS.pixels[:50]
    assert torch.allclose(model.predict(x).logits, expected.predict(x).logits, atol=1e-5)
    assert made.accuracy == pytest.approx(validation_accuracy(expected))
    assert made.run_accuracies == pytest.approx([validation_accuracy(load_model(run, "cpu")) for run in runs])
    assert model.algorithm == "ERM+SOUP" and model.novelty is not None
    assert RunFolder(made.folder).identity["soup"]["runs"] == [run.name for run in runs]
    aidgn.soup(runs[:2], tmp_path / "soup", device="cpu")  # a soup may be replaced


def test_greedy_soup_is_that_of_the_paper(runs: list[Path], tmp_path: Path) -> None:
    accuracies = [validation_accuracy(load_model(run, "cpu")) for run in runs]
    order = sorted(range(3), key=lambda i: accuracies[i], reverse=True)
    used, best = [order[0]], accuracies[order[0]]
    for i in order[1:]:
        accuracy = validation_accuracy(naive_soup([runs[j] for j in [*used, i]]))
        if accuracy >= best:
            used, best = [*used, i], accuracy
    made = soup(runs, tmp_path / "soup", greedy=True, device="cpu")
    assert list(made.used) == [runs[i] for i in used] and len(used) < 3
    assert made.accuracy == pytest.approx(best) and best >= max(accuracies)


def test_angular_columns_have_unit_length_first() -> None:
    weights = [{"classifier.weight": torch.randn(5, 3) * scale, "count": torch.tensor(7)} for scale in (1, 100)]
    mixed = average_weights(weights, "classifier.weight")
    first, second = (one["classifier.weight"].double() for one in weights)
    expected = (first / first.norm(dim=0) + second / second.norm(dim=0)) / 2
    assert torch.allclose(mixed["classifier.weight"].double(), expected, atol=1e-6)
    assert mixed["classifier.weight"].dtype == torch.float32 and mixed["count"] == 7


def test_angular_head_of_aidgn_is_found(digits_run: DigitsRun, tmp_path: Path) -> None:
    pair = [digits_run(tmp_path, "AIDGN", draw=draw) for draw in range(2)]
    made = soup(pair, tmp_path / "soup", device="cpu")
    columns = [load_file(run / "model.safetensors")["classifier.weight"] for run in pair]
    expected = sum(c / c.norm(dim=0) for c in columns) / 2
    assert torch.allclose(load_file(made.folder / "model.safetensors")["classifier.weight"], expected, atol=1e-6)


class Normalised(nn.Module):
    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3))


class Inputs(Validation):
    def __init__(self) -> None:
        self.batches = [torch.randn(6, 3, 8, 8) for _ in range(3)]

    def training_inputs(self, network: Any) -> Iterator[Tensor]:
        yield from self.batches


def test_trained_batch_norm_is_measured_again() -> None:
    torch.manual_seed(0)
    network = create("ERM", Normalised(), 2, 2).eval()
    members = [create("ERM", Normalised(), 2, 2).state_dict() for _ in range(2)]
    inputs = Inputs()
    mixer = Mixer(network, inputs)
    assert mixer.needs_images
    mixed = mixer.mix(members)
    weight, bias = (sum(m[f"featurizer.conv.{name}"] for m in members) / 2 for name in ("weight", "bias"))
    outputs = [nn.functional.conv2d(x, weight, bias) for x in inputs.batches]
    mean = torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0)
    variance = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    assert torch.allclose(mixed["featurizer.norm.running_mean"], mean, atol=1e-6)
    assert torch.allclose(mixed["featurizer.norm.running_var"], variance, atol=1e-6)
    assert not network.featurizer.norm.training and network.featurizer.norm.momentum == 0.1


def test_batch_norm_outside_the_featurizer_is_measured_again() -> None:
    """ARM predicts with a second network, whose batch norms always learn statistics."""
    torch.manual_seed(1)

    class Plain(nn.Sequential):
        num_features = 2

    def make() -> Any:
        return create("ARM", Plain(nn.Conv2d(4, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 2, 2)

    network, members, inputs = make().eval(), [make().state_dict() for _ in range(2)], Inputs()
    mixed = Mixer(network, inputs).mix(members)
    weight, bias = (sum(m[f"context_net.0.{name}"] for m in members) / 2 for name in ("weight", "bias"))
    outputs = [nn.functional.conv2d(x, weight, bias, padding=2) for x in inputs.batches]
    assert torch.allclose(
        mixed["context_net.1.running_mean"], torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0), atol=1e-6
    )
    variance = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    assert torch.allclose(mixed["context_net.1.running_var"], variance, atol=1e-5)


def test_batch_norm_of_training_alone_needs_no_images() -> None:
    """SelfReg's projection has batch norms that predictions do not pass."""
    linear = nn.Linear(3, 4)
    linear.num_features = 4  # type: ignore[assignment]
    assert not Mixer(create("SelfReg", linear, 2, 2), None).needs_images


def test_frozen_batch_norm_is_folded_after_averaging() -> None:
    torch.manual_seed(0)
    plain = backbones.create("resnet18.tv_in1k", weights="none", freeze_bn=True).eval()
    states = []
    for _ in range(2):
        state = {
            k: v + 0.05 * torch.randn_like(v) if v.is_floating_point() else v for k, v in plain.state_dict().items()
        }
        states.append({k: v.abs() if k.endswith("running_var") else v for k, v in state.items()})
    mixed = average_weights(states)
    x = torch.randn(2, 3, 64, 64)
    plain.load_state_dict(mixed)
    with torch.no_grad():
        expected = plain(x)
        folded = backbones.create("resnet18.tv_in1k", weights="none", freeze_bn=True).eval()
        assert backbones.fold(folded) > 10
        folded.load_state_dict(mixed)
        assert torch.allclose(folded(x), expected, rtol=1e-3, atol=1e-4)
    assert not Mixer(create("ERM", folded, 2, 2), None).needs_images


# What is refused ------------------------------------------------------------------------------------------------------


def changed(run: Path, out: Path, **values: Any) -> RunFolder:
    """A copy of a run with another run.json."""
    shutil.copytree(run, out)
    metadata = json.loads((out / "run.json").read_text())
    metadata["identity"] |= values
    (out / "run.json").write_text(json.dumps(metadata))
    return RunFolder(out)


@pytest.mark.parametrize(
    "values",
    [
        {"target": ["ink"]},
        {"weights": "5f3a"},
        {"backbone": "resnet18.tv_in1k"},
        {"algorithm": "CORAL"},
        {"data": "other"},
        {"trial": 1},
        {"batch_norm": "live"},
    ],
)
def test_other_starts_are_refused(runs: list[Path], tmp_path: Path, values: dict[str, Any]) -> None:
    other = changed(runs[1], tmp_path / "other", **values)
    with pytest.raises(AidgnError, match="do not share their initial weights"):
        check_shared_start([RunFolder(runs[0]), other])


def test_trials_need_a_warm_start(runs: list[Path], tmp_path: Path) -> None:
    pretrained = {"weights": "5f3a"}
    pair = [changed(runs[0], tmp_path / str(trial), trial=trial, **pretrained) for trial in range(2)]
    with pytest.raises(AidgnError, match="warm-start"):
        check_shared_start(pair)
    warm = [changed(runs[0], tmp_path / f"w{trial}", trial=trial, warm_start=5, **pretrained) for trial in range(2)]
    check_shared_start(warm)


def test_mistakes_are_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match="two runs"):
        soup(runs[:1], tmp_path / "s")
    with pytest.raises(AidgnError, match="twice"):
        soup([runs[0], runs[0]], tmp_path / "s")
    with pytest.raises(AidgnError, match="overwritten"):
        soup(runs[:2], runs[2])
    assert read_runs(runs[2]).runs


def test_without_images(runs: list[Path], tmp_path: Path) -> None:
    pair = []
    for number, run in enumerate(runs[:2]):
        folder = changed(run, tmp_path / str(number), dataset="photos", data="1")
        pair.append(folder.path)
    made = soup(pair, tmp_path / "soup", device="cpu")
    assert made.accuracy is None and made.model("cpu").novelty is None
    with pytest.raises(AidgnError):
        soup(pair, tmp_path / "greedy", greedy=True, device="cpu")
