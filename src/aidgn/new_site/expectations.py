"""Figures to expect of a model at a site it never saw, measured on the sites that other runs left out.

`measure` computes them from the runs of a fit; expectations.json in the folder of the model holds them. For the figures
of a site, everything was fitted to the other sites.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from aidgn.errors import AidgnError
from aidgn.metrics import calibration_error
from aidgn.new_site.calibration import log_probabilities, nll
from aidgn.new_site.confidence import (
    DISTANCE,
    UNSURE,
    Confidence,
    Outputs,
    UnseenSite,
    area,
    fit_confidence,
    surest_accuracy,
)
from aidgn.new_site.interval import SiteAccuracies
from aidgn.new_site.shift import SiteReference
from aidgn.trust import Floats, decode_references, encode_references

VERSION = 1
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # shares of the pictures, those with the highest trust

# Methods to predict the accuracy at a new site without labels.
METHODS = {
    "average confidence": "the mean chance that a label is right",
    "difference of confidences": "the accuracy on seen sites less the drop of the mean chance (Guillory et al., 2021)",
}


@dataclass(frozen=True)
class SiteResult:
    """Figures of the predictions for a site, with temperature, score and chances fitted to the other sites."""

    images: int  # number of pictures
    accuracy: float  # share of right labels
    nll_before: float  # mean negative log-likelihood without temperature
    nll_after: float  # the same with the temperature
    ece_before: float  # expected calibration error without temperature
    ece_after: float  # the same with the temperature
    score: str  # name of the score of trust, chosen on the other sites
    # Chance that a right prediction has more trust than a wrong one; None if all are right, or wrong
    auroc: float | None
    surest: list[float]  # accuracy on the surest pictures by their share, in the order of `SHARES`
    warned: float  # share of pictures with a warning
    warned_wrong: float | None  # share of the warned pictures whose label is wrong; None without warnings
    warned_of_wrong: float | None  # share of the wrong labels with a warning; None without wrong labels
    predicted: dict[str, float]  # accuracy predicted without labels by each of `METHODS`


@dataclass(frozen=True, eq=False)
class Expectations:
    """Figures to expect of a model at a site it never saw."""

    accuracies: SiteAccuracies  # accuracies at the sites that were left out
    # The same for the pictures of each class; sites without pictures of the class are left out
    classes: Mapping[str, SiteAccuracies]
    confidence: Confidence  # the model's temperature and its chances
    results: Mapping[str, SiteResult]  # results at each site, averaged over trials
    seen_accuracy: float  # accuracy on validation images of the sites the model has seen
    seen_confidence: float  # mean chance on the same images
    reference: SiteReference | None = None  # the training sites, for comparison with new pictures
    # Accuracy at each left-out site by method of adaptation; "none" is the model as trained
    adaptation: Mapping[str, Any] = field(default_factory=dict)
    # Features of training images, from `sample_references`; None unless trust is their distance
    references: Floats | None = None

    def mean(self, name: str) -> float | None:
        """Return the mean over sites of a field of `SiteResult`; None if no site has it."""
        values = [getattr(result, name) for result in self.results.values()]
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    @property
    def surest(self) -> dict[float, float]:
        """Accuracy on the surest pictures of a new site, by their share: the mean over sites."""
        columns = np.mean([result.surest for result in self.results.values()], axis=0).tolist()
        return dict(zip(SHARES, columns, strict=True))

    @property
    def method(self) -> str:
        """The method that predicts accuracies: the first, unless another was closer at every left-out site."""
        first, *others = METHODS
        results = self.results.values()
        errors = {name: [abs(result.predicted[name] - result.accuracy) for result in results] for name in METHODS}
        closer = (name for name in others if all(a < b for a, b in zip(errors[name], errors[first], strict=True)))
        return next(closer, first)

    def error(self, method: str) -> float:
        """Return the mean absolute error of accuracies that a method predicted for left-out sites."""
        return float(np.mean([abs(r.predicted[method] - r.accuracy) for r in self.results.values()]))

    def predict_accuracy(self, mean_chance: float, method: str | None = None) -> float:
        """Predict the accuracy at a new site from the mean chance of its pictures, without labels."""
        return _predict(method or self.method, mean_chance, self.seen_accuracy, self.seen_confidence)

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            "version": VERSION,
            "accuracies": asdict(self.accuracies),
            "classes": {name: asdict(accuracies) for name, accuracies in self.classes.items()},
            "confidence": self.confidence.to_dict(),
            "results": {site: asdict(result) for site, result in self.results.items()},
            "seen_accuracy": self.seen_accuracy,
            "seen_confidence": self.seen_confidence,
            "reference": None if self.reference is None else self.reference.to_dict(),
            "adaptation": dict(self.adaptation),
            "references": None if self.references is None else encode_references(self.references),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Expectations":
        """Restore the result of `to_dict`."""
        try:
            if values["version"] != VERSION:
                raise ValueError("version")
            reference, references = values["reference"], values.get("references")
            if values["confidence"].get("score") == DISTANCE and references is None:
                raise ValueError("references")
            return cls(
                SiteAccuracies(**values["accuracies"]),
                {name: SiteAccuracies(**entry) for name, entry in values["classes"].items()},
                Confidence(**values["confidence"]),
                {site: SiteResult(**entry) for site, entry in values["results"].items()},
                values["seen_accuracy"],
                values["seen_confidence"],
                None if reference is None else SiteReference.from_dict(reference),
                values["adaptation"],
                None if references is None else decode_references(references),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise AidgnError(
                f"expectations.json cannot be used ({type(error).__name__}: {error}): it was changed, or written by "
                "another version of aidgn. Move it away to do without calibration and warnings of new sites."
            ) from None


def measure(
    sites: Sequence[UnseenSite],
    seen: Outputs,
    class_names: Sequence[str],
    reference: SiteReference | None = None,
    adaptation: Mapping[str, Any] | None = None,
    references: Floats | None = None,
) -> Expectations:
    """Measure what to expect at a new site.

    Args:
        sites: Predictions of the runs that left out a site, one or more for each of two or more sites.
        seen: Predictions of the model in use for validation images of the sites that it has seen.
        class_names: Names of the classes.
        reference: The training sites, for comparison with new pictures.
        adaptation: Accuracies with methods of adaptation.
        references: Features of training images of the model in use; needed if predictions have distances to them.
    """
    confidence = fit_confidence(sites).for_model(seen)
    by_site: dict[str, list[UnseenSite]] = {}
    for site in sites:
        by_site.setdefault(site.site, []).append(site)
    results = {}
    for name, trials in by_site.items():
        fitted = fit_confidence([site for site in sites if site.site != name])
        results[name] = _average([_measure_site(site, fitted) for site in trials])
    return Expectations(
        SiteAccuracies(
            {name: [float(trial.unseen.right.mean()) for trial in trials] for name, trials in by_site.items()},
            {name: len(trials[0].unseen) for name, trials in by_site.items()},
        ),
        {name: _measure_class(by_site, number) for number, name in enumerate(class_names)},
        confidence,
        results,
        float(seen.right.mean()),
        float(confidence.of(seen).mean()),
        reference,
        adaptation or {},
        references if confidence.score == DISTANCE else None,
    )


def _measure_class(by_site: Mapping[str, Sequence[UnseenSite]], label: int) -> SiteAccuracies:
    accuracies, images = {}, {}
    for name, trials in by_site.items():
        shown = trials[0].unseen.labels == label
        if shown.any():
            accuracies[name] = [float(trial.unseen.right[trial.unseen.labels == label].mean()) for trial in trials]
            images[name] = int(shown.sum())
    return SiteAccuracies(accuracies, images)


def _measure_site(site: UnseenSite, fitted: Confidence) -> SiteResult:
    """Measure the predictions for a site with a confidence that was fitted to others."""
    confidence = fitted.for_model(site.seen)
    unseen = site.unseen
    right = unseen.right
    trust = confidence.of(unseen)
    warned = trust < UNSURE
    seen = float(site.seen.right.mean()), float(confidence.of(site.seen).mean())
    return SiteResult(
        images=len(unseen),
        accuracy=float(right.mean()),
        nll_before=nll(unseen.logits, unseen.labels),
        nll_after=nll(unseen.logits, unseen.labels, confidence.temperature),
        ece_before=_calibration_error(unseen, 1.0),
        ece_after=_calibration_error(unseen, confidence.temperature),
        score=confidence.score,
        auroc=area(trust, right),
        surest=[surest_accuracy(trust, right, share) for share in SHARES],
        warned=float(warned.mean()),
        warned_wrong=float((~right[warned]).mean()) if warned.any() else None,
        warned_of_wrong=float(warned[~right].mean()) if not right.all() else None,
        predicted={method: _predict(method, float(trust.mean()), *seen) for method in METHODS},
    )


def _calibration_error(outputs: Outputs, temperature: float) -> float:
    confidences = np.exp(log_probabilities(outputs.logits, temperature).max(axis=1))
    return calibration_error(confidences, outputs.right)


def _predict(method: str, mean_chance: float, seen_accuracy: float, seen_confidence: float) -> float:
    if method == "average confidence":
        return mean_chance
    return float(np.clip(seen_accuracy - (seen_confidence - mean_chance), 0, 1))


def _average(trials: Sequence[SiteResult]) -> SiteResult:
    """Average the results of the trials of one site."""
    averaged: dict[str, Any] = {"images": trials[0].images, "score": trials[0].score}
    for name in SiteResult.__dataclass_fields__:
        values = [getattr(trial, name) for trial in trials]
        known = [value for value in values if value is not None]
        if name == "surest":
            averaged[name] = np.mean(values, axis=0).tolist()
        elif name == "predicted":
            averaged[name] = {method: float(np.mean([value[method] for value in values])) for method in METHODS}
        elif name not in averaged:
            averaged[name] = float(np.mean(known)) if known else None
    return SiteResult(**averaged)
