import itertools

import numpy as np
import pytest
from scipy import stats

from aidgn.analysis.statistics import (
    chordal,
    energy_distances,
    exponential_distance,
    fit_p,
    group_means,
    holm,
    permutation_p,
    shift,
    uniform_distance,
)


def unit(rng: np.random.Generator, count: int, n: int = 5) -> np.ndarray:
    x = rng.standard_normal((count, n))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def naive_energy(a: np.ndarray, b: np.ndarray) -> float:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'| by loops over pairs of different samples."""
    across = np.mean([np.linalg.norm(x - y) for x in a for y in b])
    inside = [np.mean([np.linalg.norm(x - y) for x, y in itertools.permutations(group, 2)]) for group in (a, b)]
    return 2 * across - sum(inside)


def test_energy_distances_are_those_of_loops() -> None:
    rng = np.random.default_rng(0)
    x, groups = unit(rng, 15), rng.permutation(np.repeat([0, 1, 2], 5))
    indicator = (groups[:, None] == np.arange(3)).astype(float)[:, :, None]
    energy = energy_distances(group_means(chordal(x, x), indicator))[0]
    for a, b in itertools.combinations(range(3), 2):
        assert energy[a, b] == pytest.approx(naive_energy(x[groups == a], x[groups == b]), rel=1e-6)


def test_one_dimension_is_an_integral() -> None:
    """scipy's energy distance squared counts pairs of a sample with itself; many samples make no difference."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(0, 1, 1500), rng.normal(0.5, 1.3, 1500)
    both = np.concatenate([a, b])
    indicator = np.repeat(np.eye(2), 1500, axis=0)[:, :, None]
    energy = energy_distances(group_means(np.abs(both[:, None] - both), indicator))[0, 0, 1]
    assert energy == pytest.approx(stats.energy_distance(a, b) ** 2, abs=3e-3)


def test_no_sample_is_paired_with_itself() -> None:
    rng = np.random.default_rng(2)
    x = unit(rng, 8)
    counts = np.array([2, 0, 1, 3, 1, 0, 1, 1])
    weights = np.stack([np.where(np.arange(8) < 4, counts, 0), np.where(np.arange(8) >= 4, counts, 0)], 1)
    got = group_means(chordal(x, x), weights.astype(float)[:, :, None])[0]
    drawn = [[i for i in range(8) for _ in range(counts[i]) if (i < 4) == first] for first in (True, False)]
    expected = np.mean([np.linalg.norm(x[i] - x[j]) for i, j in itertools.product(drawn[0], drawn[0]) if i != j])
    assert got[0, 0] == pytest.approx(expected)
    assert got[0, 1] == pytest.approx(np.mean([np.linalg.norm(x[i] - x[j]) for i, j in itertools.product(*drawn)]))


def test_rotation_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    x, turn = unit(rng, 10, 6), np.linalg.qr(rng.standard_normal((6, 6)))[0]
    np.testing.assert_allclose(chordal(x @ turn, x @ turn), chordal(x, x), atol=1e-6)


@pytest.mark.parametrize("images", [8, 40, 200])
def test_the_effect_does_not_depend_on_the_number_of_images(images: int) -> None:
    """Norms 20 and 21 apart by one standard deviation: twice E over the mean difference gives about d = 1."""
    effects = []
    for seed in range(30 if images < 100 else 6):
        rng = np.random.default_rng(seed)
        r = np.concatenate([rng.normal(20, 1, images), rng.normal(21, 1, images)])
        distances, domains = np.abs(r[:, None] - r).astype(np.float32), np.repeat([0, 1], images)
        found = shift({0: (distances, domains)}, {(0, 1)}, 1 / np.sqrt(np.pi), 19, rng)  # E|X - X'| = 2 / sqrt(pi)
        assert found is not None
        effects.append(found.effect)
    x = np.sqrt(np.pi) * (
        2 * (2 / np.sqrt(np.pi) * np.exp(-0.25) + 2 * stats.norm.cdf(1 / np.sqrt(2)) - 1) - 4 / np.sqrt(np.pi)
    )  # E|X - Y| of normals one apart, in closed form
    assert np.mean(effects) == pytest.approx(np.sqrt(x), abs=0.12)
    assert 0.9 < np.sqrt(x) < 1


def test_permutation_p_is_exact_when_all_permutations_are_drawn() -> None:
    """Two domains of three and two images: the chance of the best of the ten splits is 1 / 10."""
    r = np.array([0.0, 0.1, 0.2, 5.0, 5.1])
    distances = np.abs(r[:, None] - r)
    found = shift({0: (distances, np.array([0, 0, 0, 1, 1]))}, {(0, 1)}, 1.0, 20_000, np.random.default_rng(0))
    assert found is not None and found.p == pytest.approx(0.1, abs=0.01)
    assert permutation_p(np.array([1.0, 0.0, 2.0, 1.0])) == 0.75


def test_only_asked_pairs_and_domains_present_are_compared() -> None:
    rng = np.random.default_rng(0)
    x = unit(rng, 12)
    classes = {0: (chordal(x, x), np.repeat([0, 1, 2], 4)), 7: (chordal(x[:8], x[:8]), np.repeat([0, 2], 4))}
    found = shift(classes, {(0, 1)}, 1.0, 9, rng)
    assert found is not None and set(found.classes) == {0}
    assert found.effect == pytest.approx(np.sqrt(max(naive_energy(x[:4], x[4:8]), 0)), abs=1e-6)
    assert shift(classes, {(1, 3)}, 1.0, 9, rng) is None
    assert shift(classes, set(), 1.0, 9, rng) is None


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # 4 x 0.005, 3 x 0.01, 2 x 0.03
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_goodness_of_fit_against_scipy_and_lilliefors() -> None:
    rng = np.random.default_rng(0)
    r = rng.exponential(3, 50)
    assert exponential_distance(r) == pytest.approx(stats.kstest(r, stats.expon(scale=r.mean()).cdf).statistic)
    bounds = stats.uniform(r.min(), np.ptp(r))
    assert uniform_distance(r) == pytest.approx(stats.kstest(r, bounds.cdf).statistic)
    # Lilliefors 1969, table 1: for n = 20 the exponential is refused at 5 % from a distance of 0.234 on.
    drawn = exponential_distance(rng.standard_exponential((20_000, 20)))
    assert np.quantile(drawn, 0.95) == pytest.approx(0.234, abs=0.003)


def test_fits_are_refused_at_their_level() -> None:
    rng = np.random.default_rng(1)
    p = [fit_p(exponential_distance, rng.standard_exponential, rng.exponential(7, 30), 99) for _ in range(300)]
    assert np.mean(np.array(p) <= 0.05) == pytest.approx(0.05, abs=0.035)
    assert fit_p(uniform_distance, rng.random, rng.uniform(3, 9, 200), 99) > 0.05
    assert fit_p(uniform_distance, rng.random, rng.normal(3, 1, 200), 99) == 0.01
