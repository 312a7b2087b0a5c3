"""Metrics against scikit-learn and against loops."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, log_loss, recall_score

from aidgn.metrics import are_uneven, calibration_error, measure

CLASSES = 6


def predictions(seed: int, present: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of the first `present` classes, and probabilities of all."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(present, size=97)
    likely = np.where(rng.random(97) < 0.5, labels, rng.integers(CLASSES, size=97))
    return labels, rng.dirichlet(np.ones(CLASSES), 97) * 0.6 + 0.4 * np.eye(CLASSES)[likely]


@pytest.mark.parametrize("present", [1, 3, CLASSES])
def test_metrics_are_those_of_scikit_learn(present: int) -> None:
    labels, probabilities = predictions(present, present)
    predicted = probabilities.argmax(1)
    losses = -np.log(probabilities[np.arange(97), labels])
    scores = measure(labels, predicted, probabilities.max(1), losses, CLASSES)
    recalls = recall_score(labels, predicted, average=None, labels=range(CLASSES), zero_division=np.nan)
    assert scores.accuracy == accuracy_score(labels, predicted)
    assert scores.balanced_accuracy == pytest.approx(np.nanmean(recalls))
    assert scores.macro_f1 == pytest.approx(f1_score(labels, predicted, average="macro", labels=np.unique(labels)))
    assert scores.nll == pytest.approx(log_loss(labels, probabilities, labels=range(CLASSES)))
    np.testing.assert_allclose(np.array(scores.class_accuracies, float), recalls)
    assert scores.class_accuracies[present:] == [None] * (CLASSES - present)
    assert 0 < scores.accuracy < 1 and scores.balanced_accuracy != scores.macro_f1


@pytest.mark.parametrize(
    ("class_images", "uneven"), [([], False), ([0, 0], True), ([3, 29], False), ([30, 5, 3], True)]
)
def test_uneven_classes(class_images: list[int], uneven: bool) -> None:
    assert are_uneven(class_images) == are_uneven(np.array(class_images)) == uneven


def test_classes_nobody_has_or_predicts_do_not_count() -> None:
    labels, predicted = np.array([0, 0, 1]), np.array([0, 1, 1])
    scores = measure(labels, predicted, np.full(3, 0.9), np.zeros(3), 1000)
    assert scores.macro_f1 == pytest.approx(2 / 3) and scores.balanced_accuracy == 0.75


def test_calibration_error_by_loops() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), 200)
    labels = rng.integers(3, size=200)
    expected = 0.0
    for i in range(15):
        inside = [k for k in range(200) if i / 15 < p[k].max() <= (i + 1) / 15]
        if inside:
            accuracy = np.mean([p[k].argmax() == labels[k] for k in inside])
            expected += len(inside) / 200 * abs(accuracy - np.mean([p[k].max() for k in inside]))
    assert calibration_error(p.max(1), p.argmax(1) == labels) == pytest.approx(expected)
    assert calibration_error(np.ones(2), np.array([True, True])) == 0


def test_a_network_that_diverged_has_no_calibration_error() -> None:
    assert np.isnan(calibration_error(np.array([0.5, np.nan]), np.array([True, False])))
