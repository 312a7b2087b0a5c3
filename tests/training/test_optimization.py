"""Optimizer, layer decay, batch norm and batches in parts as options of runs: recorded, continued, refused."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aidgn import backbones
from aidgn.data import load_dataset
from aidgn.errors import AidgnError, Interrupted, ParameterError
from aidgn.inference import load_model
from aidgn.training import RunSpec, train


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    for name in ("test_resnet", "test_vit"):
        network = backbones.create(name, weights="none", freeze_bn=False)
        save_file(network.state_dict(), folder / f"{name}.safetensors")
    return {name: str(folder / f"{name}.safetensors") for name in ("test_resnet", "test_vit")}


def spec(weights: dict[str, str], algorithm: str = "ERM", backbone: str = "test_resnet", **options: Any) -> RunSpec:
    settings = {"image_size": 32, "steps": 3, "eval_every": 3, "hyper_parameters": {"batch_size": 4, "lr": 1e-3}}
    settings |= {"backbone": backbone, "weights": weights.get(backbone, "none"), **options}
    return RunSpec("digits", algorithm, "ink", **settings)  # type: ignore[arg-type]


def stop_at_first_step(phase: str, done: int, total: int, record: object) -> None:
    if phase == "train" and done == 0:
        os.kill(os.getpid(), signal.SIGTERM)


OPTIONS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "layer_decay": 0.5, "backbone": "test_vit"},
    {"batch_norm": "live"},
    {"accumulate": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_recorded_and_continued(options: dict[str, Any], weights: dict[str, str], tmp_path: Path) -> None:
    run = train(spec(weights, **options), tmp_path / "whole", device="cpu")
    identity = json.loads((run / "run.json").read_text())["identity"]
    assert {name: identity[name] for name in options} == options
    with pytest.raises(Interrupted):
        train(spec(weights, **options), tmp_path / "parts", device="cpu", on_progress=stop_at_first_step)
    parts = train(spec(weights, **options), tmp_path / "parts", device="cpu")
    ours, theirs = (load_file(folder / "last.safetensors") for folder in (run, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    plain = {name: value for name, value in options.items() if name == "backbone"}
    other = load_file(train(spec(weights, **plain), tmp_path / "plain", device="cpu") / "last.safetensors")
    changed = [name for name in ours if not torch.allclose(ours[name], other[name], atol=1e-4, rtol=1e-3)]
    assert bool(changed) == ("accumulate" not in options)
    statistics = [name for name in changed if "running_mean" in name]
    assert bool(statistics) == ("batch_norm" in options)
    load_model(run, "cpu")


def test_defaults_leave_the_identity_alone(weights: dict[str, str]) -> None:
    digits = load_dataset("digits").with_image_size(32)
    plain = spec(weights).resolved(digits)
    same = {"optimizer": "adam", "layer_decay": 1.0, "accumulate": 1, "batch_norm": "frozen"}
    assert spec(weights, **same).resolved(digits).identity(digits, "") == plain.identity(digits, "")
    assert not {"optimizer", "layer_decay", "accumulate", "batch_norm"} & plain.identity(digits, "").keys()


@pytest.mark.parametrize(
    ("algorithm", "options", "parameter"),
    [
        ("AIDGN", {"accumulate": 2}, "accumulate"),
        ("SAM", {"accumulate": 2}, "accumulate"),
        ("ERM", {"accumulate": 5}, "accumulate"),
        ("ERM", {"layer_decay": 1.5}, "layer_decay"),
        ("ERM", {"layer_decay": 0.5, "backbone": "small"}, "layer_decay"),
        ("ERM", {"layer_decay": 0.5, "train_only": "head"}, "layer_decay"),
        ("ERM", {"batch_norm": "live", "train_only": "last-stage"}, "batch_norm"),
    ],
)
def test_what_cannot_be(algorithm: str, options: dict[str, Any], parameter: str, weights: dict[str, str]) -> None:
    with pytest.raises(ParameterError) as caught:
        spec(weights, algorithm, **options).resolved(load_dataset("digits").with_image_size(32))
    assert caught.value.parameter == parameter


def test_what_needs_the_network(weights: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="has no batch norm"):
        train(spec(weights, backbone="test_vit", batch_norm="live"), tmp_path, device="cpu")
    with pytest.raises(ParameterError, match="statistics"):
        train(spec(weights, batch_norm="live", accumulate=2), tmp_path, device="cpu")
    with pytest.raises(AidgnError, match="imitates"):
        train(spec(weights, "MLDG", optimizer="adamw"), tmp_path, device="cpu")
