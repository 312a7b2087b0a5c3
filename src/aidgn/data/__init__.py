"""Data sets: the catalogue, folders, images, splits."""

from aidgn.data.dataset import Dataset, load_dataset
from aidgn.data.images import IMAGE_SUFFIXES, read_image
from aidgn.data.registry import DATASETS, DatasetInfo, find_entry
from aidgn.data.splits import split
from aidgn.data.validate import Check, check

__all__ = [
    "DATASETS",
    "IMAGE_SUFFIXES",
    "Check",
    "Dataset",
    "DatasetInfo",
    "check",
    "find_entry",
    "load_dataset",
    "read_image",
    "split",
]
