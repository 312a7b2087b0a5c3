"""Whole commands, as a person types them: one in a process of its own, most in this one, as importing takes long."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aidgn.sweeps.store import PlannedRun, SweepFolder

AIDGN = [sys.executable, "-m", "aidgn"]
Aidgn = Callable[..., subprocess.CompletedProcess]  # the fixture, in conftest.py


def folder_of_images(root: Path, domains: tuple[str, ...] = ("a", "b", "c"), per_class: int = 5) -> Path:
    rng = np.random.default_rng(0)
    for domain in domains:
        for level, name in ((60, "dark"), (200, "light")):
            (root / domain / name).mkdir(parents=True)
            for number in range(per_class):
                pixels = np.clip(rng.normal(level, 25, (30, 40, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / domain / name / f"{number}.jpg")
    return root


def test_help_is_quick_and_imports_nothing_heavy(aidgn: Aidgn) -> None:
    seconds, bare = [], []
    for _ in range(5):
        began = time.perf_counter()
        text = aidgn("--help", own_process=True).stdout
        between = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        seconds.append(between - began)
        bare.append(time.perf_counter() - between)
    for command in ("demo", "train", "sweep", "table", "algorithms", "data"):
        assert command in text
    listed = subprocess.run(
        [sys.executable, "-X", "importtime", *AIDGN[1:], "--help"], capture_output=True, text=True
    ).stderr
    for module in ("torch", "numpy", "multiprocessing", "aidgn.cli.train", "aidgn.runs"):
        assert module not in listed, module
    assert min(seconds) < max(0.3, 10 * min(bare))  # the latter on a slow or busy machine


def test_what_reads_files_alone_does_not_wait_for_torch(tmp_path: Path, digits_run: Callable[..., Path]) -> None:
    folder = digits_run(tmp_path / "runs").parent
    SweepFolder(folder).write([PlannedRun("another", "digits", "ERM", ["ink"], 0, 0, 4, "")], 2, "")
    for arguments in (["status", str(folder)], ["table", str(folder)], ["data", "list"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *AIDGN[1:], *arguments], capture_output=True, text=True, check=True
        )
        assert "aidgn.data" in done.stderr and "torch" not in done.stderr, arguments


@pytest.mark.parametrize(
    "command",
    ["demo", "train", "sweep", "status", "table", "algorithms", "data check", "data download", "data prepare"],
)
def test_every_command_has_help_with_an_example(command: str, aidgn: Aidgn) -> None:
    text = aidgn(*command.split(), "--help").stdout
    assert "Example" in text and f"aidgn {command}" in text


def test_train_and_table_on_the_embedded_digits(aidgn: Aidgn, tmp_path: Path) -> None:
    for algorithm in ("ERM", "AIDGN"):
        result = aidgn(
            "train",
            "digits",
            "--algorithm",
            algorithm,
            "--target",
            "chalk",
            "--steps",
            "6",
            "--eval-every",
            "3",
            "--batch-size",
            "8",
            "--set",
            "weight_decay=0.001",
            own_process=algorithm == "AIDGN",
        )
        assert "chalk (never seen in training):" in result.stdout and "Run folder: runs/digits-" in result.stdout
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    record = json.loads((folders[0] / "results.jsonl").read_text().splitlines()[-1])
    assert record["step"] == 6 and record["hparams"]["weight_decay"] == 0.001 and record["hparams"]["batch_size"] == 8
    table = aidgn("table", "runs").stdout
    assert "ERM" in table and "AIDGN" in table and "digits" in table
    markdown = aidgn("table", "runs", "--markdown").stdout
    accuracy = (
        100
        * next(
            json.loads(line)
            for line in (folders[0] / "results.jsonl").read_text().splitlines()
            if json.loads(line)["step"] == selected_step(folders[0])
        )["env1_in_acc"]
    )
    assert f"{accuracy:.1f}" in markdown


def selected_step(folder: Path) -> int:
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    means = [np.mean([record[f"env{i}_out_acc"] for i in (0, 2, 3)]) for record in records]
    return records[int(np.argmax(means))]["step"]


def test_demo_from_start_to_table_and_again(aidgn: Aidgn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aidgn.cli.demo.POINTS", 60)  # of t-SNE, for speed
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # as many workers as cores that may be used
    first = aidgn("demo", "--steps", "4", "--trials", "1")
    assert "24 runs" not in first.stderr and ": 8 runs" in first.stderr
    for word in ("ERM", "AIDGN", "runs/demo/report.html", "Try next"):
        assert word in first.stdout
    identities = [json.loads(path.read_text())["identity"] for path in (tmp_path / "runs/demo").glob("*/run.json")]
    assert [identity["hyper_parameters"]["batch_size"] for identity in identities] == [32] * 8
    tried = [path.read_text().strip().splitlines() for path in (tmp_path / "runs/demo/.sweep/attempts").glob("*.jsonl")]
    assert len(tried) == 8 and len({json.loads(line)["pid"] for line, *_ in tried}) == 1  # by one worker
    again = aidgn("demo", "--steps", "4", "--trials", "1")
    assert again.stdout == first.stdout


def test_own_folder_with_a_broken_image(aidgn: Aidgn, tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "my photos")
    (root / "a" / "dark" / "0.jpg").write_bytes((root / "a" / "dark" / "0.jpg").read_bytes()[:300])
    command = (
        "train",
        str(root),
        "--target",
        "c",
        "--algorithm",
        "ERM",
        "--backbone",
        "small",
        "--steps",
        "2",
        "--batch-size",
        "2",
    )
    result = aidgn(*command, ok=False)
    assert result.returncode == 2 and "a/dark/0.jpg" in result.stderr and "--skip-broken" in result.stderr
    assert not list(tmp_path.rglob("results.jsonl"))
    aidgn(*command, "--skip-broken")
    record = json.loads(next(tmp_path.rglob("results.jsonl")).read_text().splitlines()[-1])
    assert record["args"]["skipped"] == 1


def test_data_check(aidgn: Aidgn, tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "photos")
    for number in range(60):
        (root / "a" / f"[red] class {number}").mkdir()
        Image.new("L", (8, 8), number).save(root / "a" / f"[red] class {number}" / "0.png")
    fine = aidgn("data", "check", "photos").stdout
    rows = [line.split("  ") for line in fine.splitlines()]
    assert "90 images" in fine and "Every image can be read" in fine
    assert [cell.strip() for cell in next(row for row in rows if row[0] == "[red] class 7") if cell] == [
        "[red] class 7",
        "1",
        "0",
        "0",
        "1",
    ]
    (root / "b" / "light" / "1.jpg").write_text("not an image")
    (root / "c" / "dark" / "9.jpg").write_bytes((root / "a" / "dark" / "1.jpg").read_bytes())
    result = aidgn("data", "check", "photos", ok=False)
    assert "b/light/1.jpg" in result.stdout and "a/dark/1.jpg, c/dark/9.jpg" in result.stdout


def test_lists(aidgn: Aidgn) -> None:
    names = aidgn("data", "list").stdout
    assert all(name in names for name in ("PACS", "VLCS", "OfficeHome", "TerraIncognita", "digits"))
    names = aidgn("algorithms").stdout
    assert all(name in names for name in ("ERM", "AIDGN", "AIDGN-noR", "AIDGN-release"))
    one = aidgn("algorithms", "AIDGN").stdout
    assert "mu_star" in one and "410" in one and "U[0.05, 0.5]" in one


@pytest.mark.parametrize("command", ["data list", "data check digits", "algorithms"])
def test_nobody_reads_a_table_any_more(command: str) -> None:
    with subprocess.Popen([*AIDGN, *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert not process.stderr.read()
    assert process.returncode == 141


@pytest.mark.parametrize(
    "locale", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}]
)  # here names of files are ASCII too
def test_letters_that_the_terminal_has_not(locale: dict[str, str], tmp_path: Path) -> None:
    folder_of_images(tmp_path / "photos", ("Zürich", "東京", "c"))

    def aidgn(*arguments: str) -> str:
        done = subprocess.run([*AIDGN, *arguments], capture_output=True, cwd=tmp_path, env={**os.environ, **locale})
        assert not done.returncode, done.stderr
        return done.stdout.decode("latin-1")

    checked = aidgn("data", "check", "photos")
    assert r"\u6771\u4eac" in checked and ("Zürich" in checked or r"Z\xfcrich" in checked)
    folder = aidgn("train", "photos", "--target", "Zürich", "--steps", "2", "--batch-size", "4", "--image-size", "28")
    (run,) = (tmp_path / "runs").glob("photos-AIDGN-*")
    assert "Run folder: runs/photos-AIDGN-Z" in folder
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["identity"]["target"] == ["Zürich"]
    for options in ((), ("--csv", "-")):
        assert aidgn("predict", f"runs/{run.name}", "photos/東京", *options).count(".jpg") == 10


@pytest.mark.parametrize(
    ("called", "command", "words"),
    [
        ("aidgn.inference.load_model", "predict run photo.jpg", "Interrupted."),
        ("aidgn.data.inspect_dataset", "data check digits", "Interrupted."),
        ("aidgn.data.cache.prepare", "data prepare digits", "Interrupted; the same command continues."),
        ("aidgn.training.train", "train digits --target ink", "Interrupted; the same command continues."),
    ],
)
def test_ctrl_c_says_what_the_same_command_would_do(
    called: str, command: str, words: str, aidgn: Aidgn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "photo.jpg").touch()
    monkeypatch.setattr(called, interrupted)
    done = aidgn(*command.split(), ok=False)
    assert done.returncode == 130 and done.stderr.splitlines()[-1] == words


def test_an_own_algorithm_is_shown_as_it_is_written(aidgn: Aidgn, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        'from aidgn.algorithms import Algorithm\n\n\nclass Mine(Algorithm):\n    """loss = CE(g([z, e]), y)[/i]"""\n\n'
        '    title = "classify [z] with [/e]"\n\n    def objective(self, minibatches): ...\n'
    )
    shown = aidgn("algorithms", "own.py:Mine").stdout
    assert shown.startswith("Mine: classify [z] with [/e]\nunpublished\n\nloss = CE(g([z, e]), y)[/i]\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian", "digits"), "Did you mean train"),
        (("train", "digits"), "--target"),
        (("train", "digits", "--target", "ink", "--set", "gamma"), "NAME=VALUE"),
        (("train", "digits", "--target", "ink", "--set", "gama=1"), "Did you mean gamma"),
        (("train", "digits", "--target", "ink", "--algorithm", "aidng"), "Did you mean"),
        (("train", "digits", "--target", "ink", "--device", "cuda:77"), "--device is cuda:77"),
        (("train", "nowhere/", "--target", "ink"), "nowhere"),
        (("table", "nowhere"), "nowhere"),
        (("algorithms", "ERN"), "Did you mean ERM"),
        (("data", "download", "PAC"), "PACS"),
    ],
)
def test_mistakes_get_one_clear_sentence(arguments: tuple[str, ...], words: str, aidgn: Aidgn, tmp_path: Path) -> None:
    result = aidgn(*arguments, ok=False)
    assert result.returncode == 2 and words in result.stderr
    assert not list(tmp_path.rglob("run.json"))
