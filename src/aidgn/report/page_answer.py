"""The result of a data set as numbers, which the page's template puts into words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aidgn.report.table import Trials, average_over_targets, have_same_trials


@dataclass(frozen=True)
class Comparison:
    """The best algorithm against the next, in the trials that have every target of both."""

    second: str
    same_trials: bool  # whether both have the same trials on every target
    differences: list[float]  # best minus second per trial, in points
    wins: int  # targets on which the best is ahead

    @property
    def mean(self) -> float:
        return float(np.mean(self.differences))

    @property
    def ahead(self) -> int:
        """The number of trials in which the best is ahead."""
        return sum(difference > 0 for difference in self.differences)


@dataclass(frozen=True)
class Answer:
    """The algorithm with the highest average accuracy on a data set."""

    best: str
    mean: float  # percent
    targets: dict[str, float]  # accuracy of the best in percent by unseen domain
    trials: int | None  # None if targets have different trials
    comparison: Comparison | None  # None if there is no other algorithm with an average
    without_average: list[str]  # algorithms that lack a target


def make_answer(domains: Sequence[str], results: Mapping[str, Trials]) -> Answer | None:
    """Find the best algorithm and compare it with the next.

    Args:
        domains: Names of the data set's domains.
        results: Accuracies from 0 to 1 by algorithm.

    Returns:
        None if no algorithm has a result for every target.
    """
    targets = sorted({target for trials in results.values() for target in trials})
    means = {
        name: [100 * float(np.mean(list(trials[target].values()))) for target in targets]
        for name, trials in results.items()
        if trials.keys() == {*targets}
    }
    if not means:
        return None
    best, *others = sorted(means, key=lambda name: -sum(means[name]))
    return Answer(
        best,
        sum(means[best]) / len(targets),
        dict(zip([domains[target] for target in targets], means[best], strict=True)),
        len(results[best][targets[0]]) if have_same_trials(results[best]) else None,
        _compare(others[0], results[best], results[others[0]], targets) if others else None,
        [name for name in results if name not in means],
    )


def _compare(second: str, best: Trials, other: Trials, targets: Sequence[int]) -> Comparison:
    ours = average_over_targets(best, targets)
    theirs = average_over_targets(other, targets)
    trials = sorted(ours.keys() & theirs.keys())
    gains = [sum(best[target][trial] - other[target][trial] for trial in trials) for target in targets]
    return Comparison(
        second,
        have_same_trials(best, other),
        [100 * (ours[trial] - theirs[trial]) for trial in trials],
        sum(gain > 0 for gain in gains),
    )
