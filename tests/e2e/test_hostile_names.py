"""Names of classes, domains and files that hold codes for terminals, markup and formulas, through the commands."""

import csv
import io
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.conftest import Tally

Aidgn = Callable[..., subprocess.CompletedProcess]
CODES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
RAW = ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e")
DOMAINS = (f"a{CODES}", f"b{CODES}", "[red]c[")
CLASSES = (f"=1+1{CODES}", f"<b>x{CODES}")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and a finished run, `runs`."""
    from aidgn.training import RunSpec, train

    folder = tmp_path_factory.mktemp("hostile")
    pictures, rng = folder / "pictures", np.random.default_rng(0)
    for domain in DOMAINS:
        for name in CLASSES:
            (pictures / domain / name).mkdir(parents=True)
            for number in range(5):
                picture = Image.fromarray(rng.integers(0, 255, (12, 12, 3), np.uint8))
                picture.save(pictures / domain / name / f"{CODES}{number}.png")
    (pictures / DOMAINS[0] / CLASSES[0] / f"broken{CODES}.txt").touch()
    spec = RunSpec(
        str(pictures),
        "ERM",
        DOMAINS[0],
        steps=2,
        eval_every=1,
        image_size=12,
        backbone="small",
        hyper_parameters={"batch_size": 2},
    )
    train(spec, folder / "runs", device="cpu", workers=1)
    return folder


COMMANDS = {
    "data check": ("data", "check", "PICTURES"),
    "train": ("train", "PICTURES", "--target", f"none{CODES}"),
    "status": ("status", "runs"),
    "table": ("table", "runs"),
    "predict": ("predict", "RUN", "PICTURE"),
    "predict --csv": ("predict", "RUN", "PICTURE", "--csv", "labels.csv"),
    "predict, no such file": ("predict", "RUN", f"none{CODES}"),
    "report": ("report", "runs", "--out", "page.html"),
    "adapt": ("adapt", "RUN"),
    "export": ("export", "RUN", "--no-onnx"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_no_codes_of_names(
    name: str, hostile: Path, aidgn: Aidgn, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.chdir(hostile)
    pictures, (run,) = hostile / "pictures", (hostile / "runs").iterdir()
    picture = pictures / DOMAINS[0] / CLASSES[0] / f"{CODES}0.png"
    places = {"PICTURES": str(pictures), "RUN": str(run), "PICTURE": str(picture)}
    ok = name not in ("train", "predict, no such file")
    done = aidgn(*(places.get(word, word) for word in COMMANDS[name]), ok=ok)
    with tally("control characters in names, by command"):
        assert not [raw for raw in RAW if raw in done.stdout + done.stderr]
    if name == "predict --csv":
        (row,) = list(csv.reader(io.StringIO((hostile / "labels.csv").read_text())))[1:]
        assert row[1].lstrip("'") in CLASSES and not row[1].startswith("=")
    written = {"report": hostile / "page.html", "export": run / "export" / "MODEL_CARD.md"}.get(name)
    if written:
        text = written.read_text()
        assert not [raw for raw in RAW if raw in text] and "<b>x" not in text


@pytest.fixture(scope="module")
def failing(hostile: Path) -> Path:
    """A file with an algorithm that fails with codes, and a sweep, `swept`, in which its run was set aside."""
    from aidgn.api import train_plans
    from aidgn.sweeps.launchers.in_process import InProcessLauncher
    from aidgn.sweeps.plan import SweepPlan

    file = hostile / "mine.py"
    file.write_text(
        "from aidgn.algorithms.erm import ERM\nclass Mine(ERM):\n"
        f"    def update(self, minibatches):\n        raise ValueError({CODES!r})\n"
    )
    options = {"trials": 1, "steps": 2, "eval_every": 1, "image_size": 12, "backbone": "small"}
    plan = SweepPlan((str(hostile / "pictures"),), (f"{file}:Mine",), (DOMAINS[0],), **options)
    train_plans([plan], hostile / "swept", InProcessLauncher(), retries=0, device="cpu", progress=False)
    return file


SMALL = "--steps 2 --eval-every 1 --image-size 12 --backbone small --batch-size 2 --trials 1 --out more --device cpu"
IN_TERMINAL = {
    "table": (["table", "runs"], 0),
    "status": (["status", "swept", "--watch"], 0),
    "sweep": (["sweep", "pictures", "--algorithm", "mine.py:Mine", "--target", DOMAINS[0], *SMALL.split()], 2),
    "serve": (["serve", "RUN", "--port", "0", "--device", "cpu"], 0),
}


@pytest.mark.parametrize("name", IN_TERMINAL)
def test_a_terminal_gets_our_codes_alone(name: str, hostile: Path, failing: Path, tally: Tally) -> None:
    """In a terminal click strips no codes, and rich writes some."""
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "OMP_NUM_THREADS": "1"}
    (run,) = (hostile / "runs").iterdir()
    arguments, code = IN_TERMINAL[name]
    command = [sys.executable, "-m", "aidgn", *(str(run) if word == "RUN" else word for word in arguments)]
    with subprocess.Popen(command, cwd=hostile, stdin=there, stdout=there, stderr=there, env=environment) as process:
        os.close(there)
        written = b""
        with suppress(OSError):  # how a terminal ends
            while part := os.read(here, 4096):
                written += part
                if b"stops)" in written and process.poll() is None and name == "serve":
                    upload_codes(written.decode())
                    process.send_signal(signal.SIGINT)
                    name = "stopped"
    os.close(here)
    text = written.decode()
    assert process.returncode == code and "owned" in text
    assert "\x1b[1m" in text or name != "table"
    with tally("control characters in names, in a terminal"):
        assert not [raw for raw in RAW if raw in text]


def upload_codes(text: str) -> None:
    """Send pictures whose names are codes to the server that has printed the text."""
    url = re.findall(r"http://\S+/", text)[0]
    files = [("images", (f"{CODES}.png", b"no picture")), ("images", (f"{CODES}.png", encoded()))]
    assert httpx.post(f"{url}api/predict", files=files).status_code == 200


def encoded() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (12, 12)).save(file, "PNG")
    return file.getvalue()


LONG = "x" * 5000
TOO_LONG = {
    "train": ("train", LONG, "--target", "a"),
    "train --out": ("train", "digits", "--target", "chalk", "--out", LONG),
    "train --weights": ("train", "digits", "--target", "chalk", "--weights", LONG),
    "train --algorithm": ("train", "digits", "--target", "chalk", "--algorithm", f"{LONG}.py:Mine"),
    "table": ("table", LONG),
    "status": ("status", LONG),
    "predict": ("predict", LONG, "picture.png"),
    "fit": ("fit", LONG),
    "serve": ("serve", LONG, "--port", "0"),
    "report": ("report", LONG),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_names_that_are_too_long_are_a_mistake(name: str) -> None:
    from click.testing import CliRunner

    from aidgn.cli import app
    from aidgn.errors import AidgnError

    result = CliRunner().invoke(app, TOO_LONG[name], standalone_mode=False)
    assert isinstance(result.exception, AidgnError)


def test_workers_log_no_codes() -> None:
    """Loggers of every process escape, not only those whose standard error is wrapped."""
    code = f"import logging, aidgn; logging.getLogger('aidgn').warning('%s: %d', {CODES!r}, 3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.startswith("\\x1b]0;owned\\x07") and not [raw for raw in RAW if raw in done.stderr]


def test_a_fit_reports_hostile_names(hostile: Path, tmp_path: Path) -> None:
    from aidgn.analysis.label_errors import DoubtfulLabel
    from aidgn.analysis.near_copies import NearCopy
    from aidgn.data import load_dataset
    from aidgn.fitting.estimate import Estimate
    from aidgn.fitting.pictures import DoubtfulPictures
    from aidgn.fitting.result import FitResult
    from aidgn.fitting.store import FitFolder
    from aidgn.runs.spec import RunSpec

    dataset = load_dataset(str(hostile / "pictures"))
    estimate = Estimate("<b>Mine", dict.fromkeys(DOMAINS, 0.5))
    sentence = f"{DOMAINS[0]} <b>"
    file = f"{DOMAINS[0]}/{dataset.classes[0]}/<b>.png"
    doubt = DoubtfulLabel(file, DOMAINS[0], *dataset.classes[:2], 0.1, 0.9)
    pictures = DoubtfulPictures([doubt], [NearCopy(file, file, 0.9)])
    final = RunSpec(dataset.name, "ERM")
    result = FitResult(tmp_path, [estimate], 0.5, [sentence], [sentence], final, pictures=pictures)
    FitFolder(tmp_path).write(dataset, result, [sentence], [sentence])
    text = (tmp_path / "REPORT.md").read_text()
    assert not [raw for raw in RAW if raw in text] and "<b>" not in text


def test_progress_shows_brackets_in_names() -> None:
    from aidgn.progress import Output, RunDisplay

    output = io.StringIO()
    console = Output(file=output, force_terminal=True, width=120)
    record = {"args": {"domains": ["[/red]", CODES], "test_envs": [0]}, "env0_in_acc": 0.5, "env1_out_acc": 0.5}
    display = RunDisplay()
    display.update("training", 1, 2, record)
    console.print(display.bar.get_renderable())
    assert "[/red] 50.0%" in output.getvalue()
    console.print(CODES, markup=False)
    assert not [raw for raw in RAW if raw in output.getvalue()]
