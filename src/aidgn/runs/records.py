"""Check records, sort them into runs, and compute the curves of a run."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aidgn.data.registry import DATASETS
from aidgn.errors import AidgnError, clip
from aidgn.files import parse_json
from aidgn.runs import names
from aidgn.runs.accuracy_key import metric_key, parse_accuracy_key
from aidgn.runs.label import Label
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.options import CHOICES

Record = dict[str, Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.intp]

RECORD_VERSION = 1  # a record without `version` is of version 1
REQUIRED: dict[str, Any] = {"args": dict, "hparams": dict, "step": (int, float)}
REQUIRED_ARGS = {"dataset": str, "algorithm": str, "test_envs": list, "trial_seed": int, "hparams_seed": int}
MAX_DOMAINS = 1000  # a table has a column for each
# From names in the identity of run.json to names in the args of a record. The identity has more settings than args.
SAME_IN_ARGS = ("dataset", "algorithm", "steps", "backbone", "weights", "precision", "task", "holdout_fraction")
SETTINGS_IN_ARGS = {"trial": "trial_seed", "draw": "hparams_seed"} | {name: name for name in SAME_IN_ARGS}
ACCURACY = re.compile(r"env\d+_\w*acc")

RECORDED = r"version|step|epoch|args|hparams|(eval|step)_time|env\d+_.*"  # names that a loss term must not have

# From our names of hyper-parameters to DomainBed's. Records hold DomainBed's names.
DOMAINBED_NAMES = {
    "DANN": {"dann_lambda": "lambda"},
    "CDANN": {"dann_lambda": "lambda"},
    "Fishr": {"fishr_lambda": "lambda"},
}


def domainbed_names(algorithm: str) -> dict[str, str]:
    """Return the map from our names of an algorithm's hyper-parameters to DomainBed's, where they differ."""
    return DOMAINBED_NAMES.get(algorithm, {})


def domain_names(args: Mapping[str, Any]) -> list[str]:
    """Return the names of a run's domains, from its record or the registry; [] if neither knows them."""
    if args.get("domains"):
        return list(args["domains"])
    return list(DATASETS[args["dataset"]].domains) if args["dataset"] in DATASETS else []


