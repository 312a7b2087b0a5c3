"""Pair the results of algorithms: results of the same unseen domain in the same trial."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Pair(NamedTuple):
    """The key of a result. Results of two algorithms with the same key are compared."""

    dataset: str
    target: int
    trial: int


Values = dict[Pair, float]
Choices = Mapping[str, Mapping[Pair, int]]  # runs that a value was chosen from, by algorithm and pair


def complete_trials(results: Sequence[Values], targets: Collection[tuple[str, int]]) -> dict[str, list[int]]:
    """Return the trials in which all of these results have every target of a data set, by data set."""
    common = set.intersection(*(set(values) for values in results))
    complete = {}
    for dataset in dict.fromkeys(dataset for dataset, _ in sorted(targets)):
        wanted = [target for name, target in targets if name == dataset]
        by_target = [{pair.trial for pair in common if pair[:2] == (dataset, target)} for target in wanted]
        complete[dataset] = sorted(set.intersection(*by_target))
    return complete
