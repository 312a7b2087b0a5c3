"""What a call of `aidgn sweep` has to do: its plan's runs, checked against the data and what the folder holds."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

import aidgn
from aidgn import backbones
from aidgn.algorithms import find
from aidgn.algorithms.custom import file_and_class, is_custom
from aidgn.data import DATASETS, Dataset, get_info
from aidgn.data.cache import prepare
from aidgn.data.dataset import check_outside
from aidgn.errors import AidgnError
from aidgn.runs.options import run_options
from aidgn.runs.spec import RunSpec
from aidgn.sweeps.journal import reset_failures
from aidgn.sweeps.plan_file import Plan, absolute_algorithm, merged, read_plans, write_plans
from aidgn.sweeps.store import PlannedRun, RunStatus, SweepFolder, items_of
from aidgn.sweeps.timing import Speeds, h200_seconds, image_counts

OnPrepare = Callable[[int, int], None]


@dataclass
class SweepPlan:
    """The runs that were asked for, each once, and how they stand."""

    folder: SweepFolder
    plans: list[Plan]
    specs: list[RunSpec]
    items: list[PlannedRun]
    datasets: dict[str, Dataset]  # by what the plan calls them
    absent: list[str]  # data sets that are only known from the catalogue
    common: dict[str, dict[str, str]]  # by name of the data set, what all its runs must share
    states: list[RunStatus] = field(default_factory=list)
    older: list[str] = field(default_factory=list)  # algorithms of runs here by another text of their file
    others: int = 0  # runs of the folder's plan that are left and were not asked for

    def look(self, retries: int) -> None:
        self.states = self.folder.states(self.items, retries)

    def count(self, kind: str) -> int:
        return sum(state.kind == kind for state in self.states)

    def of_kind(self, *kinds: str) -> list[int]:
        return [number for number, state in enumerate(self.states) if state.kind in kinds]

    def changed(self) -> int:
        """Runs that are another one than when they were planned: the file of an own algorithm was edited."""
        return sum(item.key != spec.key() for item, spec in zip(self.items, self.specs, strict=True))

    def check(self) -> None:
        """That the runs in the folder are of the same kind."""
        specs = {item.key: spec for item, spec in zip(self.items, self.specs, strict=True)}
        self.older = self.folder.check(
            specs, {key: one.name for key, one in self.datasets.items()}, self.common, self.folder.planned()[0]
        )
        if self.older and self.folder.yaml.exists():
            here = custom_plans(self.plans)
            for other in custom_plans(read_plans(self.folder.yaml)[0]):
                name, place, settings = other
                if other not in here and name in (each for each, _, _ in here):
                    said = ", ".join(f"{key}={value}" for key, value in settings.items()) or "no settings"
                    raise AidgnError(
                        f"{self.folder.path} was planned for {place} with {said} and has runs by another "
                        "text of it, which its plan would mix with these. Choose another folder with "
                        "--out, or give the same file and settings."
                    )

    def enter(self, retries: int, data_dir: str | None) -> None:
        """Write the plan into the folder, joined with what was planned there before."""
        with self.folder.locked():
            before, _ = self.folder.planned()
            places = {str(item[1:6]): item.key for item in before if not item.varied}
            clash = [
                item for item in self.items if not item.varied and places.get(str(item[1:6]), item.key) != item.key
            ]
            if not self.folder.alone() and clash:
                raise AidgnError(
                    f"Another sweep is at work in {self.folder.path} with other settings for the same runs "
                    f"(such as {clash[0]}), and tables would mix them. Choose another folder with --out."
                )
            old = read_plans(self.folder.yaml)[0] if self.folder.yaml.exists() else []
            new = [plan.settled([spec for spec in self.specs if spec.dataset in plan.datasets]) for plan in self.plans]
            # A plan that differs and has no runs yet, or `check` would have refused, was changed before it began.
            dropped = [one for one in old if any(_conflict(one, other) for other in new)]
            gone = {self.name_of(dataset) for one in dropped for dataset in one.datasets}
            plans = merged([one for one in old if one not in dropped], new)
            # Of a run by another text of an own algorithm's file no more can be made.
            own = {str(item[1:]) for item, spec in zip(self.items, self.specs, strict=True) if spec.source()}
            items = {item.key: item for item in before if item.dataset not in gone and str(item[1:]) not in own}
            items |= {item.key: item for item in self.items}
            remarks = [
                f"Written by aidgn {aidgn.__version__}: {len(items)} runs. "
                f"`aidgn sweep {quote(str(self.folder.yaml))}` continues them."
            ]
            for dataset in self.datasets:
                spec = next(spec for spec in self.specs if spec.dataset == dataset)
                remarks.append(
                    f"{self.datasets[dataset].name}: {spec.steps} steps, evaluated every {spec.eval_every}, "
                    f"images of {spec.image_size}, {spec.backbone} ({spec.weights})"
                )
            if self.folder.planned() != (list(items.values()), retries) or plans != old:
                self.folder.write(list(items.values()), retries, write_plans(plans, remarks, data_dir))
            keys = {item.key for item in self.items}
            rest = [item for item in items.values() if item.key not in keys]
        self.others = sum(state.kind != "done" for state in self.folder.states(rest, retries)) if rest else 0

    def name_of(self, dataset: str) -> str:
        return self.datasets[dataset].name if dataset in self.datasets else Path(dataset).name

    def retry_failed(self) -> None:
        for number in self.of_kind("failed"):
            reset_failures(self.folder.path, self.items[number].key)

    def seconds(self, numbers: Sequence[int]) -> float | None:
        """What one worker of this machine needs for these runs; None where nothing is known."""
        return Speeds(self.items, self.states).total(self.items[number] for number in numbers)

    def h200_seconds(self, numbers: Sequence[int]) -> float | None:
        """What one H200 needs for these runs, by what was measured."""
        counts = {
            key: list(DATASETS[one.name].counts.values()) if key in self.absent else image_counts(one)
            for key, one in self.datasets.items()
        }
        total = 0.0
        for number in numbers:
            spec = self.specs[number]
            one = h200_seconds(spec, self.datasets[spec.dataset], counts[spec.dataset])
            if one is None:
                return None
            total += one
        return total


def agenda(
    plans: Sequence[Plan],
    out: str | Path,
    *,
    data_dir: str | None = None,
    precision: str | None = None,
    dry: bool = False,
    on_prepare: OnPrepare | None = None,
) -> SweepPlan:
    """Load the data sets, decode what is not decoded yet, plan the runs. `dry` reads and writes nothing of that: data
    sets that are not on this disk are taken from the catalogue. `precision` is that of the runs, where it is known."""
    loaded: dict[tuple[str, int | None, bool], Dataset] = {}
    datasets: dict[str, Dataset] = {}
    common: dict[str, dict[str, str]] = {}
    absent: list[str] = []

    def load(spec: RunSpec) -> Dataset:
        key = spec.dataset, spec.image_size, spec.skip_broken
        if key in loaded:
            return loaded[key]
        content = ""
        try:
            dataset = spec.load_dataset(data_dir)
        except AidgnError:
            if not dry or "/" in spec.dataset:
                raise
            dataset = outline(spec)
            absent.append(spec.dataset)
        else:
            check_outside(dataset, out)
            if not dry:
                prepared = prepare(dataset, skip_broken=spec.skip_broken, on_progress=on_prepare)
                dataset, content = prepared.dataset, prepared.content
        shared = {"precision": precision} if precision else {}
        if spec.dataset not in absent:
            shared["data"] = f"{dataset.fingerprint[:32]}-{content}"
        common[dataset.name] = shared
        loaded[key] = datasets[spec.dataset] = dataset
        return dataset

    keyed = {spec.key(): spec for plan in plans for spec in plan.runs(load)}
    specs = list(keyed.values())
    _check_alike(specs)
    for dataset, backbone, weights in {(one.dataset, str(one.backbone), one.weights) for one in specs}:
        backbones.check_name(backbone, weights == "hub")
        with suppress(AidgnError) if dry else nullcontext():  # a file that is not on this disk
            common[datasets[dataset].name]["weights"] = backbones.weights_identity(backbone, weights)
    items = items_of(keyed, {key: one.name for key, one in datasets.items()})
    return SweepPlan(SweepFolder(out), list(plans), specs, items, datasets, absent, common)


def custom_plans(plans: Sequence[Plan]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Class, place and settings of every own algorithm."""
    return [
        (file_and_class(name)[1], absolute_algorithm(name), plan.hyper_parameters)
        for plan in plans
        for name in plan.algorithms
        if is_custom(name)
    ]