class RunRecords:
    """The records of one run. Args and hyper-parameters are the same in every record and are kept once.

    `rest` holds the other values of the records: dicts, or lines of flat JSON objects that are parsed when they are
    needed. If it is None, the file is read again when they are needed. `columns` caches the columns read so far.
    """

    def __init__(
        self,
        first: Record,
        last: Record,
        rest: bytes | list[Record] | None,
        length: int,
        path: Path | None,
        metadata: RunMetadata,
    ):
        self.args, self.last = first["args"], last
        self.label = Label.parse(self.args["algorithm"])
        ours = {theirs: ours for ours, theirs in domainbed_names(self.label.name).items()}
        self.hparams = {ours.get(name, name): value for name, value in first["hparams"].items()}
        self.rest, self.length, self.path = rest, length, path
        self.keys = frozenset(first)
        self.columns: dict[str, Floats] = {}
        self.targets: list[int] = sorted(set(self.args["test_envs"]))
        self.domains = sorted(
            domain for domain, split in filter(None, map(parse_accuracy_key, first)) if split == "out"
        )
        # DomainBed's last step is args.steps - 1; records with the names of the domains are ours.
        self.steps = metadata.steps or (self.args.get("steps") if "domains" in self.args else None)
        self.metadata = metadata
        # Whether run.json holds the settings; otherwise args hold some of them
        self.described = bool(metadata.identity)
        in_args = {name: self.args[key] for name, key in SETTINGS_IN_ARGS.items() if key in self.args}
        # Without the target: runs that differ only in the target have equal settings.
        self.settings: dict[str, Any] = {
            **in_args,
            **(metadata.identity or {"hyper_parameters": self.hparams}),
        }
        self.settings.pop("target", None)
        self.setting = json.dumps(self.settings, sort_keys=True)
        self.data = self.settings.get("data")  # digest of the training images, if known
        self.source = self.settings.get("source")  # digest of a custom algorithm's file

    def relabel(self, label: Label) -> None:
        """Change the label of the algorithm in all records."""
        self.label = label
        self.args = {**self.args, "algorithm": str(label)}

    def __len__(self) -> int:
        return self.length

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path.parent).rstrip("/")
        return f"the run of {self.args['algorithm']} on {self.args['dataset']}, target {self.targets}"

    @property
    def identity(self) -> tuple[str, tuple[int, ...], Any]:
        return self.setting, tuple(self.targets), self.args.get("seed")

    @property
    def last_step(self) -> float:
        step: float = self.last["step"]
        return step

    @property
    def finished(self) -> bool:
        """Whether the last record is of the run's last step; true if the number of steps is unknown."""
        return not isinstance(self.steps, int) or self.last_step >= self.steps

    def records(self) -> list[Record]:
        """Return the records. They share one args and one hparams object."""
        return [self.record(i, line) for i, line in enumerate(self.lines())]

    def record(self, i: int, line: bytes | Record | None = None) -> Record:
        """Return record i without parsing the others."""
        if line is None:
            line = self.last if i == self.length - 1 else self.lines()[i]
        record = parse(line, self.path, i + 1) if isinstance(line, bytes) else line
        if self.rest is None and record.get("step") != self.columns["step"][i]:
            raise AidgnError(f"{self.path} was changed while it was in use. Run the same command again.")
        return {**record, "args": self.args, "hparams": self.hparams}

    def lines(self) -> Sequence[bytes | Record]:
        if isinstance(self.rest, list):
            return self.rest
        text = self.rest
        if text is None:
            assert self.path is not None
            try:
                text = self.path.read_bytes()
            except OSError as error:
                raise AidgnError(f"{self.path} cannot be read: {error.strerror or error}.") from None
        return text.split(b"\n", self.length)[: self.length]

    @cached_property
    def order(self) -> Integers:
        """Positions of records by rising step; after a restart, the later of two records of a step."""
        steps = self.column("step")
        if (steps[1:] > steps[:-1]).all():
            return np.arange(len(steps))
        return len(steps) - 1 - np.unique(steps[::-1], return_index=True)[1]

    def select(self) -> tuple[float, int]:
        """Select a step by training-domain validation; the last step of a run that trained on the validation images.

        Returns:
            The highest mean over the sources' *out* splits of the accuracy, or of the metric that the run selects by,
            and the position of the first record with this mean; (-inf, 0) if no record has one.
        """
        sources = [domain for domain in self.domains if domain not in self.targets]
        if not sources:
            raise AidgnError(f"The records of {self} have no accuracy on a source domain's out split (env*_out_acc).")
        positions = self.order
        metric = CHOICES.get(str(self.settings.get("select_by")), "accuracy")
        validation = np.stack([self.curve(metric_key(domain, "out", metric)) for domain in sources], 1).mean(1)
        if self.settings.get("train_on_all"):
            positions, validation = positions[-1:], validation[-1:]
        return self.best(positions, validation)

    def best(self, positions: Integers, validation: Floats) -> tuple[float, int]:
        """Return the highest of these accuracies without NaN, and the position of the first record that has it."""
        known = np.where(np.isnan(validation), -np.inf, validation)
        if not len(known):
            return -np.inf, 0
        return float(known.max()), int(positions[known.argmax()])

    def curve(self, key: str) -> Floats:
        """Return one value of each record in `order`; NaN if a record lacks it."""
        return self.column(key)[self.order]

    def column(self, key: str) -> Floats:
        if key not in self.columns:
            self.columns[key] = self._column(key)
        return self.columns[key]

    def _column(self, key: str) -> Floats:
        if isinstance(self.rest, bytes):
            # In a flat object only a key looks like a key in quotes, so a regular expression finds its values.
            values = re.findall(rb'"%s":([^,}]+)' % key.encode(), self.rest)
            if len(values) == self.length:
                try:
                    return np.fromiter(map(float, values), float, self.length)
                except ValueError:
                    pass  # null, or not a number: parse the records
        return np.array([self.number(record, key) for record in self.records()])

    def number(self, record: Record, key: str) -> float:
        """Return a value of a record; NaN if it lacks the value, an error if the run's first record lacks it."""
        if key not in self.keys:
            raise AidgnError(f"The records of {self} have no {key}, which this selection needs.")
        value = record.get(key)
        if value is not None and not is_a(value, (int, float)):
            raise AidgnError(f"The records of {self} have {key} = {value!r}; expected a number.")
        return float("nan") if value is None else float(value)


