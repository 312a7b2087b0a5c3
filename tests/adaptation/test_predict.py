"""Predictions that adapt, against the adapters on the same features; methods that did not help are refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from aidgn.adaptation import T3A, batches
from aidgn.adaptation.predict import OFFERED, choose_settings, describe_adaptation, measure_adaptation, predict_adapted
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.inference import load_model
from aidgn.new_site.confidence import Confidence
from aidgn.new_site.expectations import Expectations
from aidgn.new_site.interval import SiteAccuracies

DIGITS = load_dataset("digits")


def test_measured_and_used(digits_run: Callable[..., Path], tmp_path: Path) -> None:
    run = digits_run(tmp_path)
    measured = measure_adaptation([run], device="cpu")
    assert {*measured} == {"none", *OFFERED}
    assert {*measured["T3A"]["accuracies"]} == {"chalk"} and "filter_k" in measured["T3A"]["settings"]

    model = load_model(run, "cpu")
    images = list(DIGITS.pixels[:70])  # type: ignore[index]
    adapter = T3A(model.network, filter_k=5)
    features = model.predict(images).features
    expected = torch.cat([adapter.predict_features(features[part.start : part.stop]) for part in batches(70, 32)])
    found = [prediction for _, prediction in predict_adapted(model, "T3A", {"filter_k": 5}, images)]
    np.testing.assert_allclose(torch.cat([p.logits for p in found]), expected, atol=1e-5)
    assert [label for p in found for label in p.labels] == [model.classes[c] for c in expected.argmax(1)]

    sites = {name: SiteAccuracies({"a": [0.5], "b": [0.5]}, {"a": 9, "b": 9}) for name in "x"}
    model.expectations = Expectations(sites["x"], sites, Confidence(1e3), {}, 0.5, 0.5)  # unsure of every label
    assert all("unsure" in str(warning) for warning in model.predict(images).warnings or [None])
    (adapted, *_) = (prediction for _, prediction in predict_adapted(model, "T3A", {"filter_k": 5}, images))
    monitor = model.site_monitor()
    assert monitor is not None
    for _ in predict_adapted(model, "T3A", {"filter_k": 5}, images, monitor=monitor):
        pass
    assert len(monitor) == len(images)
    assert adapted.chances is None and not any("unsure" in str(warning) for warning in adapted.warnings or [])


def test_only_what_helped_is_offered() -> None:
    measured = {
        "none": {"accuracies": {"a": 0.7, "b": 0.8}, "settings": {}},
        "T3A": {"accuracies": {"a": 0.8, "b": 0.8}, "settings": {"filter_k": 5}},
        "Tent-C": {"accuracies": {"a": 0.8, "b": 0.7}, "settings": {"rate": 1.0}},
    }
    settings, found = choose_settings(measured, "T3A")
    assert settings == {"filter_k": 5} and "80.0% right with it, 75.0% without" in found
    with pytest.raises(AidgnError, match="did not help"):
        choose_settings(measured, "Tent-C")
    offered, refused = describe_adaptation(measured)
    assert "--adapt t3a" in offered and "better at 1, worse at 0 of 2" in offered
    assert "--adapt" not in refused and "75.0% right with it" in refused
    assert not describe_adaptation({})
    assert choose_settings({}, "T3A")[0] == {} and "not measured" in choose_settings({}, "T3A")[1]
