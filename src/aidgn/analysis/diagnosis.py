"""Do the paper's two assumptions hold in the features of a run? Angular invariance: within a class, directions z/|z|
are distributed alike in every domain. Norm shift: norms |z| are not.

Both are measured by energy distances between domains within each class, target against sources and sources among
themselves, with a permutation test (domain labels permuted within classes, Holm's correction over the tests). With many
images every difference is beyond chance, so the verdict rests on an effect that does not depend on their number:

    angular invariance   sqrt(E / E between two classes of one domain): how far a class moves with the domain, in units
                         of the distance between classes; at 0.5 it is half way to another class, where borders lie
    norm shift           sqrt(2 E / mean difference of two norms of one class and domain): for a shift of normal
                         distributions Cohen's d, the shift in standard deviations; sees other changes too

An effect below 0.25 is small, from 0.5 on large. Where there is nothing to measure by, as classes of the sources are
not apart or norms are all the same, there is none. Sources are represented by the images set aside (`out`), because on
images it was trained on a network behaves otherwise; the target by all of its images.

On synthetic features of 4 classes and 4 domains, 20 images each, with both assumptions true, one or none, 300 times
each: angular invariance was denied in 0 of 600 cases where it holds and in all 600 where classes turn by 0.8 of their
distance; norm shift was seen in 0.7 % of 600 cases without one and in 99.7 % of those with a shift of one standard
deviation; p was up to 0.05 in 4.2 % (directions) and 4.0 % (norms) of the cases without a difference; the 90 %
intervals held the true effect in 95 and 91 of 100 cases. `python -m pytest tests/analysis/test_diagnosis.py -m slow`
makes these numbers.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aidgn.analysis.description import (
    MINIMUM,
    Floats,
    Integers,
    class_angles,
    norm_fits,
    predictions,
    von_mises_fisher,
)
from aidgn.analysis.features import Features
from aidgn.analysis.statistics import LARGE, LEVEL, Pairs, Shift, chordal, group_means, holm, shift
from aidgn.errors import AidgnError, some
from aidgn.files import for_json, write_text

KEPT = "diagnosis.json"
CELL, TOTAL = 250, 20_000  # images of a class in a domain, and of all, that are compared at most
LEAST_APART = 1.01  # times as wide as the angle within a class must that between classes be, to measure by it
LEAST_SPREAD = 1e-5  # of norms, in mean norms, below which they are the same but for rounding
TESTS = ("angular", "angular_sources", "norm", "norm_sources")

ANGULAR_VERDICTS = {
    "small": "holds",
    "moderate": "holds roughly",
    "large": "does not hold",
    "unclear": "cannot be told",
}
NORM_VERDICTS = {"small": "does not hold", "moderate": "holds roughly", "large": "holds", "unclear": "cannot be told"}


@dataclass(frozen=True)
class Diagnosis:
    """What was found; `sentences` says it, `to_dict` is what diagnosis.json holds. Angles are in degrees."""

    dataset: str
    algorithm: str
    trial: int
    draw: int
    model: str  # sha256 of the weights file
    targets: list[str]
    sources: list[str]
    class_names: list[str]
    permutations: int
    seed: int
    angular: Shift  # target against sources
    angular_sources: Shift | None  # among the sources, if there are several
    norm: Shift
    norm_sources: Shift | None
    norm_ratio: float  # of the target's mean norm to the sources', within classes
    von_mises_fisher: list[dict[str, Any]]  # per domain and class: kappa, angles of the mean direction
    norm_fits: dict[str, dict[str, float]]  # per domain: the exponential and the uniform distribution
    domains: dict[str, dict[str, float]]  # per domain: compactness, separation, predictions
    set_aside: bool  # whether sources are represented by images that were not trained on
    skipped: list[dict[str, Any]]  # domain and class with fewer than MINIMUM images
    without_direction: int  # images whose features are all zero

    @property
    def verdicts(self) -> dict[str, str]:
        return {"angular invariance": ANGULAR_VERDICTS[self.angular.size], "norm shift": NORM_VERDICTS[self.norm.size]}

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for name in TESTS:
            if found[name] is not None:
                found[name] |= {
                    "size": getattr(self, name).size,
                    "classes": {
                        self.class_names[c]: {"effect": effect, "p_holm": p}
                        for c, (effect, p) in found[name]["classes"].items()
                    },
                }
        return for_json({"verdicts": self.verdicts, **found})

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Diagnosis":
        """What `save` wrote; ValueError, KeyError, TypeError or AttributeError if it is no such file."""
        found: dict[str, Any] = {
            key: None if key in TESTS and value is None else _with_nan(value)
            for key, value in json.loads(path.read_bytes()).items()
            if key != "verdicts"
        }
        for each in found["von_mises_fisher"]:  # a kappa that is no number was infinite: all directions were one
            each["kappa"] = float("inf") if np.isnan(each["kappa"]) else each["kappa"]
        for name in TESTS:
            if found[name] is not None:
                found[name] = Shift(
                    **{key: value for key, value in found[name].items() if key != "size"}
                    | {
                        "classes": {
                            found["class_names"].index(c): (each["effect"], each["p_holm"])
                            for c, each in found[name]["classes"].items()
                        }
                    }
                )
        return cls(**found)

    def sentences(self) -> list[str]:
        target, sources = " and ".join(self.targets), ", ".join(self.sources)
        used = {name: int(values["images"]) for name, values in self.domains.items()}
        lines = [
            f"{self.dataset}, {self.algorithm}, trial {self.trial}: {sum(used[name] for name in self.targets)} "
            f"images of {target}, unseen in training, beside "
            f"{sum(used[name] for name in self.sources)} images of {sources}"
            f"{' that were set aside' if self.set_aside else ', which it was trained on'}."
        ]
        apart = np.isfinite(self.angular.effect)
        if apart:
            lines.append(
                f"Angular invariance {self.verdicts['angular invariance']}. From the sources to {target}, the "
                f"directions of a class move by {_interval(self.angular)} of the distance between two "
                f"classes, {_chance(self.angular)}; 0.5 is half way to another class."
            )
        else:
            lines.append(
                "Angular invariance cannot be told. In the sources, two images of different classes are no "
                "further apart in direction than two of the same, so there is no distance between classes to "
                f"measure by; from the sources to {target} directions differ {_chance(self.angular)}."
            )
        if self.angular_sources and apart:
            lines.append(
                f"  Among the sources they move by {_interval(self.angular_sources)}, {_chance(self.angular_sources)}."
            )
        far = sorted(
            (
                (effect, self.class_names[c])
                for c, (effect, p) in self.angular.classes.items()
                if effect >= LARGE and p < LEVEL
            ),
            reverse=True,
        )
        if far:
            lines.append(f"  Furthest: {some((f'{name} ({effect:.2f})' for effect, name in far), 5)}.")
        change = f"{abs(1 - self.norm_ratio):.0%} {'shorter' if self.norm_ratio < 1 else 'longer'} on average than"
        change = "about as long on average as" if change.startswith("0%") else change
        vary = np.isfinite(self.norm.effect)
        differ = (
            f"differ by {_interval(self.norm)} standard deviations, {_chance(self.norm)}"
            if vary
            else "cannot be compared in standard deviations, as norms of the sources do not vary"
        )
        lines.append(
            f"Norm shift {self.verdicts['norm shift']}. Within a class, features of {target} are {change} "
            f"those of the sources; the distributions {differ}."
        )
        if self.norm_sources and vary:
            lines.append(
                f"  Among the sources they differ by {_interval(self.norm_sources)}, {_chance(self.norm_sources)}."
            )
        return [
            *lines,
            self.meaning(),
            self._fits(),
            self._directions(),
            self._compactness(),
            *self._predictions(),
            *self.tested(),
        ]

    def tested(self) -> list[str]:
        """What the tests left out, and what they are."""
        lines = []
        if self.skipped:
            few = some((f"{each['class']} of {each['domain']} ({each['images']})" for each in self.skipped), 6)
            lines.append(f"Left out of the tests, with fewer than {MINIMUM} images: {few}.")
        if self.without_direction:
            lines.append(
                f"{self.without_direction} images have features that are all zero, thus no direction; they "
                "count for norms only."
            )
        tests = sum(getattr(self, name) is not None for name in TESTS)
        return [
            *lines,
            f"Tests: {self.permutations} permutations of the domains within classes, p corrected for "
            f"{tests} tests (Holm). In brackets: 90 % intervals. Effects: small below 0.25, large from 0.5 "
            "on.",
        ]

    def meaning(self) -> str:
        """What a practitioner takes from both verdicts."""
        target = " and ".join(self.targets)
        if np.isnan(self.angular.effect):
            return "In short: by direction, this network does not tell the classes of its own sources apart."
        if np.isnan(self.norm.effect):
            return "In short: this network gives all features of a class the same length."
        if "unclear" in (self.angular.size, self.norm.size):
            return f"In short: more images of {target} or of the sources are needed to tell."
        if self.angular.size == "large":
            return (
                f"In short: classes point elsewhere in {target} than in the sources, so angles learnt from these "
                "are no sure guide there; look at the classes that move furthest, and at more varied sources."
            )
        if self.norm.size == "small":
            return f"In short: to this network {target} looks much like the sources, in direction and in length."
        directions = "hardly do" if self.angular.size == "small" else "less than from class to class"
        return f"In short: from the sources to {target} lengths change, directions {directions}, as AIDGN assumes."

    def _fits(self) -> str:
        def says(name: str, family: str) -> str:
            distance, p = self.norm_fits[name][f"{family}_ks"], self.norm_fits[name][f"{family}_p_holm"]
            return f"{distance:.2f} from {family} on {name} ({'refuted' if p < LEVEL else 'not refuted'})"

        parts = [
            says(name, "exponential" if name in self.sources else "uniform")
            for name in (*self.sources, *self.targets)
            if name in self.norm_fits
        ]
        return "Families of norms the paper assumes, Kolmogorov-Smirnov distance: " + ", ".join(parts) + "."

    def _directions(self) -> str:
        def median(names: Sequence[str], key: str) -> float:
            return float(np.median(_known(each[key] for each in self.von_mises_fisher if each["domain"] in names)))

        def kappa(names: Sequence[str]) -> str:
            value = median(names, "kappa")
            return "without bound" if np.isposinf(value) else f"{value:.0f}"

        line = (
            f"von Mises-Fisher: kappa {kappa(self.targets)} on {' and '.join(self.targets)}, "
            f"{kappa(self.sources)} on the sources; a class's mean direction on "
            f"{' and '.join(self.targets)} is {median(self.targets, 'angle_to_sources'):.0f}° from the sources'"
        )
        if self.von_mises_fisher and "angle_to_classifier" in self.von_mises_fisher[0]:
            line += (
                f" and {median(self.targets, 'angle_to_classifier'):.0f}° from the classifier's (sources "
                f"{median(self.sources, 'angle_to_classifier'):.0f}°)"
            )
        return line + "; medians over classes."

    def _compactness(self) -> str:
        own, other, own_sources, other_sources = (
            self.mean(names, key)
            for names in (self.targets, self.sources)
            for key in ("within_class", "between_classes")
        )
        return (
            f"Compactness: two images of a class are {own:.0f}° apart on {' and '.join(self.targets)} (sources "
            f"{own_sources:.0f}°), of two classes {other:.0f}° (sources {other_sources:.0f}°)."
        )

    def _predictions(self) -> list[str]:
        return [
            f"Predictions on {name}: accuracy {values['accuracy']:.1%}, mean confidence "
            f"{values['confidence']:.1%}, calibration error {values['calibration_error']:.3f}, entropy "
            f"{values['entropy']:.2f} of {np.log(len(self.class_names)):.2f} nats."
            for name, values in self.domains.items()
            if name in self.targets
        ]

    def mean(self, names: Sequence[str], key: str) -> float:
        return float(np.mean(_known(self.domains[name][key] for name in names)))


def diagnose(features: Features, *, permutations: int = 999, seed: int = 0) -> Diagnosis:
    """Test both assumptions on the features of a run, and describe directions, norms and predictions per domain."""
    check(features)
    targets, sources = (
        [i for i, name in enumerate(features.domain_names) if (name in features.targets) == unseen]
        for unseen in (True, False)
    )
    # Images set aside stand for a source; where there are none, as in features made elsewhere, all of them.
    domains_aside = [s for s in sources if features.validation[features.domains == s].any()]
    used = np.flatnonzero(~np.isin(features.domains, domains_aside) | features.validation)
    z, labels, domains = (array[used] for array in (features.features, features.labels, features.domains))
    norms = np.sqrt(np.einsum("ij,ij->i", z, z, dtype=np.float64))
    directed = norms > 0
    units = (z / np.where(directed, norms, 1)[:, None]).astype(np.float32)
    rng = np.random.default_rng(seed)
    number_of_classes, number_of_domains = len(features.class_names), len(features.domain_names)
    most = int(np.clip(TOTAL // (number_of_classes * number_of_domains), 20, CELL))

    between, domain_values = {}, {}  # distance between classes, and what there is to say, per domain
    for domain, name in enumerate(features.domain_names):
        where = np.flatnonzero(domains == domain)
        between[domain], within_angle, between_angle = class_angles(
            units, labels, where[directed[where]], number_of_classes, rng
        )
        domain_values[name] = {
            "images": len(where),
            "within_class": within_angle,
            "between_classes": between_angle,
            **predictions(features.logits[used[where]], labels[where]),
        }
    distances = [between[source] for source in sources if not np.isnan(between[source])]

    cells, skipped = compared_cells(labels, domains, features, most, rng)
    from_sources: Pairs = {(min(t, s), max(t, s)) for t in targets for s in sources}
    among_sources: Pairs = {(a, b) for a in sources for b in sources if a < b}
    if not distances or not any({(a, b) for a in here for b in here} & from_sources for here in cells.values()):
        raise AidgnError(
            f"There are too few images to compare: no class has {MINIMUM} images in the unseen domain and "
            f"{MINIMUM} that were set aside in a source. More images per class are needed."
        )
    angles, lengths, spreads, ratios = {}, {}, [], []
    for number, cell in cells.items():
        everything = np.concatenate(list(cell.values()))
        some = everything[directed[everything]]
        enough = [domain for domain in cell if directed[cell[domain]].sum() >= MINIMUM]
        some = some[np.isin(domains[some], enough)]
        angles[number] = (chordal(units[some], units[some]), domains[some])
        r = norms[everything]
        lengths[number] = (np.abs(r[:, None] - r).astype(np.float32), domains[everything])
        indicator = np.stack([domains[everything] == source for source in sources], axis=1)[:, :, None]
        spreads.append(np.diagonal(group_means(lengths[number][0], indicator.astype(np.float32))[0]))
        ratios += [
            np.log(max(norms[cell[t]].mean(), 1e-12) / max(norms[cell[s]].mean(), 1e-12))
            for t in targets
            for s in sources
            if t in cell and s in cell
        ]

    def only_sources(classes: dict[int, tuple[Floats, Integers]]) -> dict[int, tuple[Floats, Integers]]:
        kept = {number: np.isin(where, sources) for number, (_, where) in classes.items()}
        return {
            number: (classes[number][0][np.ix_(keep, keep)], classes[number][1][keep]) for number, keep in kept.items()
        }

    within, beside = (
        np.nanmean([domain_values[features.domain_names[source]][key] for source in sources])
        for key in ("within_class", "between_classes")
    )
    separation, spread = float(np.mean(distances)), float(np.nanmean(spreads))
    tests: dict[str, Shift | None] = {}
    for what, classes, unit in (
        ("angular", angles, separation if separation > 0 and beside > LEAST_APART * within else float("nan")),
        ("norm", lengths, spread / 2 if spread > LEAST_SPREAD * norms.mean() else float("nan")),
    ):
        tests[what] = shift(classes, from_sources, unit, permutations, rng)
        tests[f"{what}_sources"] = shift(only_sources(classes), among_sources, unit, permutations, rng)
    corrected = iter(holm([each.p for each in tests.values() if each]))
    tests = {name: each and replace(each, p_holm=next(corrected)) for name, each in tests.items()}

    return Diagnosis(
        features.dataset,
        features.algorithm,
        features.trial,
        features.draw,
        features.model,
        [features.domain_names[t] for t in targets],
        [features.domain_names[s] for s in sources],
        features.class_names,
        permutations,
        seed,
        **tests,  # type: ignore[arg-type]
        norm_ratio=float(np.exp(np.mean(ratios))),
        von_mises_fisher=von_mises_fisher(units, labels, domains, directed, features, sources),
        norm_fits=norm_fits(norms, domains, features.domain_names, rng),
        domains=domain_values,
        set_aside=domains_aside == sources,
        skipped=skipped,
        without_direction=int((~directed).sum()),
    )


def check(features: Features) -> None:
    """Refuse features of which the question cannot be asked."""
    where = f"{features.algorithm} on {features.dataset}"
    if len(features.domain_names) < 2:
        raise AidgnError(
            f"{where} has a single domain, {', '.join(features.domain_names)}: a diagnosis compares an "
            "unseen domain with others."
        )
    if not features.targets:
        raise AidgnError(
            f"{where} was trained on all domains: none is left to compare with what was seen. Diagnose a "
            "run with a --target."
        )
    if len({*features.domain_names} - {*features.targets}) < 1:
        raise AidgnError(f"{where}: every domain is a target, so there is no source to compare with.")
    if len(np.unique(features.labels)) < 2:
        raise AidgnError(
            f"{where} has a single class: distances between domains are measured by those between classes."
        )
    if not np.isfinite(features.features).all():
        raise AidgnError(
            f"{where}: some features are NaN or infinite. The network diverged; train it with a smaller learning rate."
        )


def compared_cells(
    labels: Integers, domains: Integers, features: Features, most: int, rng: np.random.Generator
) -> tuple[dict[int, dict[int, Integers]], list[dict[str, Any]]]:
    """Class -> domain -> up to `most` images, drawn at random; and which have too few."""
    cells: dict[int, dict[int, Integers]] = {}
    skipped = []
    for number, name in enumerate(features.class_names):
        cells[number] = {}
        for domain, domain_name in enumerate(features.domain_names):
            images = np.flatnonzero((labels == number) & (domains == domain))
            if len(images) < MINIMUM:
                skipped.append({"domain": domain_name, "class": name, "images": len(images)})
            else:
                cells[number][domain] = np.sort(rng.permutation(images)[:most])
    return {number: cell for number, cell in cells.items() if cell}, skipped


def compare(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, list[str]]]:
    """Rows of a table with a column per run: what is measured, and the values."""

    def mean(one: Diagnosis, names: Sequence[str], key: str, form: str) -> str:
        return format(one.mean(names, key), form)

    def effect(each: Shift | None) -> str:
        return _interval(each) if each and np.isfinite(each.effect) else "-"

    return [
        ("unseen domain", [" and ".join(one.targets) for one in diagnoses]),
        ("angular invariance", [one.verdicts["angular invariance"] for one in diagnoses]),
        ("  directions move, in distances of classes", [effect(one.angular) for one in diagnoses]),
        ("  the same among the sources", [effect(one.angular_sources) for one in diagnoses]),
        ("norm shift", [one.verdicts["norm shift"] for one in diagnoses]),
        ("  norms differ, in standard deviations", [effect(one.norm) for one in diagnoses]),
        ("  the same among the sources", [effect(one.norm_sources) for one in diagnoses]),
        ("  norm, unseen / sources", [f"{one.norm_ratio:.2f}" for one in diagnoses]),
        (
            "angle within a class, unseen (sources)",
            [
                f"{mean(one, one.targets, 'within_class', '.0f')}° ({mean(one, one.sources, 'within_class', '.0f')}°)"
                for one in diagnoses
            ],
        ),
        (
            "angle between classes, unseen (sources)",
            [
                f"{mean(diagnosis, diagnosis.targets, 'between_classes', '.0f')}° "
                f"({mean(diagnosis, diagnosis.sources, 'between_classes', '.0f')}°)"
                for diagnosis in diagnoses
            ],
        ),
        ("accuracy on the unseen domain", [mean(one, one.targets, "accuracy", ".1%") for one in diagnoses]),
        ("calibration error", [mean(one, one.targets, "calibration_error", ".3f") for one in diagnoses]),
        ("entropy of predictions (nats)", [mean(one, one.targets, "entropy", ".2f") for one in diagnoses]),
    ]


def _interval(each: Shift) -> str:
    return f"{each.effect:.2f} [{each.low:.2f}, {each.high:.2f}]"


def _chance(each: Shift) -> str:
    if each.p_holm < LEVEL and each.low < 0.005:  # printed as 0.00
        return (
            f"perhaps more than chance explains: the permutations say so (p = {each.p_holm:.3f}), the interval, "
            "which reaches 0, does not"
        )
    return f"{'more than' if each.p_holm < LEVEL else 'no more than'} chance explains (p = {each.p_holm:.3f})"


def _known(values: Iterable[float]) -> list[float]:
    """Those that are numbers; a NaN if none is."""
    return [value for value in values if not np.isnan(value)] or [float("nan")]


def _with_nan(value: Any) -> Any:
    """NaN again where JSON has null."""
    if isinstance(value, dict):
        return {key: _with_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_nan(each) for each in value]
    return float("nan") if value is None else value
