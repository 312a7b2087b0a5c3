"""The run: one training, from its specification to a folder with records and weights."""

from aidgn.runs.spec import RunSpec
from aidgn.training.trainer import train

__all__ = ["RunSpec", "train"]
