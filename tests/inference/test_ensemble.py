"""The mean of several models, in Python and as one ONNX file."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner
from PIL import Image

from aidgn.cli import app
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.inference import Ensemble, load_model
from aidgn.inference.export import export_ensemble

DigitsRun = Callable[..., Path]
DIGITS = load_dataset("digits")


@pytest.fixture(scope="module")
def runs(digits_run: DigitsRun, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("runs")
    return [digits_run(out, name, target=target) for name, target in (("AIDGN", "chalk"), ("ERM", "ink"))]


def mean_probabilities(runs: list[Path], images: np.ndarray) -> np.ndarray:
    return np.mean([load_model(run, "cpu").predict(images).probabilities for run in runs], axis=0)


def test_probabilities_are_averaged(runs: list[Path]) -> None:
    ensemble = load_model(runs, "cpu")
    assert isinstance(ensemble, Ensemble) and ensemble.domains == load_model(runs[0], "cpu").domains
    expected = mean_probabilities(runs, DIGITS.pixels[:70])
    found = ensemble.predict(DIGITS.pixels[:70])
    assert found.probabilities == pytest.approx(expected, abs=1e-6)
    assert found.labels == [DIGITS.classes[c] for c in expected.argmax(1)]
    assert np.exp(found.logits.numpy()) == pytest.approx(expected, abs=1e-6)
    assert found.features.shape == (70, 256) and found.warnings is None
    assert type(load_model(runs[:1], "cpu")) is not Ensemble
    batches = [part.probabilities for _, part in ensemble.batches(DIGITS.pixels[:70])]
    assert np.concatenate(batches) == pytest.approx(expected, abs=1e-6)


def test_models_of_other_sizes_are_refused(runs: list[Path], digits_run: DigitsRun, tmp_path: Path) -> None:
    other = digits_run(tmp_path, "ERM", image_size=32)
    with pytest.raises(AidgnError, match="image size"):
        load_model([runs[0], other], "cpu")


def test_onnx_has_the_mean(runs: list[Path], tmp_path: Path) -> None:
    written = export_ensemble(runs, tmp_path / "mean")
    assert [path.name for path in written.files] == ["model.onnx"]
    assert written.check is not None and written.check.real
    session = onnxruntime.InferenceSession(str(written.files[0]), providers=["CPUExecutionProvider"])
    images = DIGITS.pixels[:20]
    logits, probabilities = session.run(["logits", "probabilities"], {"images": images})
    expected = mean_probabilities(runs, images)
    assert probabilities == pytest.approx(expected, abs=1e-4)
    assert np.exp(logits) == pytest.approx(probabilities, abs=1e-5)


def test_commands_take_several_models(runs: list[Path], tmp_path: Path) -> None:
    Image.fromarray(DIGITS.pixels[0]).save(tmp_path / "one.png")
    first, second = map(str, runs)
    command = ["predict", first, str(tmp_path / "one.png"), "--with", second, "--csv", str(tmp_path / "p.csv")]
    result = CliRunner().invoke(app, [*command, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    probability = float((tmp_path / "p.csv").read_text().splitlines()[1].split(",")[2])
    assert probability == pytest.approx(mean_probabilities(runs, DIGITS.pixels[:1]).max(), abs=1e-5)
    refused = CliRunner().invoke(app, ["export", first, second])
    assert isinstance(refused.exception, AidgnError) and "--out" in str(refused.exception)


def test_evaluate_measures_the_mean(runs: list[Path], tmp_path: Path) -> None:
    rows = np.arange(0, 60)
    for row in rows:
        file = tmp_path / "site" / DIGITS.classes[DIGITS.labels[row]] / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(DIGITS.pixels[row]).save(file)
    command = ["evaluate", *map(str, runs), str(tmp_path / "site"), "--mean", "--json", "--device", "cpu"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    *_, mean = json.loads(result.stdout)
    expected = mean_probabilities(runs, DIGITS.pixels[rows])
    assert mean["accuracy"] == pytest.approx((expected.argmax(1) == DIGITS.labels[rows]).mean())
    assert mean["nll"] == pytest.approx(-np.log(expected[rows, DIGITS.labels[rows]]).mean(), abs=1e-4)
