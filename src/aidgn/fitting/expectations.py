"""Measure what to expect of the model of a fit at a new site, from its runs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.adaptation.predict import describe_adaptation
from aidgn.analysis.extraction import extract_features
from aidgn.analysis.features import Features
from aidgn.analysis.predictions import Predictions, load_predictions
from aidgn.new_site.confidence import Outputs, UnseenSite
from aidgn.new_site.expectations import Expectations, measure
from aidgn.new_site.interval import percent
from aidgn.new_site.shift import SiteReference
from aidgn.trust import sample_references

LOGIT_SCORES = ("probability", "margin", "energy")


def measure_expectations(
    runs: Sequence[str | Path], final: str | Path, adaptation: Mapping[str, Any] | None = None, **options: Any
) -> Expectations | None:
    """Measure what to expect of a model at a new site; None with fewer than two sites.

    Args:
        runs: Folders of runs with the model's settings, each with one site unseen.
        final: Folder of the run on all sites.
        adaptation: Accuracies with methods of adaptation.
        options: Arguments of `extract_features`.
    """
    sites = []
    distances: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        predictions = load_predictions(run, **options)
        (target,) = predictions.targets
        # The pictures of the unseen site that the table of results counts.
        unseen = predictions.where(predictions.unseen & ~predictions.validation)
        sites.append(UnseenSite(target, predictions.trial, to_outputs(unseen), to_outputs(predictions.in_site)))
        distances[target].append(measure_distance(extract_features(run, **options)))
    if len({site.site for site in sites}) < 2:
        return None
    features = extract_features(final, **options)
    mean_distances = {name: float(np.mean(values)) for name, values in distances.items()}
    reference = make_reference(features, features.validation, mean_distances)
    seen = to_outputs(load_predictions(final, **options).in_site)
    references = sample_references(features.features[~features.validation])
    return measure(sites, seen, features.class_names, reference, adaptation, references)


def to_outputs(predictions: Predictions) -> Outputs:
    """Return predictions with the scores that do not depend on the logits."""
    names = [name for name in predictions.score_names if name not in LOGIT_SCORES]
    return Outputs(predictions.logits, predictions.labels, {name: predictions.score(name) for name in names})


def measure_distance(features: Features) -> float:
    """Return the distance of the site that a run never saw to the nearest site that it was trained on."""
    reference = make_reference(features, features.validation & ~features.unseen)
    shown = features.unseen & ~features.validation
    return reference.distance(
        reference.space.describe(features.features[shown], features.logits[shown], features.weight)
    )[0]


def make_reference(
    features: Features, shown: np.ndarray, distances: Mapping[str, float] | None = None
) -> SiteReference:
    """Describe some of the images of training sites for comparison with new ones."""
    return SiteReference.fit(
        features.features[shown],
        features.logits[shown],
        features.weight,
        features.domains[shown],
        features.domain_names,
        distances,
    )


def describe_expectations(expectations: Expectations) -> list[str]:
    """Describe what to expect of probabilities, trust, warnings and adaptation at a new site."""
    before, after = expectations.mean("ece_before"), expectations.mean("ece_after")
    nll_before, nll_after = expectations.mean("nll_before"), expectations.mean("nll_after")
    assert before is not None and after is not None
    if expectations.confidence.temperature == 1:
        calibrated = (
            "Probabilities stay as they are, because no temperature made them hold better at unseen sites: calibration "
            f"error {before:.1%} there, negative log-likelihood {nll_before:.2f}."
        )
    else:
        calibrated = (
            "Probabilities are calibrated for unseen sites by a temperature of "
            f"{expectations.confidence.temperature:.2g}. With each site calibrated by the others, the calibration "
            f"error was {before:.1%} before and {after:.1%} after, the negative log-likelihood {nll_before:.2f} and "
            f"{nll_after:.2f}."
        )
        if after > before:
            calibrated += " These sites do not agree on a temperature, so take probabilities with care."
    sentences = [calibrated]
    surest = expectations.surest
    auroc = expectations.mean("auroc")
    ranked = "" if auroc is None else f" Right labels rank above wrong ones in {auroc:.0%} of pairs (AUROC)."
    sentences.append(
        f"The surest 80 % of the pictures of a new site: expect {percent(surest[0.8])} right; the surest half: "
        f"{percent(surest[0.5])}. Trust is ranked by {expectations.confidence.score}.{ranked}"
    )
    wrong, caught = expectations.mean("warned_wrong"), expectations.mean("warned_of_wrong")
    if wrong is not None and caught is not None:
        sentences.append(
            f"Unsure labels get a warning: {expectations.mean('warned'):.1%} of the pictures of unseen sites, of which "
            f"{wrong:.0%} were wrong; {caught:.0%} of all wrong labels had one. No warning is no promise."
        )
    return [*sentences, *describe_adaptation(expectations.adaptation)]
