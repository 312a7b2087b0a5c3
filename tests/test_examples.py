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
    return root


def run(example: str, *arguments: str) -> str:
    result = subprocess.run([sys.executable, str(EXAMPLES / example), *arguments], capture_output=True, text=True,
                            timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def last_accuracy(text: str) -> float:
    return float(re.findall(r"([\d.]+)%", text)[-1])


def test_plain_loop(photos: Path) -> None:
    assert last_accuracy(run("plain_loop.py", str(photos), "--unseen", "ink", "--epochs", "20")) > 60  # of 3 classes


def test_timm_finetune(photos: Path) -> None:
    text = run("timm_finetune.py", str(photos), "--unseen", "poster", "--model", "test_resnet.r160_in1k", "--size",
               "32", "--epochs", "3", "--batch-size", "32", "--lr", "0.003")
    assert text.count("epoch") == 3 and last_accuracy(text) > 25  # it is a tiny network without pretrained weights


def test_lightning_module() -> None:
    pytest.importorskip("lightning")
    text = run("lightning_module.py", "--unseen", "ink", "--epochs", "12")
    found = re.search(r"accuracy on the unseen domain\W+([\d.]+)", text)
    assert found and float(found[1]) > 0.3, text  # of 10 classes
