"""What it takes to repeat runs: commands, versions, hyper-parameters, data."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from aidgn.data.registry import DATASETS, SMALL_SIDE
from aidgn.errors import short
from aidgn.runs.folder import RunFolder
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.options import HEAD, run_options
from aidgn.runs.records import RunRecords
from aidgn.runs.run_id import folder_name

Settings = tuple[tuple[str, str], ...]  # of --set, name and value
RunKey = tuple[tuple[str, ...], int, int]  # targets, trial, draw


@dataclass(frozen=True)
class Grid:
    """All trials and draws with each of the targets unseen; with leave-one-out, also with pairs of targets."""

    targets: tuple[str, ...] = ()
    trials: int = 0
    draws: int = 0
    leave_one_out: bool = False

    def runs(self, domains: Sequence[str]) -> set[RunKey]:
        """Return the runs of the grid."""
        unseen: set[tuple[str, ...]] = {(target,) for target in self.targets}
        if self.leave_one_out:
            for target, other in product(self.targets, domains):
                unseen.add(tuple(name for name in domains if name in (target, other)))
        return set(product(unseen, range(self.trials), range(self.draws)))


@dataclass
class RunGroup:
    """Runs of one algorithm with the same options and hyper-parameters: they differ in target, trial and draw.

    Args:
        dataset: Name of the data set.
        algorithm: Value of --algorithm.
        options: Options other than --set.
        settings: Hyper-parameters that differ from the defaults.
        domains: Domains of the data set.
        runs: The runs.
        values: Further values of single hyper-parameters, each tried in as many runs.
    """

    dataset: str
    algorithm: str
    options: tuple[str, ...]
    settings: Settings
    domains: Sequence[str]
    runs: set[RunKey] = field(default_factory=set)
    values: dict[str, list[Any]] = field(default_factory=dict)

    def accepts(self, draw: int, settings: Settings, hyper_parameters: Mapping[str, Any]) -> bool:
        """Return whether a run belongs to the group. --set replaces the values of every draw."""
        if draw == 0:
            return self.settings == settings
        return all(_exact(hyper_parameters.get(name)) == value for name, value in self.settings)

    def largest_grid(self) -> Grid:
        """Return the largest full grid among the runs."""
        best, size = Grid(), 0
        numbers = {(1 + trial, 1 + draw) for _, trial, draw in self.runs}
        for trials, draws in product({trials for trials, _ in numbers}, {draws for _, draws in numbers}):
            if trials * draws > len(self.runs):
                continue
            cells = list(product(range(trials), range(draws)))
            targets = tuple(name for name in self.domains if all(((name,), *cell) in self.runs for cell in cells))
            if len(targets) * len(cells) > size:
                size = len(targets) * len(cells)
                best = Grid(targets, trials, draws)
        with_pairs = replace(best, leave_one_out=True)
        return with_pairs if with_pairs.runs(self.domains) <= self.runs else best


def folder(path: Path) -> str:
    """Return the name that training gives the folder of this run; '' if the path is not the folder of one run."""
    run = RunFolder(path.parent if path.is_file() else path)
    return folder_name(run.identity) if run.exists and run.metadata.is_described else ""


def commands(runs: Iterable[RunRecords], out: str) -> list[str]:
    """Return the commands that train exactly these runs below the folder `out`.

    One `aidgn sweep` trains the largest full grid of targets, trials and draws of a group, `aidgn train` every other
    run. A sweep refuses a folder with a sweep of other settings, so a data set has one set of options that is swept and
    each algorithm one group.
    """
    described = [run for run in runs if run.metadata.is_described]
    weights = {_weights(run.metadata.identity): str(run.metadata.identity.get("weights")) for run in described}
    lines = [
        f"# {file}: the initial weights, in a file whose sha256 begins with {known.rpartition('-')[2]}"
        for file, known in weights.items()
        if file != known
    ]
    alike: dict[Any, list[RunGroup]] = {}  # groups that one sweep can train
    for group in _group(described):
        plan = (group.algorithm, json.dumps(group.values)) if group.values else ()
        key = group.largest_grid(), group.dataset, group.options, group.settings, tuple(group.domains), plan
        alike.setdefault(key, []).append(group)
    singles: list[str] = []
    options_swept: dict[str, tuple[str, ...]] = {}
    swept: set[tuple[str, str]] = set()
    for (grid, dataset, options, *_), groups in sorted(alike.items(), key=lambda item: -len(item[1][0].runs)):
        algorithms = [group.algorithm for group in groups]
        keys = {(dataset, algorithm) for algorithm in algorithms}
        runs_swept = grid.runs(groups[0].domains)
        if len(runs_swept) * len(groups) < 2 or options_swept.get(dataset, options) != options or keys & swept:
            runs_swept = set()
        else:
            options_swept[dataset] = options
            swept |= keys
            lines += _sweep(groups[0], algorithms, grid, out)
        singles += [_train(group, run, out) for group in groups for run in sorted(group.runs - runs_swept)]
    return lines + singles


def _group(runs: Sequence[RunRecords]) -> list[RunGroup]:
    """Group runs by data set, algorithm, options and hyper-parameters."""
    groups: dict[tuple[Any, ...], list[RunGroup]] = {}
    for run in sorted(runs, key=lambda run: run.args["hparams_seed"]):
        metadata, draw = run.metadata, run.args["hparams_seed"]
        identity = metadata.identity
        key = str(identity["dataset"]), _name(metadata), _options(metadata)
        settings = _settings(identity, key[1]) if draw == 0 else ()
        members = groups.setdefault(key, [])
        group = next((group for group in members if group.accepts(draw, settings, identity["hyper_parameters"])), None)
        if group is None:
            group = RunGroup(*key, settings, metadata.domains)
            members.append(group)
        group.runs.add((tuple(identity["target"]), int(identity["trial"]), draw))
    return [group for members in groups.values() for group in _merge_values(members)]


def _merge_values(groups: list[RunGroup]) -> list[RunGroup]:
    """Merge groups that differ from one of them in one hyper-parameter each: a plan lists the values."""
    for base in sorted(groups, key=lambda group: len(group.settings)):
        values: dict[str, list[Any]] = {}
        for group in groups:
            changes = {*group.settings} - {*base.settings}
            if (
                len(changes) == 1
                and group.runs == base.runs
                and {**dict(base.settings), **dict(changes)} == dict(group.settings)
            ):
                ((name, value),) = changes
                values.setdefault(name, []).append(yaml.safe_load(value))
        if len(base.runs) > 1 and values and sum(map(len, values.values())) == len(groups) - 1:
            return [replace(base, values=values)]
    return groups


def _sweep(group: RunGroup, algorithms: Sequence[str], grid: Grid, out: str) -> list[str]:
    words = ["aidgn", "sweep", group.dataset.removeprefix("own-")]
    for algorithm in algorithms:
        words += ["--algorithm", algorithm]
    if list(grid.targets) != list(group.domains):
        for name in grid.targets:
            words += ["--target", name]
    if grid.leave_one_out:
        words.append("--leave-one-out")
    words += ["--trials", str(grid.trials)]
    if grid.draws > 1:
        words += ["--draws", str(grid.draws)]
    words += _last_words(group, out)
    if not group.values:
        return [shlex.join(words)]
    plan = {"datasets": [words[2]], "algorithms": list(algorithms), "hyper_parameters": group.values}
    return [f"{shlex.join(['echo', json.dumps(plan)])} > values.yaml", shlex.join([*words, "--plan", "values.yaml"])]


def _train(group: RunGroup, run: RunKey, out: str) -> str:
    targets, trial, draw = run
    words = ["aidgn", "train", group.dataset.removeprefix("own-"), "--algorithm", group.algorithm]
    for name in targets or ("none",):
        words += ["--target", name]
    words += ["--trial", str(trial)]
    if draw:
        words += ["--draw", str(draw)]
    return shlex.join(words + _last_words(group, out))


def _last_words(group: RunGroup, out: str) -> list[str]:
    settings = [word for name, value in group.settings for word in ("--set", f"{name}={value}")]
    return [*group.options, *settings, "--out", out]


def _name(metadata: RunMetadata) -> str:
    """Return the value of --algorithm; custom algorithms are in a file."""
    return f"path/to/file.py:{metadata.label.name}" if "source" in metadata.identity else metadata.label.name


def _weights(identity: Mapping[str, Any]) -> str:
    """Return `hub`, `none`, or the name of the file of the initial weights."""
    known = str(identity.get("weights"))
    stem, _, digest = known.rpartition("-")
    return f"{stem}.safetensors" if stem and len(digest) == 8 else known


def _options(metadata: RunMetadata) -> tuple[str, ...]:
    """Return command-line options other than --set whose values differ from those of the data set and the device."""
    from aidgn import backbones

    identity = metadata.identity
    info = DATASETS.get(identity["dataset"])
    small = (identity.get("image_size") or 224) <= SMALL_SIDE
    defaults = {
        "eval_every": info.eval_every if info else None,
        "image_size": info.image_size if info else 224,
        "backbone": backbones.SMALL if small else backbones.DEFAULT,
        "weights": "none" if identity.get("backbone") == backbones.SMALL else "hub",
    }
    values = {**identity, "skip_broken": bool(metadata.skipped)}
    if identity.get("weights"):
        values["weights"] = _weights(identity)
    options = []
    for option in run_options():
        value = values.get(option.name)
        if value is not None and value != defaults.get(option.name, option.default):
            options += [option.command_line] if option.type is bool else [option.command_line, str(value)]
    precision = identity.get("precision")
    if precision not in (None, "float32" if metadata.device.endswith("CPU") else "bfloat16"):
        options += ["--precision", str(precision)]
    return tuple(options)


def _settings(identity: Mapping[str, Any], algorithm: str) -> Settings:
    """Return the hyper-parameters of draw 0 that differ from the defaults; all of a custom algorithm."""
    from aidgn.algorithms import ALGORITHMS

    given, defaults = identity["hyper_parameters"], {}
    if algorithm in ALGORITHMS:
        small = identity["image_size"] <= SMALL_SIDE if identity.get("image_size") else None
        head = identity.get("train_only") == HEAD
        trial = int(identity["trial"])
        defaults = ALGORITHMS[algorithm].sample(identity["dataset"], trial, 0, small=small, head=head)
    return tuple(
        (name, _exact(value))
        for name, value in sorted(given.items())
        if name not in defaults or _exact(defaults[name]) != _exact(value)
    )


def _exact(value: Any) -> str:
    """Format a value as shortly as possible without changing the run."""
    return repr(value) if isinstance(value, float) and float(_text(value)) != value else _text(value)


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
