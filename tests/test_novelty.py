"""Warnings about unlike images: the p-value against its definition, the false-alarm rate, the power, what is kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from aidgn.data import load_dataset
from aidgn.data.splits import train_val_indices
from aidgn.errors import AidgnError
from aidgn.inference import Model, load_model
from aidgn.novelty import CALIBRATION_IMAGES, Novelty, norms_and_angles
from aidgn.training import RunSpec, train

DIGITS = load_dataset("digits")
DARK_ON_LIGHT = [DIGITS.domains.index(name) for name in ("ink", "outline")]
OUTSIDE = np.concatenate([DIGITS.indices(d)[train_val_indices(len(DIGITS.indices(d)), 0, d)[1]] for d in DARK_ON_LIGHT])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the two styles that are dark on light."""
    spec = RunSpec(
        "digits", "AIDGN", ("chalk", "poster"), steps=200, eval_every=100, hyper_parameters={"batch_size": 32}
    )
    return train(spec, tmp_path_factory.mktemp("runs"), device="cpu")


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    return load_model(run, device="cpu")


def naive(norms: list[float], angles: list[float], norm: float, angle: float) -> float:
    """The definition, by loops: how many of the n + 1 images are at least as unusual as the last."""
    points = [*zip(norms, angles, strict=True), (norm, angle)]
    n = len(norms)
    r, theta = sorted(norm for norm, _ in points), sorted(angle for _, angle in points)
    low, middle, high = r[int(0.05 * n)], r[int(0.5 * n)], r[int(0.95 * n)]
    half, wide = theta[int(0.5 * n)], theta[int(0.95 * n)]

    def unusual(r: float, theta: float) -> float:
        return max((r - middle) / (high - middle), (middle - r) / (middle - low), (theta - half) / (wide - half))

    return sum(unusual(*point) >= unusual(norm, angle) for point in points) / len(points)


def measure(known: Novelty, features: Any, predicted: Any) -> tuple[np.ndarray, np.ndarray]:
    norms, angles = norms_and_angles(features, predicted, known.weight)
    return norms.detach().numpy(), angles.detach().numpy()


def compute_p_values(known: Novelty, features: Any, predicted: Any) -> np.ndarray:
    return known.p_values(*measure(known, features, predicted))


def test_p_value_is_the_definition() -> None:
    random = np.random.default_rng(0)
    norms, angles = random.normal(10, 1, 60).round(1), random.uniform(0, 1, 60).round(2)  # rounded: with ties
    known = Novelty(norms, angles, None)
    new = np.concatenate([random.normal(10, 2, 40).round(1), norms[:5], [0, 99, 1e30]])
    wide = np.concatenate([random.uniform(0, 1.2, 40).round(2), angles[:5], [0.5, 0.5, 3]])
    wanted = [naive(norms.tolist(), angles.tolist(), *point) for point in zip(new, wide, strict=True)]
    np.testing.assert_allclose(known.p_values(new, wide), wanted)
    assert known.p_values(new[:0], wide[:0]).shape == (0,)


def test_norm_and_angle_of_features() -> None:
    weight = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
    features = torch.tensor([[3.0, 0.0], [3.0, 4.0], [0.0, 0.0], [0.0, -1.0], [torch.nan, 1.0]])
    known = Novelty.from_features(features, torch.tensor([0, 1, 0, 1, 1]), weight)
    np.testing.assert_allclose(known.norms, [3, 5, 0, 1])  # what is not a number is not usual
    np.testing.assert_allclose(np.degrees(known.angles), [0, np.degrees(np.arctan2(3, 4)), 90, 180], atol=1e-3)
    logits = torch.tensor([[2.0, 1.0]])
    assert compute_p_values(known, torch.tensor([[3.0, 4.0]]), logits) == compute_p_values(
        known, np.array([[3.0, 4.0]]), np.array([0])
    )
    labels = np.array([0, 1, 1])
    for kind in (np.uint8, np.uint16, np.int32):  # numbers, never a mask
        np.testing.assert_array_equal(
            compute_p_values(known, features[:3], labels.astype(kind)), compute_p_values(known, features[:3], labels)
        )
    assert compute_p_values(known, features[4:], np.array([0])) == pytest.approx(0.2)  # the least there is
    assert known.p_values(np.array([np.inf]), np.zeros(1)) == pytest.approx(0.2)


