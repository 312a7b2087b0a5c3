"""Many runs: the plan of them, and how they are launched."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from aidgn.data import DATASETS, Dataset
from aidgn.data.cache import prepare
from aidgn.errors import AidgnError, did_you_mean

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec

Load = Callable[["RunSpec"], Dataset]


def plan(
    datasets: Sequence[str],
    algorithms: Sequence[str],
    *,
    targets: Sequence[str] = (),
    leave_one_out: bool = False,
    trials: int = 3,
    draws: int = 1,
    hyper_parameters: Mapping[str, Any] | None = None,
    data_dir: str | None = None,
    load: Load | None = None,
    **shared: Any,
) -> "list[RunSpec]":
    """Every combination, in order of priority: data set, algorithm, point of the grid, draw, trial, target.

    No target means each domain in turn; what is named twice counts once. `leave_one_out` adds the runs with two unseen
    domains that selection by leave-one-domain-out needs. A hyper-parameter that only some algorithms have is set for
    these; one given as a list is varied, one at a time, the others as they are; {algorithm: {name: value}} is for that
    algorithm alone. `shared` goes to every run. All are checked against their data set, as `load` gives it, before the
    first one starts."""
    from aidgn.algorithms import canonical, find
    from aidgn.runs.spec import RunSpec

    for option, value in (("trials", trials), ("draws", draws)):
        if value < 1:
            raise AidgnError(f"--{option} is {value}; expected a whole number of at least 1.")
    algorithms = list(dict.fromkeys(map(canonical, algorithms)))
    points = {algorithm: grid(algorithm, algorithms, hyper_parameters or {}) for algorithm in algorithms}
    specs: list[RunSpec] = []
    names: dict[str, str] = {}
    for dataset in dict.fromkeys(datasets):
        blank = RunSpec(dataset, **shared)
        loaded = load(blank) if load else load_for(blank, data_dir)
        if loaded.name in names:
            raise AidgnError(
                f"{names[loaded.name]} and {dataset} are both called {loaded.name}, and tables could not "
                "tell them apart. Rename one of the folders."
            )
        names[loaded.name] = dataset
        groups = unseen(loaded, targets, leave_one_out)
        most = max(groups, key=len)
        left = len(loaded.domains) - len(most)
        lacking = [find(each).name() for each in algorithms if 0 < left < find(each).min_domains]
        if len(lacking) > 1:  # of one it is said below; here that nobody has to find them one by one
            unseen_here = f"with {' and '.join(most)} unseen, " if most else ""
            raise AidgnError(
                f"{', '.join(lacking)} need more source domains: {unseen_here}{loaded.name} has {left}. Leave them out."
            )
        for algorithm in algorithms:
            seen = set()
            for given in points[algorithm]:
                for draw in range(draws):
                    for trial in range(trials):
                        runs = list(
                            _resolved(
                                replace(blank, algorithm=algorithm, trial=trial, draw=draw, hyper_parameters=given),
                                groups,
                                loaded,
                            )
                        )
                        same = repr((draw, trial, runs[0].hyper_parameters))  # a value of a grid may be the default
                        if same not in seen:
                            specs += runs
                        seen.add(same)
    return specs


def load_for(spec: "RunSpec", data_dir: str | None = None) -> Dataset:
    """The data set as the run will see it. Draws depend on what an own folder holds, so without its broken images."""
    dataset = spec.load_dataset(data_dir)
    own = dataset.name not in DATASETS
    return prepare(dataset, skip_broken=True).dataset if spec.skip_broken and own else dataset


def grid(algorithm: str, algorithms: Sequence[str], hyper_parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The hyper-parameters given for an algorithm; then, for every value of every list, with this one value."""
    from aidgn.algorithms import find

    known = {find(name).name(): name for name in algorithms}
    given = {name: value for name, value in hyper_parameters.items() if not isinstance(value, Mapping)}
    spaces = {each: find(each).search_space for each in algorithms}
    elsewhere = {name for each in spaces.values() for name in each if name in given} - {*spaces[algorithm]}
    for name, value in hyper_parameters.items():
        if name not in given and name.casefold() not in map(str.casefold, (*known, *algorithms)):
            raise AidgnError(
                f"hyper_parameters: {name} is not an algorithm of this plan."
                f"{did_you_mean(name, known)} It has {', '.join(known)}."
            )
        if name not in given and name.casefold() in (algorithm.casefold(), find(algorithm).name().casefold()):
            given |= value
    given = {name: value for name, value in given.items() if name not in elsewhere}
    base = {name: value for name, value in given.items() if not isinstance(value, list | tuple)}
    points = [base]
    for name, values in given.items():
        if isinstance(values, list | tuple):
            if not values:
                raise AidgnError(f"hyper_parameters: {name} is an empty list; expected values to try.")
            points += [{**base, name: value} for value in values]
    return points


def unseen(dataset: Dataset, targets: Sequence[str], leave_one_out: bool) -> list[tuple[str, ...]]:
    """The unseen domains of each run: one by one; and all pairs of a target with another domain, if asked for."""
    numbers = list(dict.fromkeys(dataset.find_domain(str(target)) for target in targets))
    numbers = numbers or list(range(len(dataset.domains)))
    pairs = (
        dict.fromkeys(
            tuple(sorted((target, other)))
            for target in numbers
            for other in range(len(dataset.domains))
            if other != target
        )
        if leave_one_out
        else {}
    )
    return [tuple(dataset.domains[number] for number in group) for group in [*((n,) for n in numbers), *pairs]]


def _resolved(spec: "RunSpec", groups: Sequence[tuple[str, ...]], dataset: Dataset) -> "Iterator[RunSpec]":
    """The run with each group of unseen domains. Nothing else depends on them but how many they are."""
    for _, same in groupby(groups, len):
        first, *rest = same
        resolved = replace(spec, target=first).resolved(dataset)
        yield resolved
        yield from (replace(resolved, target=group) for group in rest)
