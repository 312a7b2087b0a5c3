"""Test-time adaptation: a trained algorithm meets the unlabelled batches of an unseen domain and adjusts itself."""

from aidgn.adaptation.common import batches
from aidgn.adaptation.t3a import T3A
from aidgn.adaptation.tent import Tent, TentBN, TentC

__all__ = ["T3A", "Tent", "TentBN", "TentC", "batches"]
