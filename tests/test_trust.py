"""Scores against loops in float64."""

import math

import numpy as np
import pytest

from aidgn.trust import (
    REFERENCES,
    SCORES,
    decode_references,
    encode_references,
    nearest_angles,
    sample_references,
    trust_scores,
)

RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(30, 6)).astype(np.float32)
VECTORS = RANDOM.normal(size=(6, 4)).astype(np.float32)
LOGITS = FEATURES @ VECTORS
TRAINED = RANDOM.normal(size=(9, 6)).astype(np.float32)


def angle(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return math.acos(sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_each_score_follows_its_definition(temperature: float) -> None:
    scores = trust_scores(FEATURES, LOGITS, VECTORS, sample_references(TRAINED), temperature)
    assert list(scores) == list(SCORES)
    for i, (z, logits) in enumerate(zip(FEATURES.astype(np.float64), LOGITS.astype(np.float64), strict=True)):
        scaled = [float(value) / temperature for value in logits]
        total = sum(math.exp(value) for value in scaled)
        first, second = sorted(scaled, reverse=True)[:2]
        positive = [value for value in z if value > 0]
        expected = {
            "probability": math.log(math.exp(first) / total),
            "margin": first - second,
            "energy": math.log(total),
            "norm": math.hypot(*z),
            "negative-aware norm": sum(positive) / max(len(positive), 1),
            "angle": -angle(z, VECTORS[:, logits.argmax()]),
            "distance": -min(angle(z, other) for other in TRAINED),
        }
        for name, value in expected.items():
            assert scores[name][i] == pytest.approx(value, rel=1e-5, abs=1e-3 if name == "distance" else 1e-5), name


def test_scores_without_class_vectors_or_references() -> None:
    assert {"angle", "distance"}.isdisjoint(trust_scores(FEATURES, LOGITS, None, np.empty((0, 6), np.float32)))


def test_references_are_a_sample_of_unit_length() -> None:
    many = RANDOM.normal(size=(REFERENCES + 500, 3))
    references = sample_references(many)
    assert references.shape == (REFERENCES, 3) and np.linalg.norm(references, axis=1) == pytest.approx(1, abs=1e-3)
    assert (references == sample_references(many)).all()
    assert nearest_angles(references[:7], references) == pytest.approx(0, abs=0.03)  # half precision
    np.testing.assert_array_equal(decode_references(encode_references(references)), references)
