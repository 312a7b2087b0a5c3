"""From the runs of a fit to what its model is expected to do at a new site."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
        # Of the unseen site, the pictures that the table of results counts.
        unseen = predictions.where(predictions.unseen & ~predictions.validation)
        sites.append(UnseenSite(target, predictions.trial, outputs_of(unseen), outputs_of(predictions.in_site)))
        distances[target].append(measure_distance(extract_features(run, **options)))
    if len({site.site for site in sites}) < 2:
        return None
    features = extract_features(final, **options)
    mean_distances = {name: float(np.mean(values)) for name, values in distances.items()}
    reference = make_reference(features, features.validation, mean_distances)
    seen = outputs_of(load_predictions(final, **options).in_site)
    references = sample_references(features.features[~features.validation])
    return measure(sites, seen, features.class_names, reference, adaptation, references)


def outputs_of(predictions: Predictions) -> Outputs:
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
    """Say what to expect at a new site, a sentence each."""
    accuracies = expectations.accuracies
    more = accuracies.interval(more_sites=3)
    sentences = [
        accuracies.describe() + (f" With three more sites like these it would be between {more}." if more else "")
    ]
    temperature = expectations.confidence.temperature
    if temperature == 1:
        calibrated = "No temperature makes the probabilities hold better at unseen sites, so they stay as they are"
    else:
        calibrated = f"Probabilities are calibrated for unseen sites by a temperature of {temperature:.2g}"
    sentences.append(
        f"{calibrated}: calibration error {expectations.mean('ece_before'):.1%} before and "
        f"{expectations.mean('ece_after'):.1%} after, each site calibrated by the others."
    )
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
    return sentences
