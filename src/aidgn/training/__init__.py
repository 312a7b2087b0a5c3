"""The run: one training, from its specification to a folder with records and weights."""

from aidgn.training.run import train
from aidgn.training.spec import RunSpec

__all__ = ["RunSpec", "train"]
