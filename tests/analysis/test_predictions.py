"""Predictions against the run's own records, and files that were damaged."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from aidgn.analysis.extraction import extract_features
from aidgn.analysis.predictions import Predictions, load_predictions
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.runs.folder import RunFolder

DIGITS = load_dataset("digits")


@pytest.fixture(scope="module")
def run(digits_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("runs"), trial=1, steps=6, eval_every=3)


@pytest.fixture(scope="module")
def predictions(run: Path) -> Predictions:
    return load_predictions(run, device="cpu")


def test_accuracies_are_those_of_the_records(run: Path, predictions: Predictions) -> None:
    record = RunFolder(run).selected
    for number, name in enumerate(DIGITS.domains):
        here = predictions.where((predictions.domains == number) & predictions.validation)
        assert here.right.mean() == pytest.approx(record[f"env{number}_out_acc"])
        if name == "chalk":
            rest = predictions.where((predictions.domains == number) & ~predictions.validation)
            assert rest.right.mean() == pytest.approx(record[f"env{number}_in_acc"])


def test_rows_are_the_images_that_were_not_trained_on(run: Path, predictions: Predictions) -> None:
    chalk = DIGITS.domains.index("chalk")
    unseen = predictions.out_of_site
    assert unseen.files == [DIGITS.files[i] for i in DIGITS.indices(chalk)]
    assert {DIGITS.domains[i] for i in unseen.domains} == {"chalk"} and predictions.targets == ["chalk"]
    place = {file: i for i, file in enumerate(DIGITS.files)}
    rows = np.array([place[file] for file in predictions.files])
    assert (predictions.labels == DIGITS.labels[rows]).all()
    assert (predictions.domains == DIGITS.domain_of[rows]).all()
    assert set(predictions.in_site.domains) == {0, 1, 2, 3} - {chalk} and predictions.in_site.validation.all()
    features = extract_features(run, device="cpu")
    assert (predictions.logits == features.logits[rows]).all()
    norms = np.linalg.norm(features.features[rows].astype(np.float64), axis=1)
    assert predictions.score("norm") == pytest.approx(norms)


def test_a_file_comes_back_as_written(tmp_path: Path, predictions: Predictions) -> None:
    predictions.save(tmp_path / "predictions.npz")
    again = Predictions.load(tmp_path / "predictions.npz")
    for field in fields(Predictions):
        assert np.array_equal(getattr(again, field.name), getattr(predictions, field.name)), field.name


@pytest.mark.attack
def test_changed_bytes_are_found(run: Path, predictions: Predictions, tmp_path: Path) -> None:
    content = RunFolder(run).predictions.read_bytes()
    arrays = content.rfind(b"PK\x01\x02", 0, content.find(b"PK\x01\x02") + 1)  # the directory begins here
    path = tmp_path / "predictions.npz"
    for position in np.linspace(200, arrays - 1, 40).astype(int):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        try:
            again = Predictions.load(path)
        except AidgnError:
            continue
        assert np.array_equal(again.logits, predictions.logits) and again.files == predictions.files
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(AidgnError):
        Predictions.load(path)


def test_a_damaged_file_is_written_again(run: Path, predictions: Predictions) -> None:
    path = RunFolder(run).predictions
    path.write_bytes(path.read_bytes()[:1000])
    again = load_predictions(run, device="cpu")
    assert np.array_equal(again.logits, predictions.logits)
    assert Predictions.load(path).model == RunFolder(run).model_digest
