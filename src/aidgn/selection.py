"""Model selection: records in, chosen runs and steps out.

`METHODS` lists the methods: training-domain validation, leave-one-domain-out validation and the oracle.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aidgn.errors import UnknownNameError
from aidgn.metrics import METRICS
from aidgn.runs.accuracy_key import accuracy_key, class_accuracies_key, metric_key
from aidgn.runs.differences import check_same_images
from aidgn.runs.reader import load_records
from aidgn.runs.records import Record, RunRecords, as_records, domain_names

__all__ = [
    "METHODS",
    "Selected",
    "SelectionMethod",
    "choose",
    "find_method",
    "load_records",
    "select",
    "select_runs",
]


class Candidate(NamedTuple):
    """The best record of a run."""

    validation: float  # validation accuracy of the record
    # Draw of the hyper-parameters. Of candidates with equal accuracy the highest draw is chosen.
    hparams_seed: int
    run: RunRecords
    record: int  # position of the record in the run


@dataclass(frozen=True)
class SelectionMethod:
    """A method of choosing a run and a step."""

    title: str  # name in the captions of tables
    short_title: str  # name where there is little space
    description: str  # how step and draw are chosen, without a verb or full stop
    # Function from a target and runs to the best record of every run that the method can judge
    candidates: Callable[[int, list[RunRecords]], Iterator[Candidate]]
    needs: str = ""  # a sentence on the runs that the method needs, if it needs other runs than those to choose from


def _candidate(run: RunRecords, validation: float, record: int) -> Iterator[Candidate]:
    if validation > -np.inf:
        yield Candidate(validation, run.args["hparams_seed"], run, record)


def _training(target: int, runs: list[RunRecords]) -> Iterator[Candidate]:
    """Judge runs by the mean of the sources' *out* accuracies."""
    for run in runs:
        if run.targets == [target]:
            yield from _candidate(run, *run.select())


def _leave_one_out(target: int, runs: list[RunRecords]) -> Iterator[Candidate]:
    """Judge runs by the mean over sources of the *in* accuracy in the run that held the source out as well."""
    settings: dict[str, list[RunRecords]] = {}
    for run in runs:
        settings.setdefault(run.setting, []).append(run)
    for members in settings.values():
        held_out = {
            domain: run for run in members if len(run.targets) == 2 for domain in run.targets if domain != target
        }
        for run in members:
            sources = [domain for domain in run.domains if domain != target]
            if run.targets != [target] or not sources or not held_out.keys() >= set(sources):
                continue
            steps = common = run.curve("step")
            for domain in sources:
                common = np.intersect1d(common, held_out[domain].curve("step"))
            curves = [
                held_out[domain].curve(accuracy_key(domain, "in"))[np.isin(held_out[domain].curve("step"), common)]
                for domain in sources
            ]
            positions = run.order[np.isin(steps, common)]
            yield from _candidate(run, *run.best(positions, np.stack(curves, axis=1).mean(axis=1)))


def _oracle(target: int, runs: list[RunRecords]) -> Iterator[Candidate]:
    """Judge runs by the target's *out* accuracy at the last step. No step is chosen."""
    for run in runs:
        if run.targets == [target]:
            validation = run.number(run.record(int(run.order[-1])), accuracy_key(target, "out"))
            yield from _candidate(run, *run.best(run.order[-1:], np.array([validation])))


METHODS = {
    "training": SelectionMethod(
        "training-domain validation",
        "Training domains",
        "step and draw with the best accuracy on images of the source domains that were set aside",
        _training,
    ),
    "leave-one-out": SelectionMethod(
        "leave-one-domain-out validation",
        "Leave one out",
        "step and draw with the best accuracy on source domains held out in separate runs",
        _leave_one_out,
        "It needs runs with each pair of domains as targets.",
    ),
    "oracle": SelectionMethod(
        "test-domain validation (oracle)",
        "Oracle",
        "draw with the best accuracy on images of the target that were set aside; it looks at the unseen domain",
        _oracle,
    ),
}


def find_method(name: str) -> SelectionMethod:
    """Return the method of a name in `METHODS`."""
    if name not in METHODS:
        raise UnknownNameError("selection method", name, METHODS, f"Choose one of {', '.join(METHODS)}.")
    return METHODS[name]


def choose(target: int, runs: list[RunRecords], method: str = "training") -> Candidate | None:
    """Return the best record of these runs, None if there is none.

    Args:
        target: Number of the unseen domain.
        runs: Runs of one algorithm on one data set in one trial.
        method: A name in `METHODS`.
    """
    candidates = find_method(method).candidates(target, runs)
    return max(candidates, key=lambda candidate: candidate[:2], default=None)


class Selected(NamedTuple):
    """The run and record that a method selects for a data set, algorithm, target and trial."""

    dataset: str
    algorithm: str
    target: int
    trial: int
    best: Candidate

    def to_row(self) -> Record:
        """Return the accuracy on the target's *in* split, and the other metrics that the record has."""
        run, record = self.best.run, self.best.run.record(self.best.record)
        row = {
            **self._asdict(),
            "accuracy": run.number(record, accuracy_key(self.target, "in")),
            "step": record["step"],
            "hparams_seed": self.best.hparams_seed,
        }
        del row["best"]
        for metric in METRICS:
            name = metric_key(self.target, "in", metric)
            if name in run.keys:
                row[metric] = run.number(record, name)
        by_class = record.get(class_accuracies_key(self.target, "in"))
        if isinstance(by_class, list):
            row["class_accuracies"] = by_class
        names = domain_names(run.args)
        return row | ({"target_name": names[self.target]} if self.target < len(names) else {})


def select_runs(records: Iterable[Record], method: str = "training") -> list[Selected]:
    """Choose a run and a record for every data set, algorithm, target and trial; sorted."""
    find_method(method)
    groups: dict[tuple[str, str, int, int], list[RunRecords]] = {}
    for run in as_records(records).runs:
        for target in run.targets:
            key = run.args["dataset"], run.args["algorithm"], target, run.args["trial_seed"]
            groups.setdefault(key, []).append(run)
    selected = []
    for place, runs in sorted(groups.items(), key=lambda group: group[0]):
        check_same_images(runs)
        if best := choose(place[2], runs, method):
            selected.append(Selected(*place, best))
    return selected


def select(records: Iterable[Record], method: str = "training") -> list[Record]:
    """Choose a run and a step for every data set, algorithm, target and trial.

    Args:
        records: Records of runs.
        method: A name in `METHODS`.

    Returns:
        Rows with the accuracy on the target's *in* split and the other metrics that the record has, sorted. `target` is
        the number of the domain.
    """
    rows = [selected.to_row() for selected in select_runs(records, method)]
    return [row for row in rows if not np.isnan(row["accuracy"])]
