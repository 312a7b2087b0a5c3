"""The plan of a sweep, and its expansion to runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from aidgn.algorithms import canonical, find
from aidgn.algorithms.custom import file_and_class, is_custom
from aidgn.data import DATASETS, Dataset
from aidgn.data.cache import prepare
from aidgn.data.registry import is_registered
from aidgn.data.source import DataSource
from aidgn.errors import AidgnError, ParameterError, UnknownNameError
from aidgn.runs.options import Option, RunOptions, declared_options, option, run_options
from aidgn.runs.spec import RunSpec, check_sources

Load = Callable[[RunSpec], Dataset]
RUN_OPTIONS = tuple(option.name for option in run_options())
MAX_RUNS = 1_000_000
MUST_MATCH = tuple(option.name for option in run_options() if not option.may_differ)


@dataclass(frozen=True)
class SweepPlan(RunOptions):
    """The runs of a sweep: every algorithm on every data set with every target, in every trial and draw.

    Args:
        datasets: Names of data sets, or folders.
        hyper_parameters: Values by name, for the algorithms that have the hyper-parameter. A list gives values to try,
            one hyper-parameter at a time. {algorithm: {name: value}} is for that algorithm alone.
        precision: Arithmetic of all runs.
        runs: Trial, draw and unseen domains of each run, instead of `targets`, `leave_one_out`, `trials` and `draws`.
    """

    datasets: tuple[str, ...]
    algorithms: tuple[str, ...] = option(
        "A name that `aidgn algorithms` lists, or path/to/file.py:Class for your own; repeatable.",
        (),
        metavar="NAME",
        flag="--algorithm",
    )
    targets: tuple[str, ...] = option(
        "Leave out this domain, by name or letter; repeatable",
        (),
        default_help="each domain in turn",
        metavar="NAME",
        flag="--target",
    )
    leave_one_out: bool = option(
        "Add the runs with two unseen domains that `aidgn table --selection leave-one-out` needs.", False
    )
    trials: int = option("Repeat each run with N different splits and seeds", 3, minimum=1, maximum=MAX_RUNS)
    draws: int = option(
        "Train N draws of the hyper-parameters; the first uses the defaults", 1, minimum=1, maximum=MAX_RUNS
    )
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "auto"
    runs: tuple[tuple[Any, ...], ...] = ()

    def expand(self, load: Load | None = None) -> list[RunSpec]:
        """Return the resolved runs in order of priority: data set, algorithm, value varied, draw, trial, target.

        Args:
            load: Loads the data set of a run; by default from the disk.
        """
        for entry in plan_options():
            entry.convert(getattr(self, entry.name))
        algorithms = list(dict.fromkeys(map(canonical, self.algorithms)))
        points = {algorithm: self._grid(algorithm, algorithms) for algorithm in algorithms}
        shared = {name: getattr(self, name) for name in RUN_OPTIONS}
        runs: list[RunSpec] = []
        names: dict[str, str] = {}
        for dataset_name in dict.fromkeys(self.datasets):
            blank = RunSpec(dataset_name, **shared)
            dataset = (load or load_as_trained)(blank)
            if dataset.name in names:
                raise AidgnError(
                    f"{names[dataset.name]} and {dataset_name} are both called {dataset.name}, and tables could not "
                    "tell them apart. Rename one of the folders."
                )
            names[dataset.name] = dataset_name
            targets = self._targets(dataset)
            repeats = len(self.runs) or self.draws * self.trials * len(targets)
            number = sum(map(len, points.values())) * repeats
            if number > MAX_RUNS:
                raise AidgnError(
                    f"The plan has {number:,} runs on {dataset.name}; a sweep has at most {MAX_RUNS:,}. Give fewer "
                    "trials, draws or values."
                )
            _check_all_sources(algorithms, dataset, max(targets, key=len))
            for algorithm in algorithms:
                keys = set()  # a varied value may be the default, which is planned already
                for values, (draw, trial, groups) in product(points[algorithm], list(self._repeats(targets))):
                    spec = replace(blank, algorithm=algorithm, trial=trial, draw=draw, hyper_parameters=values)
                    for run in _resolve(spec, groups, dataset):
                        key = repr((draw, trial, run.target, run.hyper_parameters))
                        if key not in keys:
                            runs.append(run)
                        keys.add(key)
        return runs

    def _targets(self, dataset: Dataset) -> list[tuple[str, ...]]:
        """List the unseen domains of each run: the targets, then pairs of a target and another domain if asked for."""
        if self.runs:
            numbers = [sorted({dataset.find_domain(str(name)) for name in names}) for _, _, *names in self.runs]
            return [tuple(dataset.domains[number] for number in group) for group in numbers]
        targets = list(dict.fromkeys(dataset.find_domain(str(target)) for target in self.targets))
        targets = targets or list(range(len(dataset.domains)))
        groups: list[tuple[int, ...]] = [(target,) for target in targets]
        if self.leave_one_out:
            pairs = (tuple(sorted(pair)) for pair in product(targets, range(len(dataset.domains))))
            groups += dict.fromkeys(pair for pair in pairs if pair[0] != pair[1])
        return [tuple(dataset.domains[number] for number in group) for group in groups]

    def _repeats(self, targets: list[tuple[str, ...]]) -> Iterator[tuple[int, int, list[tuple[str, ...]]]]:
        """Yield draw, trial and groups of unseen domains; for `runs`, one group each."""
        if not self.runs:
            yield from ((draw, trial, targets) for draw, trial in product(range(self.draws), range(self.trials)))
        for (trial, draw, *_), group in zip(self.runs, targets, strict=False):
            yield draw, trial, [group]

    def _grid(self, algorithm: str, algorithms: Sequence[str]) -> list[dict[str, Any]]:
        """List the fixed hyper-parameters of an algorithm, then a variant for every value of every list."""
        known = {find(name).name().casefold(): find(name) for name in algorithms}
        known |= {name.casefold(): find(name) for name in algorithms}
        chosen: dict[str, Any] = {}
        for name, value in self.hyper_parameters.items():
            if isinstance(value, Mapping):
                if name.casefold() not in known:
                    raise UnknownNameError("algorithm in this plan called", name, [find(n).name() for n in algorithms])
                if known[name.casefold()] is find(algorithm):
                    chosen |= value
            elif name in find(algorithm).search_space or not any(name in find(n).search_space for n in algorithms):
                chosen.setdefault(name, value)
        for name, value in chosen.items():
            if isinstance(value, list | tuple) and not value:
                raise ParameterError(f"hyper_parameters: {name}", value, "values to try")
        fixed = {name: value for name, value in chosen.items() if not isinstance(value, list | tuple)}
        varied = {name: value for name, value in chosen.items() if name not in fixed}
        return [fixed, *({**fixed, name: value} for name, values in varied.items() for value in values)]

    def partly_set(self) -> dict[str, list[str]]:
        """Return hyper-parameters given for all algorithms that only some have, with the names of those algorithms."""
        owners = {
            name: [find(algorithm).name() for algorithm in self.algorithms if name in find(algorithm).search_space]
            for name in self.hyper_parameters
        }
        return {name: having for name, having in owners.items() if 0 < len(having) < len(self.algorithms)}

    def custom_algorithms(self) -> dict[str, str]:
        """Return the absolute path/to/file.py:Class of custom algorithms by the name of their class."""
        return {file_and_class(name)[1]: _absolute_algorithm(name) for name in self.algorithms if is_custom(name)}

    def settled(self, specs: Sequence[RunSpec]) -> "SweepPlan":
        """Return the plan with the settings that all its runs share, and with absolute paths."""
        settings = {name: {getattr(spec, name) for spec in specs} for name in RUN_OPTIONS}
        common = {name: values.pop() for name, values in settings.items() if len(values) == 1}
        if common.get("weights") not in (None, "hub", "none"):
            common["weights"] = str(Path(common["weights"]).resolve())
        return replace(
            self,
            **common,
            datasets=tuple(
                name if is_registered(name) else str(DataSource.parse(name).absolute()) for name in self.datasets
            ),
            algorithms=tuple(map(_absolute_algorithm, self.algorithms)),
        )

    def conflicts_with(self, other: "SweepPlan") -> bool:
        """Return whether both plans have runs on one data set with settings that a table must not mix."""
        return bool(set(self.datasets) & set(other.datasets)) and any(
            getattr(self, name) is not None
            and getattr(other, name) is not None
            and getattr(self, name) != getattr(other, name)
            for name in MUST_MATCH
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, without options at their defaults."""
        always = ("datasets", "algorithms") if self.runs else ("datasets", "algorithms", "trials", "draws")
        values = {
            entry.name: getattr(self, entry.name)
            for entry in sorted(fields(self), key=lambda entry: entry.name in RUN_OPTIONS)
            if entry.name in always or getattr(self, entry.name) not in (entry.default, None, (), {})
        }
        if self.runs:
            values["runs"] = list(map(list, self.runs))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def plan_options() -> list[Option]:
    """List the options of a plan that are not options of a run."""
    return [entry for entry in declared_options(SweepPlan) if entry.name not in RUN_OPTIONS]


