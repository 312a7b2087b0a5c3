"""What to expect at a new site: nothing that describes a site depends on its labels, but its accuracy."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax

from aidgn.errors import AidgnError
from aidgn.new_site.confidence import Outputs, UnseenSite
from aidgn.new_site.expectations import Expectations, measure


def outputs(seed: int, temperature: float, count: int = 300) -> Outputs:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2, (count, 3))
    labels = np.array([random.choice(3, p=p) for p in softmax(logits, axis=1)])
    return Outputs((logits * temperature).astype(np.float32), labels, {"norm": random.normal(size=count)})


def unseen_sites(trials: int = 1) -> list[UnseenSite]:
    return [
        UnseenSite(name, trial, outputs(10 * number + trial, 3.0), outputs(100 + number, 3.0))
        for number, name in enumerate(("hall", "yard", "shop"))
        for trial in range(trials)
    ]


def test_calibration_of_each_site_by_the_others() -> None:
    expectations = measure(unseen_sites(), outputs(99, 3.0), ["x", "y", "z"])
    assert expectations.confidence.temperature == pytest.approx(3.0, rel=0.15)
    for result in expectations.results.values():
        assert result.ece_after < result.ece_before / 2 and result.nll_after < result.nll_before
        assert result.predicted["average confidence"] == pytest.approx(result.accuracy, abs=0.08)
        assert result.surest[0] == pytest.approx(result.accuracy)
        assert result.surest[-1] > result.accuracy


def test_labels_of_a_site_choose_nothing_for_it() -> None:
    sites = unseen_sites()
    shuffled = np.random.default_rng(1).permutation(sites[0].unseen.labels)
    changed = [replace(sites[0], unseen=replace(sites[0].unseen, labels=shuffled)), *sites[1:]]
    before, after = (measure(s, outputs(99, 3.0), ["x", "y", "z"]).results["hall"] for s in (sites, changed))
    assert before.accuracy != after.accuracy
    assert (before.predicted, before.score, before.warned) == (after.predicted, after.score, after.warned)


def test_trials_and_classes_are_counted() -> None:
    sites = unseen_sites(trials=2)
    expectations = measure(sites, outputs(99, 3.0), ["x", "y", "z"])
    assert [len(values) for values in expectations.accuracies.accuracies.values()] == [2, 2, 2]
    first = sites[0].unseen
    shown = first.labels == 1
    accuracies = expectations.classes["y"]
    assert accuracies.images["hall"] == shown.sum()
    assert accuracies.accuracies["hall"][0] == pytest.approx((first.logits[shown].argmax(1) == 1).mean())


def test_accuracy_without_labels_by_each_method() -> None:
    seen = outputs(99, 3.0)
    expectations = measure(unseen_sites(), seen, ["x", "y", "z"])
    confidence = softmax(seen.logits / expectations.confidence.temperature, axis=1).max(axis=1).mean()
    accuracy = (seen.logits.argmax(axis=1) == seen.labels).mean()
    assert expectations.predict_accuracy(0.4, "average confidence") == 0.4
    dropped = accuracy - (confidence - 0.4)
    assert expectations.predict_accuracy(0.4, "difference of confidences") == pytest.approx(dropped, abs=1e-6)


def test_values_survive_json() -> None:
    expectations = measure(unseen_sites(), outputs(99, 3.0), ["x", "y", "z"])
    values = json.loads(json.dumps(expectations.to_dict(), allow_nan=False))
    again = Expectations.from_dict(values)
    assert again.to_dict() == expectations.to_dict()
    assert again.surest == expectations.surest and again.method == expectations.method
    for damage in ({"version": 2}, {"confidence": {"heat": 1}}, {"accuracies": None}):
        with pytest.raises(AidgnError, match=r"expectations\.json"):
            Expectations.from_dict({**values, **damage})
