"""Average ranks of algorithms, with the tests of Friedman and Nemenyi."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from scipy.stats import friedmanchisquare, rankdata, studentized_range

from aidgn.analysis.pairs import Choices, Pair, Values, complete_trials

LEVEL = 0.05  # level of significance


@dataclass(frozen=True)
class Ranks:
    """Average ranks over pairs (target, trial), 1 for the best (Demšar 2006)."""

    averages: dict[str, float]  # average rank by algorithm, the best first
    blocks: int  # number of pairs that were ranked
    p: float | None  # p-value of Friedman's test that all algorithms are alike; None for two algorithms
    critical_difference: float  # ranks that are further apart differ clearly (Nemenyi's test at 5 %)
    # Largest number of runs that a ranked value was chosen from, by algorithm
    draws: dict[str, int] = field(default_factory=dict)

    @property
    def same_budget(self) -> bool:
        """Whether all algorithms were chosen from the same number of runs."""
        return len(set(self.draws.values())) < 2

    def groups(self) -> list[list[str]]:
        """Return the largest groups of algorithms whose ranks are too close to tell them apart."""
        names = list(self.averages)
        groups: list[list[str]] = []
        for start, name in enumerate(names):
            limit = self.averages[name] + self.critical_difference
            group = [other for other in names[start:] if self.averages[other] <= limit]
            if len(group) > 1 and not any(set(group) <= set(larger) for larger in groups):
                groups.append(group)
        return groups


def rank(
    values: Mapping[str, Values],
    targets: Collection[tuple[str, int]],
    higher_is_better: bool = True,
    choices: Choices = MappingProxyType({}),
) -> Ranks | None:
    """Rank algorithms within each (target, trial) of the trials that all of them have on every target.

    With k algorithms and N ranked pairs, the critical difference is q sqrt(k (k + 1) / (6 N)), where q is the 95 %
    quantile of the studentized range of k values, divided by sqrt(2).

    Args:
        values: Values by algorithm and pair.
        targets: Targets as (data set, number).
        higher_is_better: Whether the highest value has rank 1.
        choices: Number of runs that each value was chosen from; 1 where it is not given.

    Returns:
        The ranks; None if no trial is complete.
    """
    complete = complete_trials(list(values.values()), targets)
    pairs = [Pair(dataset, target, trial) for dataset, target in sorted(targets) for trial in complete[dataset]]
    if not pairs:
        return None
    table = np.array([[values[name][pair] for name in values] for pair in pairs])
    averages = rankdata(-table if higher_is_better else table, axis=1).mean(axis=0)
    k = len(values)
    quantile = studentized_range.ppf(1 - LEVEL, k, np.inf) / np.sqrt(2)
    order = np.argsort(averages, kind="stable")
    names = list(values)
    return Ranks(
        {names[i]: float(averages[i]) for i in order},
        len(pairs),
        float(friedmanchisquare(*table.T).pvalue) if k > 2 else None,
        float(quantile * np.sqrt(k * (k + 1) / (6 * len(pairs)))),
        {name: max(choices.get(name, {}).get(pair, 1) for pair in pairs) for name in names},
    )
