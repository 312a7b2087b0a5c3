"""A sweep: plan runs, and compare them with the runs in its folder."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

import aidgn
from aidgn import backbones
from aidgn.algorithms import find
from aidgn.data import Dataset, get_info
from aidgn.data.cache import prepare
from aidgn.data.dataset import check_outside
from aidgn.errors import AidgnError, ParameterError
from aidgn.runs.options import run_options
from aidgn.runs.run_id import identify_images, sweep_key
from aidgn.runs.spec import RunSpec
from aidgn.sweeps.journal import last_line
from aidgn.sweeps.launchers.base import OnEvent
from aidgn.sweeps.plan import MUST_MATCH, SweepPlan
from aidgn.sweeps.plan_file import read_plans, write_plans
from aidgn.sweeps.store import Cell, PlannedRun, RunStatus, SweepFolder, list_runs
from aidgn.sweeps.timing import Speeds

SAME_FAILURES = 5  # if so many first runs fail with the same error, the others would too
OPTIONS = {option.name: option for option in run_options()}


@dataclass
class Sweep:
    """The runs of one call, each once, and their folder."""

    folder: SweepFolder
    plans: list[SweepPlan]  # plans of the runs
    specs: list[RunSpec]  # the resolved runs
    runs: list[PlannedRun]  # the same runs as the folder lists them
    datasets: dict[str, Dataset]  # data sets by the names that the plans use
    missing_datasets: list[str]  # data sets that are not on this disk
    # By name of the data set, the precision, images and weights that all its runs must share, where known
    shared: dict[str, dict[str, str]]
    statuses: list[RunStatus] = field(default_factory=list)  # status of each run at the last `refresh`
    # Custom algorithms whose files were edited after runs in the folder were made, one entry for each such run
    older: list[str] = field(default_factory=list)
    other_runs: int = 0  # unfinished runs that earlier calls planned in the folder and this call does not

    @classmethod
    def prepare(
        cls,
        plans: Sequence[SweepPlan],
        out: str | Path,
        *,
        data_dir: str | None = None,
        precision: str | None = None,
        dry_run: bool = False,
        on_prepare: Callable[[int, int], None] | None = None,
    ) -> "Sweep":
        """Plan the runs and decode the images that are not decoded yet.

        Args:
            plans: The plans.
            out: Folder of the sweep.
            data_dir: Where data sets are.
            precision: Precision of the runs, if this machine decides it.
            dry_run: Decode and write nothing, and describe data sets that are not on this disk by the registry.
            on_prepare: Called with the number of decoded images and the number of all.
        """
        loaded: dict[tuple[str, str | None, int | None, bool], Dataset] = {}
        datasets: dict[str, Dataset] = {}
        shared: dict[str, dict[str, str]] = {}
        missing: list[str] = []

        def load(spec: RunSpec) -> Dataset:
            key = spec.dataset, spec.backbone, spec.image_size, spec.skip_broken
            if key in loaded:
                return loaded[key]
            content = ""
            try:
                dataset = spec.load_dataset(data_dir)
            except AidgnError as error:
                if not dry_run or "/" in spec.dataset or isinstance(error, ParameterError):
                    raise
                dataset = outline(spec)
                missing.append(spec.dataset)
            else:
                check_outside(dataset, out)
                if not dry_run:
                    decoded = prepare(dataset, skip_broken=spec.skip_broken, on_progress=on_prepare)
                    dataset = decoded.dataset
                    content = decoded.content
            shared[dataset.name] = {"precision": precision} if precision else {}
            if spec.dataset not in missing:
                shared[dataset.name]["data"] = identify_images(dataset.fingerprint, content)
            loaded[key] = datasets[spec.dataset] = dataset
            return dataset

        specs = list({spec.key(): spec for plan in plans for spec in plan.expand(load)}.values())
        _check_one_table(specs)
        for dataset, backbone, weights in {(spec.dataset, str(spec.backbone), spec.weights) for spec in specs}:
            backbones.check_name(backbone, weights == "hub")
            with suppress(AidgnError) if dry_run else nullcontext():  # the file may be on another disk
                shared[datasets[dataset].name]["weights"] = backbones.weights_identity(backbone, weights)
        runs = list_runs(specs, {name: dataset.name for name, dataset in datasets.items()})
        folder = SweepFolder(out)
        if not dry_run:
            folder.tidy()
        return cls(folder, list(plans), specs, runs, datasets, missing, shared)

    def refresh(self, retries: int) -> None:
        """Read the statuses from the disk."""
        self.statuses = self.folder.statuses(self.runs, retries)

    def count(self, kind: str) -> int:
        """Return the number of runs with this status, see `RunStatus`."""
        return len(self.numbers(kind))

    def numbers(self, *kinds: str) -> list[int]:
        """Return the numbers of the runs with one of these statuses, see `RunStatus`."""
        return [number for number, status in enumerate(self.statuses) if status.kind in kinds]

    def errors(self) -> list[tuple[PlannedRun, str]]:
        """Return the runs that were set aside, with the last line of their error."""
        return [(self.runs[n], last_line(self.statuses[n].history.error)) for n in self.numbers("failed")]

    def edited_runs(self) -> int:
        """Count runs whose custom algorithm's file was edited since they were planned."""
        return sum(run.key != spec.key() for run, spec in zip(self.runs, self.specs, strict=True))

    def seconds(self, numbers: Sequence[int]) -> float | None:
        """Return the time that one worker of this machine needs for these runs, None if that is unknown."""
        return Speeds(self.runs, self.statuses).total(self.runs[number] for number in numbers)

    def check(self) -> None:
        """Raise an error if a table would mix these runs with runs of other settings in the folder."""
        specs = {self.datasets[spec.dataset].name: spec for spec in self.specs}
        by_cell: dict[Cell, RunSpec] = dict(zip((run.cell for run in self.runs), self.specs, strict=True))
        keys = {run.key for run in self.runs}
        before = [run for run in self.folder.planned()[0] if run.key not in keys and not run.varied]
        keys_before = {run.key for run in before}
        cells_before = {run.cell for run in before}
        self.older = []
        for name in self.folder.run_folders():
            identity = self.folder.identity(name)
            if identity.get("dataset") not in specs:
                continue
            different = self._compare(identity, specs[identity["dataset"]])
            cell = tuple(identity[key] for key in ("dataset", "algorithm", "target", "trial", "draw"))
            cell = (*cell[:2], tuple(cell[2]), *cell[3:])
            key = sweep_key(identity)
            # A run of `aidgn train` with other hyper-parameters is one more candidate for selection; a planned run is
            # not. A custom algorithm's run may have been planned before its file was edited.
            was_planned = key in keys_before or ("source" in identity and cell in cells_before)
            if not different and cell in by_cell and key not in keys and was_planned:
                spec = by_cell[cell]
                if identity.get("source") != spec.source():
                    self.older.append(identity["algorithm"])
                    continue
                there = identity["hyper_parameters"]
                different = {
                    f"{identity['algorithm']}'s {name}": (there.get(name), spec.hyper_parameters.get(name))
                    for name in {**there, **spec.hyper_parameters}
                    if there.get(name) != spec.hyper_parameters.get(name)
                }
            if different:
                values = "; ".join(f"{name} {there} (here {here})" for name, (there, here) in different.items())
                raise AidgnError(
                    f"{self.folder.path} holds runs of another plan, which tables would mix with these. Different on "
                    f"{identity['dataset']}: {values}. Choose another folder with --out, give the same settings, or "
                    f"move those runs away (the first: {self.folder.path / name})."
                )
        if self.older and self.folder.yaml.exists():
            self._check_custom_algorithms()

    def _compare(self, identity: dict[str, Any], spec: RunSpec) -> dict[str, tuple[Any, Any]]:
        """Return the settings in which a run in the folder differs from a new run, although all runs must share them.

        Returns:
            The value of the run in the folder and of the new run, by name of the setting.
        """
        here = {name: getattr(spec, name) for name in MUST_MATCH if name != "weights"}
        here |= self.shared[identity["dataset"]]
        different = {}
        for name, value in here.items():
            there = identity.get(name, OPTIONS[name].default if name in OPTIONS else None)
            # Before the images are decoded, only the beginning of their digest is known.
            same = str(there).startswith(str(value)) if name == "data" else there == value
            if not same:
                different["images" if name == "data" else name] = (there, value)
        return different

    def _check_custom_algorithms(self) -> None:
        """Raise an error for an edited custom algorithm with other settings than in the folder's plan."""
        places = {name: (place, plan) for plan in self.plans for name, place in plan.custom_algorithms().items()}
        for earlier in read_plans(self.folder.yaml)[0]:
            for name, place in earlier.custom_algorithms().items():
                if name not in places:
                    continue
                place_here, plan = places[name]
                if (place, earlier.hyper_parameters) != (place_here, plan.hyper_parameters):
                    settings = ", ".join(f"{key}={value}" for key, value in earlier.hyper_parameters.items())
                    raise AidgnError(
                        f"{self.folder.path} was planned for {place} with {settings or 'no settings'}, and has runs "
                        "by an earlier text of it. Choose another folder with --out, or give the same file and "
                        "settings."
                    )

    def save_plan(self, retries: int, data_dir: str | None) -> None:
        """Add the plans and their runs to those in the folder, and mark this process as working there."""
        with self.folder.locked():
            before, retries_before = self.folder.planned()
            keys = {run.cell: run.key for run in self.runs if not run.varied}
            replaced = [run for run in before if not run.varied and keys.get(run.cell, run.key) != run.key]
            if not self.folder.join() and replaced:
                raise AidgnError(
                    f"Another sweep is at work in {self.folder.path} with other settings for the same runs "
                    f"(such as {replaced[0]}), and tables would mix them. Choose another folder with --out."
                )
            stored = read_plans(self.folder.yaml)[0] if self.folder.yaml.exists() else []
            new = [plan.settled([spec for spec in self.specs if spec.dataset in plan.datasets]) for plan in self.plans]
            # `check` refuses plans that conflict with runs in the folder, so a conflicting plan has no runs yet.
            dropped = [plan for plan in stored if any(plan.conflicts_with(other) for other in new)]
            plans = [plan for plan in stored if plan not in dropped]
            plans += [plan for plan in new if plan not in plans]
            names = {dataset for plan in dropped for dataset in map(self._table_name, plan.datasets)}
            runs = {run.key: run for run in before if run.dataset not in names and run not in replaced}
            runs |= {run.key: run for run in self.runs}
            if list(runs.values()) != before or retries != retries_before or plans != stored:
                text = write_plans(plans, self._remarks(len(runs)), data_dir)
                self.folder.write(list(runs.values()), retries, text)
            own_keys = {run.key for run in self.runs}
            others = [run for key, run in runs.items() if key not in own_keys]
        self.other_runs = sum(status.kind != "done" for status in self.folder.statuses(others, retries))

    def _table_name(self, dataset: str) -> str:
        return self.datasets[dataset].name if dataset in self.datasets else Path(dataset).name

    def _remarks(self, runs: int) -> list[str]:
        """Compose the comments at the head of sweep.yaml."""
        specs = {spec.dataset: spec for spec in reversed(self.specs)}
        return [
            f"Written by aidgn {aidgn.__version__}: {runs} runs. "
            f"`aidgn sweep {quote(str(self.folder.yaml))}` continues them.",
            *(
                f"{dataset.name}: {specs[name].steps} steps, evaluated every {specs[name].eval_every}, images of "
                f"{specs[name].image_size}, {specs[name].backbone} ({specs[name].weights})"
                for name, dataset in self.datasets.items()
            ),
        ]


