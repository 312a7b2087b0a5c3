"""The files of a sweep, next to its run folders:

    sweep.yaml              plans of the sweep; `aidgn sweep SWEEP/sweep.yaml` continues them
    .sweep/plan.json        its runs, for readers without access to the data
    .sweep/attempts/        the journal of each run, see journal.py

The run folders alone decide which runs are done.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from aidgn.errors import AidgnError, short
from aidgn.files import FolderLock, is_of_type, parse_json, write_text
from aidgn.runs.folder import RunFolder, RunWriter
from aidgn.runs.options import MAX_NUMBER
from aidgn.runs.run_id import sweep_key
from aidgn.sweeps import names
from aidgn.sweeps.journal import History, history

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec

Cell = tuple[Any, ...]  # a place in a table: data set, algorithm, targets, trial, draw


class PlannedRun(NamedTuple):
    """A planned run."""

    key: str
    dataset: str
    algorithm: str
    target: list[str]
    trial: int
    draw: int
    steps: int
    varied: str  # hyper-parameters in which runs of one cell differ, such as "kappa=50"

    @property
    def cell(self) -> Cell:
        """The place of the run in a table."""
        return self.dataset, self.algorithm, tuple(self.target), self.trial, self.draw

    def is_valid(self) -> bool:
        """Return whether values from a file have the right types, and the key can be the name of a file."""
        typed = all(map(is_of_type, self, PLANNED_TYPES))
        numbers = self.trial, self.draw, self.steps
        return typed and not {"/", "\0"} & set(self.key) and all(0 <= number <= MAX_NUMBER for number in numbers)

    def __str__(self) -> str:
        target = f"{' and '.join(self.target) or 'nothing'} unseen"
        parts = [self.dataset, self.algorithm, target, f"trial {self.trial}", f"draw {self.draw}", self.varied]
        return ", ".join(filter(None, parts))


PLANNED_TYPES = tuple(get_type_hints(PlannedRun).values())


class RunStatus(NamedTuple):
    """Status of a planned run: "done", "running", "failed" (set aside) or "left"."""

    kind: str
    history: History


class SweepFolder:
    """The files of a sweep.

    Args:
        path: The folder, which need not exist.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.yaml = self.path / names.PLAN_YAML
        self.json = self.path / names.PLAN_JSON
        self.attempts = self.path / names.ATTEMPTS
        self._done: dict[str, RunStatus] = {}  # done runs stay done, so they are read once

    @classmethod
    def find(cls, folder: Path, *patterns: str) -> "list[SweepFolder]":
        """Find the sweeps in a folder whose paths relative to the folder match one of the patterns."""
        plans = [path for pattern in patterns for path in folder.glob(f"{pattern}/{names.PLAN_JSON}")]
        return [cls(path.parent.parent) for path in plans]

    @classmethod
    def of_plan(cls, file: Path) -> "SweepFolder | None":
        """Return the sweep whose plan a file is; None if the file is another plan."""
        folder = cls(file.parent)
        return folder if file.name == names.PLAN_YAML and (file.parent / names.STATE).is_dir() else None

    def planned(self) -> tuple[list[PlannedRun], int]:
        """Read the planned runs and the number of retries; no runs if no sweep was started here."""
        try:
            content = parse_json(self.json.read_bytes())
            runs = [PlannedRun(*values) for values in content["runs"]]
            wrong = [run for run in runs if not run.is_valid()]
            retries = content["retries"]
            if wrong or not isinstance(retries, int):
                raise ValueError("a run in it has a value of another type" if wrong else "its retries are no number")
            return runs, retries
        except (FileNotFoundError, NotADirectoryError):
            return [], 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AidgnError(f"{self.json} cannot be read ({error}). Remove it and start the sweep again.") from None

    def write(self, runs: Sequence[PlannedRun], retries: int, yaml: str) -> None:
        """Write the two files of the plan. If a crash leaves the first only, continuing the sweep writes the second."""
        write_text(self.yaml, yaml)
        write_text(self.json, json.dumps({"retries": retries, "runs": runs}) + "\n")

    def locked(self) -> FolderLock:
        """Return the lock that keeps other processes from changing the plan."""
        return FolderLock(self.path / names.LOCK)

    def join(self) -> bool:
        """Mark this process as working in the folder while this object exists; return whether it is the only one."""
        self._at_work = FolderLock(self.path / names.AT_WORK)
        alone = self._at_work.try_acquire()
        self._at_work.acquire(shared=True)
        return alone

    def statuses(self, runs: Sequence[PlannedRun], retries: int) -> list[RunStatus]:
        """Return the status of each run, from the disk alone."""
        open_runs = [run for run in runs if run.key not in self._done]
        histories = {run.key: history(self.path, run.key) for run in open_runs}
        folders = {key: past.folder for key, past in histories.items() if past.folder}
        known = {*folders.values(), *(status.history.folder for status in self._done.values())}
        for name in self.run_folders():
            if name not in known and (identity := self.identity(name)):
                folders.setdefault(sweep_key(identity), name)
        open_statuses = {}
        for run in open_runs:
            past = histories[run.key]
            folder = folders.get(run.key)
            if folder and RunFolder(self.path / folder).finished:
                self._done[run.key] = RunStatus("done", past)
            elif past.running:
                open_statuses[run.key] = RunStatus("running", past)
            else:
                open_statuses[run.key] = RunStatus("failed" if past.given_up(retries) else "left", past)
        return [self._done.get(run.key) or open_statuses[run.key] for run in runs]

    def tidy(self) -> None:
        """Remove temporary files that killed processes left in the folders of finished runs."""
        for name in self.run_folders():
            RunWriter(self.path / name).tidy()

    def run_folders(self) -> list[str]:
        """List the names of the folders that may hold runs."""
        with suppress(OSError), os.scandir(self.path) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        return []

    def identity(self, name: str) -> dict[str, Any]:
        """Read the identity of the run in a folder; {} if it holds no run."""
        with suppress(AidgnError):
            metadata = RunFolder(self.path / name).metadata
            return metadata.identity if metadata.is_described else {}
        return {}


def list_runs(specs: Sequence["RunSpec"], table_names: Mapping[str, str]) -> list[PlannedRun]:
    """List runs as a plan file stores them, with the hyper-parameters in which runs of one cell differ.

    Args:
        specs: Resolved runs.
        table_names: Names of the data sets in tables, by the names that the specifications use.
    """
    cells = defaultdict(list)
    for spec in specs:
        cells[spec.dataset, spec.label(), spec.draw, spec.trial].append(spec.hyper_parameters)
    varied = {
        cell: [name for name in first if any(values.get(name) != first[name] for values in rest)]
        for cell, (first, *rest) in cells.items()
    }
    runs = []
    for spec in specs:
        different = varied[spec.dataset, spec.label(), spec.draw, spec.trial]
        runs.append(
            PlannedRun(
                spec.key(),
                table_names[spec.dataset],
                str(spec.label()),
                list(spec.target),
                spec.trial,
                spec.draw,
                int(spec.steps or 0),
                ", ".join(f"{name}={short(spec.hyper_parameters[name])}" for name in different),
            )
        )
    return runs
