"""The plan of a sweep against the combinations written out."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aidgn.algorithms import ALGORITHMS
from aidgn.errors import AidgnError
from aidgn.sweeps.plan import SweepPlan, plan_runs
from aidgn.training import RunSpec

DOMAINS = ["ink", "chalk", "poster", "outline"]


def keys(specs: list[RunSpec]) -> list[tuple]:
    return [(spec.dataset, spec.algorithm, spec.draw, spec.trial, *spec.target) for spec in specs]


def test_every_combination_once_in_order_of_priority() -> None:
    expected = []
    for algorithm in ("AIDGN", "ERM"):
        for draw in range(2):
            for trial in range(3):
                for target in DOMAINS:
                    expected.append(("digits", algorithm, draw, trial, target))
    assert keys(plan_runs(["digits"], ["AIDGN", "ERM"], trials=3, draws=2)) == expected


def test_targets_by_name_or_letter_and_nothing_twice() -> None:
    specs = plan_runs(["digits", "digits"], ["ERM", "ERM"], targets=["outline", "c", "Chalk", "outline"], trials=1)
    assert keys(specs) == [("digits", "ERM", 0, 0, "outline"), ("digits", "ERM", 0, 0, "chalk")]


def test_algorithms_are_found_in_any_case_and_recorded_in_one() -> None:
    specs = plan_runs(
        ["digits"], ["erm", "ERM", "aidgn-NOR"], targets=["ink"], trials=1, hyper_parameters={"Erm": {"lr": 0.5}}
    )
    assert [spec.algorithm for spec in specs] == ["ERM", "AIDGN-noR"]
    assert [spec.hyper_parameters["lr"] == 0.5 for spec in specs] == [True, False]
    assert (
        specs[0].key()
        == plan_runs(["digits"], ["ERM"], targets=["ink"], trials=1, hyper_parameters={"lr": 0.5})[0].key()
    )
    assert SweepPlan(("digits",), ("erm",)).settled(specs).algorithms == ("ERM",)


def test_shared_settings_and_draws_reach_every_run() -> None:
    specs = plan_runs(
        ["digits"],
        ["IRM", "CORAL"],
        targets=["ink"],
        trials=2,
        draws=3,
        steps=7,
        average="sma",
        hyper_parameters={"batch_size": 4},
    )
    assert len(specs) == 12
    for spec in specs:
        drawn = ALGORITHMS[spec.algorithm].sample("digits", spec.trial, spec.draw)
        assert spec.hyper_parameters == {**drawn, "batch_size": 4}
        assert (spec.steps, spec.average, spec.backbone, spec.weights) == (7, "sma", "small", "none")
    rates = {spec.hyper_parameters["lr"] for spec in specs}
    assert len(rates) == 1 + 2 * 2 * 2  # the default, and two draws in two trials of two algorithms


def test_a_hyper_parameter_is_set_for_those_that_have_it() -> None:
    specs = plan_runs(
        ["digits"], ["ERM", "VREx", "IRM"], targets=["ink"], trials=1, hyper_parameters={"vrex_lambda": 3, "lr": 1}
    )
    assert [(spec.hyper_parameters.get("vrex_lambda"), spec.hyper_parameters["lr"]) for spec in specs] == [
        (None, 1),
        (3, 1),
        (None, 1),
    ]
    specs = plan_runs(["digits"], ["ERM", "VREx"], targets=["ink"], trials=1, hyper_parameters={"vrex_lambda": [3, 4]})
    assert [spec.hyper_parameters.get("vrex_lambda") for spec in specs] == [None, 10, 3, 4]
    with pytest.raises(AidgnError, match="no hyper-parameter vrex_lambda"):
        plan_runs(["digits"], ["ERM"], hyper_parameters={"vrex_lambda": 3})
    with pytest.raises(AidgnError, match="no hyper-parameter vrex_lambda"):  # said of this algorithm alone
        plan_runs(["digits"], ["ERM", "VREx"], hyper_parameters={"ERM": {"vrex_lambda": 3}})


def test_several_data_sets_each_with_its_own_domains(tmp_path: Path) -> None:
    for domain in ("north", "south", "west"):
        for name in ("cat", "dog"):
            (tmp_path / "pets" / domain / name).mkdir(parents=True)
            Image.fromarray(np.zeros((30, 30, 3), np.uint8)).save(tmp_path / "pets" / domain / name / "1.png")
    pets = str(tmp_path / "pets")
    specs = plan_runs([pets, "digits"], ["ERM"], trials=1, weights="none")
    assert keys(specs) == (
        [(pets, "ERM", 0, 0, domain) for domain in ("north", "south", "west")]
        + [("digits", "ERM", 0, 0, domain) for domain in DOMAINS]
    )


def test_all_that_lack_source_domains_are_named_at_once(tmp_path: Path) -> None:
    for domain in ("north", "south"):
        for name in ("cat", "dog"):
            (tmp_path / "pets" / domain / name).mkdir(parents=True)
            Image.fromarray(np.zeros((30, 30, 3), np.uint8)).save(tmp_path / "pets" / domain / name / "1.png")
    pets = [str(tmp_path / "pets")]
    with pytest.raises(AidgnError, match=r"^Mixup, CORAL .* north .* pets has 1"):
        plan_runs(pets, ["ERM", "Mixup", "AIDGN", "CORAL"], weights="none")
    with pytest.raises(AidgnError, match=r"^CORAL .* 2 source domains.* north .* 1"):
        plan_runs(pets, ["ERM", "CORAL"], weights="none")
    assert len(plan_runs(pets, ["ERM", "AIDGN"], trials=1, weights="none")) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithms": ["ERM", "AIDNG"]}, "Did you mean AIDGN"),
        ({"targets": ["ink", "chark"]}, "Did you mean chalk"),
        ({"datasets": ["digits", "digts"]}, "Did you mean digits"),
        ({"steps": 0}, "steps is 0"),
        ({"hyper_parameters": {"gama": 1.0}}, "Did you mean gamma"),
        ({"average": "mean"}, "average is mean"),
    ],
)
def test_a_mistake_in_any_run_is_found_before_the_first(changes: dict, message: str) -> None:
    with pytest.raises(AidgnError, match=message):
        plan_runs(**{"datasets": ["digits"], "algorithms": ["AIDGN", "ERM"], **changes})
