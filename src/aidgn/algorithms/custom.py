"""Algorithms of the user's own: a class in a file, named as path/to/file.py:Class."""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from aidgn.algorithms.base import COMMON, Algorithm
from aidgn.algorithms.search_space import Distribution
from aidgn.errors import AidgnError, did_you_mean

FORM = "Write path/to/file.py:Class."
# What is called, with what.
METHODS = {
    "__init__": "featurizer, num_classes, num_domains, **hyper_parameters",
    "objective": "minibatches",
    "update": "minibatches",
    "predict": "x",
}


def is_custom(name: str) -> bool:
    return name.endswith(".py") or ".py:" in name


def file_and_class(name: str) -> tuple[str, str]:
    file, _, class_name = name.rpartition(":") if ".py:" in name else (name, "", "")
    return file, class_name


def load_custom(name: str) -> type[Algorithm]:
    """The class of an own algorithm, checked to be one. An unchanged file is run once."""
    file, class_name = file_and_class(name)
    path = Path(file).expanduser()
    if not path.is_file():
        raise AidgnError(f"There is no file {file} with an algorithm. {FORM}")
    module_name = "aidgn_own_" + hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]
    if module_name not in sys.modules:
        _run(path.resolve(), module_name)
    contents = vars(sys.modules[module_name])
    classes = [key for key, value in contents.items() if isinstance(value, type) and value.__module__ == module_name]
    if class_name not in contents:
        lacks = f"has no class {class_name}.{did_you_mean(class_name, classes)}" if class_name else "is not a class."
        raise AidgnError(f"{file} {lacks} It has: {', '.join(classes) or 'none'}. {FORM}")
    algorithm = contents[class_name]
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise AidgnError(
            f"{class_name} in {file} is not an algorithm: make it a subclass of aidgn.algorithms.Algorithm."
        )
    if algorithm.objective is Algorithm.objective and algorithm.update is Algorithm.update:
        raise AidgnError(
            f"{class_name} in {file} lacks `objective(self, minibatches)`, which returns the terms of its "
            "objective with `loss` among them (or `update`, if it makes several steps)."
        )
    _check(algorithm, f"{class_name} in {file}")
    return algorithm


def _check(algorithm: type[Algorithm], what: str) -> None:
    """That it can be called as an algorithm is, and says of every hyper-parameter what is needed."""
    for method, arguments in METHODS.items():
        names = arguments.split(", ")
        try:
            inspect.signature(getattr(algorithm, method)).bind(
                None, *(name for name in names if name[0] != "*"), **({"lr": 0.0} if "**" in arguments else {})
            )
        except TypeError as error:
            raise AidgnError(
                f"{what}: `{method}` cannot be called as it will be ({error}). Write `def {method}(self, {arguments})`."
            ) from None
    if not (inspect.ismethod(algorithm.name) and isinstance(algorithm.name(), str) and algorithm.name()):
        raise AidgnError(
            f"{what}: `name` must be a class method that returns a word, as Algorithm's does; leave it out "
            'to be called as the class is, or write `called = "another word"`.'
        )
    for attribute in ("search_space", "small_images"):
        space = getattr(algorithm, attribute)
        entries = dict(space) if isinstance(space, Mapping) else {attribute: space}
        for name, entry in entries.items():
            if not isinstance(name, str):
                raise AidgnError(f"{what}: {name!r} in `{attribute}` is not a name; put it in quotes.")
            if not (isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[1], Distribution)):
                raise AidgnError(
                    f"{what}: {name} in `{attribute}` is {entry!r}; expected (default, distribution), for "
                    "example (0.1, uniform(0, 1)) with uniform of aidgn.algorithms.search_space."
                )
    for attribute in ("min_domains", "min_batch", "extra_channels"):
        if type(number := getattr(algorithm, attribute)) is not int or number < 0:
            raise AidgnError(f"{what}: `{attribute}` is {number!r}; expected a whole number of at least 0.")
    missing = [name for name in COMMON if name not in algorithm.search_space]
    if missing:
        raise AidgnError(
            f"{what}: `search_space` lacks {', '.join(missing)}, which every algorithm has. Begin it with "
            "**COMMON, of aidgn.algorithms.base."
        )
    for attribute in ("search_space", "small_images"):
        for name, (default, distribution) in vars(algorithm).get(attribute, {}).items():
            if name not in algorithm.search_space:
                raise AidgnError(
                    f"{what}: `{attribute}` has {name}, which is not in `search_space`."
                    f"{did_you_mean(name, algorithm.search_space)}"
                )
            for each in (distribution, algorithm.search_space[name][1]):
                try:
                    each.check(what, name, default)
                except AidgnError as error:
                    raise AidgnError(
                        f"{error} It is a default in `{attribute}`. Values such as 1 and 2 make whole "
                        "numbers, 1.0 and 2.0 any."
                    ) from None


def source_of(algorithm: type[Algorithm]) -> str:
    """A digest of the file that an own algorithm is in: the functions beside the class are part of what is run."""
    return hashlib.sha256(Path(inspect.getfile(algorithm)).read_bytes()).hexdigest()[:16]


def frame_in(name: str, error: BaseException) -> traceback.FrameSummary | None:
    """The last place in the file of an own algorithm that an error, or its cause, passed; None where it passed none."""
    path = str(Path(file_and_class(name)[0]).expanduser().resolve())
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return found[-1] if found else frame_in(name, error.__cause__) if error.__cause__ else None


def _run(path: Path, module_name: str) -> None:
    """Run the file as the module of this name."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        place, words = frame_in(str(path), error), str(error)
        line = place.lineno if place else None
        if isinstance(error, SyntaxError):
            line, words = error.lineno, error.msg
        where = f", line {line}" if line else ""
        hint = (
            " An algorithm is one file: what it imports must be installed, and it cannot import a file beside it."
            if isinstance(error, ModuleNotFoundError)
            else ""
        )
        raise AidgnError(f"{path} does not run: {type(error).__name__}: {words}{where}.{hint}") from error
