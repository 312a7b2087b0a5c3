"""Find the settings that differ between runs whose results are averaged, selected from or compared."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from aidgn.errors import AidgnError, plural, short, some
from aidgn.runs.records import RunRecords, domain_names

# All settings of run.json except these must be equal in runs that are compared. A new option needs no entry.
EXPECTED = frozenset(
    {
        "dataset",
        "algorithm",
        "target",
        "trial",
        "draw",
        "hyper_parameters",  # compared per draw, by _hyper_parameter_differences
        "evaluate_source_in",  # evaluates more and changes nothing
    }
)
# Settings that belong to an algorithm: may differ between algorithms, must be equal in all runs of one.
OF_ALGORITHM = frozenset({"average", "lr_milestones", "source"})
NUMBER_OF_RUNS = "number of runs to choose from"
SHOWN = 6  # values that a message lists


class Place(NamedTuple):
    """The key of one result of a table."""

    dataset: str
    algorithm: str
    target: int
    trial: int


@dataclass(frozen=True)
class Difference:
    """A setting with several values in runs on one data set."""

    name: str  # name of the setting in run.json, or of the hyper-parameter
    dataset: str  # name of the data set
    runs: Mapping[str, Sequence[RunRecords]]  # runs by the text of their value
    algorithm: str | None = None  # the algorithm, if only its runs are compared
    hyper_parameter: bool = False  # whether the setting is a hyper-parameter

    @property
    def mixed(self) -> list[str]:
        """Algorithms whose runs have several values, so that one row of a table averages over them."""
        values = defaultdict(set)
        for value, runs in self.runs.items():
            for run in runs:
                values[run.args["algorithm"]].add(value)
        return sorted(algorithm for algorithm, texts in values.items() if len(texts) > 1)

    def __str__(self) -> str:
        subject = f"{self.algorithm} on {self.dataset}" if self.algorithm else self.dataset
        name = f"the hyper-parameter {self.name} in the same draw" if self.hyper_parameter else self.name
        all_runs = [run for runs in self.runs.values() for run in runs]
        values = [
            f"{value} ({plural(len(runs), 'run')}{_where(runs, all_runs)})"
            for value, runs in islice(self.runs.items(), SHOWN)
        ]
        more = f" and {len(self.runs) - SHOWN} more values" if len(self.runs) > SHOWN else ""
        text = f"The runs of {subject} differ in {name}: {'; '.join(values)}{more}."
        if self.mixed and self.algorithm is None:
            text += f" Runs of {some(self.mixed)} have several of these values."
        return text


def differences(runs: Iterable[RunRecords]) -> list[Difference]:
    """Return the differences in settings per data set, except in EXPECTED ones.

    A setting that is missing in run.json had its default. A run without run.json is compared only by the settings in
    its records.
    """
    differing = []
    for dataset, members in sorted(_grouped(runs, "dataset").items()):
        names = dict.fromkeys(name for run in members for name in run.settings)
        for name in names:
            if name not in EXPECTED | OF_ALGORITHM:
                differing += _difference(name, dataset, members)
        for algorithm, algorithm_runs in sorted(_grouped(members, "algorithm").items()):
            for name in names:
                if name in OF_ALGORITHM:
                    differing += _difference(name, dataset, algorithm_runs, algorithm)
            differing += _hyper_parameter_differences(dataset, algorithm, algorithm_runs)
    return differing


def search_differences(runs: Iterable[RunRecords]) -> list[Difference]:
    """Return the data sets on which some results are chosen from more runs than others."""
    differing = []
    for dataset, members in sorted(_grouped(runs, "dataset").items()):
        members = [run for run in members if len(run.targets) == 1]
        counts = count_choices(members)
        by_value = _by_value((counts[_place(run)], run) for run in members)
        if len(by_value) > 1:
            differing.append(Difference(NUMBER_OF_RUNS, dataset, by_value))
    return differing


def count_choices(runs: Iterable[RunRecords]) -> dict[Place, int]:
    """Count the runs that each result is chosen from: draws, and values of hyper-parameters given by hand."""
    return Counter(_place(run) for run in runs if len(run.targets) == 1)


def check_same_images(runs: Iterable[RunRecords]) -> None:
    """Raise an error if runs have different images: their folder has changed, so a mean or best means nothing."""
    by_images = defaultdict(list)
    for run in runs:
        if run.data is not None:
            by_images[run.data].append(run)
    if len(by_images) > 1:
        (first, *_), (second, *_), *_ = by_images.values()
        counts = " and ".join(plural(len(members), "run") for members in by_images.values())
        raise AidgnError(
            f"{first} and {second} were trained on different images of {first.args['dataset']}: the folder "
            f"changed between them ({counts} of {first.args['algorithm']} that one row would mix). "
            "Give the folders of runs that belong together, or move the others away."
        )


def _difference(name: str, dataset: str, runs: Sequence[RunRecords], algorithm: str | None = None) -> list[Difference]:
    values = [(run.settings.get(name), run) for run in runs if run.described or run.settings.get(name) is not None]
    if _are_equal(values):
        return []
    by_value = _by_value(values)
    if name == "data":  # two digests, of names and of contents, known by their beginnings
        by_value = {"-".join(digest[:8] for digest in value.split("-")): members for value, members in by_value.items()}
    return [Difference(name, dataset, by_value, algorithm)] if len(by_value) > 1 else []


def _hyper_parameter_differences(dataset: str, algorithm: str, runs: Sequence[RunRecords]) -> list[Difference]:
    """Compare runs of the same draw, which share the cells of a row and differ only if values were set by hand.

    Draws depend on the trial; the defaults (draw 0) do not.
    """
    draws = defaultdict(list)
    for run in runs:
        draw, trial = run.args["hparams_seed"], run.args["trial_seed"]
        draws[draw, trial if draw else 0].append(run)
    differing: dict[str, list[tuple[Any, RunRecords]]] = {}
    for members in draws.values():
        if len(members) > 1:
            for name in dict.fromkeys(name for run in members for name in run.hparams):
                values = [(run.hparams[name], run) for run in members if name in run.hparams]
                if not _are_equal(values) and len({_text(value) for value, _ in values}) > 1:
                    differing.setdefault(name, []).extend(values)
    return [
        Difference(name, dataset, _by_value(values), algorithm, hyper_parameter=True)
        for name, values in differing.items()
    ]


def _are_equal(values: Sequence[tuple[Any, RunRecords]]) -> bool:
    """Compare values without composing their text, which takes long for thousands of runs."""
    return all(value == values[0][0] and type(value) is type(values[0][0]) for value, _ in values)


def _by_value(values: Iterable[tuple[Any, RunRecords]]) -> dict[str, list[RunRecords]]:
    """Return the runs by the text of their value, in the order of the values."""
    groups: dict[str, list[RunRecords]] = {}
    order: dict[str, tuple[float, str]] = {}
    for value, run in values:
        text = _text(value)
        groups.setdefault(text, []).append(run)
        order.setdefault(text, _order(value))
    return {text: groups[text] for text in sorted(groups, key=lambda text: order[text])}


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return short(value)


def _order(value: Any) -> tuple[float, str]:
    """Return a sort key: numbers in their order, then words."""
    return (value, "") if isinstance(value, int | float) else (float("inf"), str(value))


def _where(runs: Sequence[RunRecords], all_runs: Sequence[RunRecords]) -> str:
    """Name the algorithms, targets and trials of these runs, if other runs have others."""
    parts = []
    for word, places in (("", _algorithms), ("target ", _targets), ("trial ", _trials)):
        if (labels := places(runs)) != places(all_runs):
            parts.append(word + some(labels))
    return f": {'; '.join(parts)}" if parts else ""


def _grouped(runs: Iterable[RunRecords], arg: str) -> dict[str, list[RunRecords]]:
    groups = defaultdict(list)
    for run in runs:
        groups[run.args[arg]].append(run)
    return groups


def _place(run: RunRecords) -> Place:
    return Place(run.args["dataset"], run.args["algorithm"], run.targets[0], run.args["trial_seed"])


def _algorithms(runs: Iterable[RunRecords]) -> list[str]:
    return sorted({run.args["algorithm"] for run in runs})


def _targets(runs: Sequence[RunRecords]) -> list[str]:
    names = domain_names(runs[0].args)
    targets = sorted({target for run in runs for target in run.targets})
    return [names[target] if target < len(names) else str(target) for target in targets]


def _trials(runs: Iterable[RunRecords]) -> list[int]:
    return sorted({run.args["trial_seed"] for run in runs})
