"""Exported files say what the model says, wherever they are, and carry nothing that they should not."""

import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import interpolate

from aidgn import backbones
from aidgn.cli import app
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.inference import Model, load_model
from aidgn.inference.export import export
from aidgn.inference.model_card import write_model_card
from aidgn.inference.onnx_export import (
    CHECK_PICTURES,
    SHRUNK_TOLERANCE,
    TOLERANCE,
    OnnxCheck,
    compare_with_model,
    write_onnx,
)
from aidgn.runs.folder import RunFolder

DigitsRun = Callable[..., Path]
DIGITS = load_dataset("digits")
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def run(digits_run: DigitsRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    """The folder with what was exported of the run."""
    result = export(run)
    assert [path.name for path in result.files] == ["model.onnx", "model.safetensors", "MODEL_CARD.md"]
    assert result.check and result.check.real and result.check.pictures == CHECK_PICTURES
    assert sorted(path.name for path in (run / "export").iterdir()) == sorted(path.name for path in result.files)
    return run / "export"


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def reference(model: Model, picture: np.ndarray) -> torch.Tensor:
    """Logits after one antialiased resizing by PyTorch."""
    x = interpolate(
        torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float(),
        (model.image_size,) * 2,
        mode="bilinear",
        antialias=True,
    )
    with torch.no_grad():
        return model.network.predict((x / 255 - MEAN[:, None, None]) / STD[:, None, None])[0]


def cloud(height: int, width: int, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))


# ONNX -----------------------------------------------------------------------------------------------------------------


def test_onnx_matches_the_model(run: Path, exported: Path) -> None:
    model, onnx = load_model(run, "cpu"), session(exported / "model.onnx")
    images = DIGITS.pixels[::9]
    logits, probabilities = onnx.run(["logits", "probabilities"], {"images": images})
    wanted = model.predict(images)
    np.testing.assert_allclose(logits, wanted.logits, atol=1e-4)
    np.testing.assert_allclose(probabilities, wanted.probabilities, atol=1e-4)
    facts = onnx.get_modelmeta().custom_metadata_map
    classes = json.loads(facts["classes"])
    assert classes == DIGITS.classes and facts["algorithm"] == "AIDGN" and facts["image_size"] == "28"
    assert [classes[c] for c in logits.argmax(1)] == wanted.labels


@pytest.mark.parametrize("size", [(28, 28), (1, 1), (17, 32), (32, 9), (75, 120), (180, 190)])
def test_onnx_prepares_pictures_of_any_size(size: tuple[int, int], run: Path, exported: Path) -> None:
    model = load_model(run, "cpu")
    pictures = np.stack([cloud(*size, seed) for seed in range(3)])
    found = session(exported / "model.onnx").run(["logits"], {"images": pictures})[0]
    wanted = model.logits(pictures).numpy()
    tolerance = TOLERANCE if max(size) <= 32 else SHRUNK_TOLERANCE
    assert np.abs(found - wanted).max() <= tolerance * max(1, np.abs(wanted).max())
    assert (found.argmax(1) == wanted.argmax(1)).all()
    if size != (1, 1):  # independent of our resizing; beyond 32 pixels we round to whole grey levels on the way
        exact = torch.stack([reference(model, picture) for picture in pictures]).numpy()
        np.testing.assert_allclose(found, exact, atol=1e-4 if max(size) <= 32 else 0.05)


def test_timm_network_with_folded_batch_norm(digits_run: DigitsRun, tmp_path: Path) -> None:
    weights = tmp_path / "tiny.safetensors"
    net = backbones.create("test_resnet", weights="none")
    torch.manual_seed(0)
    state = {
        name: torch.rand_like(tensor) / 2 if "running" in name else tensor for name, tensor in net.state_dict().items()
    }  # statistics that folding must not lose
    save_file(state, weights, {"architecture": "test_resnet"})
    folder = digits_run(tmp_path / "runs", "ERM", steps=1, backbone="test_resnet", weights=str(weights))
    model = load_model(folder, "cpu")
    assert any(isinstance(layer, backbones.FoldedConv2d) for layer in model.network.modules())
    result = export(folder, tmp_path / "out")
    logits = session(tmp_path / "out" / "model.onnx").run(["logits"], {"images": DIGITS.pixels[:40]})[0]
    wanted = model.logits(DIGITS.pixels[:40]).numpy()
    assert result.check and np.abs(logits - wanted).max() < 1e-3 * max(1, np.abs(wanted).max())
    assert (logits.argmax(1) == wanted.argmax(1)).all() and wanted.std(0).min() > 0.1  # it depends on the picture
    assert any(isinstance(layer, backbones.FoldedConv2d) for layer in model.network.modules())  # left as it was


