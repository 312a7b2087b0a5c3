"""Prediction intervals over sites, against scipy and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from aidgn.new_site.interval import SiteAccuracies, sampling_interval

SITES = {"a": [0.9], "b": [0.7], "c": [0.85], "d": [0.95]}


def test_one_trial_follows_the_formula_of_t() -> None:
    images = {"a": 400, "b": 300, "c": 200, "d": 500}
    interval = SiteAccuracies(SITES, images).interval(0.9)
    y = [math.asin(math.sqrt((SITES[s][0] * n + 3 / 8) / (n + 3 / 4))) for s, n in images.items()]
    scale = np.std(y, ddof=1) * math.sqrt(1 + 1 / 4)
    low, high = stats.t(3, np.mean(y), scale).interval(0.9)
    assert interval is not None
    assert interval.low == pytest.approx(math.sin(low) ** 2)
    assert interval.high == pytest.approx(math.sin(min(high, math.pi / 2)) ** 2)
    assert SiteAccuracies(SITES, images).mean == pytest.approx(0.85)


def test_no_interval_from_two_sites() -> None:
    two = SiteAccuracies({"a": [0.9], "b": [0.8]}, {"a": 500, "b": 500})
    assert two.interval() is None and two.chance(0.1, 100) is None


def test_equal_sites_keep_the_noise_of_their_pictures() -> None:
    few = SiteAccuracies({name: [0.9] for name in "abc"}, dict.fromkeys("abc", 20)).interval()
    many = SiteAccuracies({name: [0.9] for name in "abc"}, dict.fromkeys("abc", 2000)).interval()
    assert few is not None and many is not None
    assert few.high - few.low > 5 * (many.high - many.low) > 0


def test_trials_that_differ_widen_the_interval() -> None:
    images = dict.fromkeys("abc", 1000)
    steady = SiteAccuracies({"a": [0.8, 0.8], "b": [0.9, 0.9], "c": [0.85, 0.85]}, images).interval()
    shaky = SiteAccuracies({"a": [0.7, 0.88], "b": [0.83, 0.95], "c": [0.77, 0.91]}, images).interval()
    assert steady is not None and shaky is not None
    assert shaky.high - shaky.low > steady.high - steady.low


def test_more_sites_narrow_the_interval() -> None:
    sites = SiteAccuracies(SITES, dict.fromkeys(SITES, 400))
    widths = [i.high - i.low for more in range(4) if (i := sites.interval(more_sites=more))]
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]


@pytest.mark.parametrize("sites", [3, 5])
@pytest.mark.parametrize("shape", [(8, 1.5), (5, 5)])
def test_nine_new_sites_in_ten_are_inside(sites: int, shape: tuple[float, float]) -> None:
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(1500):
        true = random.beta(*shape, sites + 1)
        seen = {str(i): [random.binomial(200, p) / 200] for i, p in enumerate(true[:-1])}
        interval = SiteAccuracies(seen, dict.fromkeys(seen, 200)).interval()
        assert interval is not None
        inside += interval.low <= true[-1] <= interval.high
    assert 0.88 < inside / 1500 < 0.95


def test_the_chance_of_a_difference_is_uniform_for_alike_sites() -> None:
    random = np.random.default_rng(1)
    chances = []
    for _ in range(800):
        right = random.binomial(150, random.beta(16, 4, 5)) / 150
        sites = SiteAccuracies({str(i): [p] for i, p in enumerate(right[:-1])}, {str(i): 150 for i in range(4)})
        chances.append(sites.chance(right[-1], 150))
    assert 0.05 < np.mean(np.array(chances) < 0.1) < 0.13


def test_sampling_interval_is_wilsons() -> None:
    interval = sampling_interval(90, 100)
    assert (interval.low, interval.high) == pytest.approx((0.8256, 0.9448), abs=1e-4)


def test_interval_that_excludes_little_is_wide() -> None:
    far = SiteAccuracies({"a": [0.2], "b": [0.6], "c": [0.95]}, dict.fromkeys("abc", 100))
    near = SiteAccuracies({"a": [0.9], "b": [0.92], "c": [0.95]}, dict.fromkeys("abc", 100))
    wide, narrow = far.interval(), near.interval()
    assert wide and narrow and wide.is_wide and not narrow.is_wide
    assert far.describe() != near.describe() and len(far.describe()) > len(near.describe())
