"""Describe a diagnosis in sentences, and several diagnoses in a table."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from aidgn.analysis.description import MINIMUM
from aidgn.analysis.diagnosis import TESTS, Diagnosis, known
from aidgn.analysis.statistics import LARGE, LEVEL, Shift
from aidgn.backbones import feature_norm
from aidgn.errors import some


class Sentence(NamedTuple):
    """A statement of a diagnosis."""

    text: str
    main: bool = False  # whether it is about the two assumptions, and not a description or the method
    detail: bool = False  # whether it belongs to the sentence before

    def __str__(self) -> str:
        return "  " * self.detail + self.text


def sentences(diagnosis: Diagnosis) -> list[Sentence]:
    """Describe a diagnosis: both assumptions, what they mean, fits, compactness, predictions, and the tests."""
    images = {name: int(values["images"]) for name, values in diagnosis.domains.items()}
    source_images = "validation images" if diagnosis.set_aside else "training images"
    first = (
        f"{diagnosis.dataset}, {diagnosis.algorithm}, trial {diagnosis.trial}: "
        f"{sum(images[name] for name in diagnosis.targets)} images of {_target(diagnosis)}, unseen in training, "
        f"against {sum(images[name] for name in diagnosis.sources)} {source_images} of {', '.join(diagnosis.sources)}."
    )
    descriptions = [_fits(diagnosis), _directions(diagnosis), _compactness(diagnosis), *_predictions(diagnosis)]
    return [
        Sentence(first, main=True),
        *_angular(diagnosis),
        *_norms(diagnosis),
        Sentence(meaning(diagnosis), main=True),
        *map(Sentence, [*descriptions, *tested(diagnosis)]),
    ]


def meaning(diagnosis: Diagnosis) -> str:
    """Say what both verdicts mean for a practitioner."""
    target = _target(diagnosis)
    if np.isnan(diagnosis.angular.effect):
        return "In short: by direction, this network does not tell the classes of its source domains apart."
    if np.isnan(diagnosis.norm.effect):
        return "In short: this network gives all features of a class the same length."
    if "unclear" in (diagnosis.angular.size, diagnosis.norm.size):
        return f"In short: more images of {target} or of the sources are needed for a verdict."
    if diagnosis.angular.size == "large":
        return (
            f"In short: classes point elsewhere in {target} than in the sources, so angles learnt from the sources are "
            "unreliable there. Look at the classes that move furthest, and add more varied sources."
        )
    if diagnosis.norm.size == "small":
        return f"In short: to this network {target} looks much like the sources, in direction and in length."
    directions = "hardly change" if diagnosis.angular.size == "small" else "change less than from class to class"
    return f"In short: from the sources to {target} lengths change and directions {directions}, as AIDGN assumes."


def describe_fixed_norm(backbone: str, image_size: int) -> str:
    """Say what becomes of AIDGN with a network whose last layer fixes norms; "" for other networks."""
    norm = feature_norm(backbone, image_size)
    if norm == "fixed":
        return (
            f"{backbone} ends in a layer norm, which gives all features about the same norm, whatever the domain: of "
            "AIDGN's margin a constant angle is left, and norms say nothing about domains (docs/backbones.md)."
        )
    if norm == "averaged":
        return (
            f"{backbone} averages over the image after a layer norm: the norm of a feature tells how alike the places "
            "of an image are, and has an upper limit (docs/backbones.md)."
        )
    return ""


def tested(diagnosis: Diagnosis) -> list[str]:
    """Describe the tests: the samples they left out, and their methods."""
    lines = []
    if diagnosis.skipped:
        few = some((f"{cell['class']} of {cell['domain']} ({cell['images']})" for cell in diagnosis.skipped), 6)
        lines.append(f"Left out of the tests, with fewer than {MINIMUM} images: {few}.")
    if diagnosis.without_direction:
        lines.append(
            f"{diagnosis.without_direction} images have features that are all zero, so they have no direction and "
            "count for norms only."
        )
    tests = sum(getattr(diagnosis, name) is not None for name in TESTS)
    lines.append(
        f"Tests: {diagnosis.permutations} permutations of the domains within classes, p corrected for {tests} tests "
        "(Holm). In brackets: 90 % intervals. Effects: small below 0.25, large from 0.5 on."
    )
    return lines


def _target(diagnosis: Diagnosis) -> str:
    return " and ".join(diagnosis.targets)


def _angular(diagnosis: Diagnosis) -> list[Sentence]:
    target, shift = _target(diagnosis), diagnosis.angular
    verdict = diagnosis.verdicts["angular invariance"]
    if not np.isfinite(shift.effect):
        text = (
            f"Angular invariance {verdict}. In the sources, two images of different classes are no further apart in "
            "direction than two of the same, so there is no distance between classes to measure by; from the sources "
            f"to {target} directions differ {_chance(shift)}."
        )
        lines = [Sentence(text, main=True)]
    else:
        text = (
            f"Angular invariance {verdict}. From the sources to {target}, the directions of a class move by "
            f"{_interval(shift)} of the distance between two classes, {_chance(shift)}; 0.5 is half way to another "
            "class."
        )
        lines = [Sentence(text, main=True)]
        if sources := diagnosis.angular_sources:
            text = f"Among the sources they move by {_interval(sources)}, {_chance(sources)}."
            lines.append(Sentence(text, main=True, detail=True))
    far = sorted(
        (
            (effect, diagnosis.class_names[number])
            for number, (effect, p) in shift.classes.items()
            if effect >= LARGE and p < LEVEL
        ),
        reverse=True,
    )
    if far:
        names = some((f"{name} ({effect:.2f})" for effect, name in far), 5)
        lines.append(Sentence(f"Furthest: {names}.", main=True, detail=True))
    return lines


def _norms(diagnosis: Diagnosis) -> list[Sentence]:
    target, shift, ratio = _target(diagnosis), diagnosis.norm, diagnosis.norm_ratio
    percent = f"{abs(1 - ratio):.0%}"
    change = f"{percent} {'shorter' if ratio < 1 else 'longer'} on average than"
    if percent == "0%":
        change = "about as long on average as"
    differ = "cannot be compared in standard deviations, as norms of the sources do not vary"
    if np.isfinite(shift.effect):
        differ = f"differ by {_interval(shift)} standard deviations, {_chance(shift)}"
    text = (
        f"Norm shift {diagnosis.verdicts['norm shift']}. Within a class, features of {target} are {change} those of "
        f"the sources; the distributions {differ}."
    )
    lines = [Sentence(text, main=True)]
    if diagnosis.norm_sources and np.isfinite(shift.effect):
        sources = diagnosis.norm_sources
        text = f"Among the sources they differ by {_interval(sources)}, {_chance(sources)}."
        lines.append(Sentence(text, main=True, detail=True))
    return lines


def _fits(diagnosis: Diagnosis) -> str:
    parts = []
    for name in (*diagnosis.sources, *diagnosis.targets):
        if fit := diagnosis.norm_fits.get(name):
            family = "exponential" if name in diagnosis.sources else "uniform"
            verdict = "refuted" if fit[f"{family}_p_holm"] < LEVEL else "not refuted"
            parts.append(f"{fit[f'{family}_ks']:.2f} from {family} on {name} ({verdict})")
    return f"Families of norms the paper assumes, Kolmogorov-Smirnov distance: {', '.join(parts)}."


def _directions(diagnosis: Diagnosis) -> str:
    rows, target = diagnosis.von_mises_fisher, _target(diagnosis)

    def median(names: Sequence[str], key: str) -> float:
        return float(np.median(known(row[key] for row in rows if row["domain"] in names)))

    def kappa(names: Sequence[str]) -> str:
        value = median(names, "kappa")
        return "without bound" if np.isposinf(value) else f"{value:.0f}"

    line = (
        f"von Mises-Fisher: kappa {kappa(diagnosis.targets)} on {target}, {kappa(diagnosis.sources)} on the sources; a "
        f"class's mean direction on {target} is {median(diagnosis.targets, 'angle_to_sources'):.0f}° from the sources'"
    )
    if rows and "angle_to_classifier" in rows[0]:
        line += (
            f" and {median(diagnosis.targets, 'angle_to_classifier'):.0f}° from the classifier's (sources "
            f"{median(diagnosis.sources, 'angle_to_classifier'):.0f}°)"
        )
    return line + "; medians over classes."


def _compactness(diagnosis: Diagnosis) -> str:
    return (
        f"Compactness: two images of a class are {_pair(diagnosis, 'within_class', 'sources ')} apart on "
        f"{_target(diagnosis)}, of two classes {_pair(diagnosis, 'between_classes', 'sources ')}."
    )


def _predictions(diagnosis: Diagnosis) -> list[str]:
    lines = []
    for name in diagnosis.targets:
        values = diagnosis.domains[name]
        lines.append(
            f"Predictions on {name}: accuracy {values['accuracy']:.1%}, mean confidence {values['confidence']:.1%}, "
            f"calibration error {values['calibration_error']:.3f}, entropy {values['entropy']:.2f} of "
            f"{np.log(len(diagnosis.class_names)):.2f} nats."
        )
    return lines


def _pair(diagnosis: Diagnosis, key: str, word: str = "") -> str:
    """Format an angle on the targets, with that on the sources in brackets."""
    targets, sources = diagnosis.mean(diagnosis.targets, key), diagnosis.mean(diagnosis.sources, key)
    return f"{targets:.0f}° ({word}{sources:.0f}°)"


def _interval(shift: Shift | None) -> str:
    if shift is None or not np.isfinite(shift.effect):
        return "-"
    return f"{shift.effect:.2f} [{shift.low:.2f}, {shift.high:.2f}]"


def _chance(shift: Shift) -> str:
    if shift.p_holm < LEVEL and shift.low < 0.005:  # printed as 0.00
        return f"perhaps more than chance explains: p = {shift.p_holm:.3f}, but the interval reaches 0"
    return f"{'more than' if shift.p_holm < LEVEL else 'no more than'} chance explains (p = {shift.p_holm:.3f})"


ROWS: dict[str, Callable[[Diagnosis], str]] = {
    "unseen domain": _target,
    "angular invariance": lambda d: d.verdicts["angular invariance"],
    "  directions move, in distances of classes": lambda d: _interval(d.angular),
    "  directions move among the sources": lambda d: _interval(d.angular_sources),
    "norm shift": lambda d: d.verdicts["norm shift"],
    "  norms differ, in standard deviations": lambda d: _interval(d.norm),
    "  norms differ among the sources": lambda d: _interval(d.norm_sources),
    "  norm, unseen / sources": lambda d: f"{d.norm_ratio:.2f}",
    "angle within a class, unseen (sources)": lambda d: _pair(d, "within_class"),
    "angle between classes, unseen (sources)": lambda d: _pair(d, "between_classes"),
    "accuracy on the unseen domain": lambda d: f"{d.mean(d.targets, 'accuracy'):.1%}",
    "calibration error": lambda d: f"{d.mean(d.targets, 'calibration_error'):.3f}",
    "entropy of predictions (nats)": lambda d: f"{d.mean(d.targets, 'entropy'):.2f}",
}


def compare(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, list[str]]]:
    """Return rows of a table with a column per run."""
    return [(label, [value(diagnosis) for diagnosis in diagnoses]) for label, value in ROWS.items()]
