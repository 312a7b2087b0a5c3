"""Plans as YAML files: a mapping with the options of `aidgn sweep`, or a list of such mappings."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from aidgn.devices import PRECISION_NAMES
from aidgn.errors import AidgnError, ParameterError, amount, clip, did_you_mean
from aidgn.runs.options import MAX_NUMBER, Option, run_options, without_aliases
from aidgn.sweeps.plan import SweepPlan, plan_options

PLACES = ("out", "data_dir")  # keys with folders
MAX_BYTES = 1 << 20
MAX_NODES = 100_000
EXAMPLE = "For example:\n  datasets: [PACS]\n  algorithms: [ERM, AIDGN]\n  trials: 3"


class PlanFileError(AidgnError):
    """A plan file cannot be used."""

    def __init__(self, path: Path, problem: str):
        super().__init__(f"The plan {path} {problem}")
        self.path = path


class UnusableYaml(Exception):
    """YAML is well formed, but ambiguous or too large."""


def read_plans(path: Path) -> tuple[list[SweepPlan], dict[str, str]]:
    """Read the plans of a file, and the folders it names: `out` and `data_dir`."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PlanFileError(path, f"is larger than {amount(MAX_BYTES)}, which no plan is.")
        content = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanFileError(path, f"cannot be read: {error.strerror or error}.") from None
    except RecursionError:
        raise PlanFileError(path, "cannot be used: it is nested too deeply.") from None
    except UnusableYaml as error:
        raise PlanFileError(path, f"cannot be used: {error}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise PlanFileError(path, f"is not YAML: {' '.join(str(error).split())}.") from None
    entries = content if isinstance(content, list) else [content]
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise PlanFileError(path, f"should be a mapping of keys to values. {EXAMPLE}")
    values = [_check_entry(path, entry) for entry in entries]
    places = {key: values[0].pop(key) for key in PLACES if key in values[0]}
    for entry in values:
        missing = [key for key in ("datasets", "algorithms") if not entry.get(key)]
        if missing:
            raise PlanFileError(path, f"does not say which {missing[0]}. {EXAMPLE}")
    return [SweepPlan(**entry) for entry in values], places


def load_yaml(text: str) -> Any:
    """Read YAML; refuse keys given twice, and aliases that multiply to more than `MAX_NODES`."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of nodes after every alias is replaced by its value."""
    if id(node) in known:
        if not known[id(node)]:
            raise UnusableYaml("an alias stands for something that it is part of")
        return known[id(node)]
    known[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
        if twice is not None:
            raise UnusableYaml(f"the key {clip(twice)} is given twice")
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.ScalarNode) and "\0" in node.value:
        raise UnusableYaml("a value has a null character, which no name has")
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = 1 + sum(_count_nodes(child, known) for child in children)
    if known[id(node)] > MAX_NODES:
        raise UnusableYaml(f"its aliases stand for more than {MAX_NODES} values")
    return known[id(node)]


def write_plans(plans: Sequence[SweepPlan], remarks: Sequence[str], data_dir: str | None) -> str:
    """Return plans as the text of a file, with comments at its head."""
    entries = [plan.to_dict() for plan in plans]
    if data_dir:
        entries[0]["data_dir"] = str(Path(data_dir).resolve())
    text = yaml.safe_dump(
        entries if len(entries) > 1 else entries[0],
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=110,
    )
    comments = (f"# {' '.join(remark.split())}\n" for remark in remarks)  # names of folders may hold line breaks
    return "".join(comments) + text


def _check_entry(path: Path, entry: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values of an entry, converted to the types of their keys."""
    values = {}
    for key, value in without_aliases(entry).items():
        if key not in CHECKS:
            near = did_you_mean(str(key), CHECKS)
            raise PlanFileError(
                path, f"has a key {clip(key)}, which does not exist.{near} The keys are {', '.join(CHECKS)}."
            )
        try:
            if value is not None:
                values[key] = CHECKS[key](key, value)
        except ParameterError as error:
            raise PlanFileError(
                path, f"has {clip(error.parameter)}: {clip(error.value)}; expected {error.expected}."
            ) from None
    return values


def _names(key: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str | int | float) and not isinstance(name, bool) for name in values):
        raise ParameterError(key, value, "a list of names")
    return tuple(map(str, values))


def _runs(key: str, value: Any) -> tuple[tuple[Any, ...], ...]:
    runs = value if isinstance(value, list) and all(isinstance(run, list) for run in value) else [[]]
    for run in runs:
        numbers = [type(number) is int and 0 <= number <= MAX_NUMBER for number in run[:2]]
        if len(numbers) < 2 or not all(numbers) or not all(isinstance(name, str | int) for name in run[2:]):
            raise ParameterError(key, value, "a list of lists: trial, draw, unseen domains")
    return tuple(map(tuple, runs))


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ParameterError(key, value, "a text")
    return value


def _precision(key: str, value: Any) -> str:
    if value not in PRECISION_NAMES:
        raise ParameterError(key, value, f"one of {', '.join(PRECISION_NAMES)}")
    return str(value)


def _hyper_parameters(key: str, value: Any) -> dict[str, Any]:
    """Check a mapping of names to values or lists of values, and of algorithms to such mappings."""
    if not isinstance(value, dict):
        raise ParameterError(key, value, "a mapping of names to values, or to lists of values")
    values = {str(name): inner for name, inner in value.items()}
    for name, inner in values.items():
        if isinstance(inner, dict) and any(isinstance(deeper, dict) for deeper in inner.values()):
            raise ParameterError(f"{key}: {name}", inner, "values or lists of values")
        if isinstance(inner, dict):
            values[name] = _hyper_parameters(f"{key}: {name}", inner)
        if isinstance(inner, list) and any(isinstance(item, dict | list) for item in inner):
            raise ParameterError(f"{key}: {name}", inner, "a list of plain values")
    return values


def _option_check(option: Option) -> Callable[[str, Any], Any]:
    return lambda _, value: option.convert(value)


CHECKS = {
    "datasets": _names,
    **{option.name: _names if option.type is tuple else _option_check(option) for option in plan_options()},
    "runs": _runs,
    "hyper_parameters": _hyper_parameters,
    **{option.name: _option_check(option) for option in run_options()},
    "precision": _precision,
    "out": _text,
    "data_dir": _text,
}