def test_wrong_onnx_is_deleted(run: Path, exported: Path, digits_run: DigitsRun, tmp_path: Path) -> None:
    """A file of other weights fails the comparison, and what was there before stays."""
    other = load_model(digits_run(tmp_path / "runs", steps=3, eval_every=3), "cpu")
    with pytest.raises(AidgnError, match="not agree"):
        compare_with_model(exported / "model.onnx", other, DIGITS)
    with pytest.raises(AidgnError, match="not agree"):
        compare_with_model(exported / "model.onnx", other, None)
    model = load_model(run, "cpu")
    assert compare_with_model(exported / "model.onnx", model, None).shrunk_difference > 0
    before = (exported / "model.onnx").read_bytes()
    model.network.predict = lambda x: torch.rand(len(x), 10) + x.sum() * 0  # type: ignore[method-assign]
    with pytest.raises(AidgnError):
        write_onnx(model, RunFolder(run).metadata, exported / "model.onnx")
    assert (exported / "model.onnx").read_bytes() == before and len(list(exported.iterdir())) == 3


def test_models_without_onnx(run: Path, digits_run: DigitsRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = digits_run(tmp_path, "ARM", steps=1)
    with pytest.raises(AidgnError, match="8 neighbouring"):
        export(arm)
    assert not (arm / "export").exists()
    assert [path.name for path in export(arm, onnx=False).files] == ["model.safetensors", "MODEL_CARD.md"]
    assert "no ONNX file" in (arm / "export" / "MODEL_CARD.md").read_text()
    moved = Path(shutil.move(arm / "export" / "model.safetensors", tmp_path / "arm.safetensors"))
    assert torch.equal(
        load_model(moved, "cpu").logits(DIGITS.pixels[:16]), load_model(arm, "cpu").logits(DIGITS.pixels[:16])
    )

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnxscript" else there(name, *a))
    with pytest.raises(AidgnError, match=r"onnxscript, .*'aidgn\[onnx\]'"):
        export(run, tmp_path / "out")


def test_own_algorithm(digits_run: DigitsRun, own: str, tmp_path: Path) -> None:
    folder = digits_run(tmp_path / "runs", own, steps=1)
    with pytest.raises(AidgnError, match=r"file\.py:Mine"):
        export(folder)
    export(folder, algorithm=own)
    logits = session(folder / "export" / "model.onnx").run(["logits"], {"images": DIGITS.pixels[:20]})[0]
    np.testing.assert_allclose(logits, load_model(folder, "cpu", own).logits(DIGITS.pixels[:20]), atol=1e-4)
    with pytest.raises(AidgnError, match="custom"):
        load_model(folder / "export" / "model.safetensors")


# Safetensors ----------------------------------------------------------------------------------------------------------


def test_exported_file_is_self_contained(run: Path, exported: Path, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere.safetensors"
    shutil.copy(exported / "model.safetensors", alone)
    found, wanted = (load_model(path, "cpu").predict(DIGITS.pixels[::20]) for path in (alone, run))
    assert torch.equal(found.logits, wanted.logits) and found.classes == wanted.classes
    assert found.warnings == wanted.warnings and found.warnings is not None and any(found.warnings)
    about = json.loads((run / "run.json").read_text())
    assert str(about.get("root") or run).encode() not in alone.read_bytes()  # where the data lay is nobody's business
    for path in (alone, run / "model.safetensors", run / "last.safetensors"):
        assert path.stat().st_mode & 0o777 == run.stat().st_mode & 0o666  # others may read what they may look into

    Image.fromarray(DIGITS.pixels[0]).save(tmp_path / "a.png")
    result = subprocess.run(
        [sys.executable, "-m", "aidgn", "predict", alone, tmp_path / "a.png", "--json"],
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert json.loads(result.stdout)["label"] == wanted.labels[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": {}}, "identity"),
        ({"run": 7}, "object"),
        ({"novelty": {"norms": 3}}, "novelty"),
        ({"algorithm": "ERM"}, "ERM"),
    ],
)
def test_a_changed_file_is_refused(change: dict[str, object], words: str, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match=words):
        load_model(changed(exported, tmp_path / "x.safetensors", change))


def changed(exported: Path, path: Path, change: dict[str, object]) -> Path:
    from safetensors import safe_open

    with safe_open(exported / "model.safetensors", framework="pt") as file:
        metadata = json.loads(file.metadata()["aidgn"])
    del metadata["sha256"]  # as in a file of version 0.1.0
    save_file(load_file(exported / "model.safetensors"), path, {"aidgn": json.dumps({**metadata, **change})})
    return path


def test_a_file_cannot_name_code_to_run(run: Path, exported: Path, tmp_path: Path) -> None:
    code = tmp_path / "evil.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    about = json.loads((run / "run.json").read_text())
    about["identity"]["algorithm"] = f"{code}:Evil"
    path = changed(exported, tmp_path / "x.safetensors", {"run": about, "algorithm": f"{code}:Evil"})
    with pytest.raises(AidgnError, match="this version of aidgn"):
        load_model(path)
    assert not (tmp_path / "ran").exists()


# The card -------------------------------------------------------------------------------------------------------------


def test_card_has_the_accuracy_on_unseen_domains(digits_run: DigitsRun, tmp_path: Path) -> None:
    runs = {target: digits_run(tmp_path / "runs", "ERM", target) for target in ("chalk", "ink")}
    digits_run(tmp_path / "runs", "ERM", "ink", steps=2)  # another setting: no part of it
    accuracy = {}
    for target, folder in runs.items():
        number = DIGITS.domains.index(target)
        best = max(
            RunFolder(folder).records,
            key=lambda record, n=number: np.mean([record[f"env{i}_out_acc"] for i in range(4) if i != n]),
        )
        accuracy[target] = best[f"env{number}_in_acc"]
    other = shutil.copytree(runs["chalk"], tmp_path / "runs" / "unfinished")  # of another trial: no part of it yet
    about = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**about, "identity": {**about["identity"], "trial": 1}, "steps": 99}))
    text = (other / "results.jsonl").read_text()
    (other / "results.jsonl").write_text(text.replace('"trial_seed": 0', '"trial_seed": 1'))
    export(runs["ink"], tmp_path / "out", onnx=False)
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    for target, value in accuracy.items():
        assert f"| {target} | {value:.1%} | 1 |" in card
    assert "Not measured with poster, outline unseen." in card
    mean, worst = np.mean(list(accuracy.values())), min(accuracy.values())
    assert f"Expect about {mean:.0%} on a new domain, and {worst:.0%} if" in card
    assert "Of new pictures of the training domains" in card
    assert f"| chalk | training | {len(DIGITS.indices(1))} |" in card and "| ink | unseen |" in card
    final = digits_run(tmp_path / "fit" / "runs", "ERM", ())  # as `aidgn fit` leaves it: beside the runs
    for folder in runs.values():
        shutil.copytree(folder, tmp_path / "fit" / "runs" / folder.name)
    (tmp_path / "fit" / "model").mkdir()
    for name in ("model.safetensors", "novelty.json", "run.json"):
        shutil.copy(final / name, tmp_path / "fit" / "model")
    export(tmp_path / "fit" / "model", onnx=False)
    fitted = (tmp_path / "fit" / "model" / "export" / "MODEL_CARD.md").read_text()
    assert f"Expect about {mean:.0%} on a new domain, and {worst:.0%} if" in fitted and "| ink | training |" in fitted
    assert "get a false alarm" in card and "## Limits" in card and "MIT" in card


