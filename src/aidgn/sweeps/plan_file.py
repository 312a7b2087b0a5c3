"""A plan as a YAML file: a mapping of what `aidgn sweep` takes as options, or a list of such mappings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from aidgn.algorithms import canonical
from aidgn.algorithms.custom import file_and_class, is_custom
from aidgn.data.registry import is_registered
from aidgn.devices import PRECISION_NAMES
from aidgn.errors import AidgnError, ParameterError, did_you_mean
from aidgn.runs.options import RunOptions, run_options
from aidgn.runs.spec import RunSpec
from aidgn.sweeps.grid import Load, plan

PLACES = ("out", "data_dir")  # keys of a file that say where, not what
EXAMPLE = "For example:\n  datasets: [PACS]\n  algorithms: [ERM, AIDGN]\n  trials: 3"


@dataclass(frozen=True)
class Plan(RunOptions):
    """What runs are made of. None is the data set's or the algorithm's own."""

    datasets: tuple[str, ...]
    algorithms: tuple[str, ...]
    targets: tuple[str, ...] = ()  # () is each domain in turn
    leave_one_out: bool = False
    trials: int = 3
    draws: int = 1
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "auto"

    def runs(self, load: Load) -> list[RunSpec]:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return plan(
            given.pop("datasets"),
            given.pop("algorithms"),
            load=load,
            **{name: value for name, value in given.items() if name != "precision"},
        )

    def settled(self, specs: Sequence[RunSpec]) -> "Plan":
        """With what its runs have in common written out, and paths that hold from any folder."""
        common = {
            name: values.pop()
            for name in ("steps", "eval_every", "image_size", "backbone", "weights")
            if len(values := {getattr(spec, name) for spec in specs}) == 1
        }
        if common.get("weights") not in (None, "hub", "none"):
            common["weights"] = str(Path(common["weights"]).resolve())
        return replace(
            self,
            **common,
            datasets=tuple(map(_absolute_data, self.datasets)),
            algorithms=tuple(map(absolute_algorithm, self.algorithms)),
        )

    def covers(self, other: "Plan") -> bool:
        """Whether every run of `other` is one of this plan's."""
        more = {"datasets", "algorithms", "targets", "leave_one_out", "trials", "draws", "hyper_parameters"}
        return (
            all(getattr(self, each.name) == getattr(other, each.name) for each in fields(self) if each.name not in more)
            and set(other.datasets) <= set(self.datasets)
            and set(other.algorithms) <= set(self.algorithms)
            and (not self.targets or (bool(other.targets) and set(other.targets) <= set(self.targets)))
            and other.leave_one_out <= self.leave_one_out
            and other.trials <= self.trials
            and other.draws <= self.draws
            and _covers(self.hyper_parameters, other.hyper_parameters)
        )

    def to_dict(self) -> dict[str, Any]:
        """Without what is left at its default."""
        found = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("datasets", "algorithms", "trials", "draws") or value not in (None, (), {}, False, "auto"):
                found[each.name] = list(value) if isinstance(value, tuple) else value
        return found


def merged(plans: Sequence[Plan], new: Sequence[Plan]) -> list[Plan]:
    """The plans of a sweep with new ones: one that another covers is left out."""
    kept = list(plans)
    for one in new:
        if not any(other.covers(one) for other in kept):
            kept = [other for other in kept if not one.covers(other)] + [one]
    return kept


