"""The step that another metric than the accuracy selects, against the records read one by one."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aidgn.results import RunResult
from aidgn.runs.checkpoints import read_model
from aidgn.runs.folder import RunFolder


def means(run: Path, key: str) -> list[float]:
    """Mean over the sources' validation images at each step; chalk, domain 1, is the target."""
    records = [json.loads(line) for line in RunFolder(run).results.read_text().splitlines()]
    return [np.mean([record[f"env{domain}_out_{key}"] for domain in (0, 2, 3)]) for record in records]


@pytest.mark.parametrize(("metric", "key"), [("balanced", "balanced_accuracy"), ("macro-f1", "macro_f1")])
def test_the_metric_selects_the_step(metric: str, key: str, digits_run: Callable[..., Path], tmp_path: Path) -> None:
    run = digits_run(tmp_path, "ERM", steps=13, eval_every=1, select_by=metric, hyper_parameters={"lr": 3e-3})
    accuracies, values = means(run, "acc"), means(run, key)
    best = RunResult(run).best
    assert best.step == int(np.argmax(values)) + 1 != int(np.argmax(accuracies)) + 1
    assert best.validation == pytest.approx(accuracies[best.step - 1])
    assert int(read_model(RunFolder(run).model)[1]["step"]) == best.step


def test_accuracy_is_the_default(digits_run: Callable[..., Path], tmp_path: Path) -> None:
    assert digits_run(tmp_path, select_by="accuracy") == digits_run(tmp_path)