@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_false_alarm_rate(rate: float) -> None:
    random = np.random.default_rng(1)
    alarms = repeats = 0
    for _ in range(40):  # over calibration sets too: the promise is on average over both
        values = random.standard_t(4, (500 + 250, 2)) @ [[1, 0.6], [0, 0.8]]  # dependent, heavy tails
        known = Novelty(values[:500, 0], values[:500, 1], None)
        alarms += int((known.p_values(values[500:, 0], values[500:, 1]) <= known.false_alarm_rate(rate)).sum())
        repeats += 250
    # Images share a calibration set, which doubles the variance of the count at most at these sizes.
    low, high = binom.ppf([1e-4, 1 - 1e-4], repeats, rate)
    middle = rate * repeats
    assert middle - 1.5 * (middle - low) <= alarms <= middle + 1.5 * (high - middle)


def test_few_images_raise_the_rate() -> None:
    known = Novelty(np.arange(40.0), np.zeros(40), None)
    assert known.false_alarm_rate(0.01) == 1 / 41 and known.false_alarm_rate(0.05) == 0.05
    assert known.warnings(np.array([20.0, 1e9]), np.zeros(2)) == [None, known.describe(1 / 41, 1e9, 0)]


def test_warnings_on_similar_and_different_images(model: Model) -> None:
    random = np.random.default_rng(2)
    shuffled = random.permutation(OUTSIDE)
    found = model.predict(DIGITS.pixels[shuffled])
    half = len(shuffled) // 2
    known = Novelty.from_features(found.features[:half], found.logits[:half], model.network.classifier.weight)
    rate = known.false_alarm_rate(0.05)
    alarms = sum(
        text is not None for text in known.warnings(*measure(known, found.features[half:], found.logits[half:]), rate)
    )
    low, high = binom.ppf([0.001, 0.999], half, rate)
    assert low <= alarms <= high

    def warned(pixels: np.ndarray) -> float:
        model.false_alarms = 0.05
        warnings = model.predict(pixels).warnings
        assert warnings is not None
        return float(np.mean([text is not None for text in warnings]))

    assert warned(random.integers(0, 256, (200, 28, 28, 3), dtype=np.uint8)) > 0.4
    assert warned(255 - DIGITS.pixels[OUTSIDE]) > 0.4


def test_saved_with_the_selected_weights(run: Path, model: Model, tmp_path: Path) -> None:
    assert model.novelty is not None and len(model.novelty) == len(OUTSIDE)
    found = model.predict(DIGITS.pixels[OUTSIDE])
    np.testing.assert_allclose(np.sort(model.novelty.norms), np.sort(found.features.norm(dim=1)), rtol=1e-4)
    again = Novelty.from_dict(json.loads(json.dumps(model.novelty.to_dict())), model.network.classifier.weight)
    np.testing.assert_array_equal(
        compute_p_values(again, found.features, found.logits),
        compute_p_values(model.novelty, found.features, found.logits),
    )
    assert load_model(run / "last.safetensors", device="cpu").predict(DIGITS.pixels[:2]).warnings is None

    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "novelty.json").write_text('{"version": 1, "norms": [1], "angles": []}')
    with pytest.raises(AidgnError, match=r"novelty\.json"):
        load_model(copy)
    (copy / "novelty.json").unlink()  # as a run of an older version
    assert load_model(copy, device="cpu").predict(DIGITS.pixels[:2]).warnings is None


def test_many_images_are_thinned_out() -> None:
    known = Novelty.from_features(
        torch.rand(CALIBRATION_IMAGES + 1000, 3), torch.zeros(CALIBRATION_IMAGES + 1000, dtype=torch.long), None
    )
    assert len(known) == CALIBRATION_IMAGES and len(json.dumps(known.to_dict())) < 200_000
