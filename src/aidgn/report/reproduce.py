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


@dataclass
class Group:
    """Runs that one command makes: alike in all but algorithm, target, trial and draw."""

    dataset: str
    options: tuple[str, ...]
    settings: Settings
    domains: Sequence[str]
    runs: set[tuple[tuple[str, ...], int, int]] = field(default_factory=set)  # targets, trial, draw
    plan: str = ""  # what a file says besides: values to try

    @property
    def shape(self) -> tuple[Any, ...]:
        """What a sweep of several algorithms has in common."""
        return self.dataset, self.options, self.settings, tuple(self.domains), frozenset(self.runs), self.plan


def folder(path: Path) -> str:
    """What training calls the folder of this run, whatever it is called by now; '' if it is no folder of one run."""
    run = RunFolder(path.parent if path.is_file() else path)
    return folder_name(run.identity) if run.exists and run.metadata.is_described else ""


def commands(runs: Iterable[RunRecords], out: str) -> list[str]:
    """The commands that make these runs below the folder `out`; holes in a sweep are filled by them too,
    which a comment says."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[tuple[str, Group]]] = {}
    quick: dict[tuple[str, tuple[str, ...]], dict[str, Settings]] = {}
    files: dict[str, str] = {}
    described = [run for run in runs if run.metadata.is_described]
    for run in sorted(described, key=lambda run: run.args["hparams_seed"]):
        made, draw = run.metadata, run.args["hparams_seed"]
        identity = made.identity
        algorithm = _name(made)
        dataset, options = str(identity["dataset"]), _options(made)
        key = dataset, algorithm, options
        settings = _settings(identity, algorithm) if draw == 0 else ()
        if _weights(identity) != (known := str(identity.get("weights"))):
            files[_weights(identity)] = known.rpartition("-")[2]
        if identity.get("train_only"):
            quick.setdefault((dataset, options), {})[algorithm] = settings
            continue
        values = {name: _exact(value) for name, value in identity["hyper_parameters"].items()}
        fitting = [
            group
            for _, group in groups.get(key, [])
            if (
                group.settings == settings
                if draw == 0
                else all(values.get(name) == value for name, value in group.settings)
            )
        ]
        if not fitting:
            fitting = [Group(dataset, options, settings, made.domains)]
            groups.setdefault(key, []).append((algorithm, fitting[0]))
        fitting[0].runs.add((tuple(identity["target"]), int(identity["trial"]), draw))
    sweeps: dict[Any, tuple[Group, list[str]]] = {}
    for algorithm, group in [pair for pairs in groups.values() for pair in _grid(pairs)]:
        sweeps.setdefault(group.shape, (group, []))[1].append(algorithm)
    return [
        *(
            f"# {file}: the initial weights, in a file whose sha256 begins with {digest}"
            for file, digest in files.items()
        ),
        *(_fit(*key, given, out) for key, given in quick.items()),
        *(line for group, algorithms in sweeps.values() for line in _lines(group, algorithms, out)),
    ]


def _grid(pairs: list[tuple[str, Group]]) -> list[tuple[str, Group]]:
    """Sweeps of an algorithm that differ in one hyper-parameter at a time as one, whose plan lists the values: a second
    sweep with others in the same folder would be refused. Other groups as they are."""
    for algorithm, base in sorted(pairs, key=lambda pair: len(pair[1].settings)):
        values: dict[str, list[Any]] = {}
        for _, group in pairs:
            changes = {*group.settings} - {*base.settings}
            if group.runs == base.runs and len(changes) <= 1 and len(group.settings) >= len(base.settings):
                for name, value in changes:
                    values.setdefault(name, []).append(yaml.safe_load(value))
        if len(pairs) > 1 and sum(map(len, values.values())) == len(pairs) - 1 and len(base.runs) > 1:
            plan = {
                "datasets": [base.dataset.removeprefix("own-")],
                "algorithms": [algorithm],
                "hyper_parameters": values,
            }
            return [(algorithm, replace(base, plan=json.dumps(plan)))]
    return pairs


def _fit(data: str, options: tuple[str, ...], given: Mapping[str, Settings], out: str) -> str:
    """The `aidgn fit --quick` that made runs of these algorithms, with these settings, in the folder `runs` of its
    own."""
    algorithm = next((name for name in given if name != "ERM"), "ERM")
    settings = [part for name, value in given[algorithm] for part in ("--set", f"{name}={value}")]
    return shlex.join(
        [
            "aidgn",
            "fit",
            data.removeprefix("own-"),
            "--quick",
            "--algorithm",
            algorithm,
            *options,
            *settings,
            "--out",
            out.removesuffix("/runs"),
        ]
    )


def _lines(group: Group, algorithms: list[str], out: str) -> list[str]:
    """One sweep for the runs with one target, and with two where leave-one-out needs them; single runs for the rest."""
    data = group.dataset.removeprefix("own-")
    options = [
        *group.options,
        *(part for name, value in group.settings for part in ("--set", f"{name}={value}")),
        "--out",
        out,
    ]
    swept = {run for run in group.runs if len(run[0]) == 1}
    if len(swept) * len(algorithms) < 2:
        swept = set()
    lines, besides = [], []
    if swept:
        targets = [name for name in group.domains if (name,) in {run[0] for run in swept}]
        some = [] if targets == list(group.domains) else [part for name in targets for part in ("--target", name)]
        pairs = {
            (pair, trial, draw)
            for (target,), trial, draw in swept
            for other in group.domains
            if set(pair := tuple(name for name in group.domains if name in (target, other))) != {target}
        }
        if pairs <= group.runs:
            swept |= pairs
            some.append("--leave-one-out")
        trials, draws = 1 + max(run[1] for run in swept), 1 + max(run[2] for run in swept)
        more = set(product(((name,) for name in targets), range(trials), range(draws))) - swept
        absent = sorted({trial for _, trial, _ in more} - {trial for _, trial, _ in swept})
        besides = [
            *(f"trial {trial}" for trial in absent),
            *(["runs missing here"] if any(trial not in absent for _, trial, _ in more) else []),
        ]
        lines.append(
            [
                "aidgn",
                "sweep",
                data,
                *(part for name in algorithms for part in ("--algorithm", name)),
                *some,
                "--trials",
                str(trials),
                *(["--draws", str(draws)] if draws > 1 else []),
                *options,
            ]
        )
        if group.plan:
            lines[:0] = [["echo", group.plan]]
            lines[-1] += ["--plan", "values.yaml"]
    for unseen, trial, draw in sorted(group.runs - swept):
        lines += [
            [
                "aidgn",
                "train",
                data,
                "--algorithm",
                algorithm,
                *(part for name in unseen or ("none",) for part in ("--target", name)),
                "--trial",
                str(trial),
                *(["--draw", str(draw)] if draw else []),
                *options,
            ]
            for algorithm in algorithms
        ]
    return [
        *([f"# the sweep below also trains {' and '.join(besides)}"] if besides else []),
        *(shlex.join(line) + " > values.yaml" * (line[0] == "echo") for line in lines),
    ]


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
    if identity.get("train_only"):  # `aidgn fit --quick` chooses these
        for name in ("train_only", "eval_every", "skip_broken"):
            values.pop(name, None)
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
