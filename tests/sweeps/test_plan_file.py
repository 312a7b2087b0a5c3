"""Plans as YAML: what is refused and how, and what a written plan says."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from aidgn.data import Dataset
from aidgn.errors import AidgnError
from aidgn.sweeps.plan import SweepPlan, load_as_trained
from aidgn.sweeps.plan_file import read_plans, write_plans
from aidgn.training import RunSpec
from tests.conftest import Tally


@cache
def digits() -> Dataset:
    return load_as_trained(RunSpec("digits"))


def load(spec: RunSpec) -> Dataset:
    return digits()


PLAN = SweepPlan(("digits",), ("ERM", "AIDGN"), steps=10)


def read(tmp_path: Path, text: str) -> list[SweepPlan]:
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
        ("datasets: [digits]\nalgorithms: [ERM]\nruns: [[0]]", ["runs: [[0]]", "trial, draw"]),
        ("datasets: [digits]\nalgorithms: [ERM]\nruns: [[ink, 0, 0]]", ["runs: ", "trial, draw"]),
        ("datasets: [digits", ["is not YAML"]),
        ("", ["mapping"]),
        ("- 3", ["mapping"]),
    ],
)
def test_mistakes_are_named(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(AidgnError) as caught:
        read(tmp_path, text)
    assert all(word in str(caught.value) for word in words), caught.value


def test_runs_may_be_listed_one_by_one(tmp_path: Path) -> None:
    (plan,) = read(tmp_path, "datasets: [digits]\nalgorithms: [ERM]\nruns: [[0, 0, ink], [2, 1, chalk, I], [1, 0]]")
    runs = [(run.trial, run.draw, run.target) for run in plan.expand(load)]
    assert runs == [(0, 0, ("ink",)), (2, 1, ("ink", "chalk")), (1, 0, ())]
    (tmp_path / "again.yaml").write_text(write_plans([plan], [], None))
    assert read_plans(tmp_path / "again.yaml")[0] == [plan]
    with pytest.raises(AidgnError, match="outlin"):
        replace(plan, runs=((0, 0, "outlin"),)).expand(load)


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
    runs = one.expand(load)
    erm = [spec.hyper_parameters for spec in runs if spec.algorithm == "ERM"]
    aidgn = [spec.hyper_parameters for spec in runs if spec.algorithm == "AIDGN" and spec.trial == 0]
    assert len(erm) == 2 and {spec.hyper_parameters["lr"] for spec in runs} == {1e-3}
    # The defaults for small images, kappa 10 and mu_star 20, then one change at a time; 10 is there already.
    assert [(values["kappa"], values["mu_star"]) for values in aidgn] == [(10, 20), (5, 20), (20, 20), (10, 7)]


def test_hyper_parameters_of_an_algorithm_that_is_not_planned(tmp_path: Path) -> None:
    (one,) = read(tmp_path, "datasets: digits\nalgorithms: [AIDGN]\nhyper_parameters: {AIDGM: {kappa: 5}}")
    with pytest.raises(AidgnError, match="Did you mean AIDGN"):
        one.expand(load)
    (one,) = read(tmp_path, "datasets: digits\nalgorithms: [AIDGN]\nhyper_parameters: {kapa: [5]}")
    with pytest.raises(AidgnError, match="Did you mean kappa"):
        one.expand(load)


def test_plan_is_the_same_after_writing_and_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from aidgn.algorithms.erm import ERM\nclass Mine(ERM):\n    pass\n")
    first = replace(
        PLAN,
        algorithms=("own.py:Mine",),
        targets=("ink",),
        leave_one_out=True,
        hyper_parameters={"Mine": {"lr": [0.1, 0.2]}, "batch_size": 4},
    )
    settled = first.settled(first.expand(load))
    assert settled.algorithms == (f"{tmp_path / 'own.py'}:Mine",) and settled.datasets == ("digits",)
    assert (settled.backbone, settled.eval_every, settled.image_size) == ("small", 25, 28)
    text = write_plans([settled, PLAN], ["two plans"], "data")
    assert text.startswith("# two plans\n") and yaml.safe_load(text)[0]["leave_one_out"] is True
    (tmp_path / "again.yaml").write_text(text)
    plans, places = read_plans(tmp_path / "again.yaml")
    assert plans == [settled, PLAN] and places == {"data_dir": str(tmp_path / "data")}
    monkeypatch.chdir("/")
    assert [spec.key() for spec in plans[0].expand(load)] == [spec.key() for spec in settled.expand(load)]


@pytest.mark.parametrize(
    ("changes", "conflict"),
    [
        ({}, False),
        ({"trials": 9, "algorithms": ("IRM",), "average": "sma"}, False),
        ({"steps": 11}, True),
        ({"augment_validation": True}, True),
        ({"steps": 11, "datasets": ("PACS",)}, False),
    ],
)
def test_plans_whose_runs_a_table_must_not_mix(changes: dict, conflict: bool) -> None:
    assert replace(PLAN, **changes).conflicts_with(PLAN) == conflict


BOMB = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (BOMB, "aliases"),
        ("datasets: &a [*a]", "alias"),
        (f"datasets: {'[' * 100_000}", "nested"),
        ("datasets: [digits]\nalgorithms: [ERM]\ntrials: 1\ntrials: 2", "trials is given twice"),
        (f"steps: {'9' * 5000}", "digits"),
        (f"datasets: [digits]\nalgorithms: [ERM]\nsteps: {'9' * 30}", "steps: 9999"),
        ("datasets: [digits]\nalgorithms: [ERM]\ntrials: 1e9", "trials: 1e9"),
        ("datasets: 2001-99-99", "month"),
    ],
)
def test_plans_that_mean_too_much_are_refused(text: str, word: str, tmp_path: Path, tally: Tally) -> None:
    with tally("hostile plans"):
        with pytest.raises(AidgnError, match=word) as caught:
            read(tmp_path, text)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("numbers", [{"trials": 10**9}, {"trials": 100_000, "draws": 100_000}])
def test_a_sweep_has_a_limited_number_of_runs(numbers: dict[str, int]) -> None:
    with pytest.raises(AidgnError, match=r"1,?000,?000"):
        replace(PLAN, **numbers).expand(load)


def test_aliases_in_moderation_are_read(tmp_path: Path) -> None:
    (first, second) = read(
        tmp_path,
        "- &one {datasets: [digits], algorithms: [ERM], trials: 2}\n- {<<: *one, algorithms: [CORAL]}\n",
    )
    assert (first.trials, second.trials, second.algorithms) == (2, 2, ("CORAL",))
