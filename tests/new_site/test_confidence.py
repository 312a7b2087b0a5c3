"""Temperature, choice of a score and its chances, against brute force and scikit-learn."""

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from aidgn.new_site.calibration import choose_temperature, fit_temperature, nll
from aidgn.new_site.confidence import (
    Confidence,
    Outputs,
    UnseenSite,
    area,
    fit_confidence,
    fit_logistic,
    surest_accuracy,
)

RANDOM = np.random.default_rng(0)


def draw(count: int, temperature: float, random: np.random.Generator = RANDOM) -> tuple[np.ndarray, np.ndarray]:
    """Logits whose probabilities hold after division by the temperature."""
    logits = random.normal(0, 2, (count, 4))
    labels = np.array([random.choice(4, p=p) for p in softmax(logits, axis=1)])
    return logits * temperature, labels


def test_temperature_is_that_of_a_grid_search() -> None:
    logits, labels = draw(300, 2.5)
    grid = np.exp(np.linspace(-1, 3, 2001))
    losses = [nll(logits, labels, t) for t in grid]
    assert fit_temperature(logits, labels) == pytest.approx(grid[np.argmin(losses)], rel=3e-3)


def test_the_median_of_sites_is_chosen() -> None:
    sites = {
        "a": [draw(300, 2.5)],
        "b": [draw(300, 4.0)],
        "failed": [(draw(300, 9.0)[0], RANDOM.integers(4, size=300))],
    }
    assert choose_temperature(sites) == pytest.approx(fit_temperature(*sites["b"][0]), rel=1e-3)
    assert choose_temperature({"a": sites["a"]}) == pytest.approx(fit_temperature(*sites["a"][0]), rel=1e-3)


def test_a_temperature_that_does_not_help_others_is_1() -> None:
    assert choose_temperature({"a": [draw(300, 3.0)], "b": [draw(300, 1 / 3)]}) == 1


def test_nll_is_the_cross_entropy_of_divided_logits() -> None:
    logits, labels = draw(50, 1.0)
    expected = -np.mean([np.log(softmax(row / 1.7)[label]) for row, label in zip(logits, labels, strict=True)])
    assert nll(logits, labels, 1.7) == pytest.approx(expected)


def test_area_is_that_of_scikit_learn() -> None:
    scores, right = np.round(RANDOM.normal(size=200), 1), RANDOM.random(200) < 0.7
    assert area(scores, right) == pytest.approx(roc_auc_score(right, scores))
    assert area(scores, np.ones(200, bool)) is None


def test_logistic_regression_weighs_sites_alike() -> None:
    values = [RANDOM.normal(size=100), RANDOM.normal(1, 1, size=700)]
    right = [
        RANDOM.random(len(x)) < 1 / (1 + np.exp(-1.5 * x - shift)) for x, shift in zip(values, (0, 1), strict=True)
    ]
    weights = np.concatenate([np.full(len(x), 400 / len(x)) for x in values])
    reference = LogisticRegression(C=1e6, tol=1e-10).fit(
        np.concatenate(values)[:, None], np.concatenate(right), sample_weight=weights
    )
    slope, intercept = fit_logistic(values, right)
    assert slope == pytest.approx(reference.coef_[0, 0], rel=0.01)
    assert intercept == pytest.approx(reference.intercept_[0], rel=0.01)


def test_surest_pictures_are_those_of_highest_trust() -> None:
    trust, right = np.array([0.9, 0.1, 0.8, 0.7]), np.array([True, False, True, False])
    assert surest_accuracy(trust, right, 0.5) == 1
    assert surest_accuracy(trust, right, 1.0) == 0.5
    ties = np.array([0.9, 0.5, 0.5, 0.5])
    assert surest_accuracy(ties, np.array([True, True, False, False]), 0.5) == pytest.approx((1 + 1 / 3) / 2)


def site(name: str, informative: str) -> UnseenSite:
    """Predictions of which one score tells the errors; its scale differs from site to site."""
    random = np.random.default_rng(len(name))
    logits, labels = draw(400, 3.0, random)
    right = logits.argmax(1) == labels
    scores = {"norm": random.normal(size=400), "angle": random.normal(size=400)}
    scores[informative] = (right + random.normal(0, 0.1, 400)) * len(name)
    outputs = Outputs(logits, labels, scores)
    return UnseenSite(name, 0, outputs, outputs)


@pytest.mark.parametrize("score", ["angle", "distance"])
def test_the_score_that_ranks_errors_is_chosen(score: str) -> None:
    sites = [site("a", score), site("bb", score), site("cccc", score)]
    confidence = fit_confidence(sites)
    assert confidence.score == score and confidence.temperature == pytest.approx(3.0, rel=0.2)
    chances = confidence.for_model(sites[2].unseen).of(sites[2].unseen)
    right = sites[2].unseen.right
    assert chances[right].mean() > 0.9 and chances[~right].mean() < 0.1


def test_probability_is_preferred_to_equal_scores() -> None:
    random = np.random.default_rng(5)
    sites = []
    for name in "abc":
        logits, labels = draw(500, 2.0, random)
        outputs = Outputs(logits, labels, {"norm": random.normal(size=500)})
        sites.append(UnseenSite(name, 0, outputs, outputs))
    confidence = fit_confidence(sites)
    assert confidence == Confidence(confidence.temperature)
    outputs = sites[0].unseen
    expected = softmax(outputs.logits / confidence.temperature, axis=1).max(axis=1)
    np.testing.assert_allclose(confidence.of(outputs), expected)