def plan_runs(datasets: Sequence[str], algorithms: Sequence[str], **options: Any) -> list[RunSpec]:
    """Return the runs of a `SweepPlan` with these fields."""
    targets = tuple(options.pop("targets", ()))
    return SweepPlan(datasets=tuple(datasets), algorithms=tuple(algorithms), targets=targets, **options).expand()


def load_as_trained(spec: RunSpec, data_dir: str | None = None) -> Dataset:
    """Load the data set as the run will see it, without broken images: draws depend on the number of images."""
    dataset = spec.load_dataset(data_dir)
    if spec.skip_broken and dataset.name not in DATASETS:
        return prepare(dataset, skip_broken=True).dataset
    return dataset


def _check_all_sources(algorithms: Sequence[str], dataset: Dataset, targets: tuple[str, ...]) -> None:
    """Raise one error for all algorithms that lack source domains, if there are several."""
    left = len(dataset.domains) - len(targets)
    lacking = [find(name).name() for name in algorithms if 0 < left < find(name).min_domains]
    if len(lacking) > 1:
        raise AidgnError(
            f"{', '.join(lacking)} need more source domains: with {' and '.join(targets)} unseen, "
            f"{dataset.name} has {left}. Leave them out."
        )


def _resolve(spec: RunSpec, targets: Sequence[tuple[str, ...]], dataset: Dataset) -> Iterator[RunSpec]:
    """Resolve the run with each group of unseen domains; only the check of source domains depends on them."""
    resolved = replace(spec, target=targets[0]).resolved(dataset)
    for group in targets:
        check_sources(find(spec.algorithm), dataset, group)
        yield replace(resolved, target=group)


def _absolute_algorithm(name: str) -> str:
    if not is_custom(name):
        return canonical(name)
    file, class_name = file_and_class(name)
    return f"{Path(file).expanduser().resolve()}:{class_name}"
