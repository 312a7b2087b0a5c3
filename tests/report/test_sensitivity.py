"""Accuracy against hyper-parameters, from records whose numbers are known."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from aidgn.errors import AidgnError
from aidgn.report.figures import save
from aidgn.report.sensitivity import collect_curves, sensitivity

DOMAINS = ["a", "b", "c"]


def record(step: int, target: int, trial: int, accuracy: float, validation: float, **hparams: object) -> dict:
    values = {f"env{i}_out_acc": validation for i in range(3)} | {f"env{target}_in_acc": accuracy}
    return {
        "step": step,
        **values,
        "hparams": {"lr": 0.1, "kappa": 10, "mu_star": 20, **hparams},
        "args": {
            "dataset": "made",
            "algorithm": "AIDGN",
            "test_envs": [target],
            "trial_seed": trial,
            "hparams_seed": 0,
            "steps": 2,
            "domains": DOMAINS,
        },
    }


def accuracy(target: int, trial: int, kappa: float, mu_star: float) -> float:
    return round(0.5 + 0.1 * target + 0.01 * trial + kappa / 1000 - mu_star / 10000, 6)


def records(points: list[dict]) -> list[dict]:
    made = []
    for point, target, trial in product(points, range(3), range(2)):
        right = accuracy(target, trial, point.get("kappa", 10), point.get("mu_star", 20))
        made += [record(1, target, trial, right, 0.9, **point), record(2, target, trial, 0.01, 0.8, **point)]
    return made


POINTS = [{}, {"kappa": 5}, {"kappa": 40}, {"mu_star": 5}]


def test_values_vary_one_at_a_time_at_selected_steps() -> None:
    found, base = collect_curves(records(POINTS))
    assert base == {"lr": 0.1, "kappa": 10, "mu_star": 20}
    assert {name: list(values) for name, values in found.items()} == {"kappa": [5, 10, 40], "mu_star": [5, 20]}
    for value in (5, 10, 40):
        for target, trial in product(range(3), range(2)):
            assert found["kappa"][value][DOMAINS[target]][trial] == accuracy(target, trial, value, 20)
    assert found["mu_star"][5]["b"][1] == accuracy(1, 1, 10, 5)


def test_the_figure_shows_means_and_standard_deviations(tmp_path: Path) -> None:
    figure = sensitivity(records(POINTS))
    panel, other = figure.axes
    assert (panel.get_xlabel(), other.get_xlabel(), panel.get_xscale()) == ("kappa", "mu_star", "log")
    thick = max(panel.get_lines(), key=lambda line: line.get_linewidth())
    by_trial = (
        np.array(
            [
                [np.mean([accuracy(target, trial, kappa, 20) for target in range(3)]) for trial in range(2)]
                for kappa in (5, 10, 40)
            ]
        )
        * 100
    )
    np.testing.assert_allclose(np.asarray(thick.get_ydata(), float), by_trial.mean(1))
    segments = panel.containers[0].lines[2][0].get_segments()
    np.testing.assert_allclose([(s[1, 1] - s[0, 1]) / 2 for s in segments], by_trial.std(1, ddof=1))
    assert [path.suffix for path in save(figure, tmp_path, "sensitivity")] == [".png", ".svg"]
    (alone,) = sensitivity(records(POINTS[:3])).axes  # no other varies, so that no value is the one meanwhile
    dotted = [[line for line in axis.get_lines() if line.get_linestyle() == ":"] for axis in (panel, alone)]
    assert [len(lines) for lines in dotted] == [1, 0]


def test_other_settings_that_differ_are_told(caplog: pytest.LogCaptureFixture) -> None:
    collect_curves(records(POINTS))
    assert caplog.messages == []
    mixed = records(POINTS)
    for one in mixed:
        if one["hparams"]["kappa"] == 40:
            one["args"]["precision"] = "bfloat16"
        else:
            one["args"]["precision"] = "float32"
    collect_curves(mixed)
    (told,) = caplog.messages
    assert "precision: bfloat16 (6 runs); float32 (18 runs)" in told


def test_nothing_varied_or_several_algorithms_are_mistakes() -> None:
    with pytest.raises(AidgnError, match="several values"):
        sensitivity(records([{}]))
    mixed = records([{}])
    mixed[0]["args"]["algorithm"] = "ERM"
    with pytest.raises(AidgnError, match="one algorithm on one data set"):
        collect_curves(mixed)
