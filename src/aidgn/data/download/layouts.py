"""Arrange the files of a mirror as FOLDER/<domain>/<class>/<image>; one function for each kind of mirror."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from aidgn.data.download.archives import DamagedFile, Limit, check_member, damage_named, read_members, unpack
from aidgn.data.download.connection import MirrorError
from aidgn.data.images import IMAGE_SUFFIXES, suffix_of
from aidgn.data.registry import DatasetInfo, normalize_name
from aidgn.data.table_reader import read_class_names
from aidgn.files import translate_os_errors

SPLITS = frozenset({"train", "crossval", "val", "test", "full"})  # folders inside a domain in copies of VLCS
LOCATIONS = ("100", "38", "43", "46")
MAX_ANNOTATIONS = 1 << 30
MNIST_SEED = 0


@dataclass
class Download:
    """The arguments of a layout function."""

    files: list[Path]  # the downloaded files, in the mirror's order
    folder: Path  # where the images go
    info: DatasetInfo
    names: Mapping[str, str]  # the mirror's own names of domains and classes, with ours
    limit: Limit  # what the files may contain

    @cached_property
    def domain_names(self) -> dict[str, str]:
        return spellings(self.info.domains, {**self.info.domain_aliases, **self.names})

    @cached_property
    def class_names(self) -> dict[str, str]:
        return spellings(self.info.classes, self.names)


def spellings(names: Iterable[str], others: Mapping[str, str]) -> dict[str, str]:
    """Map every spelling, normalized, to the name; `others` are further spellings."""
    names = set(names)
    aliases = {normalize_name(other): name for other, name in others.items() if name in names}
    return {normalize_name(name): name for name in names} | aliases


# Folders ------------------------------------------------------------------------------------------------------------


def place_by_folder(download: Download, name: str) -> list[str]:
    """Place .../<domain>/[<split>/]<class>/<image> as <domain>/<class>/[<split>_]<image>, with our names."""
    domains, classes = download.domain_names, download.class_names
    *folders, file = name.replace("\\", "/").split("/")
    if Path(file).suffix.lower() not in IMAGE_SUFFIXES or file.startswith(".") or "__MACOSX" in folders:
        return []
    for position, folder in enumerate(folders):
        domain = domains.get(normalize_name(folder))
        below = folders[position + 1 :]
        splits = [part for part in below if part in SPLITS]
        rest = [part for part in below if part not in SPLITS]
        if domain and len(rest) == 1:
            label = classes.get(normalize_name(rest[0])) if classes else rest[0]
            if label:
                return [f"{domain}/{label}/{'_'.join([*splits, file])}"]
    return []


def folders(download: Download) -> None:
    """Unpack folders per domain and class. In VLCS, `full` repeats `train` and `crossval`, so remove these."""
    for file in download.files:
        unpack(file, download.folder, partial(place_by_folder, download), download.limit)
    for class_folder in {image.parent for image in download.folder.glob("*/*/full_*")}:
        for part in ("train", "crossval", "val"):
            for copy in class_folder.glob(f"{part}_*"):
                copy.unlink()


def listed_folders(download: Download) -> None:
    """Unpack the images that text files list as `<domain>/<class>/<image> <label>`."""
    listed = {
        line.rpartition(" ")[0].strip()
        for file in download.files
        if file.suffix == ".txt"
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
    }

    def place(name: str) -> list[str]:
        return place_by_folder(download, name) if "/".join(name.split("/")[-3:]) in listed else []

    for file in download.files:
        if file.suffix != ".txt":
            unpack(file, download.folder, place, download.limit)


# Caltech Camera Traps -----------------------------------------------------------------------------------------------


def camera_traps(download: Download) -> None:
    """Unpack the images of four locations and ten categories, by annotations in COCO camera-traps form."""
    images, annotations = download.files
    try:
        annotated = read_annotations(annotations)
        categories = {category["id"]: category["name"] for category in annotated["categories"]}
        categories_of = defaultdict(set)
        for annotation in annotated["annotations"]:
            categories_of[annotation["image_id"]].add(categories[annotation["category_id"]])
        places: dict[str, set[str]] = defaultdict(set)
        for image in annotated["images"]:
            if str(image["location"]) in LOCATIONS:
                file = PurePosixPath(image["file_name"]).name
                for category in categories_of[image["id"]] & set(download.info.classes):
                    places[file].add(f"location_{image['location']}/{category}/{file}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(annotations, f"not in COCO camera-traps form ({error!r})") from error
    unpack(images, download.folder, lambda name: places.get(PurePosixPath(name).name, ()), download.limit)


def read_annotations(archive: Path) -> dict[str, list[Any]]:
    """Join the lists of all JSON files in an archive."""
    annotated: dict[str, list[Any]] = defaultdict(list)
    with damage_named(archive):
        for name, content in read_members(archive, Limit(MAX_ANNOTATIONS, 1000)):
            if name.endswith(".json") and not PurePosixPath(name).name.startswith("."):
                for key, values in json.load(content).items():
                    if isinstance(values, list):
                        annotated[key] += values
    return annotated


# Parquet ------------------------------------------------------------------------------------------------------------


def parquet(download: Download) -> None:
    """Write the images of a table with the columns image, domain and label, as Hugging Face stores them."""
    import pyarrow
    import pyarrow.parquet

    domains, classes = download.domain_names, download.class_names
    number = 0
    for file in download.files:
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                class_names = read_class_names(table.schema_arrow)
                for batch in table.iter_batches(batch_size=32, columns=["image", "domain", "label"]):
                    for row in batch.to_pylist():
                        words = [
                            class_names[column][row[column]] if isinstance(row[column], int) else row[column]
                            for column in ("domain", "label")
                        ]
                        domain = domains[normalize_name(words[0])]
                        label = classes[normalize_name(words[1])] if classes else words[1]
                        content = row["image"]["bytes"]
                        download.limit.spend(len(content), 1)
                        check_member(f"x/{label}", "/" not in label)
                        write_image(download.folder / domain / label, row["image"].get("path") or "", number, content)
                        number += 1
        except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedFile(file, f"not a table of image, domain and label ({error!r})") from error


def write_image(folder: Path, name: str, number: int, content: bytes) -> None:
    """Write an image under its own name, or under its number if it has no usable name or another image has it."""
    path = folder / PurePosixPath(name.replace("\\", "/")).name
    if not name or path.suffix.lower() not in IMAGE_SUFFIXES or path.name.startswith(".") or path.exists():
        suffix = suffix_of(content)
        if suffix is None:
            raise ValueError(f"row {number} holds no image")
        path = folder / f"{number:06d}{suffix}"
    with translate_os_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


# MNIST --------------------------------------------------------------------------------------------------------------


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read a gzipped idx file of bytes: 0, 0, 8, number of dimensions, their sizes (big-endian), the data."""
    with damage_named(path), gzip.open(path) as file:
        header = file.read(4 + 4 * dimensions)
        sizes = [int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4)]
        sound = header[:4] == bytes((0, 0, 8, dimensions)) and len(sizes) == dimensions
        if not sound or sizes[0] > 1_000_000 or sizes[1:] != [28, 28][: dimensions - 1]:
            raise DamagedFile(path, "not an idx file of MNIST")
        expected = int(np.prod(sizes))
        content = file.read(expected + 1)
    if len(content) != expected:
        problem = "longer" if len(content) > expected else "shorter"
        raise DamagedFile(path, f"{problem} than its beginning says, which is {expected} bytes")
    return np.frombuffer(content, np.uint8).reshape(sizes)


