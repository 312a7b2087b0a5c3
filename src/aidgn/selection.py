"""Records in, chosen runs out: which run and step to believe, by training-domain validation, leave-one-domain-out
validation or the oracle."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from aidgn.errors import AidgnError, did_you_mean
from aidgn.runs.differences import check_same_images
from aidgn.runs.reader import load_records, read_runs
from aidgn.runs.records import Record, Records, RunRecords, as_records, domain_names

__all__ = [
    "METHODS",
    "Record",
    "Records",
    "RunRecords",
    "as_records",
    "choose",
    "domain_names",
    "load_records",
    "read_runs",
    "select",
]


class Candidate(NamedTuple):
    """The best a run has to offer: its highest validation accuracy, and at which of its records."""

    validation: float
    hparams_seed: int
    run: RunRecords
    record: int


def _candidate(run: RunRecords, validation: float, record: int) -> Iterator[Candidate]:
    if validation > -np.inf:
        yield Candidate(validation, run.args["hparams_seed"], run, record)


def _training(target: int, runs: list[RunRecords]) -> Iterator[Candidate]:
    """Validation accuracy = mean of the source *out* accuracies."""
    for run in runs:
        if run.targets == [target]:
            yield from _candidate(run, *run.select())


def _leave_one_out(target: int, runs: list[RunRecords]) -> Iterator[Candidate]:
    """Validation accuracy = mean over source domains of their *in* accuracy in the run that held them out as well."""
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
                held_out[domain].curve(f"env{domain}_in_acc")[np.isin(held_out[domain].curve("step"), common)]
                for domain in sources
            ]
            positions = run.order[np.isin(steps, common)]
            yield from _candidate(run, *run.best(positions, np.stack(curves, axis=1).mean(axis=1)))


def _oracle(target: int, runs: list[RunRecords]) -> Iterator[Candidate]:
    """Validation accuracy = the target's *out* accuracy at the last step; no step is chosen."""
    for run in runs:
        if run.targets == [target]:
            validation = run.number(run.record(int(run.order[-1])), f"env{target}_out_acc")
            yield from _candidate(run, *run.best(run.order[-1:], np.array([validation])))


METHODS = {"training": _training, "leave-one-out": _leave_one_out, "oracle": _oracle}


def choose(target: int, runs: list[RunRecords], method: str = "training") -> Candidate | None:
    """The best that these runs have to offer; of runs with equal validation accuracy the one of the highest draw."""
    return max(METHODS[method](target, runs), key=lambda candidate: candidate[:2], default=None)


def select(records: Iterable[Record], method: str = "training") -> list[Record]:
    """Per (data set, algorithm, target, trial) the accuracy on the target's *in* split of the run and step chosen.
    `target` is the number of the domain."""
    if method not in METHODS:
        raise AidgnError(
            f"There is no selection method {method}.{did_you_mean(method, METHODS)} Choose one of {', '.join(METHODS)}."
        )
    groups: dict[tuple[str, str, int, int], list[RunRecords]] = {}
    for run in as_records(records).runs:
        for target in run.targets:
            key = run.args["dataset"], run.args["algorithm"], target, run.args["trial_seed"]
            groups.setdefault(key, []).append(run)
    rows = []
    for (dataset, algorithm, target, trial), runs in sorted(groups.items(), key=lambda group: group[0]):
        check_same_images(runs)
        best = choose(target, runs, method)
        if best is None:
            continue
        record = best.run.record(best.record)
        accuracy = best.run.number(record, f"env{target}_in_acc")
        if np.isnan(accuracy):
            continue
        row = {
            "dataset": dataset,
            "algorithm": algorithm,
            "target": target,
            "trial": trial,
            "accuracy": accuracy,
            "step": record["step"],
            "hparams_seed": best.hparams_seed,
        }
        names = domain_names(runs[0].args)
        rows.append(row | ({"target_name": names[target]} if target < len(names) else {}))
    return rows
