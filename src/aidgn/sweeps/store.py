"""The folder of a sweep: run folders, and beside them

    sweep.yaml              the plan, with which the sweep can be continued
    .sweep/plan.json        its runs, for those who look on without the data at hand
    .sweep/attempts/        see attempts.py

What is done is decided by the run folders alone.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aidgn.errors import AidgnError, short
from aidgn.files import lock, open_no_link, storage_error, write_text
from aidgn.runs.folder import RunFolder
from aidgn.runs.options import run_options
from aidgn.runs.run_id import sweep_key
from aidgn.sweeps.journal import History, history

if TYPE_CHECKING:
    from aidgn.runs.spec import RunSpec


# Options that an identity omits when they are not set.
DEFAULTS = {option.name: option.default for option in run_options() if option.identity == "if set"}


class PlannedRun(NamedTuple):
    """A planned run."""

    key: str
    dataset: str
    algorithm: str
    target: list[str]
    trial: int
    draw: int
    steps: int
    varied: str  # the point of a grid: "kappa=50"

    def __str__(self) -> str:
        parts = [
            self.dataset,
            self.algorithm,
            f"{' and '.join(self.target) or 'nothing'} unseen",
            f"trial {self.trial}",
            f"draw {self.draw}",
            self.varied,
        ]
        return ", ".join(filter(None, parts))


class RunStatus(NamedTuple):
    """How it stands with a planned run: "done", "running", "failed" (and set aside) or "left"."""

    kind: str
    history: History


class SweepFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.yaml = self.path / "sweep.yaml"
        self.json = self.path / ".sweep" / "plan.json"
        self.finished: dict[str, RunStatus] = {}  # runs seen to be done; they stay so

    def planned(self) -> tuple[list[PlannedRun], int]:
        """The runs of the plan and how often a broken one is retried; none where no sweep was started."""
        try:
            content = json.loads(self.json.read_bytes())
            return [PlannedRun(*fields) for fields in content["runs"]], int(content["retries"])
        except (FileNotFoundError, NotADirectoryError):
            return [], 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AidgnError(f"{self.json} cannot be read ({error}). Remove it and start the sweep again.") from None

    def write(self, items: Sequence[PlannedRun], retries: int, yaml: str) -> None:
        write_text(self.yaml, yaml)  # first: if no more than this is written, continuing it writes the other
        write_text(self.json, json.dumps({"retries": retries, "runs": items}) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While the plan is read and written."""
        try:
            self.json.parent.mkdir(parents=True, exist_ok=True)
            file = open_no_link(self.json.parent / "lock", "a")
        except OSError as error:
            raise storage_error(self.path, error) from None
        with file:
            lock(file, self.path, wait=True)
            yield

    def alone(self) -> bool:
        """Whether no other process is at work on its plan here. From now on this one is, as long as this object is."""
        self.at_work = open_no_link(self.json.parent / "at-work", "a")
        alone = lock(self.at_work, self.path, wait=False)
        lock(self.at_work, self.path, wait=True, shared=True)
        return alone

    def states(self, items: Sequence[PlannedRun], retries: int) -> list[RunStatus]:
        """How each run stands, from the disk alone."""
        histories = {item.key: history(self.path, item.key) for item in items if item.key not in self.finished}
        folders = {key: one.folder for key, one in histories.items() if one.folder}
        named = {*folders.values(), *(state.history.folder for state in self.finished.values())}
        for name in self.run_folders():
            if name not in named and (identity := self.identity(name)):
                folders.setdefault(sweep_key(identity), name)
        found = []
        for item in items:
            if item.key not in self.finished:
                past, folder = histories[item.key], folders.get(item.key)
                if folder and RunFolder(self.path / folder).finished:
                    self.finished[item.key] = RunStatus("done", past)
                else:
                    kind = "running" if past.running else "failed" if past.failures > retries else "left"
                    found.append(RunStatus(kind, past))
                    continue
            found.append(self.finished[item.key])
        return found

    def run_folders(self) -> list[str]:
        with suppress(OSError), os.scandir(self.path) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        return []

    def identity(self, name: str) -> dict[str, Any]:
        """Of the run in a folder; {} where there is none."""
        with suppress(AidgnError):
            metadata = RunFolder(self.path / name).metadata
            return metadata.identity if metadata.is_described else {}
        return {}

    def check(
        self,
        specs: "Mapping[str, RunSpec]",
        names: Mapping[str, str],
        common: Mapping[str, Mapping[str, Any]],
        items: Sequence[PlannedRun],
    ) -> list[str]:
        """Refuse runs here that the new ones would be mixed with in a table though they are of another kind. Returns
        the algorithms of those that are by another text of an own algorithm's file: they have rows of their own.

        `specs` are by key; `names` are the data sets' names by what the specifications call them; `common` says by name
        what is known of weights, precision and images; `items` are the runs that were planned before."""
        planned = {item.key for item in items if not item.varied} - specs.keys()
        examples = {names[spec.dataset]: spec for spec in specs.values()}
        cells: dict[tuple[Any, ...], RunSpec] = {
            (names[spec.dataset], str(spec.label()), repr(list(spec.target)), spec.trial, spec.draw): spec
            for spec in specs.values()
        }
        replaced = {
            (item.dataset, item.algorithm, repr(item.target), item.trial, item.draw)
            for item in items
            if item.key in planned
        }
        older = []
        for name in self.run_folders():
            identity = self.identity(name)
            example = examples.get(identity.get("dataset", ""))
            if example is None:
                continue
            ours = {option.name: getattr(example, option.name) for option in run_options() if option.must_match}
            ours |= {"weights": None, **common[identity["dataset"]]}
            differing = {
                key: (identity.get(key, DEFAULTS.get(key)), value)
                for key, value in ours.items()
                if (value is not None or key in DEFAULTS)
                and not _same(key, identity.get(key, DEFAULTS.get(key)), value)
            }
            cell = (
                identity["dataset"],
                identity["algorithm"],
                repr(identity["target"]),
                identity["trial"],
                identity["draw"],
            )
            # A single run that someone trained with hyper-parameters of their own is a candidate like any other. One by
            # an own file that was changed may have been planned by another text of it, with other defaults.
            key = sweep_key(identity)
            if (
                not differing
                and cell in cells
                and key not in specs
                and (key in planned or (cell in replaced and "source" in identity))
            ):
                spec = cells[cell]
                if identity.get("source") != spec.source():
                    older.append(identity["algorithm"])
                    continue
                there, here = identity["hyper_parameters"], spec.hyper_parameters
                differing = {
                    f"{identity['algorithm']}'s {key}": (there.get(key), here.get(key))
                    for key in {**there, **here}
                    if there.get(key) != here.get(key)
                }
            if differing:
                said = "; ".join(
                    "the images" if name == "data" else f"{name} {there} (here {here})"
                    for name, (there, here) in differing.items()
                )
                raise AidgnError(
                    f"{self.path} holds runs of another plan, which tables would mix with these. Different on "
                    f"{identity['dataset']}: {said}. Choose another folder with --out, give the same settings, or move "
                    f"those runs away (the first: {self.path / name})."
                )
        return older


def items_of(specs: "Mapping[str, RunSpec]", names: Mapping[str, str]) -> list[PlannedRun]:
    """Runs, by key, as a plan lists them. Of those that differ in hyper-parameters alone it says in which."""
    cells = defaultdict(list)
    for spec in specs.values():
        cells[spec.dataset, spec.label(), spec.draw, spec.trial].append(spec)
    varied: dict[tuple[Any, ...], list[str]] = {}
    for cell, members in cells.items():
        first = members[0].hyper_parameters
        varied[cell] = [
            name for name in first if any(spec.hyper_parameters.get(name) != first[name] for spec in members)
        ]
    return [
        PlannedRun(
            key,
            names[spec.dataset],
            str(spec.label()),
            list(spec.target),
            spec.trial,
            spec.draw,
            int(spec.steps or 0),
            ", ".join(
                f"{name}={short(spec.hyper_parameters[name])}"
                for name in varied[spec.dataset, spec.label(), spec.draw, spec.trial]
            ),
        )
        for key, spec in specs.items()
    ]


def _same(key: str, there: Any, here: Any) -> bool:
    if key == "data":  # names of the images, and their content where that is known
        return str(there).startswith(str(here))
    return there == here
