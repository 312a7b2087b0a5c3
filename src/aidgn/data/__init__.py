"""Data sets: the catalogue, folders, images, splits."""

from aidgn.data.catalogue import CATALOGUE, Entry, find_entry
from aidgn.data.checking import Check, check
from aidgn.data.dataset import Dataset, load_dataset
from aidgn.data.images import IMAGE_SUFFIXES, read_image
from aidgn.data.splits import split

__all__ = [
    "CATALOGUE",
    "IMAGE_SUFFIXES",
    "Check",
    "Dataset",
    "Entry",
    "check",
    "find_entry",
    "load_dataset",
    "read_image",
    "split",
]
