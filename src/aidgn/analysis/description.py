"""Describe the features of a domain: angles within and between classes, von Mises-Fisher fits, norms, predictions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax, xlogy

from aidgn.analysis.features import Features
from aidgn.analysis.statistics import (
    energy_distances,
    exponential_distance,
    fit_p,
    group_means,
    holm,
    uniform_distance,
)
from aidgn.metrics import calibration_error
from aidgn.theory import vmf_concentration

Integers = NDArray[np.integer]
Floats = NDArray[np.floating]

MINIMUM = 5  # classes with fewer images in a domain are neither described nor compared there
GRAM = 2_000  # images of a domain in the comparison of its classes
FITS = 199  # samples drawn from a family of distributions to test a fit


def class_angles(
    units: Floats, labels: Integers, where: Integers, number_of_classes: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Describe the directions of one domain, with equal weight for every class or pair of classes.

    Returns:
        The energy distance between the directions of two classes, the mean angle between two images of a class, and
        between two images of different classes.
    """
    shuffled = rng.permutation(where)
    parts = [
        shuffled[labels[shuffled] == number][: max(GRAM // number_of_classes, 2)] for number in range(number_of_classes)
    ]
    parts = [part for part in parts if len(part) > 1]
    if len(parts) < 2:
        return (float("nan"),) * 3
    sample = units[np.concatenate(parts)]
    cosines = np.clip(sample @ sample.T, -1, 1)
    indicator = np.repeat(np.eye(len(parts), dtype=np.float32), [len(part) for part in parts], axis=0)[:, :, None]
    energy = energy_distances(group_means(np.sqrt(2 - 2 * cosines), indicator))[0]
    means = np.degrees(group_means(np.arccos(cosines), indicator)[0])
    different = ~np.eye(len(parts), dtype=bool)
    return float(energy[different].mean()), float(means[~different].mean()), float(means[different].mean())


def predictions(logits: Floats, labels: Integers) -> dict[str, float]:
    probabilities = softmax(logits.astype(np.float64), axis=1)
    confidences = probabilities.max(1)
    right = probabilities.argmax(1) == labels
    return {
        "accuracy": float((logits.argmax(1) == labels).mean()),
        "confidence": float(confidences.mean()),
        "entropy": float(-xlogy(probabilities, probabilities).sum(1).mean()),
        "calibration_error": calibration_error(confidences, right),
    }


def von_mises_fisher(
    units: Floats,
    labels: Integers,
    domains: Integers,
    directed: NDArray[np.bool_],
    features: Features,
    sources: Sequence[int],
) -> list[dict[str, Any]]:
    """Fit a von Mises-Fisher distribution to the directions of every domain and class.

    kappa solves A_n(kappa) = length of the mean direction. With R the length of the mean of N unit vectors, the square
    of that length is estimated without bias by (N R^2 - 1) / (N - 1). Maximum likelihood takes R^2, which in many
    dimensions makes a few images look concentrated. Angles between mean directions are corrected in the same way.
    """
    fits: dict[tuple[int, int], tuple[Floats, float, float]] = {}  # mean, its squared length, variance of the mean
    for number in range(len(features.class_names)):
        for domain in range(len(features.domain_names)):
            x = units[directed & (labels == number) & (domains == domain)].astype(np.float64)
            if len(x) >= MINIMUM:
                mean = x.mean(0)
                square = max((len(x) * (mean @ mean) - 1) / (len(x) - 1), 0.0)
                fits[number, domain] = mean, square, (1 - square) / len(x)
    rows = []
    for (number, domain), (mean, square, _) in fits.items():
        others = [fits[number, source] for source in sources if source != domain and (number, source) in fits]
        row = {
            "domain": features.domain_names[domain],
            "class": features.class_names[number],
            "kappa": float(vmf_concentration(np.sqrt(square), units.shape[1])),
            "mean_length": float(np.sqrt(square)),
            "angle_to_sources": float("nan"),
        }
        if others:
            other = np.mean([other_mean for other_mean, _, _ in others], axis=0)
            length = float(other @ other) - sum(variance for _, _, variance in others) / len(others) ** 2
            row["angle_to_sources"] = _angle(float(mean @ other), square * length)
        if features.weight is not None:
            vector = features.weight[:, number].astype(np.float64)
            row["angle_to_classifier"] = _angle(float(mean @ vector), square * float(vector @ vector))
        rows.append(row)
    return rows


def norm_fits(
    norms: Floats, domains: Integers, names: Sequence[str], rng: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Compare the norms of each domain with the exponential and the uniform distribution nearest to them."""
    fits: dict[str, dict[str, float]] = {}
    for domain, name in enumerate(names):
        r = norms[domains == domain]
        if len(r) < MINIMUM:
            continue
        fits[name] = {
            "mean": float(r.mean()),
            "least": float(r.min()),
            "most": float(r.max()),
            "exponential_ks": float(exponential_distance(r)),
            "uniform_ks": float(uniform_distance(r)),
            "exponential_p": fit_p(exponential_distance, rng.standard_exponential, r, FITS),
            "uniform_p": fit_p(uniform_distance, rng.random, r, FITS),
        }
    keys = [(name, family) for name in fits for family in ("exponential", "uniform")]
    for (name, family), p in zip(keys, holm([fits[name][f"{family}_p"] for name, family in keys]), strict=True):
        fits[name][f"{family}_p_holm"] = p
    return fits


def _angle(product: float, squares: float) -> float:
    """Return degrees between two vectors, given their dot product and the product of their squared lengths."""
    return float(np.degrees(np.arccos(np.clip(product / np.sqrt(squares), -1, 1)))) if squares > 0 else float("nan")
