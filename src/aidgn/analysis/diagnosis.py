"""Test the paper's two assumptions on the features of a run.

Angular invariance: within a class, directions z/|z| have the same distribution in every domain. Norm shift: norms |z|
have not.

Both are measured by energy distances between domains within each class, target against sources and sources among each
other, with a permutation test (domain labels permuted within classes, Holm's correction over the tests). With many
images every difference is significant, so the verdict rests on an effect that does not depend on their number:

    angular invariance   sqrt(E / E between two classes of one domain): how far a class moves with the domain, in units
                         of the distance between classes; at 0.5 it is half way to another class, where borders lie
    norm shift           sqrt(2 E / mean difference of two norms of one class and domain): for a shift of normal
                         distributions Cohen's d, the shift in standard deviations; sees other changes too

An effect below 0.25 is small, from 0.5 on large. There is none without a unit: if the sources' classes are not apart,
or all norms are the same. Sources are represented by their validation images (`out`), because a network behaves
differently on images that it was trained on; the target by all of its images.

The tests were tried on synthetic features of 4 classes and 4 domains, 20 images each, with both assumptions true, one
or none, 300 times each. Angular invariance was denied in 0 of 600 cases where it holds and in all 600 where classes
turn by 0.8 of their distance. Norm shift was found in 0.7 % of 600 cases without one and in 99.7 % of those with a
shift of one standard deviation. p was at most 0.05 in 4.2 % (directions) and 4.0 % (norms) of the cases without a
difference. The 90 % intervals held the true effect in 95 and 91 of 100 cases. `python -m pytest
tests/analysis/test_diagnosis.py -m slow` computes these numbers.
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
from aidgn.analysis.statistics import Pairs, Shift, chordal, group_means, holm, shift
from aidgn.errors import AidgnError
from aidgn.files import for_json, parse_json, write_text

CELL, TOTAL = 250, 20_000  # images of a class in a domain, and of all, that are compared at most
MIN_ANGLE_RATIO = 1.01  # classes are apart if the angle between classes is at least so many times the angle within one
MIN_SPREAD = 1e-5  # a smaller spread of norms, relative to the mean norm, is rounding
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
    """Verdicts on both assumptions, and the numbers behind them. Angles are in degrees."""

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
        fields = asdict(self)
        for name in TESTS:
            if fields[name] is not None:
                fields[name] |= {
                    "size": getattr(self, name).size,
                    "classes": {
                        self.class_names[c]: {"effect": effect, "p_holm": p}
                        for c, (effect, p) in fields[name]["classes"].items()
                    },
                }
        return for_json({"verdicts": self.verdicts, **fields})

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Diagnosis":
        """Read a file of `save`; raise ValueError, KeyError, TypeError or AttributeError for another file."""
        fields: dict[str, Any] = {
            key: None if key in TESTS and value is None else _with_nan(value)
            for key, value in parse_json(path.read_bytes()).items()
            if key != "verdicts"
        }
        for fit in fields["von_mises_fisher"]:  # JSON has no infinity: a kappa of null was infinite
            fit["kappa"] = float("inf") if np.isnan(fit["kappa"]) else fit["kappa"]
        for name in TESTS:
            if fields[name] is not None:
                fields[name] = Shift(
                    **{key: value for key, value in fields[name].items() if key != "size"}
                    | {
                        "classes": {
                            fields["class_names"].index(c): (entry["effect"], entry["p_holm"])
                            for c, entry in fields[name]["classes"].items()
                        }
                    }
                )
        return cls(**fields)

    def mean(self, names: Sequence[str], key: str) -> float:
        return float(np.mean(known(self.domains[name][key] for name in names)))


def diagnose(features: Features, *, permutations: int = 999, seed: int = 0) -> Diagnosis:
    """Test both assumptions on the features of a run, and describe directions, norms and predictions per domain.

    Args:
        features: Features of images of at least one source and one target.
        permutations: Permutations of the domains that p-values are counted from.
        seed: Seed of permutations, intervals and samples.
    """
    check_domains(features)
    targets = [i for i, name in enumerate(features.domain_names) if name in features.targets]
    sources = [i for i, name in enumerate(features.domain_names) if name not in features.targets]
    used = np.sort(np.concatenate(list(features.representative().values())))
    z, labels, domains = (array[used] for array in (features.features, features.labels, features.domains))
    norms = np.sqrt(np.einsum("ij,ij->i", z, z, dtype=np.float64))
    directed = norms > 0
    units = (z / np.where(directed, norms, 1)[:, None]).astype(np.float32)
    rng = np.random.default_rng(seed)
    number_of_classes, number_of_domains = len(features.class_names), len(features.domain_names)
    most = int(np.clip(TOTAL // (number_of_classes * number_of_domains), 20, CELL))

    between, domain_values = {}, {}  # by domain: the distance between classes, and the described values
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

    names = [features.domain_names[source] for source in sources]
    mean_within = np.nanmean([domain_values[name]["within_class"] for name in names])
    mean_between = np.nanmean([domain_values[name]["between_classes"] for name in names])
    separation, spread = float(np.mean(distances)), float(np.nanmean(spreads))
    tests: dict[str, Shift | None] = {}
    classes_are_apart = separation > 0 and mean_between > MIN_ANGLE_RATIO * mean_within
    angular_unit = separation if classes_are_apart else float("nan")
    norm_unit = spread / 2 if spread > MIN_SPREAD * norms.mean() else float("nan")
    for name, classes, unit in (("angular", angles, angular_unit), ("norm", lengths, norm_unit)):
        tests[name] = shift(classes, from_sources, unit, permutations, rng)
        tests[f"{name}_sources"] = shift(only_sources(classes), among_sources, unit, permutations, rng)
    corrected = iter(holm([test.p for test in tests.values() if test]))
    tests = {name: test and replace(test, p_holm=next(corrected)) for name, test in tests.items()}

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
        set_aside=all(features.validation[features.domains == source].any() for source in sources),
        skipped=skipped,
        without_direction=int((~directed).sum()),
    )


def check_domains(features: Features) -> None:
    """Raise an error if the features have no source, no target or fewer than two classes to compare."""
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
    """Draw up to `most` images of each class and domain; also list the classes and domains with too few."""
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


def known(values: Iterable[float]) -> list[float]:
    """Drop NaNs; return one NaN if there is nothing else."""
    return [value for value in values if not np.isnan(value)] or [float("nan")]


def _with_nan(value: Any) -> Any:
    """Put NaN back where JSON has null."""
    if isinstance(value, dict):
        return {key: _with_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_nan(entry) for entry in value]
    return float("nan") if value is None else value
