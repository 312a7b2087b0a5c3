"""Describe how to repeat runs: plans and commands, versions, hyper-parameters, data."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aidgn.data.registry import SMALL_SIDE
from aidgn.errors import short
from aidgn.runs.folder import RunFolder
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.options import HEAD, run_options
from aidgn.runs.records import RunRecords
from aidgn.runs.run_id import folder_name

if TYPE_CHECKING:
    from aidgn.sweeps.plan import SweepPlan


def name_folder(path: Path) -> str:
    """Return the name that training gives to the folder of this run; '' if the path is not the folder of a run."""
    run = RunFolder(path.parent if path.is_file() else path)
    return folder_name(run.identity) if run.exists and run.metadata.is_described else ""


def commands(runs: Iterable[RunRecords], out: str) -> list[str]:
    """Return the lines of a shell script that trains exactly these runs below the folder `out`.

    The script writes a plan, the stored specifications of the runs, and sweeps it. All runs of a sweep on a data set
    share their settings, so runs with other settings go to another folder.
    """
    from aidgn.sweeps.plan_file import write_plans

    described = [run.metadata for run in runs if run.metadata.is_described]
    files: list[list[SweepPlan]] = []  # plans that one sweep can train
    for plan in _plans(described):
        for plans in files:
            if plan.precision == plans[0].precision and not any(map(plan.conflicts_with, plans)):
                plans.append(plan)
                break
        else:
            files.append([plan])
    weights = {_weights(run.identity): str(run.identity.get("weights")) for run in described}
    lines = [
        f"# {file}: the initial weights, in a file whose sha256 begins with {known.rpartition('-')[2]}"
        for file, known in weights.items()
        if file != known
    ]
    for number, plans in enumerate(files, 1):
        place = out if number == 1 else f"{out}-{number}"
        file = f"{Path(place).name}.yaml"
        lines += [f"cat > {shlex.quote(file)} <<'END'", *write_plans(plans, [], None).splitlines(), "END"]
        lines.append(shlex.join(["aidgn", "sweep", file, "--out", place]))
    return lines


def _plans(runs: Sequence[RunMetadata]) -> "list[SweepPlan]":
    """Return a plan for each group of runs that differ only in algorithm, unseen domains, trial and draw."""
    from aidgn.sweeps.plan import SweepPlan

    groups: dict[tuple[str, str, str, str], set[tuple[Any, ...]]] = {}  # data set, algorithm, options, settings
    for run in sorted(runs, key=lambda run: int(run.identity["draw"])):
        identity = run.identity
        key = str(identity["dataset"]).removeprefix("own-"), _name(run), json.dumps(_options(run))
        settings = json.dumps(_settings(identity, key[1]) if identity["draw"] == 0 else {})
        if identity["draw"]:  # settings replace the values of every draw, also of the first
            values_of_run = identity["hyper_parameters"]
            known = [other for *group, other in groups if tuple(group) == key]
            known = [other for other in known if json.loads(other).items() <= values_of_run.items()]
            settings = max(known, key=len, default=settings)
        place = int(identity["trial"]), int(identity["draw"]), *identity["target"]
        groups.setdefault((*key, settings), set()).add(place)
    alike: dict[tuple[Any, ...], list[str]] = {}  # algorithms with the same runs
    for (dataset, algorithm, options, settings), places in groups.items():
        alike.setdefault((dataset, options, settings, tuple(sorted(places))), []).append(algorithm)
    plans = []
    for (dataset, options, settings, runs_of_plan), algorithms in alike.items():
        values = {"hyper_parameters": json.loads(settings), **json.loads(options)}
        plans.append(SweepPlan(datasets=(dataset,), algorithms=tuple(algorithms), **_grid(runs_of_plan), **values))
    return plans


def _grid(places: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Return targets, trials and draws if the runs are all their combinations; otherwise list each run."""
    targets = tuple(dict.fromkeys(names for _, _, *names in places for names in names))
    trials, draws = (1 + max(place[part] for place in places) for part in (0, 1))
    if all(len(place) == 3 for place in places) and len(places) == len(targets) * trials * draws:
        return {"targets": targets, "trials": trials, "draws": draws}
    return {"runs": tuple(places)}