def test_code_in_the_card_runs(exported: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(exported, tmp_path / "place"))
    Image.fromarray(DIGITS.pixels[3]).resize((280, 280)).save(place / "photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", (place / "MODEL_CARD.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    first, second = (
        subprocess.run(
            [sys.executable, "-c", block], cwd=place, capture_output=True, text=True, check=True, timeout=120
        ).stdout.split()
        for block in blocks
    )
    assert first[0] == second[0] and float(first[1]) == pytest.approx(float(second[1]), abs=0.02)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK", "L"])
def test_code_in_the_card_converts_as_the_model_does(
    mode: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(shutil.copytree(exported, tmp_path / "place"))
    digit = Image.fromarray(DIGITS.pixels[3]).resize((28, 28))
    picture = digit.convert(mode)
    if mode.endswith("A"):  # a digit that only its transparency shows, on black for whom does not look at that
        picture = Image.new(mode, digit.size)
        picture.putalpha(digit.convert("L"))
    with (place / "photo.jpg").open("wb") as file:
        picture.save(file, "TIFF" if mode == "CMYK" else "PNG", **({"transparency": 0} if mode == "P" else {}))
    monkeypatch.chdir(place)
    _, block = re.findall(r"```python\n(.*?)```", Path("MODEL_CARD.md").read_text(), re.DOTALL)
    exec(block, {})
    label, probability = capsys.readouterr().out.split()
    found = load_model("model.safetensors", "cpu").predict("photo.jpg")
    assert label == found.labels[0] and float(probability) == pytest.approx(found.probabilities.max(), abs=1e-3)


def test_text_of_the_comparison() -> None:
    assert str(OnnxCheck(24, True, 0.0, 9e-4)).endswith("0.0009 for large pictures (allowed: 0.02)")
    assert str(OnnxCheck(24, True, 4e-5, 0.0)).endswith("4e-05 of the largest (allowed: 0.001)")


def test_card_of_a_quick_fit_and_strange_names(run: Path, tmp_path: Path) -> None:
    metadata = RunFolder(run).metadata
    model = load_model(run, "cpu")
    assert "last stage" not in write_model_card(run, metadata, model)
    domains = ["<b>|x|\n*y*", *metadata.domains[1:]]
    identity = {**metadata.identity, "train_only": "last-stage", "target": [], "dataset": "a_b`c"}
    strange = replace(metadata, identity=identity, domains=domains, classes=["# head", "[x](http://y)"])
    card = write_model_card(run, strange, model)
    assert "Only the network's last stage and the classifier were trained" in card
    frozen = write_model_card(run, replace(metadata, identity={**identity, "train_only": "head"}), model)
    assert "last stage" not in frozen and "Only the classifier was trained" in frozen
    assert card.startswith("# a\\_b\\`c classifier")
    assert "on the domains \\<b\\>\\|x\\| \\*y\\*" in card and "Classes: \\# head, \\[x\\](http://y)." in card
    assert (
        "\n\n\n" not in card
        and "Per class" not in card
        and f"draw 0: lr {identity['hyper_parameters']['lr']:g}, " in card
    )


def test_a_full_disk_leaves_no_empty_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = tmp_path / "before"
    before.mkdir()
    for out in (tmp_path / "out", before):
        with pytest.raises(AidgnError, match="disk is full"):
            export(run, out, onnx=False)
    assert list(tmp_path.rglob("*")) == [before]


# The command ----------------------------------------------------------------------------------------------------------


def test_command(run: Path, tmp_path: Path) -> None:
    def command(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["export", *map(str, arguments)])

    result = command(run, "--out", tmp_path / "a b", "--no-onnx")
    assert result.exit_code == 0 and f"{tmp_path}/a b/model.safetensors  0.6 MB" in result.stdout
    for arguments, words in (
        ((tmp_path / "nowhere",), "does not exist"),
        ((run, "--out", run), "overwrite"),
        ((run / "model.safetensors",), "folder of a finished run"),
        ((run, "--out", run / "run.json"), "give --out a folder"),
        ((tmp_path / "a b",), "made by `aidgn export`"),
        ((tmp_path / "a b" / "model.safetensors",), "made by `aidgn export`"),
    ):
        error = command(*arguments).exception
        assert isinstance(error, AidgnError) and words in str(error)