def stop_if_all_fail(on_event: OnEvent) -> OnEvent:
    """Return a callback that calls `on_event` and ends the sweep if the first runs all fail with the same error."""
    errors: list[str] | None = []

    def checked(number: int, event: str, value: Any) -> None:
        nonlocal errors
        on_event(number, event, value)
        if event == "done":
            errors = None
        elif event == "failed" and errors is not None:
            errors.append(last_line(value))
            if errors == errors[:1] * SAME_FAILURES:
                raise AidgnError(
                    f"The first {SAME_FAILURES} runs failed with the same error, so the others were not started: "
                    f"{errors[0]}\nOnce that is fixed, the same command with --retry-failed continues."
                )

    return checked


def outline(spec: RunSpec) -> Dataset:
    """Return a data set of the registry without images, which is enough to plan runs."""
    info = get_info(spec.dataset)
    empty = np.zeros(0, np.int64)
    return Dataset(
        replace(info, image_size=spec.choose_image_size(info.image_size)), list(info.classes), [], empty, empty
    )


def _check_one_table(specs: Sequence[RunSpec]) -> None:
    """Raise an error if a table would mix runs of these plans that have other settings or another algorithm."""
    names: dict[str, str] = {}
    for algorithm in dict.fromkeys(spec.algorithm for spec in specs):
        name = find(algorithm).name()
        namesake = names.setdefault(name, algorithm)
        if find(namesake) is not find(algorithm):
            raise AidgnError(
                f"{namesake} and {algorithm} are both called {name}, and tables could not tell them apart. "
                "Rename one of the classes."
            )
    first: dict[str, RunSpec] = {}
    for spec in specs:
        other = first.setdefault(spec.dataset, spec)
        for name in MUST_MATCH:
            if getattr(spec, name) != getattr(other, name):
                raise AidgnError(
                    f"The plans differ on {spec.dataset}, {name} {getattr(other, name)} and {getattr(spec, name)}, and "
                    "tables would mix their runs. Give them the same settings, or a file and a folder each."
                )