def shuffled_mnist(files: list[Path]) -> tuple[np.ndarray, np.ndarray, np.random.RandomState]:
    """Join and shuffle both halves with a fixed seed; return images, digits and the random generator."""
    images = np.concatenate([read_idx(files[0], 3), read_idx(files[2], 3)])
    digits = np.concatenate([read_idx(files[1], 1), read_idx(files[3], 1)])
    if len(images) != len(digits) or (digits > 9).any():
        raise MirrorError("sent labels that do not belong to the images")
    random = np.random.RandomState(MNIST_SEED)
    order = random.permutation(len(images))
    return images[order], digits[order], random


def rotated_mnist(download: Download) -> None:
    """Give domain i of d every d-th shuffled image from the i-th on, rotated by the angle in the domain's name."""
    images, digits, _ = shuffled_mnist(download.files)
    count = len(download.info.domains)
    for start, domain in enumerate(download.info.domains):
        for number, (image, digit) in enumerate(zip(images[start::count], digits[start::count], strict=True)):
            rotated = Image.fromarray(image).rotate(int(domain), Image.Resampling.BILINEAR, fillcolor=0)
            save_png(rotated, download.folder / domain / str(digit), number)


def colored_mnist(download: Download) -> None:
    """Colour the digits.

    The label is digit < 5, flipped with probability 0.25. The colour is the label, flipped with probability 0.1, 0.2
    and 0.9 in the domains +90%, +80% and -90%. Colour 0 is red, 1 is green; the blue channel is empty.
    """
    images, digits, random = shuffled_mnist(download.files)
    count = len(download.info.domains)
    for start, (domain, flip) in enumerate(zip(download.info.domains, (0.1, 0.2, 0.9), strict=True)):
        greys = images[start::count]
        labels = (digits[start::count] < 5) ^ (random.rand(len(greys)) < 0.25)
        colours = labels ^ (random.rand(len(greys)) < flip)
        pixels = np.zeros((*greys.shape, 3), np.uint8)
        pixels[np.arange(len(greys)), :, :, colours.astype(int)] = greys
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            save_png(Image.fromarray(image), download.folder / domain / str(int(label)), number)


def save_png(image: Image.Image, folder: Path, number: int) -> None:
    path = folder / f"{number:05d}.png"
    with translate_os_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        image.save(path)


LAYOUTS: dict[str, Callable[[Download], None]] = {
    function.__name__: function
    for function in (folders, listed_folders, camera_traps, parquet, rotated_mnist, colored_mnist)
}
