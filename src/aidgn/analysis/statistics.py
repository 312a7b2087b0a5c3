"""The statistics of a diagnosis: energy distances between domains with permutation tests and bootstrap intervals,
Holm's correction, goodness of fit with estimated parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Pairs = set[tuple[int, int]]  # of domains that are compared, in one order each

LEVEL = 0.05  # of significance; intervals hold 1 - 2 LEVEL, so that each end is a test at this level
SMALL, LARGE = 0.25, 0.5  # effects below and above these are called small and large
BOOTSTRAPS = 200


@dataclass(frozen=True)
class Shift:
    """How far domains are apart within classes. `p` is of the permutation test, `p_holm` corrected for the tests made
    beside it; `low` and `high` are the ends of a 90 % interval of `effect`."""

    effect: float
    low: float
    high: float
    p: float
    p_holm: float
    classes: dict[int, tuple[float, float]]  # class -> (effect, p corrected over the classes)

    @property
    def size(self) -> str:
        """small: below 0.25, and surely below 0.5; large: from 0.5 on and beyond chance; moderate: between, beyond
        chance; else unclear, as there are too few images to tell, or nothing to measure by (NaN)."""
        if np.isnan(self.effect):
            return "unclear"
        if self.effect < SMALL:
            return "small" if self.high < LARGE else "unclear"
        if self.p_holm >= LEVEL:
            return "unclear"
        return "large" if self.effect >= LARGE else "moderate"


def chordal(x: Array, y: Array) -> Array:
    """|x_i - y_j| of unit vectors [N, n] and [M, n]. Energy distances of it vanish for equal distributions only, and no
    rotation changes them."""
    return np.sqrt(np.clip(2 - 2 * (x @ y.T), 0, None))


def group_means(distances: Array, weights: Array) -> NDArray[np.float64]:
    """Mean distance between a sample of group a and another one of group b [P, K, K], for P ways to group n samples.

    distances [n, n]; weights [n, K, P]: how often sample i is in group a, as an indicator, permuted, or as the counts
    of a bootstrap. A pair of a sample with itself never counts; NaN where there is no pair."""
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
    """E_ab = 2 E|X_a - X_b| - E|X_a - X_a'| - E|X_b - X_b'| from `group_means`. As no pair of a sample with itself
    counts, its mean is 0 for equal distributions, whatever the number of samples (Szekely and Rizzo 2004)."""
    within = np.diagonal(means, axis1=1, axis2=2)
    return 2 * means - within[:, :, None] - within[:, None, :]


def shift(
    classes: dict[int, tuple[Array, NDArray[np.integer]]],
    pairs: Pairs,
    scale: float,
    permutations: int,
    rng: np.random.Generator,
) -> Shift | None:
    """Energy distance between the two domains of a pair within a class, its mean over classes and pairs, as the effect
    sqrt(E / scale), NaN if `scale` is; None if no class has two domains to compare.

    classes: class -> (distances [n, n], domain of each sample [n]). The test permutes the domains of the samples within
    each class; the interval resamples each class of each domain."""
    null, resampled, found = [], [], []
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
            own = np.flatnonzero(domains == domain)
            drawn = rng.multinomial(len(own), np.full(len(own), 1 / len(own)), BOOTSTRAPS)
            drawn[(drawn > 0).sum(1) < 2] = 1  # one image alone has no distance to another
            counts[own, k] = drawn.T
        resampled.append(energy_distances(group_means(distances, counts))[:, compared])
        found.append(number)
    if not found:
        return None

    def effects(energy: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sqrt(np.clip(energy / scale, 0, None))

    by_class = [each.mean(1) for each in null]
    p_classes = holm([permutation_p(each) for each in by_class])
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
            number: (float(effects(each[0])), p_class)
            for number, each, p_class in zip(found, by_class, p_classes, strict=True)
        },
    )


def permutation_p(statistics: Array) -> float:
    """The share of statistics, the first being the observed one and the others those of permutations, not below it."""
    tolerance = 1e-6 * np.abs(statistics).max()  # of float32 sums in another order
    return float((statistics >= statistics[0] - tolerance).mean())


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected so that the chance of any false alarm among them stays below the level (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    steps = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected.tolist()


# Families of norms ----------------------------------------------------------------------------------------------------


def exponential_distance(r: Array) -> Array:
    """Kolmogorov-Smirnov distance of samples r [..., n] from the exponential distribution of their mean."""
    return ks_distance(r, lambda sorted_r: -np.expm1(-sorted_r / r.mean(-1, keepdims=True)))


def uniform_distance(r: Array) -> Array:
    """Kolmogorov-Smirnov distance of samples r [..., n] from the uniform distribution between their extremes."""
    low, high = r.min(-1, keepdims=True), r.max(-1, keepdims=True)
    return ks_distance(r, lambda sorted_r: (sorted_r - low) / np.where(high > low, high - low, 1))


def ks_distance(r: Array, cdf: Callable[[Array], Array]) -> Array:
    n = r.shape[-1]
    values = cdf(np.sort(r, axis=-1))
    steps = np.arange(n + 1) / n
    return np.maximum(steps[1:] - values, values - steps[:-1]).max(-1)


def fit_p(distance: Callable[[Array], Array], draw: Callable[[tuple[int, int]], Array], r: Array, times: int) -> float:
    """Return the chance of a distance as large as that of r if r were of the family (Lilliefors).

    The parameters are estimated for each of `times` samples. Members of the family differ by scale and place only, so
    the samples may come from any member.
    """
    drawn = np.array([distance(draw((1, len(r))))[0] for _ in range(times)])
    return float((1 + (drawn >= distance(r)).sum()) / (1 + times))
