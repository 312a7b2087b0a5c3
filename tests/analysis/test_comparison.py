"""Paired comparisons against enumerations written out naively, and against scipy's other functions."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import stats

from aidgn.analysis.comparison import Comparison, compare, compare_values, mean_interval, sign_permutation_p
from aidgn.analysis.pairs import Pair, Values
from aidgn.analysis.ranks import Ranks, rank

RANDOM = np.random.default_rng(3)


def values(table: Any, trials: int = 3) -> Values:
    """Values [target x trial] of a data set."""
    return {Pair("D", t, k): float(row[k]) for t, row in enumerate(table) for k in range(trials)}


def compared(*tables: Any, metric: str = "accuracy", **draws: int) -> Comparison:
    named = {name: values(table) for name, table in zip("abcdef", tables, strict=False)}
    choices = {name: dict.fromkeys(named[name], count) for name, count in draws.items()}
    return compare_values("D", named, choices, metric)


@pytest.mark.parametrize("n", [3, 8, 11])
def test_permutation_p_counts_all_signs(n: int) -> None:
    gaps = RANDOM.normal(0.6, 1, n).round(1)
    means = [abs(np.mean(gaps * signs)) for signs in product((1, -1), repeat=n)]
    share = np.mean(np.array(means) >= abs(gaps.mean()) - 1e-9)
    assert sign_permutation_p(gaps) == pytest.approx(share)


def test_permutation_p_of_many_pairs() -> None:
    gaps = RANDOM.normal(0.3, 1, 40)
    # for many pairs the permutation distribution of the mean is normal with variance sum gaps^2 / n^2
    normal = 2 * stats.norm.sf(abs(gaps.mean()) / np.sqrt((gaps**2).sum()) * len(gaps))
    assert sign_permutation_p(gaps) == pytest.approx(normal, rel=0.1)
    assert sign_permutation_p(gaps) == sign_permutation_p(gaps)  # the seed is fixed
    assert sign_permutation_p(np.zeros(5)) == 1


def test_interval_is_that_of_scipy() -> None:
    gaps = RANDOM.normal(1, 2, 12)
    expected = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert mean_interval(gaps) == pytest.approx((expected.low, expected.high))
    assert mean_interval(np.ones(4)) == (1, 1)


def test_differences_by_hand() -> None:
    a, b = np.array([[80, 82, 84], [70, 70, 70.0]]), np.array([[79, 82, 81], [71, 68, 66.0]])
    (found,) = compared(b, a).differences
    assert (found.first, found.second, found.trials, found.pairs) == ("b", "a", 3, 6)
    assert found.mean == pytest.approx((1 + 0 + 3 - 1 + 2 + 4) / 6)
    assert found.targets == pytest.approx({("D", 0): 4 / 3, ("D", 1): 5 / 3})
    assert (found.wins, found.ties, found.losses) == (4, 1, 1)
    assert found.p == sign_permutation_p((a - b).ravel()) == found.p_holm


def test_lower_is_better() -> None:
    (found,) = compared([[0.9, 0.8, 0.7]], [[0.5, 0.6, 0.9]], metric="nll").differences
    assert (found.first, found.wins, found.losses) == ("b", 2, 1) and found.mean < 0


def test_holm_over_all_pairs() -> None:
    tables = [RANDOM.normal(70 + 3 * shift, 1, (4, 3)) for shift in range(4)]
    differences = compared(*tables).differences
    plain = sorted(found.p for found in differences if found.p)
    naive = [max(min(1, p * (6 - i)) for i, p in enumerate(plain[: place + 1])) for place in range(6)]
    assert sorted(found.p_holm for found in differences if found.p_holm) == pytest.approx(naive)
    assert any(found.clear for found in differences)


def test_two_trials_are_no_result() -> None:
    far = {"a": values(np.full((9, 3), 90.0), 2), "b": values(np.full((9, 3), 10.0))}
    found = compare_values("D", far, {})
    assert found.ranks is None
    assert [(d.p, d.low, d.clear, d.trials) for d in found.differences] == [(None, None, False, 2)]
    # with two others to compare, it is left out
    far |= {"c": values(np.full((9, 3), 20.0))}
    found = compare_values("D", far, {})
    assert [(d.first, d.second) for d in found.differences] == [("c", "b")] and found.left_out == {"a": 2}


def test_only_complete_trials_are_paired() -> None:
    a, b = values(np.full((2, 4), 50.0), 4), values(np.full((2, 4), 40.0), 4)
    del a[Pair("D", 1, 0)]  # the other target of trial 0 would count more
    (found,) = compare_values("D", {"a": a, "b": b}, {}).differences
    assert (found.trials, found.pairs, found.mean) == (3, 6, 10)


def test_unequal_draws_are_no_result() -> None:
    good, bad = np.full((3, 3), 90.0), np.full((3, 3), 10.0)
    (found,) = compared(good, bad, a=20, b=1).differences
    assert found.p_holm is not None and found.p_holm < 0.05
    assert found.draws == (20, 1) and not found.clear and "20" in found.verdict
    assert compared(good, bad, a=20, b=20).differences[0].clear


def test_budgets_are_compared_pair_by_pair() -> None:
    """20 draws in one trial alone, or on one data set alone, are more than 20 in another."""
    one, other = Pair("D", 0, 0), Pair("D", 1, 2)
    named = {"a": values(np.full((3, 3), 90.0)), "b": values(np.full((3, 3), 10.0))}
    (found,) = compare_values("D", named, {"a": {one: 20}, "b": {other: 20}}).differences
    assert found.draws == (20, 1) and not found.clear
    (found,) = compare_values("D", named, {"a": {one: 20}, "b": {one: 20}}).differences
    assert found.draws == (20, 20) and found.clear


def test_ranks_by_hand() -> None:
    a, b, c = values([[9, 8, 7]]), values([[8, 8, 8]]), values([[1, 2, 3]])
    ranks = rank({"a": a, "b": b, "c": c}, [("D", 0)])
    assert ranks is not None and ranks.blocks == 3
    assert ranks.averages == pytest.approx({"a": (1 + 1.5 + 2) / 3, "b": (2 + 1.5 + 1) / 3, "c": 3})
    rows = [[9, 8, 7], [8, 8, 8], [1, 2, 3]]
    assert ranks.p == pytest.approx(stats.friedmanchisquare(*rows).pvalue)
    # Demšar (2006), table 5: q = 2.343 for three classifiers
    assert ranks.critical_difference == pytest.approx(2.343 * np.sqrt(3 * 4 / (6 * 3)), abs=1e-3)


def test_published_critical_difference() -> None:
    # Demšar (2006), section 3.2.2: four classifiers on 14 data sets, critical difference 1.25
    table = {name: values(RANDOM.normal(size=(14, 1)), 1) for name in "abcd"}
    ranks = rank(table, [("D", target) for target in range(14)])
    assert ranks is not None and ranks.critical_difference == pytest.approx(1.25, abs=0.005)


def test_groups_of_ranks() -> None:
    ranks = Ranks({"a": 1.0, "b": 1.8, "c": 2.1, "d": 4.0}, 10, 0.01, 1.0)
    assert ranks.groups() == [["a", "b"], ["b", "c"]]
    assert Ranks({"a": 1.0, "b": 2.5}, 10, None, 1.0).groups() == []


def test_false_alarms_stay_below_the_level() -> None:
    """Three equal algorithms on four targets that differ: at most 5 % of comparisons call anything a result."""
    targets = np.array([90, 70, 60, 80])[:, None]
    random, alarms = np.random.default_rng(0), 0
    for _ in range(40):
        tables = [targets + random.normal(0, 2, (4, 3)) for _ in range(3)]
        alarms += any(found.clear for found in compared(*tables).differences)
    assert alarms <= 6  # P(more than 6 of 40 at 5 %) = 0.003


def test_records_to_comparison() -> None:
    records = []
    for name, draws in (("ERM", 1), ("Mine", 2)):
        for target, trial, draw in product(range(2), range(3), range(draws)):
            args = {"dataset": "D", "algorithm": name, "test_envs": [target]}
            args |= {"trial_seed": trial, "hparams_seed": draw}
            accuracy = 0.5 + 0.1 * (name == "Mine") + 0.01 * trial
            validation = {f"env{i}_out_acc": 0.5 - 0.1 * draw for i in range(2)}
            records.append({"args": args, "hparams": {}, "step": 0, **validation, f"env{target}_in_acc": accuracy})
    (found,) = compare(records)
    (difference,) = found.differences
    assert (difference.first, difference.pairs, difference.draws) == ("Mine", 6, (2, 1))
    assert difference.mean == pytest.approx(10)
    assert found.to_dict()["differences"][0]["targets"][1] == {"dataset": "D", "target": 1, "mean": pytest.approx(10)}


def test_values_given_by_hand_count_as_draws() -> None:
    """The best of three learning rates is chosen like the best of three draws."""
    records = []
    for name, rates in (("ERM", (1e-3, 2e-3, 4e-3)), ("Mine", (1e-3,))):
        for target, trial, lr in product(range(3), range(3), rates):
            args = {"dataset": "D", "algorithm": name, "test_envs": [target]}
            args |= {"trial_seed": trial, "hparams_seed": 0, "seed": f"{name} {lr}"}
            accuracies = {f"env{i}_out_acc": 0.5 + 10 * lr for i in range(3)}
            accuracies[f"env{target}_in_acc"] = 0.9 if name == "ERM" else 0.2
            records.append({"args": args, "hparams": {"lr": lr}, "step": 0, **accuracies})
    (difference,) = compare(records)[0].differences
    assert difference.p_holm is not None and difference.p_holm < 0.05
    assert difference.draws == (3, 1) and not difference.clear
