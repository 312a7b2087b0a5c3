"""The runs on disk: what a run is, the files of its folder, its records."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aidgn.runs.folder import RunFolder
    from aidgn.runs.label import Label
    from aidgn.runs.packed import pack
    from aidgn.runs.reader import load_records, read_runs
    from aidgn.runs.spec import RunSpec

# Imported on first use: a specification needs PyTorch, reading records does not.
MODULES = {
    "Label": "label",
    "RunFolder": "folder",
    "RunSpec": "spec",
    "load_records": "reader",
    "pack": "packed",
    "read_runs": "reader",
}

__all__ = ["Label", "RunFolder", "RunSpec", "load_records", "pack", "read_runs"]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
