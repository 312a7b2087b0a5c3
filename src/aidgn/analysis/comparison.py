"""Paired comparisons of algorithms: differences with intervals, permutation tests, and average ranks.

Two algorithms are compared on the results that both have: a pair is the same unseen domain of the same trial. Under the
hypothesis that both have the same accuracy on these domains, both signs of every difference are equally likely. The
tests say nothing about other domains.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from scipy.stats import permutation_test

from aidgn.analysis.pairs import Choices, Pair, Values, complete_trials
from aidgn.analysis.ranks import LEVEL, Ranks, rank
from aidgn.analysis.statistics import holm
from aidgn.metrics import METRICS
from aidgn.runs.differences import count_choices
from aidgn.runs.records import Record, as_records
from aidgn.selection import select

MIN_TRIALS = 3  # with fewer trials, differences are shown without a test
RESAMPLES = 2**16  # permutations; up to 16 pairs have no more, so that their test is exact


@dataclass(frozen=True)
class Difference:
    """The difference of two algorithms, the one with the better mean first."""

    first: str  # algorithm with the better mean
    second: str  # the other algorithm
    trials: int  # trials that both have on every target; of several data sets the fewest
    pairs: int  # number of pairs (target, trial) in these trials
    # Mean of first minus second; in points if the metric is a share. NaN without pairs.
    mean: float
    low: float | None  # lower end of the 95 % interval of the mean (Student's t over pairs); None if there is no test
    high: float | None  # its upper end
    p: float | None  # p-value of the permutation test; None if there is no test
    p_holm: float | None  # p-value corrected for the number of tests (Holm 1979)
    wins: int  # pairs in which the first is better
    losses: int  # pairs in which the second is better
    targets: dict[tuple[str, int], float]  # mean difference by (data set, target)
    # Number of runs (draws or values of hyper-parameters) that the results of the first and of the second were chosen
    # from, in the pair where the two numbers differ most
    draws: tuple[int, int]

    @property
    def ties(self) -> int:
        return self.pairs - self.wins - self.losses

    @property
    def same_budget(self) -> bool:
        """Whether both results of every pair were chosen from the same number of runs."""
        return self.draws[0] == self.draws[1]

    @property
    def clear(self) -> bool:
        """Whether the corrected test finds a difference between algorithms with the same budget."""
        return self.p_holm is not None and self.p_holm < LEVEL and self.same_budget

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        if self.p_holm is None:
            return f"too few trials ({self.trials})"
        if not self.same_budget:
            return f"unequal budgets ({self.draws[0]}, {self.draws[1]})"
        return f"{self.first} is better" if self.clear else "no clear difference"


@dataclass(frozen=True)
class Comparison:
    """The comparison of all algorithms on a data set, or over several."""

    dataset: str | None  # name of the data set; None for several
    metric: str  # a key of `aidgn.metrics.METRICS`
    differences: list[Difference]  # one for every two algorithms, the largest first
    ranks: Ranks | None  # average ranks; None if there are fewer than two algorithms with enough trials
    left_out: dict[str, int]  # algorithms with too few trials for a test, with the number

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        differences = [
            {
                **asdict(difference),
                "ties": difference.ties,
                "verdict": difference.verdict,
                "targets": [
                    {"dataset": dataset, "target": target, "mean": mean}
                    for (dataset, target), mean in difference.targets.items()
                ],
            }
            for difference in self.differences
        ]
        ranks = self.ranks and {**asdict(self.ranks), "groups": self.ranks.groups()}
        return {
            "dataset": self.dataset,
            "metric": self.metric,
            "differences": differences,
            "ranks": ranks,
            "left_out": self.left_out,
        }


def compare(
    records: Iterable[Record],
    method: str = "training",
    metric: str = "accuracy",
) -> list[Comparison]:
    """Compare every two algorithms on the results that a selection method selects.

    Args:
        records: Records of runs. Unfinished runs are left out.
        method: Selection method, a name in `aidgn.selection.METHODS`.
        metric: A key of `aidgn.metrics.METRICS`.

    Returns:
        A comparison per data set and, if there are several data sets, one over all of them.
    """
    finished = as_records(records).finished()
    values: dict[str, Values] = {}
    for row in select(finished, method):
        if not np.isnan(row.get(metric, np.nan)):
            pair = Pair(row["dataset"], row["target"], row["trial"])
            values.setdefault(row["algorithm"], {})[pair] = METRICS[metric].factor * row[metric]
    choices: dict[str, dict[Pair, int]] = {}
    for place, count in count_choices(finished.runs).items():
        choices.setdefault(place.algorithm, {})[Pair(place.dataset, place.target, place.trial)] = count
    datasets = list(dict.fromkeys(pair.dataset for results in values.values() for pair in results))
    made = []
    for dataset in datasets:
        on_dataset = {
            name: {pair: value for pair, value in results.items() if pair.dataset == dataset}
            for name, results in values.items()
        }
        made.append(compare_values(dataset, {k: v for k, v in on_dataset.items() if v}, choices, metric))
    if len(datasets) > 1:
        made.append(compare_values(None, values, choices, metric))
    return made


def compare_values(
    dataset: str | None,
    values: Mapping[str, Values],
    choices: Choices,
    metric: str = "accuracy",
) -> Comparison:
    """Compare every two algorithms on their values.

    If several algorithms have enough trials for a test, those with fewer are left out.

    Args:
        dataset: Name of the data set; None for several.
        values: Values by algorithm and pair.
        choices: Number of runs that each value was chosen from; 1 where it is not given.
        metric: A key of `aidgn.metrics.METRICS`.
    """
    everywhere = {(pair.dataset, pair.target) for results in values.values() for pair in results}
    trials = {name: _fewest(complete_trials([results], everywhere)) for name, results in values.items()}
    enough = [name for name in values if trials[name] >= MIN_TRIALS]
    names = enough if len(enough) > 1 else list(values)
    higher = METRICS[metric].higher_is_better
    differences = [
        _difference(first, second, values, everywhere, choices, higher) for first, second in combinations(names, 2)
    ]
    tested = [number for number, difference in enumerate(differences) if difference.p is not None]
    p_values = holm([differences[number].p for number in tested])  # type: ignore[misc]
    corrected = dict(zip(tested, p_values, strict=True))
    differences = [replace(difference, p_holm=corrected.get(number)) for number, difference in enumerate(differences)]
    differences.sort(key=lambda difference: -abs(np.nan_to_num(difference.mean)))
    left_out = {name: trials[name] for name in values if name not in names}
    ranks = rank({name: values[name] for name in enough}, everywhere, higher, choices) if len(enough) > 1 else None
    return Comparison(dataset, metric, differences, ranks, left_out)


def _fewest(trials: Mapping[str, Sequence[int]]) -> int:
    return min(map(len, trials.values()))


def _difference(
    first: str,
    second: str,
    values: Mapping[str, Values],
    everywhere: Collection[tuple[str, int]],
    choices: Choices,
    higher_is_better: bool,
) -> Difference:
    """Compare two algorithms in the trials that both have on every target, so that all targets have the same weight."""
    complete = complete_trials([values[first], values[second]], everywhere)
    pairs = [Pair(dataset, target, trial) for dataset, target in sorted(everywhere) for trial in complete[dataset]]
    gaps = np.array([values[first][pair] - values[second][pair] for pair in pairs])
    if len(gaps) and gaps.mean() != 0 and (gaps.mean() > 0) != higher_is_better:
        first, second, gaps = second, first, -gaps
    targets = {
        place: float(np.mean([gap for pair, gap in zip(pairs, gaps, strict=True) if pair[:2] == place]))
        for place in sorted(everywhere)
        if complete[place[0]]
    }
    better = gaps if higher_is_better else -gaps
    trials = _fewest(complete)
    tested = trials >= MIN_TRIALS
    low, high = mean_interval(gaps) if tested else (None, None)
    of_first, of_second = choices.get(first, {}), choices.get(second, {})
    draws = [(of_first.get(pair, 1), of_second.get(pair, 1)) for pair in pairs]
    return Difference(
        first,
        second,
        trials,
        len(pairs),
        float(gaps.mean()) if len(gaps) else float("nan"),
        low,
        high,
        sign_permutation_p(gaps) if tested else None,
        None,
        int((better > 0).sum()),
        int((better < 0).sum()),
        targets,
        max(draws, key=lambda counts: (abs(counts[0] - counts[1]), counts), default=(1, 1)),
    )


def mean_interval(gaps: NDArray[np.float64], level: float = LEVEL) -> tuple[float, float]:
    """Return the interval mean ± t_(1 - level/2, n - 1) s / sqrt(n) of n differences."""
    half = stdtrit(len(gaps) - 1, 1 - level / 2) * gaps.std(ddof=1) / np.sqrt(len(gaps))
    return float(gaps.mean() - half), float(gaps.mean() + half)


def sign_permutation_p(gaps: NDArray[np.float64]) -> float:
    """Return the two-sided p-value of the mean of paired differences when their signs are permuted.

    All 2^n signs are counted up to n = 16, beyond that `RESAMPLES` random ones from a fixed seed.
    """
    if not gaps.any():
        return 1.0
    result = permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, random_state=0)
    return float(result.pvalue)