def _name(metadata: RunMetadata) -> str:
    """Return the algorithm of a plan; custom algorithms are in a file."""
    return f"path/to/file.py:{metadata.label.name}" if "source" in metadata.identity else metadata.label.name


def _weights(identity: Mapping[str, Any]) -> str:
    """Return `hub`, `none`, or the name of the file of the initial weights."""
    known = str(identity.get("weights"))
    stem, _, digest = known.rpartition("-")
    return f"{stem}.safetensors" if stem and len(digest) == 8 else known


def _options(metadata: RunMetadata) -> dict[str, Any]:
    """Return the options of a run and its precision, in the form of a plan."""
    values = {**metadata.identity, "skip_broken": bool(metadata.skipped)}
    if values.get("weights"):
        values["weights"] = _weights(metadata.identity)
    changed = {
        option.name: values[option.name]
        for option in run_options()
        if values.get(option.name) not in (None, option.default)
    }
    return {**changed, "precision": values.get("precision") or "auto"}


def _settings(identity: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Return the hyper-parameters of draw 0 that differ from the defaults; all of a custom algorithm."""
    from aidgn.algorithms import ALGORITHMS

    values = identity["hyper_parameters"]
    defaults = {}
    if algorithm in ALGORITHMS:
        small = identity["image_size"] <= SMALL_SIDE if identity.get("image_size") else None
        head = identity.get("train_only") == HEAD
        trial = int(identity["trial"])
        defaults = ALGORITHMS[algorithm].sample(identity["dataset"], trial, 0, small=small, head=head)
    return {name: value for name, value in sorted(values.items()) if name not in defaults or defaults[name] != value}


def _text(value: Any) -> str:
    return "none" if value is None else short(value)


def versions(runs: Iterable[RunRecords]) -> list[tuple[str, str]]:
    """Return titles and values of versions and settings in the run.json of the runs."""
    described = [run.metadata for run in runs if run.metadata.is_described]
    names = {"aidgn": "aidgn", "torch": "PyTorch", "python": "Python", "device": "Device", "precision": "Precision"}
    rows = [
        (title, ", ".join(sorted({getattr(metadata, key) for metadata in described} - {"", None})))
        for key, title in names.items()
    ]
    for key, title in (("backbone", "Backbone"), ("weights", "Initial weights"), ("data", "Data fingerprint")):
        values = {(str(run.identity["dataset"]), str(run.identity.get(key, ""))) for run in described}
        several = len({dataset for dataset, _ in values}) > 1 and key == "data"
        texts = {f"{dataset}: {value}" if several else value for dataset, value in values if value}
        rows.append((title, ", ".join(sorted(texts))))
    return [(title, text) for title, text in rows if text]


def hyper_parameters(runs: Sequence[RunRecords]) -> list[tuple[str, list[tuple[str, str]]]]:
    """List, by data set and algorithm, each hyper-parameter with its values or their range."""
    values: dict[str, dict[str, list[Any]]] = {}
    several = len({run.args["dataset"] for run in runs}) > 1
    for run in runs:
        head = f"{run.args['algorithm']}, {run.args['dataset']}" if several else run.args["algorithm"]
        for name, value in run.hparams.items():
            values.setdefault(head, {}).setdefault(name, []).append(value)
    return [(head, [(name, _range(tried)) for name, tried in named.items()]) for head, named in values.items()]


def _range(values: Sequence[Any]) -> str:
    texts = list(dict.fromkeys(map(_text, values)))
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(texts) <= 3 or len(numbers) < len(values):
        return ", ".join(texts[:8]) + (" …" if len(texts) > 8 else "")
    return f"{min(numbers):.3g} to {max(numbers):.3g} ({len(texts)} values)"
