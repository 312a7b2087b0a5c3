"""Algorithms of the user's own: a class in a file, named as path/to/file.py:Class."""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path

from aidgn.algorithms.base import Algorithm
from aidgn.errors import UserError, did_you_mean

FORM = "Write path/to/file.py:Class."


def is_own(name: str) -> bool:
    return name.endswith(".py") or ".py:" in name


def load_own(name: str) -> type[Algorithm]:
    """The class of an own algorithm, checked to be one. An unchanged file is run once."""
    file, _, class_name = name.rpartition(":") if ".py:" in name else (name, "", "")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"There is no file {file} with an algorithm. {FORM}")
    module_name = "aidgn_own_" + hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]
    if module_name not in sys.modules:
        _run(path.resolve(), module_name)
    contents = vars(sys.modules[module_name])
    classes = [key for key, value in contents.items() if isinstance(value, type) and value.__module__ == module_name]
    if class_name not in contents:
        lacks = f"has no class {class_name}.{did_you_mean(class_name, classes)}" if class_name else "is not a class."
        raise UserError(f"{file} {lacks} It has: {', '.join(classes) or 'none'}. {FORM}")
    algorithm = contents[class_name]
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise UserError(f"{class_name} in {file} is not an algorithm: make it a subclass of "
                        "aidgn.algorithms.Algorithm.")
    if algorithm.objective is Algorithm.objective and algorithm.update is Algorithm.update:
        raise UserError(f"{class_name} in {file} lacks `objective(self, minibatches)`, which returns the terms of its "
                        "objective with `loss` among them (or `update`, if it makes several steps).")
    return algorithm


def source_of(algorithm: type[Algorithm]) -> str:
    """A digest of the file that an own algorithm is in: the functions beside the class are part of what is run."""
    return hashlib.sha256(Path(inspect.getfile(algorithm)).read_bytes()).hexdigest()[:16]


def _run(path: Path, module_name: str) -> None:
    """Run the file as the module of this name."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f", line {line}" if line else ""
        raise UserError(f"{path} does not run: {type(error).__name__}: {error}{where}.") from error
