"""Everything needed to run runs again: the commands, the versions, the hyper-parameters, the data."""

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
from aidgn.runs.options import run_options
from aidgn.runs.records import RunRecords
from aidgn.runs.run_id import folder_name

Settings = tuple[tuple[str, str], ...]  # of --set, name and value
RunKey = tuple[tuple[str, ...], int, int]  # targets, trial, draw


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

    @property
    def shape(self) -> tuple[Any, ...]:
        """What groups of several algorithms have in common if one sweep trains them."""
        plan = (self.algorithm, json.dumps(self.values)) if self.values else ()
        return self.dataset, self.options, self.settings, tuple(self.domains), frozenset(self.runs), plan

    def accepts(self, draw: int, settings: Settings, hyper_parameters: Mapping[str, Any]) -> bool:
        """Return whether a run belongs to the group. --set replaces the values of every draw."""
        if draw == 0:
            return self.settings == settings
        return all(_exact(hyper_parameters.get(name)) == value for name, value in self.settings)

    def largest_grid(self) -> tuple[list[str], int, int]:
        """Return the targets, trials and draws of the largest full grid among the runs with one target."""
        best: tuple[list[str], int, int] = ([], 0, 0)
        numbers = {(1 + trial, 1 + draw) for _, trial, draw in self.runs}
        for trials, draws in product({trials for trials, _ in numbers}, {draws for _, draws in numbers}):
            cells = list(product(range(trials), range(draws))) if trials * draws <= len(self.runs) else [(-1, -1)]
            targets = [name for name in self.domains if all(((name,), *cell) in self.runs for cell in cells)]
            if len(targets) * trials * draws > len(best[0]) * best[1] * best[2]:
                best = (targets, trials, draws)
        return best

    def pairs(self, targets: Sequence[str], trials: int, draws: int) -> set[RunKey]:
        """Return the runs with two targets that leave-one-out needs for a grid."""
        return {
            (tuple(name for name in self.domains if name in (target, other)), trial, draw)
            for target, other, trial, draw in product(targets, self.domains, range(trials), range(draws))
            if other != target
        }


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
    alike: dict[Any, list[RunGroup]] = {}
    for group in _group(described):
        alike.setdefault(group.shape, []).append(group)
    singles: list[str] = []
    options_swept: dict[str, tuple[str, ...]] = {}
    swept: set[tuple[str, str]] = set()
    for groups in sorted(alike.values(), key=lambda groups: -len(groups[0].runs)):
        group = groups[0]
        algorithms = [member.algorithm for member in groups]
        keys = {(group.dataset, algorithm) for algorithm in algorithms}
        left = set(group.runs)
        targets, trials, draws = group.largest_grid()
        several = len(targets) * trials * draws * len(groups) > 1
        if several and options_swept.get(group.dataset, group.options) == group.options and not keys & swept:
            options_swept[group.dataset] = group.options
            swept |= keys
            left -= set(product(((name,) for name in targets), range(trials), range(draws)))
            pairs = group.pairs(targets, trials, draws)
            leave_one_out = pairs <= left
            if leave_one_out:
                left -= pairs
            lines += _sweep(group, algorithms, targets, trials, draws, leave_one_out, out)
        singles += [_train(group, algorithm, run, out) for run in sorted(left) for algorithm in algorithms]
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


def _sweep(
    group: RunGroup,
    algorithms: Sequence[str],
    targets: Sequence[str],
    trials: int,
    draws: int,
    leave_one_out: bool,
    out: str,
) -> list[str]:
    words = ["aidgn", "sweep", group.dataset.removeprefix("own-")]
    for algorithm in algorithms:
        words += ["--algorithm", algorithm]
    if list(targets) != list(group.domains):
        for name in targets:
            words += ["--target", name]
    if leave_one_out:
        words.append("--leave-one-out")
    words += ["--trials", str(trials)]
    if draws > 1:
        words += ["--draws", str(draws)]
    words += _last_words(group, out)
    if not group.values:
        return [shlex.join(words)]
    plan = {"datasets": [words[2]], "algorithms": list(algorithms), "hyper_parameters": group.values}
    return [f"{shlex.join(['echo', json.dumps(plan)])} > values.yaml", shlex.join([*words, "--plan", "values.yaml"])]


