"""Statistics of a diagnosis: energy distances with permutation tests and bootstrap intervals, goodness of fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Pairs = set[tuple[int, int]]  # pairs of domains to compare, each in one order

LEVEL = 0.05  # level of significance; intervals cover 1 - 2 LEVEL, so that each end is a test at this level
SMALL, LARGE = 0.25, 0.5  # bounds of effects that are called small and large
BOOTSTRAPS = 200


@dataclass(frozen=True)
class Shift:
    """The distance between domains within classes."""

    effect: float
    low: float  # lower end of its 90 % interval
    high: float  # upper end of its 90 % interval
    p: float  # p-value of the permutation test
    p_holm: float  # the same, corrected for the other tests of the diagnosis
    classes: dict[int, tuple[float, float]]  # effect and p-value, corrected over the classes, by class

    @property
    def size(self) -> str:
        """The effect in a word.

        Small: below 0.25, with the whole interval below 0.5. Large: 0.5 or more, and significant. Moderate: between,
        and significant. Otherwise unclear.
        """
        if np.isnan(self.effect):
            return "unclear"
        if self.effect < SMALL:
            return "small" if self.high < LARGE else "unclear"
        if self.p_holm >= LEVEL:
            return "unclear"
        return "large" if self.effect >= LARGE else "moderate"


def chordal(x: Array, y: Array) -> Array:
    """Return |x_i - y_j| of unit vectors [N, n] and [M, n].

    Its energy distance is zero only for equal distributions, and invariant under rotation.
    """
    return np.sqrt(np.clip(2 - 2 * (x @ y.T), 0, None))


def group_means(distances: Array, weights: Array) -> NDArray[np.float64]:
    """Return the mean distance between samples of every two groups, for P ways to group n samples.

    Args:
        distances: Distances between samples, [n, n].
        weights: How often each sample is in each group, [n, K, P]: an indicator, or the counts of a bootstrap.

    Returns:
        Means [P, K, K] without pairs of a sample with itself; NaN where there is no pair.
    """
    n, groups, times = weights.shape
    reach = (distances @ weights.reshape(n, -1)).reshape(weights.shape)
    sums = np.empty((times, groups, groups))
    for a in range(groups):
        for b in range(a, groups):
            sums[:, a, b] = sums[:, b, a] = np.einsum("ip,ip->p", weights[:, a], reach[:, b])
    counts, squares = weights.sum(0).T.astype(float), (weights**2).sum(0).T.astype(float)
    pairs = counts[:, :, None] * counts[:, None, :] - np.eye(groups) * squares[:, None, :]
    return np.divide(sums, pairs, out=np.full_like(sums, np.nan), where=pairs > 0)


def energy_distances(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute E_ab = 2 E|X_a - X_b| - E|X_a - X_a'| - E|X_b - X_b'| from `group_means` (Szekely and Rizzo 2004).

    Its expectation is 0 for equal distributions with any number of samples, as no sample is paired with itself.
    """
    within = np.diagonal(means, axis1=1, axis2=2)
    return 2 * means - within[:, :, None] - within[:, None, :]


def shift(
    classes: dict[int, tuple[Array, NDArray[np.integer]]],
    pairs: Pairs,
    scale: float,
    permutations: int,
    rng: np.random.Generator,
) -> Shift | None:
    """Measure the effect sqrt(E / scale), E the mean energy distance between domains within classes.

    The test permutes the domains of samples within each class. The interval resamples each class of each domain.

    Args:
        classes: By class, distances between its samples [n, n] and the domain of each sample [n].
        pairs: Pairs of domains to compare.
        scale: Unit of energy distance; NaN makes the effect NaN.
        permutations: Number of permutations.
        rng: Source of permutations and samples.

    Returns:
        None if no class has two domains to compare.
    """
    null, resampled, compared_classes = [], [], []
    for number, (distances, domains) in classes.items():
        here = np.unique(domains)
        compared = np.array([[(a, b) in pairs for b in here] for a in here])
        if not compared.any():
            continue
        indicator = (domains[:, None] == here).astype(np.float32)
        shuffled = rng.permuted(np.tile(np.arange(len(domains)), (permutations, 1)), axis=1)
        weights = np.concatenate([indicator[None], indicator[shuffled]]).transpose(1, 2, 0)
        null.append(energy_distances(group_means(distances, weights))[:, compared])
        counts = np.zeros((len(domains), len(here), BOOTSTRAPS), np.float32)
        for k, domain in enumerate(here):
            members = np.flatnonzero(domains == domain)
            drawn = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), BOOTSTRAPS)
            drawn[(drawn > 0).sum(1) < 2] = 1  # one image alone has no distance to another
            counts[members, k] = drawn.T
        resampled.append(energy_distances(group_means(distances, counts))[:, compared])
        compared_classes.append(number)
    if not compared_classes:
        return None

    def effects(energy: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sqrt(np.clip(energy / scale, 0, None))

    by_class = [energies.mean(1) for energies in null]
    p_classes = holm([permutation_p(energies) for energies in by_class])
    pooled = np.concatenate(null, axis=1).mean(1)
    low, high = np.quantile(effects(np.concatenate(resampled, axis=1).mean(1)), (LEVEL, 1 - LEVEL))
    p = permutation_p(pooled)
    return Shift(
        float(effects(pooled[0])),
        float(low),
        float(high),
        p,
        p,
        {
            number: (float(effects(energies[0])), p_class)
            for number, energies, p_class in zip(compared_classes, by_class, p_classes, strict=True)
        },
    )


def permutation_p(statistics: Array) -> float:
    """Return the share of statistics not below the first, which is the observed one; the others are of permutations."""
    tolerance = 1e-6 * np.abs(statistics).max()  # of float32 sums in another order
    return float((statistics >= statistics[0] - tolerance).mean())


def holm(p: Sequence[float]) -> list[float]:
    """Correct p-values so that the chance of any false alarm stays below the level (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    steps = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected.tolist()


# Families of norms ----------------------------------------------------------------------------------------------------


def exponential_distance(r: Array) -> Array:
    """Return the Kolmogorov-Smirnov distance of samples [..., n] from the exponential distribution of their mean."""
    return ks_distance(r, lambda sorted_r: -np.expm1(-sorted_r / r.mean(-1, keepdims=True)))


def uniform_distance(r: Array) -> Array:
    """Return the Kolmogorov-Smirnov distance of samples [..., n] from the uniform distribution of their range."""
    low, high = r.min(-1, keepdims=True), r.max(-1, keepdims=True)
    return ks_distance(r, lambda sorted_r: (sorted_r - low) / np.where(high > low, high - low, 1))


def ks_distance(r: Array, cdf: Callable[[Array], Array]) -> Array:
    n = r.shape[-1]
    values = cdf(np.sort(r, axis=-1))
    steps = np.arange(n + 1) / n
    return np.maximum(steps[1:] - values, values - steps[:-1]).max(-1)


def fit_p(distance: Callable[[Array], Array], draw: Callable[[tuple[int, int]], Array], r: Array, times: int) -> float:
    """Return the chance of a distance at least as large as r's for samples of the family (Lilliefors).

    The parameters are estimated for each of `times` samples. Members of the family differ by scale and place only, so
    the samples may come from any member.
    """
    drawn = np.array([distance(draw((1, len(r))))[0] for _ in range(times)])
    return float((1 + (drawn >= distance(r)).sum()) / (1 + times))
