"""Training on all images, validation ones included, and the refit of `fit` that uses it."""

import dataclasses
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import aidgn
from aidgn.analysis.extraction import extract_features
from aidgn.data import load_dataset
from aidgn.errors import AidgnError, ParameterError
from aidgn.fitting.plan import plan_refit
from aidgn.inference import load_model
from aidgn.runs.folder import RunFolder
from aidgn.runs.reader import read_runs
from aidgn.runs.spec import RunSpec
from aidgn.selection import select
from aidgn.soups import soup
from aidgn.training import train
from aidgn.training.schedule import learning_rate_factor

DigitsRun = Callable[..., Path]
DIGITS = load_dataset("digits")


@pytest.fixture(scope="module")
def run(digits_run: DigitsRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("runs"), "ERM", steps=6, eval_every=2, train_on_all=True)


def test_every_source_image_is_trained_on(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from aidgn.training import trainer

    pools: list[np.ndarray] = []
    plain = trainer.BatchSampler

    def sampler(given: list[np.ndarray], *arguments: int) -> trainer.BatchSampler:
        pools.extend(given)
        return plain(given, *arguments)

    monkeypatch.setattr(trainer, "BatchSampler", sampler)
    train(RunSpec("digits", "ERM", "chalk", steps=1, train_on_all=True), tmp_path, device="cpu")
    sources = [d for d, name in enumerate(DIGITS.domains) if name != "chalk"]
    for domain, pool in zip(sources, pools, strict=True):
        assert sorted(pool) == sorted(DIGITS.indices(domain))


def test_the_last_step_is_kept(run: Path) -> None:
    folder = RunFolder(run)
    assert not folder.novelty.exists()
    last, kept = load_file(folder.last), load_file(folder.model)
    assert all(torch.equal(last[name], kept[name]) for name in last)
    (row,) = select(read_runs(run))
    assert row["step"] == 6
    assert extract_features(run, device="cpu").validation.sum() == 0


def test_the_option_is_omitted_from_other_identities(run: Path, digits_run: DigitsRun, tmp_path: Path) -> None:
    assert RunFolder(run).identity["train_on_all"] is True
    assert "train_on_all" not in RunFolder(digits_run(tmp_path, "ERM")).identity


def test_what_needs_validation_images_is_refused(run: Path, digits_run: DigitsRun, tmp_path: Path) -> None:
    spec = RunSpec("digits", "ERM", "chalk", average="swad", train_on_all=True)
    with pytest.raises(ParameterError, match="swad"):
        spec.resolved(DIGITS)
    other = digits_run(tmp_path, "ERM", draw=1)
    with pytest.raises(AidgnError, match="validation"):
        soup([run, other], tmp_path / "soup", greedy=True)
    assert soup([run, other], tmp_path / "soup", device="cpu").accuracy is None


def test_refit_takes_the_median_step() -> None:
    final = RunSpec("digits", "ERM", steps=100, warmup=30).resolved(DIGITS)
    refit = plan_refit(final, [90, 10, 60])
    assert refit == dataclasses.replace(final, steps=60, train_on_all=True)
    assert plan_refit(final, [10, 10, 60]).steps == 31  # the warm-up must end


def test_refit_has_the_rates_of_the_runs_that_it_repeats() -> None:
    """A schedule that falls to 0 at step 100 is at half its way after 50 steps, not at its end."""
    final = RunSpec("digits", "ERM", steps=100, schedule="linear", warmup=10).resolved(DIGITS)
    refit = plan_refit(final, [50]).resolved(DIGITS)
    rates, before = (
        [learning_rate_factor(step, spec.steps, spec.schedule, spec.warmup) for step in range(50)]
        for spec in (refit, final)
    )
    assert (refit.steps, rates) == (50, before) and rates[-1] > 0.5
    assert plan_refit(dataclasses.replace(final, schedule="halve:5"), [50]).schedule == "halve:5"


@pytest.mark.slow  # three trainings in processes of a launcher
def test_refit_trains_as_long_as_the_estimate_chose(tmp_path: Path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    for row in range(0, 900, 6):  # of two domains
        domain, name = DIGITS.domains[DIGITS.domain_of[row]], DIGITS.classes[DIGITS.labels[row]]
        path = photos / domain / name / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(DIGITS.pixels[row]).save(path)
    options = {"algorithm": "ERM", "steps": 40, "lr": 2e-3, "report": False, "progress": False, "device": "cpu"}
    said: list[str] = []
    (out / "model").mkdir(parents=True)
    (out / "model" / "novelty.json").write_text("of an earlier model")
    result = aidgn.fit(photos, out=out, refit=True, on_message=said.append, **options)
    chosen = [
        read_runs(folder.path).runs[0] for folder in RunFolder.find(out / "runs", "*") if folder.identity["target"]
    ]
    assert len(chosen) == 2
    steps = round(statistics.median(run.record(run.select()[1])["step"] for run in chosen))
    assert (result.final.steps, result.final.train_on_all, result.final.target) == (steps, True, ())
    assert result.seen_accuracy == pytest.approx(np.mean([run.select()[0] for run in chosen]))
    model = load_model(result.model_folder, "cpu")
    assert model.novelty is None and model.expectations is None
    assert RunFolder(result.model_folder).identity["train_on_all"]
    assert any(f"for {steps} steps" in sentence for sentence in said)
    shutil.rmtree(photos / DIGITS.domains[0])
    with pytest.raises(AidgnError, match="only one"):
        aidgn.fit(photos, refit=True, out=tmp_path / "x", **options)
    with pytest.raises(AidgnError, match="adapt"):
        aidgn.fit(photos, refit=True, adapt=True, out=tmp_path / "x", **options)
