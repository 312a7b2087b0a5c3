"""The accuracy to expect on an unseen domain, and the choice between two algorithms."""

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.special import stdtrit

from aidgn.errors import plural
from aidgn.runs.differences import differences
from aidgn.selection import read_runs, select

CLEAR_POINTS = 0.01  # a smaller difference is never clear

log = logging.getLogger("aidgn")


@dataclass(frozen=True)
class Estimate:
    """The accuracy of an algorithm on each domain, by runs that never saw the domain.

    Args:
        algorithm: Its name in tables.
        accuracies: Accuracy by domain, the mean over trials.
    """

    algorithm: str
    accuracies: dict[str, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies.values())

    @property
    def standard_deviation(self) -> float:
        """The standard deviation between domains."""
        return statistics.stdev(self.accuracies.values()) if len(self.accuracies) > 1 else 0.0

    @property
    def worst(self) -> tuple[str, float]:
        """The domain with the lowest accuracy, and this accuracy."""
        return min(self.accuracies.items(), key=lambda entry: entry[1])

    def __str__(self) -> str:
        domain, accuracy = self.worst
        return (
            f"On an unseen domain expect about {self.mean:.0%} with {self.algorithm}: mean {self.mean:.1%} over "
            f"{plural(len(self.accuracies), 'domain')} left out in turn, standard deviation between domains "
            f"{100 * self.standard_deviation:.1f} points, worst {domain} with {accuracy:.1%}."
        )


def read_estimates(folders: Sequence[str | Path]) -> list[Estimate]:
    """Read the estimates from finished runs with one unseen domain each, at the step that validation selects."""
    if not folders:
        return []
    accuracies: dict[str, dict[str, list[float]]] = {}
    records = read_runs(*folders)
    for difference in differences(records.runs):
        log.warning("%s", difference)
    for row in select(records, "training"):
        accuracies.setdefault(row["algorithm"], {}).setdefault(row["target_name"], []).append(row["accuracy"])
    return [
        Estimate(algorithm, {domain: statistics.fmean(trials) for domain, trials in by_domain.items()})
        for algorithm, by_domain in accuracies.items()
    ]


def choose_algorithm(estimates: Sequence[Estimate], preferred: str) -> str:
    """Choose the algorithm with the higher mean; the preferred one if the means are equal or unknown."""
    if not estimates:
        return preferred
    return max(estimates, key=lambda estimate: (estimate.mean, estimate.algorithm == preferred)).algorithm


def is_clear_difference(first: Estimate, second: Estimate) -> bool:
    """Whether the means differ by more than a point, and a paired t test over domains finds that at 5 %."""
    gaps = [accuracy - second.accuracies[domain] for domain, accuracy in first.accuracies.items()]
    if len(gaps) < 3:
        return False
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return abs(statistics.fmean(gaps)) > max(float(stdtrit(len(gaps) - 1, 0.975)) * error, CLEAR_POINTS)


def compare(estimates: Sequence[Estimate], chosen: str) -> str:
    """Say how the two algorithms compare and which of them the final model uses."""
    first, second = sorted(estimates, key=lambda estimate: estimate.algorithm != chosen)
    verdict = "a clear difference" if is_clear_difference(first, second) else "no clear difference"
    return (
        f"{first.algorithm} {first.mean:.1%}, {second.algorithm} {second.mean:.1%}: {verdict}. "
        f"The final model uses {chosen}."
    )


def summarize(estimates: Sequence[Estimate], chosen: str, seen_accuracy: float, classes: int) -> list[str]:
    """Say what to expect of the final model, a sentence each.

    Args:
        estimates: Estimates of one algorithm or two; none if there is only one domain.
        chosen: The algorithm of the final model.
        seen_accuracy: Its accuracy on validation images of the domains it has seen.
        classes: Number of classes.
    """
    sentences = [
        f"{estimate} Guessing gives {1 / classes:.1%}." for estimate in estimates if estimate.algorithm == chosen
    ]
    if len(estimates) > 1:
        sentences.append(compare(estimates, chosen))
    return [*sentences, f"On the domains it has seen: {seen_accuracy:.1%} of the validation images."]
