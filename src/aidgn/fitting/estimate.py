"""The accuracy to expect on an unseen domain, and the choice between algorithms."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scipy.special import stdtrit

from aidgn.data import Dataset
from aidgn.errors import plural
from aidgn.metrics import METRICS
from aidgn.new_site.interval import SiteAccuracies
from aidgn.runs.differences import differences
from aidgn.runs.options import ACCURACY, CHOICES
from aidgn.runs.reader import read_runs
from aidgn.selection import select
from aidgn.terminal import log

CLEAR_POINTS = 0.01  # a smaller difference is never clear


def choose_metric(dataset: Dataset) -> str:
    """Return the name in `CHOICES` of a data set's metric."""
    return next(name for name, metric in CHOICES.items() if metric == dataset.metric)


@dataclass(frozen=True)
class Estimate:
    """The accuracy of an algorithm on each domain, by runs that never saw the domain."""

    algorithm: str  # its name in tables
    accuracies: dict[str, float]  # accuracy by domain, the mean over trials
    balanced_accuracy: dict[str, float] = field(default_factory=dict)  # mean accuracy of the classes, by domain
    macro_f1: dict[str, float] = field(default_factory=dict)  # macro-F1 by domain

    def values(self, metric: str) -> dict[str, float]:
        """Return the values of a metric of `CHOICES` by domain."""
        values: dict[str, float] = self.accuracies if metric == ACCURACY else getattr(self, CHOICES[metric])
        return values

    def score(self, metric: str) -> float:
        """Return the mean over domains of a metric of `CHOICES`."""
        return statistics.fmean(self.values(metric).values())

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
            f"mean {self.mean:.1%} over {plural(len(self.accuracies), 'domain')} left out in turn, standard deviation "
            f"between domains {100 * self.standard_deviation:.1f} points, worst {domain} with {accuracy:.1%}."
        )


def read_estimates(folders: Mapping[str, Sequence[str | Path]]) -> list[Estimate]:
    """Read the estimates from finished runs with one unseen domain each, at the step that validation selects.

    Args:
        folders: Folders of the runs by name of the algorithm.
    """
    estimates = []
    for algorithm, runs in folders.items():
        records = read_runs(*runs)
        for difference in differences(records.runs):
            log.warning("%s", difference)
        rows = select(records, "training")
        means: dict[str, dict[str, float]] = {}
        for domain in dict.fromkeys(row["target_name"] for row in rows):
            trials = [row for row in rows if row["target_name"] == domain]
            for metric in CHOICES.values():
                if metric in trials[0]:  # records of 0.1.0 have the accuracy only
                    means.setdefault(metric, {})[domain] = statistics.fmean(row[metric] for row in trials)
        estimates.append(Estimate(algorithm, *(means.get(metric, {}) for metric in CHOICES.values())))
    return estimates


def choose_algorithm(estimates: Sequence[Estimate], preferred: str, metric: str = ACCURACY) -> str:
    """Choose the algorithm with the higher mean; the preferred one if the means are equal or unknown."""
    if not estimates:
        return preferred
    return max(estimates, key=lambda estimate: (estimate.score(metric), estimate.algorithm == preferred)).algorithm


def is_clear_difference(first: Estimate, second: Estimate, metric: str = ACCURACY) -> bool:
    """Return whether the means differ by more than a point and by a paired t test over domains at 5 %."""
    others = second.values(metric)
    gaps = [value - others[domain] for domain, value in first.values(metric).items()]
    if len(gaps) < 3:
        return False
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return abs(statistics.fmean(gaps)) > max(float(stdtrit(len(gaps) - 1, 0.975)) * error, CLEAR_POINTS)


def compare(estimates: Sequence[Estimate], chosen: str, metric: str = ACCURACY) -> str:
    """Describe how the algorithms compare and which of them the final model uses."""
    first, second, *others = sorted(
        estimates, key=lambda estimate: (estimate.algorithm != chosen, -estimate.score(metric))
    )
    verdict = "a clear difference" if is_clear_difference(first, second, metric) else "no clear difference"
    verdict += f" between {first.algorithm} and {second.algorithm}" if others else ""
    values = ", ".join(f"{entry.algorithm} {entry.score(metric):.1%}" for entry in (first, second, *others))
    by = "" if metric == ACCURACY else f"{METRICS[CHOICES[metric]].title} on unseen domains: "
    return f"{by}{values}: {verdict}. The final model uses {chosen}."


def summarize(
    estimates: Sequence[Estimate],
    chosen: str,
    seen_accuracy: float,
    classes: int,
    metric: str = ACCURACY,
    accuracies: SiteAccuracies | None = None,
) -> list[str]:
    """Describe what to expect of the final model, a sentence or two each.

    Args:
        estimates: Estimates of one algorithm or several; none if there is only one domain.
        chosen: The algorithm of the final model.
        seen_accuracy: Its accuracy on validation images of the domains it has seen.
        classes: Number of classes.
        metric: The metric that chose the algorithm, a name of `CHOICES`.
        accuracies: Its accuracies at the sites left out, for an interval; None if they are not known.
    """
    sentences = []
    for estimate in estimates:
        if estimate.algorithm != chosen:
            continue
        measured = f"{estimate} Guessing gives {1 / classes:.1%}."
        more = accuracies.interval(more_sites=3) if accuracies else None
        if accuracies and more:
            narrower = f"With three more sites like these it would be between {more}."
            sentences.append(f"{accuracies.describe(f' on an unseen domain with {chosen}')} {narrower}")
            sentences.append(f"{chosen}: {measured}")
        else:
            sentences.append(f"On an unseen domain expect about {estimate.mean:.0%} with {chosen}: {measured}")
            sentences += [accuracies.describe()] if accuracies else []
    if len(estimates) > 1:
        sentences.append(compare(estimates, chosen, metric))
    elif estimates and metric != ACCURACY:
        sentences.append(f"{METRICS[CHOICES[metric]].title} on unseen domains: {estimates[0].score(metric):.1%}.")
    return [*sentences, f"On the domains it has seen: {seen_accuracy:.1%} of the validation images."]
