"""Measure a model on labelled pictures of a new site, and compare the result with the promise of `fit`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.data.labelled import LabelledPictures, find_labelled
from aidgn.errors import AidgnError, plural, some
from aidgn.inference.model import Model
from aidgn.inference.prediction import softmax
from aidgn.metrics import (
    ClassMetrics,
    Scores,
    calibration_error,
    count_confusions,
    list_mistakes,
    measure,
    measure_classes,
)
from aidgn.new_site.confidence import area, surest_accuracy
from aidgn.new_site.expectations import SHARES
from aidgn.new_site.interval import Interval, SiteAccuracies, percent, sampling_interval
from aidgn.new_site.monitor import SiteReport

__all__ = ["Comparison", "Evaluation", "LabelledPictures", "evaluate", "find_labelled"]

BINS = 10  # number of bins of the reliability diagram
OTHER_SHARES = 0.05  # a sentence mentions the shares of classes if they change the promise by at least this
UNUSUAL = 0.1  # a site is below or above the promise if its difference has a smaller chance than this

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Comparison:
    """The accuracy at the new site and the one that `fit` promised."""

    promised: float  # mean accuracy at the sites that `fit` left out
    interval: Interval | None  # promised interval; None with too few sites
    # Chance that a new site like those differs from their mean at least as much; None with too few sites
    chance: float | None
    verdict: str  # "within", "below" or "above" the promise; "unknown" with too few sites
    sites: int  # number of sites that `fit` left out

    @classmethod
    def of(cls, accuracies: SiteAccuracies, accuracy: float, images: int) -> "Comparison":
        """Compare the accuracy on this many pictures of a new site with those at the left-out sites."""
        chance = accuracies.chance(accuracy, images)
        if chance is None:
            verdict = "unknown"
        elif chance >= UNUSUAL:
            verdict = "within"
        else:
            verdict = "below" if accuracy < accuracies.mean else "above"
        return cls(accuracies.mean, accuracies.interval(), chance, verdict, len(accuracies.accuracies))

    def __str__(self) -> str:
        promised = f"The promise of aidgn fit was {percent(self.promised)}"
        if self.interval is None or self.chance is None:
            return f"{promised} from {plural(self.sites, 'site')}, too few for an interval to compare with."
        wide = " So wide a promise excludes hardly any accuracy." if self.interval.is_wide else ""
        return (
            f"{promised}, at nine new sites in ten between {self.interval}: this site is {self.verdict} the promise."
            f"{wide} A difference from the mean at least as large has a chance of {self.chance:.0%} at a new site like "
            f"those {self.sites}, whose number is small."
        )


@dataclass(frozen=True)
class Bin:
    """Pictures whose label has a similar probability."""

    images: int  # number of pictures
    confidence: float  # mean probability of their labels
    accuracy: float  # share of right labels


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The measurements of a model on labelled pictures of a site."""

    model: str  # name of the model
    site: str  # name of the site
    classes: list[str]  # names of the classes
    images: int  # number of pictures
    left_out: list[str]  # files that could not be read, with the reason
    scores: Scores  # accuracy and other metrics, with calibrated probabilities
    interval: Interval  # 95 % confidence interval for the accuracy at this site, of which the pictures are a sample
    ece_before: float  # expected calibration error without the temperature of the model
    confusion: np.ndarray  # number of pictures by right class (row) and label (column)
    bins: list[Bin]  # the reliability diagram
    # Accuracy on the surest pictures by their share; None if the model cannot rank them
    surest: dict[float, float] | None
    promised_surest: dict[float, float] | None  # what `fit` promised for these
    auroc: float | None  # chance that a right label has more trust than a wrong one
    warned: float | None  # share of pictures with a warning
    warned_wrong: float | None  # share of pictures with a warning whose label is wrong
    comparison: Comparison | None  # with the promise of `fit`; None if the model has none
    site_report: SiteReport | None  # results from the pictures without their labels
    temperature: float = 1.0  # divides the logits of the model
    # Mean accuracy of each class at the sites that `fit` left out; without classes they lacked
    promised_classes: dict[str, float] = field(default_factory=dict)
    trained_on: int = 0  # number of pictures in folders that the model was trained on

    @property
    def class_metrics(self) -> list[ClassMetrics]:
        """The metrics of every class, in the order of `classes`."""
        return measure_classes(self.confusion)

    @property
    def confusions(self) -> list[tuple[str, str, int]]:
        """Right class, label and number of pictures of the most frequent mistakes."""
        mistakes = list_mistakes(self.confusion, self.confusion.size)
        return [(self.classes[right], self.classes[label], count) for right, label, count, _ in mistakes]

    def sentences(self, without_labels: bool = True) -> list[str]:
        """Describe the results, a sentence or two each.

        Args:
            without_labels: Whether to include results from the pictures without their labels.
        """
        scores, interval = self.scores, self.interval
        sentences = [
            f"{self.model} on {self.site}: {scores.accuracy:.1%} of {plural(self.images, 'picture')} right (95 % "
            f"confidence interval of the site {interval.low:.1%} to {interval.high:.1%}), balanced accuracy "
            f"{scores.balanced_accuracy:.1%}, macro-F1 {scores.macro_f1:.1%}."
        ]
        if self.left_out:
            sentences.append(f"{plural(len(self.left_out), 'file')} left out: {some(self.left_out)}.")
        if self.trained_on:
            sentences.append(
                f"{self.trained_on} of the pictures are in folders that the model was trained on: right labels there "
                "say nothing about a new site."
            )
        if self.comparison:
            sentences.append(str(self.comparison))
            sentences += self._describe_shares(self.comparison)
        else:
            sentences.append("The model has no promise to compare with: `aidgn fit` with two or more sites makes one.")
        before = f" ({self.ece_before:.1%} without calibration)" if self.temperature != 1 else ""
        sentences.append(
            f"Calibration error of the probabilities: {scores.ece:.1%}{before}, negative log-likelihood "
            f"{scores.nll:.2f}."
        )
        if self.warned is not None:
            wrong = "" if self.warned_wrong is None else f"; {self.warned_wrong:.0%} of these labels are wrong"
            sentences.append(f"With a warning: {self.warned:.1%} of the pictures{wrong}.")
        if self.surest and self.promised_surest:
            sentences.append(
                f"The surest 80 % of the pictures: {self.surest[0.8]:.1%} right, promised "
                f"{percent(self.promised_surest[0.8])}; the surest half: {self.surest[0.5]:.1%}, promised "
                f"{percent(self.promised_surest[0.5])}."
            )
        if self.confusions:
            listed = (f"{right} as {label} ({count})" for right, label, count in self.confusions)
            sentences.append(f"Most frequent mistakes: {some(listed, 5)}.")
        if self.site_report and without_labels:
            sentences.append(f"Without the labels: {self.site_report}")
        return sentences

    @property
    def promised_here(self) -> float | None:
        """The promise of `fit` with the shares of classes at this site; None if it has none for one of the classes."""
        counts = {name: row.images for name, row in zip(self.classes, self.class_metrics, strict=True) if row.images}
        if not counts.keys() <= self.promised_classes.keys():
            return None
        return sum(count * self.promised_classes[name] for name, count in counts.items()) / self.images

    def _describe_shares(self, comparison: Comparison) -> list[str]:
        """Describe how the shares of classes at this site change the promise, if they change it much."""
        absent = [name for name, row in zip(self.classes, self.class_metrics, strict=True) if not row.images]
        here = self.promised_here
        if not absent and (here is None or abs(here - comparison.promised) < OTHER_SHARES):
            return []
        difference = f"There are no pictures of {some(absent, 5)}." if absent else "Classes have other shares here."
        if here is None:
            return [f"{difference} The promise is for all {len(self.classes)} classes."]
        return [f"{difference} With the shares of this site the promise would have been {percent(here)}."]

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON."""
        values = asdict(self)
        scores = values.pop("scores")
        del values["site_report"], scores["class_accuracies"]
        return values | {
            **scores,
            "promised_here": self.promised_here,
            "classes": {name: asdict(metrics) for name, metrics in zip(self.classes, self.class_metrics, strict=True)},
            "confusion": self.confusion.tolist(),
            "reliability": values.pop("bins"),
            "site_alarm": self.site_report.to_dict() if self.site_report else None,
        }


def evaluate(
    model: Model, pictures: LabelledPictures, name: str = "model", on_progress: Progress | None = None
) -> Evaluation:
    """Measure a model on labelled pictures.

    Args:
        model: The model.
        pictures: From `find_labelled`.
        name: Name of the model in sentences.
        on_progress: Called with the part of the work, the number done and the total.
    """
    label_of = dict(zip(pictures.files, pictures.labels.tolist(), strict=True))
    left_out: list[str] = []
    parts: dict[str, list[np.ndarray]] = {"labels": [], "logits": [], "chances": [], "warned": []}
    monitor = model.site_monitor()
    done = 0
    batches = model.batches(pictures.files, lambda _, error: left_out.append(str(error).rstrip(".")))
    for files, prediction in batches:
        parts["labels"].append(np.array([label_of[str(file)] for file in files], np.int64))
        parts["logits"].append(prediction.logits.numpy())
        if prediction.warnings is not None:
            parts["warned"].append(np.array([warning is not None for warning in prediction.warnings]))
        if prediction.chances is not None and monitor is not None:
            parts["chances"].append(prediction.chances)
            monitor.add(prediction.features.numpy(), prediction.logits.numpy(), prediction.chances)
        done += len(files)
        if on_progress:
            on_progress("evaluating", done + len(left_out), len(pictures.files))
    if not done:
        raise AidgnError(f"None of the {len(pictures.files)} pictures of {pictures.name} could be read: {left_out[0]}.")
    joined = {key: np.concatenate(arrays) if arrays else None for key, arrays in parts.items()}
    labels, logits = joined["labels"], joined["logits"]
    assert labels is not None and logits is not None
    probabilities = softmax(logits, model.temperature)
    predicted = probabilities.argmax(axis=1)
    right = predicted == labels
    confidences = probabilities.max(axis=1)
    losses = -np.log(np.maximum(probabilities[np.arange(len(labels)), labels], 1e-300))
    scores = measure(labels, predicted, confidences, losses, len(model.classes))
    chances, warned, expected = joined["chances"], joined["warned"], model.expectations
    by_class = {} if expected is None else expected.classes
    promised_classes = {name: measured.mean for name, measured in by_class.items() if measured.accuracies}
    folders = [folder.resolve() for folder in model.training_folders]
    return Evaluation(
        model=name,
        site=pictures.name,
        classes=list(model.classes),
        images=len(labels),
        left_out=left_out,
        scores=scores,
        interval=sampling_interval(int(right.sum()), len(labels)),
        ece_before=calibration_error(softmax(logits).max(axis=1), right),
        confusion=count_confusions(labels, predicted, len(model.classes)),
        bins=make_bins(confidences, right),
        surest=None if chances is None else {share: surest_accuracy(chances, right, share) for share in SHARES},
        promised_surest=None if expected is None else expected.surest,
        auroc=None if chances is None else area(chances, right),
        warned=None if warned is None else float(warned.mean()),
        warned_wrong=None if warned is None or not warned.any() else float((~right[warned]).mean()),
        comparison=None if expected is None else Comparison.of(expected.accuracies, scores.accuracy, len(labels)),
        site_report=None if monitor is None else monitor.report(),
        temperature=model.temperature,
        promised_classes=promised_classes,
        trained_on=sum(
            any(Path(file).resolve().is_relative_to(folder) for folder in folders) for file in pictures.files
        ),
    )


def make_bins(confidences: np.ndarray, right: np.ndarray) -> list[Bin]:
    """Sort pictures into bins of equal width by the probability of their label; empty bins are left out."""
    places = np.clip(np.ceil(confidences * BINS).astype(int) - 1, 0, BINS - 1)
    bins = []
    for number in np.unique(places):
        inside = places == number
        bins.append(Bin(int(inside.sum()), float(confidences[inside].mean()), float(right[inside].mean())))
    return bins
