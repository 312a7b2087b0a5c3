"""Plans as YAML: what is refused and how, what a written plan says, and when one plan holds another."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from aidgn.data import Dataset
from aidgn.errors import AidgnError
from aidgn.sweeps.grid import load_for
from aidgn.sweeps.plan_file import Plan, merged, read_plans, write_plans
from aidgn.training import RunSpec


@cache
def digits() -> Dataset:
    return load_for(RunSpec("digits"))


def load(spec: RunSpec) -> Dataset:
    return digits()


PLAN = Plan(("digits",), ("ERM", "AIDGN"), steps=10)


def read(tmp_path: Path, text: str) -> list[Plan]:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return read_plans(path)[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("datasets: [digits]\nalgoritms: [ERM]", ["algoritms", "Did you mean algorithms?", "plan.yaml"]),
        ("datasets: [digits]\nalgorithms: [ERM]\ntrails: 3", ["trails", "Did you mean trials?"]),
        ("algorithms: [ERM]", ["does not say which datasets"]),
        ("datasets: [digits]\nalgorithms: [ERM]\nsteps: many", ["steps: many", "a whole number"]),
        ("datasets: [digits]\nalgorithms: [ERM]\ntrials: 0", ["trials: 0", "at least 1"]),
        ("datasets: [digits]\nalgorithms: [ERM]\nleave_one_out: 3", ["leave_one_out: 3", "true or false"]),
        ("datasets: [digits]\nalgorithms: {ERM: 1}", ["algorithms", "a list of names"]),
        ("datasets: [digits]\nalgorithms: [ERM]\nhyper_parameters: [1]", ["hyper_parameters", "a mapping"]),
        ("datasets: [digits]\nalgorithms: [ERM]\nhyper_parameters: {lr: [[1]]}", ["lr", "plain values"]),
        ("datasets: [digits]\nalgorithms: [ERM]\nprecision: double", ["precision: double", "bfloat16"]),
        ("datasets: [digits", ["is not YAML"]),
        ("", ["mapping"]),
        ("- 3", ["mapping"]),
    ],
)
def test_mistakes_are_named(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(AidgnError) as caught:
        read(tmp_path, text)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_missing_file_is_a_clear_mistake(tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match=r"nowhere.yaml cannot be read"):
        read_plans(tmp_path / "nowhere.yaml")


def test_what_a_file_says_is_planned(tmp_path: Path) -> None:
    (one,) = read(
        tmp_path,
        """
datasets: digits
algorithms: [ERM, AIDGN]
targets: [I]
trials: 2
steps: 5
hyper_parameters:
  lr: 1e-3
  AIDGN: {kappa: [5, 10, 20], mu_star: [7]}
""",
    )
    runs = one.runs(load)
    erm = [spec.hyper_parameters for spec in runs if spec.algorithm == "ERM"]
    aidgn = [spec.hyper_parameters for spec in runs if spec.algorithm == "AIDGN" and spec.trial == 0]
    assert len(erm) == 2 and {spec.hyper_parameters["lr"] for spec in runs} == {1e-3}
    # The defaults for small images, kappa 10 and mu_star 20, then one change at a time; 10 is there already.
    assert [(values["kappa"], values["mu_star"]) for values in aidgn] == [(10, 20), (5, 20), (20, 20), (10, 7)]


def test_hyper_parameters_of_an_algorithm_that_is_not_planned(tmp_path: Path) -> None:
    (one,) = read(tmp_path, "datasets: digits\nalgorithms: [AIDGN]\nhyper_parameters: {AIDGM: {kappa: 5}}")
    with pytest.raises(AidgnError, match="Did you mean AIDGN"):
        one.runs(load)
    (one,) = read(tmp_path, "datasets: digits\nalgorithms: [AIDGN]\nhyper_parameters: {kapa: [5]}")
    with pytest.raises(AidgnError, match="Did you mean kappa"):
        one.runs(load)


def test_written_and_read_again_it_is_the_same_plan_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from aidgn.algorithms.erm import ERM\nclass Mine(ERM):\n    pass\n")
    first = replace(
        PLAN,
        algorithms=("own.py:Mine",),
        targets=("ink",),
        leave_one_out=True,
        hyper_parameters={"Mine": {"lr": [0.1, 0.2]}, "batch_size": 4},
    )
    settled = first.settled(first.runs(load))
    assert settled.algorithms == (f"{tmp_path / 'own.py'}:Mine",) and settled.datasets == ("digits",)
    assert (settled.backbone, settled.eval_every, settled.image_size) == ("small", 25, 28)
    text = write_plans([settled, PLAN], ["two plans"], "data")
    assert text.startswith("# two plans\n") and yaml.safe_load(text)[0]["leave_one_out"] is True
    (tmp_path / "again.yaml").write_text(text)
    plans, places = read_plans(tmp_path / "again.yaml")
    assert plans == [settled, PLAN] and places == {"data_dir": str(tmp_path / "data")}
    monkeypatch.chdir("/")
    assert [spec.key() for spec in plans[0].runs(load)] == [spec.key() for spec in settled.runs(load)]


@pytest.mark.parametrize(
    ("changes", "covers"),
    [
        ({}, True),
        ({"algorithms": ("ERM",)}, True),
        ({"trials": 1}, True),
        ({"targets": ("ink",)}, True),
        ({"algorithms": ("ERM", "IRM")}, False),
        ({"draws": 2}, False),
        ({"steps": 11}, False),
        ({"leave_one_out": True}, False),
        ({"hyper_parameters": {"lr": 1.0}}, False),
        ({"average": "sma"}, False),
    ],
)
def test_one_plan_holds_another(changes: dict, covers: bool) -> None:
    other = replace(PLAN, **changes)
    assert PLAN.covers(other) == covers
    held = {spec.key() for spec in PLAN.runs(load)}
    assert ({spec.key() for spec in other.runs(load)} <= held) == covers
    assert merged([PLAN], [other]) == ([PLAN] if covers else [other] if other.covers(PLAN) else [PLAN, other])


def test_grids_that_grow(tmp_path: Path) -> None:
    small, large = (
        replace(PLAN, algorithms=("AIDGN",), hyper_parameters={"AIDGN": {"kappa": values}, "lr": 0.1})
        for values in ([5, 10], [5, 10, 20])
    )
    assert large.covers(small) and not small.covers(large) and merged([small], [large]) == [large]
