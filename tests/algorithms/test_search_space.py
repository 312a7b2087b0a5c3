"""Hyper-parameters: what a distribution says of possible values, and what --set makes of words."""

import numpy as np
import pytest

from aidgn.algorithms import find
from aidgn.algorithms.search_space import Distribution, fixed, floor_uniform, one_of, resolve, uniform
from aidgn.cli.options import parse_settings
from aidgn.errors import AidgnError


@pytest.mark.parametrize(
    "distribution",
    [
        uniform(-1, 1),
        floor_uniform(-3, 2),
        one_of(-2.0, 5.0),
        one_of("soft", "hard"),
        one_of(1, None),
        fixed(-4.0),
        fixed("none"),
        fixed(None),
    ],
)
def test_what_is_drawn_is_possible(distribution: Distribution) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        value = distribution.sample(rng)
        assert distribution.check("Mine", "it", value) == value
        assert distribution.check("Mine", "it", str(value)) == value  # as --set gives it


def test_a_whole_part_below_zero_is_the_one_below() -> None:
    rng = np.random.default_rng(0)
    assert {floor_uniform(-2, 1).sample(rng) for _ in range(100)} == {-2, -1, 0}


def test_words_are_those_that_were_said() -> None:
    with pytest.raises(AidgnError, match=r"Mine: mode=zzz .*soft, hard"):
        one_of("soft", "hard").check("Mine", "mode", "zzz")
    settings = parse_settings(("mode=none", "n=None"), None)
    space = {"mode": ("hard", one_of("none", "hard")), "n": (1, one_of(1, 2, optional=True))}
    assert resolve("Mine", space, settings) == {"mode": "none", "n": None}


def test_whole_numbers_are_those_of_which_all_are() -> None:
    space = {"width": (16, one_of(16, 32)), "depth": (3, fixed(3)), "weight": (1, one_of(1, 0.5))}
    found = resolve("Mine", space, {"width": "32"})
    assert found == {"width": 32, "depth": 3, "weight": 1.0}
    assert [type(value) for value in found.values()] == [int, int, float]
    with pytest.raises(AidgnError, match=r"Mine: width=16\.5 .*whole number"):
        resolve("Mine", space, {"width": 16.5})


def test_a_setting_is_given_once() -> None:
    assert parse_settings(("lr=1", "lr = 1"), None) == {"lr": "1"}
    with pytest.raises(AidgnError, match="--set lr is given twice, 1 and 2: give one"):
        parse_settings(("lr=1", "lr=2"), None)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("AIDGN-noD", {"ratio": "exact"}, "ratio=exact is out of range, expected one of linear"),
        ("AIDGN-noRD", {"ratio": "exact"}, "ratio=exact is out of range"),
        ("AIDGN-release", {"mu_star": 10}, "mu_star=10 is out of range, expected a number above 10"),
        ("ERM", {"resnet_dropout": 1}, "resnet_dropout=1 is out of range, expected a number of at least 0 and below 1"),
        ("DANN", {"mlp_dropout": 1}, "mlp_dropout=1 is out of range"),
    ],
)
def test_what_would_train_nothing(name: str, settings: dict, message: str) -> None:
    with pytest.raises(AidgnError, match=message):
        resolve(name, find(name).search_space, settings)
