"""The examples run as they stand, and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from aidgn.data import load_dataset

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Part of the embedded digits as a folder of pictures: three classes, four domains."""
    root, digits = tmp_path_factory.mktemp("photos"), load_dataset("digits")
    assert digits.pixels is not None
    for file, pixels, label in zip(digits.files, digits.pixels, digits.labels, strict=True):
        if label < 3:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / file)
    (root / ".aidgn-cache").mkdir()  # as a command has left it
    return root


def run(example: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def last_accuracy(text: str) -> float:
    return float(re.findall(r"([\d.]+)%", text)[-1])


def test_plain_loop(photos: Path) -> None:
    assert last_accuracy(run("plain_loop.py", str(photos), "--unseen", "ink", "--epochs", "20")) > 60  # of 3 classes


def test_timm_finetune(photos: Path) -> None:
    text = run(
        "timm_finetune.py",
        str(photos),
        "--unseen",
        "poster",
        "--model",
        "test_resnet.r160_in1k",
        "--size",
        "32",
        "--epochs",
        "3",
        "--batch-size",
        "32",
        "--lr",
        "0.003",
    )
    assert text.count("epoch") == 3 and last_accuracy(text) > 25  # it is a tiny network without pretrained weights


@pytest.mark.parametrize("example", ["plain_loop.py", "timm_finetune.py"])
def test_domains_with_other_classes_are_not_mixed_up(example: str, tmp_path: Path) -> None:
    for place in ("a/cat", "a/dog", "b/cat", "b/dog", "c/dog"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / place / "0.png")
    model = ["--model", "test_resnet.r160_in1k"] if example.startswith("timm") else []
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / example), str(tmp_path), "--unseen", "b", *model],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1 and "every domain needs the same" in result.stderr


def test_lightning_module() -> None:
    pytest.importorskip("lightning")
    text = run("lightning_module.py", "--unseen", "ink", "--epochs", "12")
    found = re.search(r"accuracy on the unseen domain\W+([\d.]+)", text)
    assert found and float(found[1]) > 0.3, text  # of 10 classes
