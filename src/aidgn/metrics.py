"""Metrics of predictions: accuracy, per class and balanced, macro-F1, negative log-likelihood, calibration error."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

CALIBRATION_BINS = 15
UNEVEN = 10  # if the largest class has so many times the images of the smallest, accuracy hides the rare classes


@dataclass(frozen=True)
class Metric:
    """The names of a metric, and how to show it."""

    title: str  # name in captions
    key: str  # last part of its name in records
    percent: bool = True  # whether it is a share, shown in percent
    higher_is_better: bool = True  # whether more is better

    @property
    def noun(self) -> str:
        """The title inside a sentence."""
        return self.title[0].lower() + self.title[1:]

    @property
    def factor(self) -> float:
        """The factor that values are multiplied by when they are shown."""
        return 100.0 if self.percent else 1.0

    @property
    def digits(self) -> int:
        """Decimals that are shown."""
        return 1 if self.percent else 3


METRICS = {
    "accuracy": Metric("Accuracy", "acc"),
    "balanced_accuracy": Metric("Balanced accuracy", "balanced_accuracy"),
    "macro_f1": Metric("Macro-F1", "macro_f1"),
    "nll": Metric("Negative log-likelihood", "nll", percent=False, higher_is_better=False),
    "ece": Metric("Expected calibration error", "ece", higher_is_better=False),
}


@dataclass(frozen=True)
class Scores:
    """The metrics of predictions for some images."""

    accuracy: float  # share of images with the right label
    # Mean over classes of the accuracy on images of the class; classes without images left out
    balanced_accuracy: float
    # Mean over classes of 2 hits / (images + predictions); classes without images left out, as WILDS does
    macro_f1: float
    nll: float  # mean negative log-likelihood of the right labels
    ece: float  # expected calibration error, see `calibration_error`
    class_accuracies: list[float | None]  # accuracy on the images of every class; None for a class without images


def measure(labels: Integers, predicted: Integers, confidences: Floats, losses: Floats, num_classes: int) -> Scores:
    """Measure predictions by the probability of predicted classes and the negative log-likelihood of right ones."""
    right = predicted == labels
    images = np.bincount(labels, minlength=num_classes)
    predictions = np.bincount(predicted, minlength=num_classes)
    hits = np.bincount(labels[right], minlength=num_classes)
    known = images > 0
    recalls = hits[known] / images[known]
    by_class = np.full(num_classes, None, dtype=object)
    by_class[known] = recalls.tolist()
    return Scores(
        accuracy=int(right.sum()) / len(labels),
        balanced_accuracy=float(recalls.mean()),
        macro_f1=float((2 * hits[known] / (images + predictions)[known]).mean()),
        nll=float(losses.mean(dtype=np.float64)),
        ece=calibration_error(confidences, right),
        class_accuracies=by_class.tolist(),
    )


def are_uneven(class_images: Sequence[int] | Integers) -> bool:
    """Return whether the largest class has at least `UNEVEN` times the images of the smallest."""
    return len(class_images) > 0 and max(class_images) >= UNEVEN * min(class_images)


@dataclass(frozen=True)
class ClassMetrics:
    """The metrics of a class."""

    images: int  # number of images of the class
    accuracy: float | None  # share of them with the right label (recall); None without images
    precision: float | None  # share of right ones among the images with this label; None without such images
    f1: float | None  # 2 hits / (images + images with this label); None with neither


def measure_classes(confusion: Integers) -> list[ClassMetrics]:
    """Measure every class by the number of images of each class (row) and label (column)."""
    hits = np.diag(confusion).tolist()
    images = confusion.sum(1).tolist()
    labelled = confusion.sum(0).tolist()
    return [
        ClassMetrics(n, accuracy=_ratio(hit, n), precision=_ratio(hit, m), f1=_ratio(2 * hit, n + m))
        for hit, n, m in zip(hits, images, labelled, strict=True)
    ]


def _ratio(part: int, whole: int) -> float | None:
    """Return part / whole; None if whole is 0."""
    return part / whole if whole else None


def calibration_error(confidences: Floats, right: NDArray[np.bool_], bins: int = CALIBRATION_BINS) -> float:
    """Return the expected calibration error (Guo et al. 2017).

    ECE = sum over bins of (share of images) |accuracy - mean confidence|, with bins of equal width (low, high].
    """
    if np.isnan(confidences).any():
        return float("nan")
    confidences = confidences.astype(np.float64)
    places = np.clip(np.ceil(confidences * bins).astype(int) - 1, 0, bins - 1)
    return float(np.abs(np.bincount(places, right - confidences, bins)).sum() / len(right))


def count_confusions(labels: NDArray[np.integer], predicted: NDArray[np.integer], classes: int) -> NDArray[np.int64]:
    """Count images by class and predicted class, [classes, classes]."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels, predicted), 1)
    return counts


def list_mistakes(counts: NDArray[np.int64], most: int) -> list[tuple[int, int, int, int]]:
    """List the most frequent mistakes: class, predicted class, their images, images of the class."""
    wrong = counts * (1 - np.eye(len(counts), dtype=np.int64))
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
    return [(int(i), int(j), int(wrong[i, j]), int(counts[i].sum())) for i, j in pairs if wrong[i, j]]
