"""Load custom algorithms: classes in a user's file, named path/to/file.py:Class."""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from aidgn.algorithms.base import COMMON, Algorithm
from aidgn.algorithms.search_space import Distribution, HyperParameterError
from aidgn.errors import AidgnError, did_you_mean

ADVICE = "Write path/to/file.py:Class."
ARGUMENTS = {  # arguments of the methods that are called from outside
    "__init__": "featurizer, num_classes, num_domains, **hyper_parameters",
    "objective": "minibatches",
    "update": "minibatches",
    "predict": "x",
}
OLD_NAMES = {"called": "display_name", "implied": "with_derived"}  # names of version 0.1.0, in a user's class


class CustomAlgorithmError(AidgnError):
    """A user's file or class cannot be used as an algorithm."""


def is_custom(name: str) -> bool:
    """Return whether a name refers to a file."""
    return name.endswith(".py") or ".py:" in name


def file_and_class(name: str) -> tuple[str, str]:
    """Split path/to/file.py:Class."""
    file, _, class_name = name.rpartition(":") if ".py:" in name else (name, "", "")
    return file, class_name


def load_custom(name: str) -> type[Algorithm]:
    """Load and check the class of a custom algorithm. An unchanged file runs once per process."""
    file, class_name = file_and_class(name)
    path = Path(file).expanduser()
    if not path.is_file():
        raise CustomAlgorithmError(f"There is no file {file} with an algorithm. {ADVICE}")
    module_name = "aidgn_own_" + hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]
    if module_name not in sys.modules:
        _run(path.resolve(), module_name)
    contents = vars(sys.modules[module_name])
    classes = [key for key, value in contents.items() if isinstance(value, type) and value.__module__ == module_name]
    if class_name not in contents:
        problem = f"has no class {class_name}.{did_you_mean(class_name, classes)}" if class_name else "is not a class."
        raise CustomAlgorithmError(f"{file} {problem} It has: {', '.join(classes) or 'none'}. {ADVICE}")
    algorithm = contents[class_name]
    owner = f"{class_name} in {file}"
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise CustomAlgorithmError(f"{owner} is not an algorithm: make it a subclass of aidgn.algorithms.Algorithm.")
    if algorithm.objective is Algorithm.objective and algorithm.update is Algorithm.update:
        raise CustomAlgorithmError(
            f"{owner} lacks `objective(self, minibatches)`, which returns the terms of its objective with `loss` among "
            "them (or `update`, if it makes several steps)."
        )
    for custom_class in classes:
        _rename_old_attributes(contents[custom_class])
    _check_methods(algorithm, owner)
    _check_attributes(algorithm, owner)
    _check_defaults(algorithm, owner)
    return algorithm


def _rename_old_attributes(custom_class: type) -> None:
    for old, new in OLD_NAMES.items():
        if issubclass(custom_class, Algorithm) and old in vars(custom_class) and new not in vars(custom_class):
            setattr(custom_class, new, vars(custom_class)[old])


def _check_methods(algorithm: type[Algorithm], owner: str) -> None:
    for method, arguments in ARGUMENTS.items():
        positional = [name for name in arguments.split(", ") if name[0] != "*"]
        keywords = {"lr": 0.0} if "**" in arguments else {}
        try:
            inspect.signature(getattr(algorithm, method)).bind(None, *positional, **keywords)
        except TypeError as error:
            raise CustomAlgorithmError(
                f"{owner}: `{method}` does not take its arguments ({error}). Write `def {method}(self, {arguments})`."
            ) from None
    if not (inspect.ismethod(algorithm.name) and isinstance(algorithm.name(), str) and algorithm.name()):
        raise CustomAlgorithmError(
            f"{owner}: `name` must be a class method that returns a word, as Algorithm's does. Leave it out to use the "
            'name of the class, or write `display_name = "another word"`.'
        )


def _check_attributes(algorithm: type[Algorithm], owner: str) -> None:
    for attribute in ("search_space", "small_images"):
        space = getattr(algorithm, attribute)
        entries = dict(space) if isinstance(space, Mapping) else {attribute: space}
        for name, entry in entries.items():
            if not isinstance(name, str):
                raise CustomAlgorithmError(f"{owner}: {name!r} in `{attribute}` is not a name; put it in quotes.")
            if not (isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[1], Distribution)):
                raise CustomAlgorithmError(
                    f"{owner}: {name} in `{attribute}` is {entry!r}; expected (default, distribution), for example "
                    "(0.1, uniform(0, 1)) with uniform from aidgn.algorithms."
                )
    for attribute in ("min_domains", "min_batch", "extra_channels"):
        number = getattr(algorithm, attribute)
        if type(number) is not int or number < 0:
            raise CustomAlgorithmError(f"{owner}: `{attribute}` is {number!r}; expected a whole number of at least 0.")
    missing = [name for name in COMMON if name not in algorithm.search_space]
    if missing:
        raise CustomAlgorithmError(
            f"{owner}: `search_space` lacks {', '.join(missing)}, which every algorithm has. Begin it with **COMMON, "
            "from aidgn.algorithms."
        )


def _check_defaults(algorithm: type[Algorithm], owner: str) -> None:
    for attribute in ("search_space", "small_images"):
        for name, (default, distribution) in vars(algorithm).get(attribute, {}).items():
            if name not in algorithm.search_space:
                raise CustomAlgorithmError(
                    f"{owner}: `{attribute}` has {name}, which is not in `search_space`."
                    f"{did_you_mean(name, algorithm.search_space)}"
                )
            for valid in (distribution, algorithm.search_space[name][1]):
                try:
                    valid.check(owner, name, default)
                except HyperParameterError as error:
                    raise CustomAlgorithmError(
                        f"{error} It is a default in `{attribute}`. Values such as 1 and 2 make whole numbers, 1.0 and "
                        "2.0 any."
                    ) from None


def source_of(algorithm: type[Algorithm]) -> str:
    """Return a digest of the file of a custom algorithm, which may have functions outside the class."""
    return hashlib.sha256(Path(inspect.getfile(algorithm)).read_bytes()).hexdigest()[:16]


def frame_in(name: str, error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of an error, or of its causes, in the file of a custom algorithm; None without one."""
    path = str(Path(file_and_class(name)[0]).expanduser().resolve())
    cause: BaseException | None = error
    while cause is not None:
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == path]
        if frames:
            return frames[-1]
        cause = cause.__cause__
    return None


def _run(path: Path, module_name: str) -> None:
    """Run a file as a module of this name."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        frame = frame_in(str(path), error)
        line = frame.lineno if frame else None
        message = str(error)
        if isinstance(error, SyntaxError):
            line = error.lineno
            message = error.msg
        where = f", line {line}" if line else ""
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = " An algorithm is one file: imports must be installed, and files in its folder cannot be imported."
        raise CustomAlgorithmError(f"{path} does not run: {type(error).__name__}: {message}{where}.{hint}") from error
