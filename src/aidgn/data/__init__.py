"""Data sets: the registry, folders of images, decoding, splits."""

from aidgn.data.dataset import Dataset
from aidgn.data.images import IMAGE_SUFFIXES, read_image
from aidgn.data.loading import load_dataset
from aidgn.data.registry import DATASETS, DatasetInfo, get_info
from aidgn.data.splits import train_val_indices
from aidgn.data.validate import Inspection, inspect_dataset

__all__ = [
    "DATASETS",
    "IMAGE_SUFFIXES",
    "Dataset",
    "DatasetInfo",
    "Inspection",
    "get_info",
    "inspect_dataset",
    "load_dataset",
    "read_image",
    "train_val_indices",
]