def _train(group: RunGroup, algorithm: str, run: RunKey, out: str) -> str:
    targets, trial, draw = run
    words = ["aidgn", "train", group.dataset.removeprefix("own-"), "--algorithm", algorithm]
    for name in targets or ("none",):
        words += ["--target", name]
    words += ["--trial", str(trial)]
    if draw:
        words += ["--draw", str(draw)]
    return shlex.join(words + _last_words(group, out))


def _last_words(group: RunGroup, out: str) -> list[str]:
    settings = [word for name, value in group.settings for word in ("--set", f"{name}={value}")]
    return [*group.options, *settings, "--out", out]


def _name(made: RunMetadata) -> str:
    """What --algorithm is given; custom algorithms are in a file."""
    return f"path/to/file.py:{made.label.name}" if "source" in made.identity else made.label.name


def _weights(identity: Mapping[str, Any]) -> str:
    """`hub`, `none`, or what the file of the initial weights was called."""
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
    """Hyper-parameters of draw 0 that are not the defaults. Of an algorithm of the user's own: all of them."""
    from aidgn.algorithms import ALGORITHMS

    given, defaults = identity["hyper_parameters"], {}
    if algorithm in ALGORITHMS:
        small = identity["image_size"] <= SMALL_SIDE if identity.get("image_size") else None
        defaults = ALGORITHMS[algorithm].sample(identity["dataset"], int(identity["trial"]), 0, small=small)
    return tuple(
        (name, _exact(value))
        for name, value in sorted(given.items())
        if name not in defaults or _exact(defaults[name]) != _exact(value)
    )


def _exact(value: Any) -> str:
    """As short as the same run allows."""
    return repr(value) if isinstance(value, float) and float(_text(value)) != value else _text(value)


def _text(value: Any) -> str:
    return "none" if value is None else short(value)


def versions(runs: Iterable[RunRecords]) -> list[tuple[str, str]]:
    """(what, the values found), from run.json of the runs."""
    found = [run.metadata for run in runs if run.metadata.is_described]
    names = {"aidgn": "aidgn", "torch": "PyTorch", "python": "Python", "device": "Device", "precision": "Precision"}
    rows = [
        (title, ", ".join(sorted({getattr(made, key) for made in found if getattr(made, key)})))
        for key, title in names.items()
    ]
    for key, title in (("backbone", "Backbone"), ("weights", "Initial weights"), ("data", "Data fingerprint")):
        values = {(str(made.identity["dataset"]), str(made.identity.get(key, ""))) for made in found}
        several = len({dataset for dataset, _ in values}) > 1 and key == "data"
        texts = {f"{dataset}: {value}" if several else value for dataset, value in values if value}
        rows.append((title, ", ".join(sorted(texts))))
    return [(title, text) for title, text in rows if text]


def hyper_parameters(runs: Sequence[RunRecords]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Per data set and algorithm, each hyper-parameter with its value, its few values, or its range."""
    values: dict[str, dict[str, list[Any]]] = {}
    several = len({run.args["dataset"] for run in runs}) > 1
    for run in runs:
        head = f"{run.args['algorithm']}, {run.args['dataset']}" if several else run.args["algorithm"]
        for name, value in run.hparams.items():
            values.setdefault(head, {}).setdefault(name, []).append(value)
    return [(head, [(name, _range(some)) for name, some in of.items()]) for head, of in values.items()]


def _range(values: Sequence[Any]) -> str:
    texts = list(dict.fromkeys(map(_text, values)))
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(texts) <= 3 or len(numbers) < len(values):
        return ", ".join(texts[:8]) + (" …" if len(texts) > 8 else "")
    return f"{min(numbers):.3g} to {max(numbers):.3g} ({len(texts)} values)"
