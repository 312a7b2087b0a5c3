"""Train image classifiers for domains they never saw, by angular invariance (AIDGN).

    run    = aidgn.train("PACS", target="sketch", algorithm="AIDGN", lr=5e-5)
    runs   = aidgn.sweep(["PACS"], ["ERM", "AIDGN"], trials=3)
    result = aidgn.fit("photos/")
    model  = aidgn.load_model("runs/fit-photos/model")

Importing the package is fast: each name imports its module when it is used first.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aidgn.terminal import SafeLog, log

if TYPE_CHECKING:
    from aidgn.api import list_algorithms, sweep, train
    from aidgn.data import load_dataset
    from aidgn.errors import AidgnError
    from aidgn.fitting import FitResult, fit
    from aidgn.inference import load_model
    from aidgn.objective import AngularClassifier, aidgn_loss
    from aidgn.results import RunResult, SweepResult
    from aidgn.runs.spec import RunSpec
    from aidgn.selection import load_records, select
    from aidgn.soups import soup

__version__ = "0.1.0"

__all__ = [
    "AidgnError",
    "AngularClassifier",
    "FitResult",
    "RunResult",
    "RunSpec",
    "SweepResult",
    "__version__",
    "aidgn_loss",
    "fit",
    "list_algorithms",
    "load_dataset",
    "load_model",
    "load_records",
    "select",
    "soup",
    "sweep",
    "train",
]

_MODULES = {
    "AidgnError": "errors",
    "AngularClassifier": "objective",
    "FitResult": "fitting",
    "RunResult": "results",
    "RunSpec": "runs.spec",
    "SweepResult": "results",
    "aidgn_loss": "objective",
    "fit": "fitting",
    "list_algorithms": "api",
    "load_dataset": "data",
    "load_model": "inference",
    "load_records": "selection",
    "select": "selection",
    "soup": "soups",
    "sweep": "api",
    "train": "api",
}

log.addFilter(SafeLog())  # in every process, as workers write to the terminal too


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'aidgn' has no attribute {name!r}")
    value = getattr(import_module(f"aidgn.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
