"""aidgn features, adapt and table --adaptation, with the words a person types, in this process to save time."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aidgn.adaptation.methods import METHODS
from aidgn.cli import app
from aidgn.errors import AidgnError
from aidgn.progress import RunDisplay
from aidgn.training import RunSpec, train


def aidgn(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, standalone_mode=False, catch_exceptions=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms with two domains unseen, one trial, in runs/."""
    folder = tmp_path_factory.mktemp("adapt")
    for algorithm in ("ERM", "AIDGN"):
        for target in ("ink", "chalk"):
            train(
                RunSpec("digits", algorithm, target, steps=4, eval_every=4, hyper_parameters={"batch_size": 8}),
                folder / "runs",
                device="cpu",
            )
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(trained, tmp_path / "here"))
    monkeypatch.chdir(folder)
    return folder


def test_a_sweep_from_features_to_table_and_figure(here: Path) -> None:
    run = next((here / "runs").glob("digits-AIDGN-chalk-*"))
    said = aidgn("features", str(run), "--out", "features.parquet").stdout
    assert "1797 images of 4 domains, 128 features each" in said and "chalk (unseen): accuracy" in said
    assert (here / "features.parquet").stat().st_size > 500_000 and (run / "features.npz").exists()

    first = aidgn("adapt", "runs")
    for head in ("ERM", "ERM + T3A", "ERM + Tent-C", "ERM + Tent-BN", "AIDGN + T3A"):
        assert head in first.stdout
    assert (here / "runs" / "adaptation.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (here / "runs" / "adaptation.svg").read_text()
    files = sorted((here / "runs").glob("*/adaptation.jsonl"))
    assert [len(file.read_text().splitlines()) for file in files] == [19] * 4
    written = [file.stat().st_mtime_ns for file in files]
    again = aidgn("adapt", "runs")
    assert again.stdout == first.stdout and [file.stat().st_mtime_ns for file in files] == written

    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    chosen = [line for line in lines if (line["algorithm"], line["method"]) == ("ERM", "T3A") and line["selected"]]
    table = aidgn("table", "runs", "--adaptation", "--paper", "--markdown", "--csv", "a.csv", "--parquet", "a.parquet")
    row = next(line for line in table.stdout.splitlines() if "ERM + T3A" in line)
    assert f"{100 * chosen[0]['target_accuracy']:.1f}" in row and len(chosen) == 2
    assert "The paper has no numbers for this table" in table.stdout and "X: no result" in table.stdout
    assert len((here / "a.csv").read_text().splitlines()) == 1 + len(lines) and (here / "a.parquet").exists()
    aidgn("table", "runs", "--parquet", "b.parquet")
    assert (here / "b.parquet").read_bytes()[:4] == b"PAR1"

    alone = aidgn("adapt", str(run)).stdout
    assert "as trained" in alone and "filter_k" in alone and "chalk" in alone


def mistake(*arguments: str) -> str:
    with pytest.raises(AidgnError) as caught:
        aidgn(*arguments)
    return str(caught.value)


def test_mistakes(here: Path) -> None:
    erm, other = (str(next((here / "runs").glob(f"digits-{name}-chalk-*"))) for name in ("ERM", "AIDGN"))
    for arguments, words in (
        (("adapt", "nowhere"), "nowhere does not exist"),
        (("features", erm, "--out", "features.csv"), ".npz or .parquet"),
        (("features", "runs"), "holds 4 runs: give one"),
        (("table", "runs", "--adaptation"), "None of the 4 runs in runs has been adapted. `aidgn adapt runs`"),
        (("table", "runs", "--adaptation", "--selection", "oracle"), "--selection oracle does not go with"),
        (("table", "runs", "--parquet", "all.csv"), "--parquet all.csv"),
        (("table", "runs", "--csv", "all.parquet"), "--parquet"),
        (("adapt", erm, "--method", "tent", "--device", "cpu"), "BatchNorm2d"),
    ):
        assert words in mistake(*arguments)
    aidgn("features", other, "--out", "other.npz")
    assert "features of another model" in mistake("adapt", erm, "--features", "other.npz")
    assert "is of one model" in mistake("adapt", "runs", "--features", "other.npz")
    (Path(erm) / "model.safetensors").unlink()
    (Path(erm) / "last.safetensors").unlink()
    for command in ("adapt", "features"):
        assert "is not finished" in mistake(command, erm)
    said = aidgn("adapt", "runs", "--method", "t3a").stdout
    assert "cannot be adapted" in said and "ERM + T3A" in said


def test_the_time_left_is_measured_by_whole_runs(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later runs need features first, and the settings of methods take different times."""
    shown: list[tuple[int, int, bool]] = []

    def note(display: RunDisplay, work: str, done: int, total: int, cycle_end: bool = True) -> None:
        if work == "adapting":
            shown.append((done, total, cycle_end))

    monkeypatch.setattr(RunDisplay, "update", note)
    shutil.copytree(trained / "runs", trained / "fresh", ignore=shutil.ignore_patterns("adaptation*"))
    aidgn("adapt", str(trained / "fresh"), "--method", "t3a", "--device", "cpu")
    settings = len(METHODS["T3A"].settings)
    assert {total for _, total, _ in shown} == {4 * settings}
    assert {done for done, _, end in shown if end} == {settings * runs for runs in range(5)}
    assert any(not end for _, _, end in shown)