def read_plans(path: Path) -> tuple[list[Plan], dict[str, str]]:
    """The plans in a file, and where the file says that things are: `out`, `data_dir`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AidgnError(f"The plan {path} cannot be read: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AidgnError(f"The plan {path} is not YAML: {' '.join(str(error).split())}.") from None
    entries = content if isinstance(content, list) else [content]
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise AidgnError(f"The plan {path} should be a mapping of keys to values. {EXAMPLE}")
    places = {key: _checked(path, key, entries[0].pop(key)) for key in PLACES if key in entries[0]}
    return [_parse(path, entry) for entry in entries], places


def write_plans(plans: Sequence[Plan], remarks: Sequence[str], data_dir: str | None) -> str:
    entries = [one.to_dict() for one in plans]
    if data_dir:
        entries[0]["data_dir"] = str(Path(data_dir).resolve())
    text = yaml.safe_dump(
        entries if len(entries) > 1 else entries[0],
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=110,
    )
    return "".join(f"# {' '.join(remark.split())}\n" for remark in remarks) + text  # a folder may be called anything


KINDS = {
    "datasets": "texts",
    "algorithms": "texts",
    "targets": "texts",
    "leave_one_out": "yes or no",
    "trials": "number",
    "draws": "number",
    "hyper_parameters": "mapping",
    "precision": "text",
}
EXPECTED = {
    "texts": "a list of names",
    "text": "a word",
    "number": "a whole number of at least 1",
    "yes or no": "true or false",
    "mapping": "a mapping of names to values, or to lists of values",
}


RUN_OPTIONS = {option.name: option for option in run_options()}
KEYS = [*KINDS, *RUN_OPTIONS, *PLACES]


def _parse(path: Path, entry: Mapping[Any, Any]) -> Plan:
    for key in entry:
        if key not in KEYS:
            near = did_you_mean(str(key), KEYS)
            raise AidgnError(
                f"The plan {path} has a key {key}, which does not exist.{near} The keys are {', '.join(KEYS)}."
            )
    missing = [key for key in ("datasets", "algorithms") if not entry.get(key)]
    if missing:
        raise AidgnError(f"The plan {path} does not say which {missing[0]}. {EXAMPLE}")
    given = {key: _checked(path, key, value) for key, value in entry.items() if value is not None}
    if given.get("precision", "auto") not in PRECISION_NAMES:
        raise AidgnError(
            f"The plan {path} has precision: {given['precision']}; expected one of {', '.join(PRECISION_NAMES)}."
        )
    return Plan(**given)


def _checked(path: Path, key: str, value: Any) -> Any:
    """The value as the type that the key has."""
    if key in RUN_OPTIONS:
        try:
            RUN_OPTIONS[key].check(value)
        except ParameterError as error:
            raise AidgnError(f"The plan {path} has {key}: {value}; expected {error.expected}.") from None
        return value
    kind = KINDS.get(key, "text")
    fine: Any = None
    if kind == "texts":
        values = value if isinstance(value, list) else [value]
        if all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values):
            fine = tuple(map(str, values))
    elif (
        (kind == "number" and isinstance(value, int) and not isinstance(value, bool) and value >= 1)
        or (kind == "text" and isinstance(value, str))
        or (kind == "yes or no" and isinstance(value, bool))
    ):
        fine = value
    elif kind == "mapping" and isinstance(value, dict):
        fine = {str(name): _point(path, str(name), each) for name, each in value.items()}
    if fine is None:
        raise AidgnError(f"The plan {path} has {key}: {value}; expected {EXPECTED[kind]}.")
    return fine


def _point(path: Path, name: str, value: Any) -> Any:
    if isinstance(value, dict):
        inner = {str(key): each for key, each in value.items()}
        if any(isinstance(each, dict) for each in inner.values()):
            raise AidgnError(f"The plan {path} has mappings below hyper_parameters: {name}; expected values or lists.")
        return inner
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        raise AidgnError(f"The plan {path} has hyper_parameters: {name}: {value}; expected a list of plain values.")
    return value


def _covers(more: Mapping[str, Any], less: Mapping[str, Any]) -> bool:
    """Whether the same hyper-parameters are fixed alike, and those varied take all of the other's values."""
    if more.keys() != less.keys():
        return False
    for name, value in less.items():
        ours = more[name]
        if isinstance(value, Mapping) and isinstance(ours, Mapping):
            if not _covers(ours, value):
                return False
        elif isinstance(value, list) and isinstance(ours, list):
            if not all(each in ours for each in value):
                return False
        elif ours != value:
            return False
    return True


def _absolute_data(name: str) -> str:
    return name if is_registered(name) else str(Path(name).resolve())


def absolute_algorithm(name: str) -> str:
    if not is_custom(name):
        return canonical(name)
    file, class_name = file_and_class(name)
    return f"{Path(file).expanduser().resolve()}:{class_name}"