def outline(spec: RunSpec) -> Dataset:
    """A data set of the catalogue without its images: enough to plan runs and to know how long they take."""
    info = get_info(spec.dataset)
    none = np.zeros(0, np.int64)
    return Dataset(replace(info, image_size=spec.image_size or info.image_size), list(info.classes), [], none, none)


def _check_alike(specs: Sequence[RunSpec]) -> None:
    """Refuse plans in one file that a table would mix, as runs of another plan in the folder are refused."""
    called: dict[str, str] = {}
    for algorithm in dict.fromkeys(spec.algorithm for spec in specs):
        name = find(algorithm).name()
        namesake = called.setdefault(name, algorithm)
        if find(namesake) is not find(algorithm):
            raise AidgnError(
                f"{namesake} and {algorithm} are both called {name}, and tables could not tell them apart. "
                "Rename one of the classes."
            )
    first: dict[str, RunSpec] = {}
    for spec in specs:
        other = first.setdefault(spec.dataset, spec)
        for name in (option.name for option in run_options() if option.must_match):
            here, there = getattr(spec, name), getattr(other, name)
            if here != there:
                raise AidgnError(
                    f"The plans differ on {spec.dataset}, {name} {there} and {here}, and tables would mix "
                    "their runs. Give them the same settings, or a file and a folder each."
                )


def _conflict(one: Plan, other: Plan) -> bool:
    """Whether two plans want different runs for a cell of a table."""
    names = ("steps", "eval_every", "image_size", "backbone", "weights", "augment_validation")
    return bool(set(one.datasets) & set(other.datasets)) and any(
        getattr(one, name) is not None
        and getattr(other, name) is not None
        and getattr(one, name) != getattr(other, name)
        for name in names
    )
