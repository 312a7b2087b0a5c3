"""Test-time adaptation: a trained algorithm adjusts itself to the unlabelled batches of an unseen domain."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aidgn.adaptation.common import batches
    from aidgn.adaptation.t3a import T3A
    from aidgn.adaptation.tent import Tent, TentBN, TentC

__all__ = ["T3A", "Tent", "TentBN", "TentC", "batches"]
MODULES = {"T3A": "t3a", "Tent": "tent", "TentBN": "tent", "TentC": "tent", "batches": "common"}


def __getattr__(name: str) -> Any:
    """Import PyTorch only when a class is asked for."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
