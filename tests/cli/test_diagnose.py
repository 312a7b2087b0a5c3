"""aidgn diagnose on small real runs and on feature files."""

import json
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aidgn.analysis import embedding
from aidgn.analysis.extraction import extract_features
from aidgn.analysis.features import Features
from aidgn.cli import app
from aidgn.errors import AidgnError
from aidgn.training import RunSpec, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    return {
        name: train(
            RunSpec("digits", name, "chalk", steps=6, eval_every=3, hyper_parameters={"batch_size": 16}),
            out,
            device="cpu",
        )
        for name in ("ERM", "AIDGN")
    }


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aidgn.report.run_figures.MAX_POINTS", 120)  # of t-SNE, for speed


def aidgn(*arguments: object) -> None:
    app(["diagnose", *map(str, arguments)], standalone_mode=False)


def test_one_run_in_sentences_numbers_and_figures(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    aidgn(runs["AIDGN"], "--permutations", 99)
    said = capsys.readouterr().out
    assert "Angular invariance" in said and "Norm shift" in said and "In short:" in said and "chalk" in said
    assert max(map(len, said.splitlines()[:-1])) <= 120
    kept = json.loads((runs["AIDGN"] / "diagnosis.json").read_text())
    assert set(kept["verdicts"]) == {"angular invariance", "norm shift"}
    assert kept["sources"] == ["ink", "poster", "outline"] and kept["targets"] == ["chalk"]
    assert 0.001 <= kept["angular"]["p"] <= 1 and len(kept["von_mises_fisher"]) == 40
    for name in ("latent-space", "norms", "angles", "confusion", "curves"):
        assert (runs["AIDGN"] / "figures" / f"{name}.svg").is_file()
        with Image.open(runs["AIDGN"] / "figures" / f"{name}.png") as image:
            image.load()


def test_settings_of_runs_that_differ_are_told(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(runs["AIDGN"], tmp_path / "other")
    about = json.loads((other / "run.json").read_text())
    about["identity"]["precision"] = "bfloat16"
    (other / "run.json").write_text(json.dumps(about))
    aidgn(runs["ERM"], other, "--permutations", 99, "--no-figures")
    said = " ".join(capsys.readouterr().out.split())
    assert "differ in precision: bfloat16 (1 run: AIDGN); float32 (1 run: ERM)." in said


def test_two_runs_are_compared(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    aidgn(runs["ERM"], runs["AIDGN"], "--permutations", 99)
    said = capsys.readouterr().out
    header = said.splitlines()[0]
    assert "ERM" in header and "AIDGN" in header and "ERM. In short" in said
    assert "different data" not in said and "differ in" not in said
    assert (runs["ERM"] / "figures" / "latent-space-ERM-AIDGN.png").is_file()
    assert "nan" not in said and "Left out" not in said


def test_nobody_reads_the_comparison_any_more(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(SystemExit) as end, os.fdopen(writer, "w") as closed:  # which is written to /dev/null by then
        monkeypatch.setattr(sys, "stdout", closed)
        aidgn(runs["ERM"], runs["AIDGN"], "--permutations", 99, "--no-figures")
    assert end.value.code == 141


def test_only_comparable_runs_are_drawn_together(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = extract_features(runs["ERM"], device="cpu")
    keep = ~((features.labels == 7) & (features.domains == features.domain_names.index("chalk")))
    cut = {name: getattr(features, name)[keep] for name in ("features", "logits", "labels", "domains", "validation")}
    few = replace(features, **cut, files=list(np.array(features.files)[keep]))
    few.save(tmp_path / "chalk.npz")
    replace(few, targets=["ink"], algorithm="AIDGN").save(tmp_path / "ink.npz")
    aidgn(tmp_path / "chalk.npz", tmp_path / "ink.npz", "--permutations", 99)
    assert capsys.readouterr().out.count("Left out of the tests, with fewer than 5 images: 7 of chalk (0).") == 1
    assert {path.name for path in (tmp_path / "chalk/figures").glob("latent*")} == {
        "latent-space.png",
        "latent-space.svg",
    }


def test_a_feature_file_and_the_same_numbers(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aidgn(runs["AIDGN"], "--no-figures", "--permutations", 99)
    shutil.copy(runs["AIDGN"] / "features.npz", tmp_path / "mine.npz")
    aidgn(tmp_path / "mine.npz", "--no-figures", "--permutations", 99)
    assert (tmp_path / "mine/diagnosis.json").read_text() == (runs["AIDGN"] / "diagnosis.json").read_text()
    assert not (tmp_path / "mine/figures").exists()
    other = replace(Features.load(tmp_path / "mine.npz"), targets=["ink"])
    other.save(tmp_path / "other.npz")
    capsys.readouterr()
    aidgn(tmp_path / "mine.npz", tmp_path / "other.npz", "--no-figures", "--permutations", 99)
    assert "different data, unseen domains or trials" in " ".join(capsys.readouterr().out.split())


def test_an_unfinished_run_shows_its_curves(runs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("run.json", "results.jsonl"):
        shutil.copy(runs["AIDGN"] / name, tmp_path)
    with pytest.raises(AidgnError, match=r"not finished.*curves so far are in"):
        aidgn(tmp_path)
    assert (tmp_path / "figures/curves.png").is_file()
    (tmp_path / "results.jsonl").unlink()
    with pytest.raises(AidgnError, match="no records yet"):
        aidgn(tmp_path)


def test_features_of_another_model_and_other_mistakes(runs: dict[str, Path], tmp_path: Path) -> None:
    aidgn(runs["AIDGN"], "--no-figures", "--permutations", 99)
    for name in ("run.json", "model.safetensors"):
        shutil.copy(runs["ERM"] / name, tmp_path)
    shutil.copy(runs["AIDGN"] / "features.npz", tmp_path)
    with pytest.raises(AidgnError, match="features of another model"):
        aidgn(tmp_path / "features.npz", "--no-figures")
    for name, why in (("nowhere.npz", "does not exist"), ("run.json", "is something else")):
        with pytest.raises(AidgnError, match=rf"{name} {why}: expected .* or a file of features \(.npz or .parquet\)"):
            aidgn(tmp_path / name)
    with pytest.raises(AidgnError, match=r"[Gg]ive one|holds 2 runs"):
        aidgn(runs["ERM"].parent)
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 not a feature file")
    with pytest.raises(AidgnError, match="not a feature file"):
        aidgn(broken)
    alone = tmp_path / "elsewhere/alone.npz"
    features = Features.load(runs["AIDGN"] / "features.npz")
    one = features.domains == 1
    cut = {name: getattr(features, name)[one] for name in ("features", "logits", "labels", "validation")}
    replace(
        features,
        **cut,
        domains=np.zeros(int(one.sum()), np.int64),
        domain_names=["chalk"],
        files=["x"] * int(one.sum()),
    ).save(alone)
    with pytest.raises(AidgnError, match="single domain"):
        aidgn(alone)


def test_a_last_layer_norm_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"backbone": "test_vit", "weights": "none", "image_size": 32, "steps": 1, "eval_every": 1}
    spec = RunSpec("digits", "AIDGN", "chalk", hyper_parameters={"batch_size": 4}, **options)  # type: ignore[arg-type]
    aidgn(train(spec, tmp_path, device="cpu"), "--permutations", 99, "--no-figures")
    assert "test_vit ends in a layer norm" in " ".join(capsys.readouterr().out.split())


def test_figures_wait_for_positions_of_another_thread(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    compute, computed = embedding._compute, []

    def count(values: np.ndarray, seed: int) -> np.ndarray:
        computed.append(threading.current_thread() is threading.main_thread())
        return compute(values, seed)

    monkeypatch.setattr(embedding, "_compute", count)
    aidgn(runs["ERM"], runs["AIDGN"], "--permutations", 99, "--seed", 77)
    assert len(computed) == 2 and not computed[0]
    computed.clear()
    aidgn(runs["ERM"], "--permutations", 99, "--seed", 78, "--no-figures")
    assert not computed
