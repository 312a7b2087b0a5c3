"""The accuracy at a new site as a prediction interval over sites.

The sample are sites (domains), not pictures. y = arcsin sqrt((right + 3/8) / (pictures + 3/4)) has nearly the same
sampling variance, 1 / (4 pictures), at every accuracy (Anscombe, Biometrika 1948). With n sites of mean m and variance
s^2 of y, the y of a new site lies in

    m +- t(n - 1) sqrt(s^2 (1 + 1/n) + w^2 (1 - 1/T))

if sites are drawn alike from a normal distribution of y. s^2 is at least the sampling variance of the pictures, so that
sites that agree by chance give no certainty. w^2 is the variance between T trainings of one site: the model in use is
one of them, not their mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtr, stdtrit

from aidgn.errors import plural

LEVEL = 0.9  # nine new sites in ten
WIDE = 0.8  # width of an interval that says hardly anything
MIN_SITES = 3  # with two, the factor of the standard deviation is 7.7, and no accuracy is excluded


@dataclass(frozen=True)
class Interval:
    """An interval of accuracies."""

    low: float  # its lower end
    high: float  # its upper end
    level: float  # share of new sites that lie in the interval
    sites: int  # number of sites that the interval rests on

    def __str__(self) -> str:
        return f"{percent(self.low)} and {percent(self.high)}"

    @property
    def is_wide(self) -> bool:
        """Whether hardly any accuracy is outside."""
        return self.high - self.low >= WIDE


@dataclass(frozen=True)
class SiteAccuracies:
    """Accuracies at sites that a model never saw, as a sample of new sites."""

    accuracies: Mapping[str, Sequence[float]]  # accuracy at each site in each trial
    images: Mapping[str, int]  # number of pictures behind each site's accuracy

    @property
    def mean(self) -> float:
        """The mean over sites of the mean over trials."""
        return float(np.mean([np.mean(values) for values in self.accuracies.values()]))

    def describe(self, model: str = "") -> str:
        """Say what to expect at a new site, or that the sites are too few.

        Args:
            model: Which model this is said of, such as " with ERM".
        """
        sites, interval = len(self.accuracies), self.interval()
        if interval is None:
            return (
                f"{plural(sites, 'site')} are too few for an interval around {percent(self.mean)}: nothing honest can "
                f"be said about the next one. {MIN_SITES} or more make one possible."
            )
        wide = " Sites that differ this much exclude hardly any accuracy." if interval.is_wide else ""
        return (
            f"Expect {percent(self.mean)} right{model}, at nine new sites in ten between {interval} "
            f"({plural(sites, 'site')}, {sum(self.images.values())} pictures), if new sites differ from these as they "
            f"differ from each other.{wide}"
        )

    def interval(self, level: float = LEVEL, more_sites: int = 0) -> Interval | None:
        """Return the prediction interval for the accuracy at a new site; None with fewer than three sites.

        Args:
            level: Share of new sites that lie in it.
            more_sites: Assume so many more sites with the same mean and variance.
        """
        sites = len(self.accuracies) + more_sites
        if len(self.accuracies) < MIN_SITES:
            return None
        reach = float(stdtrit(sites - 1, (1 + level) / 2)) * self._deviation(sites)
        low, high = (float(np.sin(np.clip(self._mean + side * reach, 0, np.pi / 2)) ** 2) for side in (-1, 1))
        return Interval(low, high, level, sites)

    def chance(self, accuracy: float, images: int) -> float | None:
        """Return the chance that a new site like these differs from their mean at least as much as this accuracy.

        None with fewer than three sites.

        Args:
            accuracy: The accuracy at a new site.
            images: The number of its pictures, whose sampling variance counts.
        """
        sites = len(self.accuracies)
        if sites < MIN_SITES:
            return None
        deviation = np.hypot(self._deviation(sites), np.sqrt(sampling_variance(images)))
        difference = abs(float(transform(accuracy, images)) - self._mean)
        return float(2 * stdtr(sites - 1, -difference / deviation))

    @cached_property
    def _values(self) -> list[np.ndarray]:
        return [transform(np.asarray(values), self.images[site]) for site, values in self.accuracies.items()]

    @property
    def _mean(self) -> float:
        return float(np.mean([values.mean() for values in self._values]))

    def _deviation(self, sites: int) -> float:
        between = float(np.var([values.mean() for values in self._values], ddof=1))
        between = max(between, float(np.mean([sampling_variance(self.images[site]) for site in self.accuracies])))
        repeated = [values for values in self._values if len(values) > 1]
        within = float(np.mean([values.var(ddof=1) * (1 - 1 / len(values)) for values in repeated])) if repeated else 0
        return float(np.sqrt(between * (1 + 1 / sites) + within))


def transform(accuracy: float | np.ndarray, images: int) -> np.ndarray:
    """Return arcsin sqrt((right + 3/8) / (images + 3/4))."""
    return np.arcsin(np.sqrt((np.asarray(accuracy) * images + 0.375) / (images + 0.75)))


def sampling_variance(images: int) -> float:
    """Return the variance of `transform` over samples of this many images."""
    return 1 / (4 * images + 2)


def sampling_interval(right: int, images: int, level: float = 0.95) -> Interval:
    """Return Wilson's confidence interval for the accuracy at one site, of which these images are a sample.

    Args:
        right: Number of images with the right label.
        images: Number of images.
        level: Share of samples whose interval covers the accuracy.
    """
    from scipy.stats import binomtest

    low, high = binomtest(right, images).proportion_ci(level, method="wilson")
    return Interval(float(low), float(high), level, 1)


def percent(share: float) -> str:
    """Format a share in whole percent, with a decimal where it is nearly 0 or 1 but neither."""
    near_end = 0 < share < 0.005 or 0.995 < share < 1
    return f"{share:.1%}" if near_end else f"{share:.0%}"
