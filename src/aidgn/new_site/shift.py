"""Measure how far the pictures of a new site are from the pictures of the training sites.

A picture is described by the logarithm of its feature's norm, the angle to the predicted class's vector and the largest
variations of features (principal components), each in units of its standard deviation over validation images of the
training sites. The distance between two sets X and Y of pictures is the energy distance (Szekely & Rizzo, 2013)

    D^2 = 2 E|X - Y| - E|X - X'| - E|Y - Y'|,

estimated without bias. The distance of a site is its distance to the nearest training site. It is compared with the
distances of the n sites that runs left out: an alarm needs a larger distance than all of them, which happens by chance
to one of n + 1 sites that are alike.

The permutation test is weaker: it asks whether the pictures may come from one of the training sites, or from all.

Pictures of one class are far from every site with several classes, even if they come from one of these. So an alarm
also needs a larger distance to training pictures that are weighted to have the predicted classes of the new pictures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aidgn.novelty import norms_and_angles

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]

COMPONENTS = 8  # principal components in a description
SAMPLE = 200  # pictures that stand for a training site
MAX_NEW = 500  # pictures of a new site that are compared
MIN_NEW = 20
PERMUTATIONS = 999
FALSE_ALARM_RATE = 0.01
MIN_MATCHED = 0.5  # a training site is compared class by class if it has the classes of this share of new pictures


@dataclass(frozen=True, eq=False)
class Space:
    """The coordinates that describe pictures, fitted to features of validation images of the training sites."""

    center: Floats  # mean feature [n]
    components: Floats  # principal components [n, K]
    mean: Floats  # mean of each description [D]
    deviation: Floats  # standard deviation of each description [D]

    @classmethod
    def fit(cls, features: Floats, logits: Floats, vectors: Floats | None) -> "Space":
        """Fit the description to features [N, n], logits [N, C] and the classifier's vectors [n, C], if it has them."""
        from sklearn.decomposition import PCA  # takes a while to import

        values = features.astype(np.float64)
        components = min(COMPONENTS, *values.shape)
        pca = PCA(components, svd_solver="randomized", random_state=0).fit(values)
        raw = _describe(values, logits, vectors, pca.mean_, pca.components_.T)
        return cls(pca.mean_, pca.components_.T, raw.mean(axis=0), np.maximum(raw.std(axis=0), 1e-9))

    def describe(self, features: Floats, logits: Floats, vectors: Floats | None) -> Floats:
        """Describe pictures by their features [N, n] and logits [N, C]: float64 [N, D]."""
        raw = _describe(features.astype(np.float64), logits, vectors, self.center, self.components)
        return (raw - self.mean) / self.deviation

    def to_dict(self) -> dict[str, Any]:
        names = ("center", "components", "mean", "deviation")
        return {name: rounded(getattr(self, name)) for name in names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Space":
        return cls(**{name: np.asarray(entry, np.float64) for name, entry in values.items()})


def _describe(values: Floats, logits: Floats, vectors: Floats | None, center: Floats, components: Floats) -> Floats:
    norms, angles = (part.numpy() for part in norms_and_angles(values, logits, vectors))
    columns = [np.log(np.maximum(norms, 1e-9))[:, None]]
    if vectors is not None:
        columns.append(angles[:, None])
    return np.concatenate([*columns, (values - center) @ components], axis=1)


@dataclass(frozen=True)
class SiteComparison:
    """The pictures of a new site compared with the training sites."""

    pictures: int  # number of pictures that were compared
    distance: float  # energy distance to the nearest training site
    nearest: str  # name of this site
    # The distance divided by the mean distance of the sites that were left out; None if no site was
    ratio: float | None
    farthest: float | None  # the largest distance of a site that was left out, divided by their mean distance
    left_out: int  # number of sites that were left out
    p_value: float  # p-value of the test whether the pictures may come from a training site or from all of them
    # The ratio for training pictures with the classes of the new ones; None if it cannot be known
    matched: float | None = None

    @property
    def differs(self) -> bool:
        """Whether the pictures differ from every training site and from all of them together."""
        return self.p_value <= FALSE_ALARM_RATE

    @property
    def alarm(self) -> bool:
        """Whether the site is farther from the training sites than any of these is from the others."""
        return self.is_far and not self.other_classes

    @property
    def is_far(self) -> bool:
        """Whether the distance is larger than the distance of every left-out site, for any reason."""
        return self.ratio is not None and self.farthest is not None and self.differs and self.ratio > self.farthest

    @property
    def other_classes(self) -> bool:
        """Whether the site is far only because its pictures show other classes, or in other shares."""
        if self.matched is None or self.farthest is None:
            return False
        return self.is_far and self.matched <= self.farthest


@dataclass(frozen=True, eq=False)
class SiteReference:
    """Samples of a model's training sites, for comparison with new pictures."""

    space: Space  # coordinates that describe pictures
    samples: Mapping[str, Floats]  # descriptions of validation images of each training site
    distances: Mapping[str, float]  # distance of each site to the nearest other one, by a model that never saw it
    # Predicted class of each of these images, by site; files of earlier versions do not have it
    labels: Mapping[str, Integers] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        features: Floats,
        logits: Floats,
        vectors: Floats | None,
        sites: Integers,
        names: Sequence[str],
        distances: Mapping[str, float] | None = None,
    ) -> "SiteReference":
        """Describe validation images of training sites.

        Args:
            features: [N, n].
            logits: [N, C].
            vectors: Class vectors of the classifier [n, C], if it has them.
            sites: Site of each image [N], index into `names`.
            names: Names of all sites.
            distances: Distances of sites that other models left out.
        """
        space = Space.fit(features, logits, vectors)
        described = space.describe(features, logits, vectors)
        predicted = logits.argmax(axis=1)
        samples, labels = {}, {}
        for number, name in enumerate(names):
            chosen = subsample(np.flatnonzero(sites == number), SAMPLE)
            if len(chosen):
                samples[name] = rounded_array(described[chosen])
                labels[name] = predicted[chosen]
        return cls(space, samples, distances or {}, labels)

    def distance(self, described: Floats) -> tuple[float, str]:
        """Return the distance to the nearest training site, and its name."""
        sample = subsample(described, MAX_NEW)
        distances = {name: energy_distance(sample, other) for name, other in self.samples.items()}
        nearest = min(distances, key=lambda name: distances[name])
        return distances[nearest], nearest

    def match_classes(self, described: Floats, predicted: Integers) -> float | None:
        """Return the distance to the nearest training site after its pictures are weighted to have the same classes.

        None if every training site lacks the classes of more than half of the new pictures.
        """
        shares = np.bincount(predicted) / len(predicted)
        distances = []
        for name, labels in self.labels.items():
            counts = np.bincount(labels, minlength=len(shares))
            wanted = np.zeros(len(counts))
            wanted[: len(shares)] = shares
            weights = (wanted / np.maximum(counts, 1))[labels]
            if weights.sum() >= MIN_MATCHED:
                distances.append(weighted_energy_distance(described, self.samples[name], weights))
        return min(distances, default=None)

    def compare(self, described: Floats, predicted: Integers | None = None) -> SiteComparison | None:
        """Compare the pictures of a new site; None for fewer than 20.

        Args:
            described: Their descriptions by `space` [N, D].
            predicted: Their classes as the model predicts them [N].
        """
        if len(described) < MIN_NEW:
            return None
        sample = subsample(described, MAX_NEW)
        matched = None if predicted is None else self.match_classes(sample, subsample(predicted, MAX_NEW))
        distance, nearest = self.distance(described)
        known = np.array(list(self.distances.values()))
        scale = max(float(known.mean()), 1e-9) if len(known) else None
        return SiteComparison(
            pictures=len(sample),
            distance=distance,
            nearest=nearest,
            ratio=None if scale is None else distance / scale,
            farthest=None if scale is None else float(known.max()) / scale,
            left_out=len(known),
            p_value=self._p_value(sample),
            matched=None if scale is None or matched is None else matched / scale,
        )

    def _p_value(self, sample: Floats) -> float:
        """Return the largest p-value over the training sites and all of them together.

        If the pictures come from one of these, its p-value alone keeps the rate of false alarms.
        """
        together = subsample(np.concatenate(list(self.samples.values())), MAX_NEW)
        return max(permutation_test(sample, other) for other in (*self.samples.values(), together))

    def to_dict(self) -> dict[str, Any]:
        return {
            "space": self.space.to_dict(),
            "samples": {name: sample.tolist() for name, sample in self.samples.items()},
            "distances": dict(self.distances),
            "labels": {name: labels.tolist() for name, labels in self.labels.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SiteReference":
        samples = {name: np.asarray(sample, np.float64) for name, sample in values["samples"].items()}
        labels = {name: np.asarray(entry, np.int64) for name, entry in values.get("labels", {}).items()}
        if any(len(entry) != len(samples[name]) for name, entry in labels.items()):
            raise ValueError("labels")
        return cls(Space.from_dict(values["space"]), samples, values["distances"], labels)


def energy_distance(x: Floats, y: Floats) -> float:
    """Return D of two samples [N, D] and [M, D], from the unbiased estimate of D^2; 0 if this is negative."""
    distances = pairwise_distances(np.concatenate([x, y]))
    return float(np.sqrt(max(_squared(distances, np.arange(len(distances))[:, None] < len(x))[0], 0)))


def weighted_energy_distance(x: Floats, y: Floats, weights: Floats) -> float:
    """Return D of two samples [N, D] and [M, D], where the images of the second have weights [M].

    If only one or two weights are positive, the mean distance within the second sample is taken from the first.
    """
    from scipy.spatial.distance import cdist

    kept = weights > 0
    y, weights = y[kept], weights[kept]
    between = cdist(x, y).mean(axis=0) @ weights / weights.sum()
    within = within_new = pairwise_distances(x).sum() / (len(x) * (len(x) - 1))
    if len(y) > 2:
        pairs = weights[:, None] * weights
        np.fill_diagonal(pairs, 0)
        within = (pairs * pairwise_distances(y)).sum() / pairs.sum()
    return float(np.sqrt(max(2 * between - within_new - within, 0)))


def permutation_test(x: Floats, y: Floats, permutations: int = PERMUTATIONS, seed: int = 0) -> float:
    """Return the p-value of equal distributions: the share of permutations with at least this energy distance."""
    distances = pairwise_distances(np.concatenate([x, y]))
    count = len(distances)
    random = np.random.default_rng(seed)
    orders = np.stack([np.arange(count), *(random.permutation(count) for _ in range(permutations))], axis=1)
    squared = _squared(distances, orders < len(x))
    return float((squared >= squared[0] - 1e-12).mean())


def _squared(distances: Floats, first: NDArray[np.bool_]) -> Floats:
    """Return D^2 for each division of the images, a column of `first`, into two samples."""
    inside = first.astype(np.float64)
    number = inside.sum(axis=0)
    others = len(distances) - number
    sums = distances @ inside
    within = (inside * sums).sum(axis=0)
    between = ((1 - inside) * sums).sum(axis=0)
    outside = distances.sum() - within - 2 * between
    pairs = np.maximum(number * (number - 1), 1), np.maximum(others * (others - 1), 1)
    return 2 * between / (number * others) - within / pairs[0] - outside / pairs[1]


def pairwise_distances(x: Floats) -> Floats:
    """Return the Euclidean distances between all rows [N, D]: [N, N]."""
    from scipy.spatial.distance import pdist, squareform

    return squareform(pdist(x))


def subsample(values: NDArray[Any], most: int, seed: int = 0) -> NDArray[Any]:
    """Choose at most `most` rows at random, the same rows for all arrays of one length."""
    if len(values) <= most:
        return values
    return values[np.sort(np.random.default_rng(seed).permutation(len(values))[:most])]


def rounded(values: Floats) -> Any:
    """Return lists of numbers with five digits, to keep the file small."""
    return rounded_array(values).tolist()


def rounded_array(values: Floats) -> Floats:
    """Round to five digits."""
    scale = 10.0 ** (4 - np.floor(np.log10(np.maximum(np.abs(values.astype(np.float64)), 1e-12))))
    return np.round(values * scale) / scale
