"""What `fit` says of calibration agrees with what it stores."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax

from aidgn.fitting.expectations import describe_expectations
from aidgn.new_site.confidence import Confidence, Outputs, UnseenSite
from aidgn.new_site.expectations import Expectations, measure


def outputs(seed: int, temperature: float) -> Outputs:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2, (300, 3))
    labels = np.array([random.choice(3, p=p) for p in softmax(logits, axis=1)])
    return Outputs((logits * temperature).astype(np.float32), labels, {})


def expectations(temperature: float, change: float) -> Expectations:
    """Expectations with a calibration error that the temperature changes by so much."""
    sites = [UnseenSite(f"site {number}", 0, outputs(number, 3.0), outputs(9, 1.0)) for number in range(3)]
    found = measure(sites, outputs(10, 1.0), ["x", "y", "z"])
    results = {name: replace(each, ece_after=each.ece_before + change) for name, each in found.results.items()}
    return replace(found, confidence=Confidence(temperature), results=results)


@pytest.mark.parametrize("change", [-0.05, 0.05])
def test_error_and_likelihood_before_and_after(change: float) -> None:
    found = expectations(2.0, change)
    calibrated = describe_expectations(found)[0]
    for name, digits in (("ece_before", ".1%"), ("ece_after", ".1%"), ("nll_before", ".2f"), ("nll_after", ".2f")):
        assert f"{found.mean(name):{digits}}" in calibrated
    assert ("with care" in calibrated) == (change > 0)


def test_without_a_temperature_there_is_no_error_after() -> None:
    found = expectations(1.0, 0.05)
    calibrated = describe_expectations(found)[0]
    assert f"{found.mean('ece_before'):.1%}" in calibrated and f"{found.mean('ece_after'):.1%}" not in calibrated