@dataclass(eq=False)
class Records:
    """The records of many runs. Iterates over dicts in a fraction of the memory of a list."""

    runs: list[RunRecords]
    cut: int = 0  # files whose last line was cut in half by a crash; that line is ignored
    twice: int = 0  # runs found a second time and counted once
    empty: Sequence[Path] = ()  # folders of runs without any record yet

    @property
    def unfinished(self) -> list[Path | str]:
        """Folders of the runs that have not reached their last step."""
        return [*self.empty, *(run.path.parent if run.path else str(run) for run in self.runs if not run.finished)]

    @property
    def class_images(self) -> dict[str, list[int]]:
        """Images of each class by data set, as far as runs know them."""
        return {run.args["dataset"]: run.metadata.class_images for run in self.runs if run.metadata.class_images}

    def finished(self) -> "Records":
        return Records([run for run in self.runs if run.finished], self.cut, self.twice)

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[Record]:
        for run in self.runs:
            yield from run.records()


def as_records(records: Iterable[Record]) -> Records:
    """Check records and sort them into runs."""
    if isinstance(records, Records):
        return records
    records = list(records)
    for number, record in enumerate(records):
        check(record, f"Record {number}")
    return Records(sort_into_runs(records, None, RunMetadata()))


def parse(line: bytes, path: Path | None, number: int) -> Record:
    try:
        record = parse_json(line)
        if isinstance(record, dict):
            return record
        problem = "a record is an object in braces"
    except ValueError as error:
        problem = str(error)
    raise AidgnError(f"{path}, line {number} is broken: {problem}.{train_again(path)}")


def train_again(path: Path | None) -> str:
    """Return the sentences that say how to repair a run with damaged records."""
    if path is None or path.name != names.RECORDS:
        return ""
    last, state = path.parent / names.LAST, path.parent / names.STATE
    if state.exists() and not last.exists():
        return " The command that started the run repairs its records and continues it."
    if not last.exists():
        return " Remove that line, or train the run again."
    return f" To train the run again: `rm {shlex.quote(str(last))}`, then the command that started it."


def is_a(value: Any, value_type: Any) -> bool:
    """Return whether a value from JSON has a type, where a boolean is not a number."""
    return isinstance(value, value_type) and not isinstance(value, bool)


def check(record: Record, where: str, written_by: str = "", accuracies: bool = True) -> None:
    """Raise an error if selection cannot use a record.

    Args:
        record: The record.
        where: The file and line, for messages.
        written_by: Version of aidgn that wrote it, for messages.
        accuracies: Whether to check the accuracies.
    """
    version = record.get("version", RECORD_VERSION)
    if not is_a(version, int) or version > RECORD_VERSION:
        raise AidgnError(
            f"{where}: the record is of version {clip(version)}, this aidgn reads up to {RECORD_VERSION}. "
            "Install a newer aidgn."
        )
    wrong = [_named(key, record) for key, expected in REQUIRED.items() if not is_a(record.get(key), expected)]
    if not wrong:
        args = record["args"]
        wrong = [
            f"args.{_named(key, args)}" for key, expected in REQUIRED_ARGS.items() if not is_a(args.get(key), expected)
        ]
        if not wrong and not all(is_a(domain, int) and 0 <= domain < MAX_DOMAINS for domain in args["test_envs"]):
            wrong = [f"args.{_named('test_envs', args)} (numbers of domains)"]
        names = args.get("domains") or []
        if not wrong and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            wrong = ["args.domains (their names)"]
    if wrong:
        by = f" It was written by aidgn {written_by}." if written_by else ""
        raise AidgnError(f"{where}: the record has no valid {wrong[0]}. Expected a record of aidgn or DomainBed.{by}")
    for key, value in record.items() if accuracies else ():
        if key.startswith("env") and ACCURACY.fullmatch(key) and not _is_accuracy(value):
            raise AidgnError(
                f"{where}: {key} is {json.dumps(value)}. An accuracy is a number from 0 to 1, NaN or null. "
                "Correct that line, or train the run again."
            )


def _named(key: str, values: Mapping[str, Any]) -> str:
    return f"{key} = {clip(json.dumps(values[key]))}" if key in values else key


def _is_accuracy(value: Any) -> bool:
    return value is None or (is_a(value, (int, float)) and (0 <= value <= 1 or value != value))


def sort_into_runs(records: list[Record], path: Path | None, metadata: RunMetadata) -> list[RunRecords]:
    """Sort records into runs, in the order of their first records."""
    known: dict[tuple[int, int], list[Record]] = {}  # by the ids of args and hparams, which most records share
    members: dict[Any, list[Record]] = {}
    for record in records:
        objects = id(record["args"]), id(record["hparams"])
        if objects not in known:
            known[objects] = members.setdefault(RunRecords(record, record, [record], 1, path, metadata).identity, [])
        known[objects].append(record)
    return [RunRecords(run[0], run[-1], run, len(run), path, metadata) for run in members.values()]
