"""Energy distance, its test and the comparison of sites, against loops and by simulation."""

import numpy as np
import pytest

from aidgn.new_site.shift import SiteReference, energy_distance, permutation_test, weighted_energy_distance

RANDOM = np.random.default_rng(0)


def naive(x: np.ndarray, y: np.ndarray) -> float:
    def mean(a: np.ndarray, b: np.ndarray, same: bool) -> float:
        values = [np.linalg.norm(p - q) for i, p in enumerate(a) for j, q in enumerate(b) if not same or i != j]
        return float(np.mean(values))

    return 2 * mean(x, y, False) - mean(x, x, True) - mean(y, y, True)


def test_energy_distance_is_that_of_loops() -> None:
    x, y = RANDOM.normal(size=(12, 3)), RANDOM.normal(1, 2, size=(9, 3))
    assert energy_distance(x, y) ** 2 == pytest.approx(naive(x, y))
    assert energy_distance(x, x) == 0


def test_the_test_keeps_its_rate_of_false_alarms() -> None:
    alarms = [
        permutation_test(RANDOM.normal(size=(15, 2)), RANDOM.normal(size=(20, 2)), 99) <= 0.05 for _ in range(400)
    ]
    assert 0.02 < np.mean(alarms) < 0.08
    assert permutation_test(RANDOM.normal(size=(15, 2)), RANDOM.normal(2, 1, size=(20, 2)), 99) == 0.01


def sites(shifts: list[float], count: int = 150) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features of sites that differ in their mean, with logits and sites."""
    vectors = np.eye(6)[:, :3]
    features = np.concatenate([RANDOM.normal(shift, 1, (count, 6)) for shift in shifts])
    return features, features @ vectors, np.arange(len(shifts)).repeat(count)


def reference(distances: dict[str, float] | None = None) -> SiteReference:
    features, logits, numbers = sites([0.0, 0.5, 1.0])
    return SiteReference.fit(features, logits, np.eye(6)[:, :3], numbers, ["a", "b", "c"], distances)


@pytest.mark.parametrize("shift", [0.0, 0.5, 3.0])
def test_only_a_far_site_raises_the_alarm(shift: float) -> None:
    known = reference({"a": 0.4, "b": 0.3, "c": 0.5})
    known = SiteReference.from_dict(known.to_dict())
    features, logits, _ = sites([shift], 100)
    comparison = known.compare(known.space.describe(features, logits, np.eye(6)[:, :3]))
    assert comparison is not None and comparison.left_out == 3
    assert comparison.differs == (shift == 3.0) == comparison.alarm
    assert comparison.ratio == pytest.approx(comparison.distance / 0.4)
    assert comparison.farthest == pytest.approx(0.5 / 0.4)
    if shift == 3.0:
        assert comparison.nearest == "c"


def test_too_few_pictures_are_not_compared() -> None:
    known = reference({"a": 0.4})
    features, logits, _ = sites([9.0], 19)
    assert known.compare(known.space.describe(features, logits, np.eye(6)[:, :3])) is None


def test_a_batch_of_one_training_site_is_no_alarm() -> None:
    known = reference({"a": 0.01, "b": 0.01, "c": 0.01})
    differs = []
    for _ in range(20):
        features, logits, _ = sites([1.0], 40)
        comparison = known.compare(known.space.describe(features, logits, np.eye(6)[:, :3]))
        assert comparison is not None
        differs.append(comparison.differs)
    assert sum(differs) <= 2


def test_weights_count_as_copies() -> None:
    x, y = RANDOM.normal(size=(12, 3)), RANDOM.normal(1, 2, size=(6, 3))
    weights = np.array([1.0, 3.0, 0.0, 2.0, 1.0, 0.5])

    def mean(pairs: list[tuple[float, float]]) -> float:
        return sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)

    between = mean([(weights[j], float(np.linalg.norm(p - q))) for p in x for j, q in enumerate(y)])
    within = mean(
        [
            (weights[i] * weights[j], float(np.linalg.norm(p - q)))
            for i, p in enumerate(y)
            for j, q in enumerate(y)
            if i != j
        ]
    )
    within_new = mean([(1.0, float(np.linalg.norm(p - q))) for i, p in enumerate(x) for j, q in enumerate(x) if i != j])
    assert weighted_energy_distance(x, y, weights) ** 2 == pytest.approx(2 * between - within_new - within)
    assert weighted_energy_distance(x, y, np.ones(6)) == pytest.approx(energy_distance(x, y))


def draw_classes(classes: list[int], shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Features with far classes, and the logits that tell them."""
    logits = 9 * np.eye(3)[classes]
    features = np.concatenate([logits + RANDOM.normal(size=logits.shape), np.zeros((len(classes), 3))], axis=1)
    return features + shift + RANDOM.normal(scale=0.3, size=features.shape), logits


@pytest.mark.parametrize("rare", [60, 1])
def test_one_class_of_a_training_site_raises_no_alarm(rare: int) -> None:
    """Also if the training site has but one picture of the class."""
    vectors = np.eye(6)[:, :3]
    drawn = [draw_classes([0] * rare + [1, 2] * 50, shift) for shift in (0.0, 1.0, 2.0)]
    features, logits = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    numbers = np.arange(3).repeat(len(drawn[0][0]))
    known = SiteReference.fit(features, logits, vectors, numbers, ["a", "b", "c"], {"a": 0.6, "b": 0.4, "c": 0.5})
    for again in (known, SiteReference.from_dict(known.to_dict())):
        for shift, alarm in ((1.0, False), (5.0, True)):
            new, found = draw_classes([0] * 40, shift)
            described = again.space.describe(new, found, vectors)
            comparison = again.compare(described, found.argmax(axis=1))
            assert comparison is not None and comparison.is_far
            assert (comparison.alarm, comparison.other_classes) == (alarm, not alarm)
            blind = again.compare(described)
            assert blind is not None and blind.alarm and blind.matched is None
