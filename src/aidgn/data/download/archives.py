"""Archives, unpacked straight into FOLDER/<domain>/<class>/<image>; no member gets out of it or floods the disk."""

import gzip
import json
import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from PIL import Image

from aidgn.data.download.http import CHUNK, MirrorError, storing
from aidgn.data.images import IMAGE_SUFFIXES
from aidgn.data.registry import DatasetInfo, normalize_name

Place = Callable[[str], Iterable[str]]  # a member's name -> where it goes below the folder; nowhere: it is left out
SPLITS = frozenset({"train", "crossval", "val", "test", "full"})  # folders inside a domain that copies of VLCS have
LOCATIONS = ("100", "38", "43", "46")
LARGEST_ANNOTATIONS = 1 << 30
MNIST_SEED = 0
SIGNATURES = ((b"\xff\xd8\xff", ".jpg"), (b"\x89PNG\r\n\x1a\n", ".png"), (b"GIF8", ".gif"), (b"BM", ".bmp"))


class BadFile(MirrorError):
    """A downloaded file that cannot be read: it must not be taken for a finished download the next time."""

    def __init__(self, path: Path, problem: object) -> None:
        super().__init__(f"sent {path.name}, which is {problem}")
        self.path = path


# Archives -----------------------------------------------------------------------------------------------------------


@dataclass
class Limit:
    """What the archives of a data set may still hold, in bytes and in members."""

    size: int
    members: int

    def spend(self, size: int, members: int = 0) -> None:
        self.size -= size
        self.members -= members
        if self.size < 0 or self.members < 0:
            raise MirrorError("holds far more than the data set, so it was not unpacked further")


def members(archive: Path, limit: Limit) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, content) of the files in a zip, tar or tar.gz. An archive with an unsafe member is refused as a whole."""
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as opened:
                for info in opened.infolist():
                    kind = stat.S_IFMT(info.external_attr >> 16)
                    check_member(info.filename, kind in (0, stat.S_IFREG, stat.S_IFDIR) and not info.flag_bits & 1)
                    limit.spend(info.file_size, 1)
                for info in opened.infolist():
                    if not info.is_dir():
                        with opened.open(info) as content:
                            yield info.filename, content
        else:
            with tarfile.open(archive) as tar:
                for member in tar:
                    check_member(member.name, member.isreg() or member.isdir())
                    if hasattr(tarfile, "data_filter"):  # Python's own check as well, where it has one
                        tarfile.data_filter(member, str(archive.parent))
                    limit.spend(member.size, 1)
                    if member.isreg() and (file := tar.extractfile(member)):
                        yield member.name, file
    except (
        zipfile.BadZipFile,
        tarfile.TarError,
        gzip.BadGzipFile,
        lzma.LZMAError,
        zlib.error,
        EOFError,
        NotImplementedError,
        UnicodeError,
    ) as error:
        raise BadFile(archive, f"damaged or no archive ({error})") from error


def check_member(name: str, plain: bool) -> None:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not plain:
        raise MirrorError(f"sent an archive with {name!r}, which is a link, a device or encrypted; refused")
    if name.startswith(("/", "\\")) or ".." in parts or "\0" in name or any(":" in part for part in parts[:1]):
        raise MirrorError(f"sent an archive with {name!r}, which would land outside the folder; refused")


def unpack(archive: Path, folder: Path, place: Place, limit: Limit) -> None:
    """The members of the archive, each to where `place` says."""
    left = Limit(limit.size, limit.members)  # of bytes that really come out, whatever the archive says of itself
    for name, content in members(archive, limit):
        targets = [folder / target for target in place(name)]
        if not targets:
            continue
        first = targets[0]
        with storing(first):
            first.parent.mkdir(parents=True, exist_ok=True)
            output = first.open("wb")
        with output:
            while chunk := content.read(CHUNK):
                left.spend(len(chunk))
                with storing(first):
                    output.write(chunk)
            with storing(first):
                output.flush()
        for other in targets[1:]:  # copied, since to read it again a tar.gz would be unpacked from its beginning
            with storing(other):
                other.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(first, other)


# Folders ------------------------------------------------------------------------------------------------------------


class ByFolder:
    """.../<domain>/[<split>/]<class>/<image> -> <domain>/<class>/[<split>_]<image>, with the catalogue's names."""

    def __init__(self, info: DatasetInfo, names: Mapping[str, str]) -> None:
        self.domains = known(info.domains, {**info.domain_aliases, **names})
        self.classes = known(info.classes, names)
        self.splits: set[str] = set()

    def __call__(self, name: str) -> list[str]:
        *folders, file = name.replace("\\", "/").split("/")
        if Path(file).suffix.lower() not in IMAGE_SUFFIXES or file.startswith(".") or "__MACOSX" in folders:
            return []
        for position, folder in enumerate(folders):
            domain = self.domains.get(normalize_name(folder))
            below = folders[position + 1 :]
            splits = [part for part in below if part in SPLITS]
            rest = [part for part in below if part not in SPLITS]
            if domain and len(rest) == 1:
                label = self.classes.get(normalize_name(rest[0])) if self.classes else rest[0]
                if label:
                    self.splits |= set(splits)
                    return [f"{domain}/{label}/{'_'.join([*splits, file])}"]
        return []


def known(names: Iterable[str], other: Mapping[str, str]) -> dict[str, str]:
    """Spellings without case, space, _ and - -> the name."""
    names = set(names)
    return {normalize_name(name): name for name in names} | {
        normalize_name(key): name for key, name in other.items() if name in names
    }


def folders(files: list[Path], folder: Path, info: DatasetInfo, names: Mapping[str, str], limit: Limit) -> str:
    """Archives of folders per domain and class. In VLCS, `full` is `train` and `crossval` together: taken once."""
    place = ByFolder(info, names)
    for file in files:
        unpack(file, folder, place, limit)
    if "full" in place.splits:
        for class_folder in {image.parent for image in folder.glob("*/*/full_*")}:
            for part in ("train", "crossval", "val"):
                for copy in class_folder.glob(f"{part}_*"):
                    copy.unlink()
    return ""


def listed_folders(files: list[Path], folder: Path, info: DatasetInfo, names: Mapping[str, str], limit: Limit) -> str:
    """Folders of which only the images named in the text files, as `<domain>/<class>/<image> <label>`, belong to it."""
    listed = {
        line.rpartition(" ")[0].strip()
        for file in files
        if file.suffix == ".txt"
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
    }
    by_folder = ByFolder(info, names)

    def place(name: str) -> list[str]:
        return by_folder(name) if "/".join(name.split("/")[-3:]) in listed else []

    for file in files:
        if file.suffix != ".txt":
            unpack(file, folder, place, limit)
    return ""


# Caltech Camera Traps -----------------------------------------------------------------------------------------------


def camera_traps(files: list[Path], folder: Path, info: DatasetInfo, names: Mapping[str, str], limit: Limit) -> str:
    """TerraIncognita: the images of four locations and ten categories, by annotations in COCO camera-traps form."""
    images, annotations = files
    annotated: dict[str, list[Any]] = defaultdict(list)
    places: dict[str, set[str]] = defaultdict(set)
    try:
        for name, content in members(annotations, Limit(LARGEST_ANNOTATIONS, 1000)):
            if name.endswith(".json") and not PurePosixPath(name).name.startswith("."):
                for key, values in json.load(content).items():
                    if isinstance(values, list):
                        annotated[key] += values
        categories = {category["id"]: category["name"] for category in annotated["categories"]}
        found = defaultdict(set)
        for annotation in annotated["annotations"]:
            found[annotation["image_id"]].add(categories[annotation["category_id"]])
        for image in annotated["images"]:
            if str(image["location"]) in LOCATIONS:
                file = PurePosixPath(image["file_name"]).name
                places[file] |= {
                    f"location_{image['location']}/{category}/{file}"
                    for category in found[image["id"]] & set(info.classes)
                }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(annotations, f"not in COCO camera-traps form ({error!r})") from error
    unpack(images, folder, lambda name: places.get(PurePosixPath(name).name, ()), limit)
    return ""


# Parquet ------------------------------------------------------------------------------------------------------------


def parquet(files: list[Path], folder: Path, info: DatasetInfo, names: Mapping[str, str], limit: Limit) -> str:
    """Rows of image, domain and label, as Hugging Face stores them: each image's bytes as they are."""
    import pyarrow
    import pyarrow.parquet

    domains = known(info.domains, {**info.domain_aliases, **names})
    classes = known(info.classes, names)
    number = 0
    for file in files:
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                features = json.loads((table.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
                features = features.get("info", {}).get("features", {})
                for batch in table.iter_batches(batch_size=32, columns=["image", "domain", "label"]):
                    for row in batch.to_pylist():
                        words = [
                            features[column]["names"][row[column]] if isinstance(row[column], int) else row[column]
                            for column in ("domain", "label")
                        ]
                        domain = domains[normalize_name(words[0])]
                        label = classes[normalize_name(words[1])] if classes else words[1]
                        content = row["image"]["bytes"]
                        limit.spend(len(content), 1)
                        check_member(f"x/{label}", "/" not in label)
                        write_image(folder / domain / label, row["image"].get("path") or "", number, content)
                        number += 1
        except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadFile(file, f"not a table of image, domain and label ({error!r})") from error
    return ""


def write_image(folder: Path, name: str, number: int, content: bytes) -> None:
    """The image under its own name, or under its number if it has none or another image has it."""
    path = folder / PurePosixPath(name.replace("\\", "/")).name
    if not name or path.suffix.lower() not in IMAGE_SUFFIXES or path.name.startswith(".") or path.exists():
        suffix = next((suffix for start, suffix in SIGNATURES if content.startswith(start)), None)
        if suffix is None:
            raise ValueError(f"row {number} holds no image")
        path = folder / f"{number:06d}{suffix}"
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


# MNIST --------------------------------------------------------------------------------------------------------------


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The unsigned bytes of a gzipped idx file: 0, 0, 8, number of dimensions, their sizes (big-endian), the data."""
    try:
        with gzip.open(path) as file:
            header = file.read(4 + 4 * dimensions)
            sizes = [int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4)]
            if (
                header[:4] != bytes((0, 0, 8, dimensions))
                or len(header) != 4 + 4 * dimensions
                or sizes[0] > 1_000_000
                or sizes[1:] != [28, 28][: dimensions - 1]
            ):
                raise BadFile(path, "not an idx file of MNIST")
            wanted = int(np.prod(sizes))
            content = file.read(wanted + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadFile(path, f"damaged ({error})") from error
    if len(content) != wanted:
        raise BadFile(
            path, f"{'longer' if len(content) > wanted else 'shorter'} than its beginning says, which is {wanted} bytes"
        )
    return np.frombuffer(content, np.uint8).reshape(sizes)


def shuffled_mnist(files: list[Path]) -> tuple[np.ndarray, np.ndarray, np.random.RandomState]:
    """The images and digits of both halves, shuffled with a fixed seed; and what random numbers come after."""
    images = np.concatenate([read_idx(files[0], 3), read_idx(files[2], 3)])
    digits = np.concatenate([read_idx(files[1], 1), read_idx(files[3], 1)])
    if len(images) != len(digits) or (digits > 9).any():
        raise MirrorError("sent labels that do not belong to the images")
    random = np.random.RandomState(MNIST_SEED)
    order = random.permutation(len(images))
    return images[order], digits[order], random


def rotated_mnist(files: list[Path], folder: Path, info: DatasetInfo, names: Mapping[str, str], limit: Limit) -> str:
    """Domain i of d has every d-th shuffled image from the i-th on, rotated by the angle it is named after."""
    images, digits, _ = shuffled_mnist(files)
    count = len(info.domains)
    for start, domain in enumerate(info.domains):
        for number, (image, digit) in enumerate(zip(images[start::count], digits[start::count], strict=True)):
            rotated = Image.fromarray(image).rotate(int(domain), Image.Resampling.BILINEAR, fillcolor=0)
            save_png(rotated, folder / domain / str(digit), number)
    return f"made from MNIST as DomainBed does, by bilinear rotation; shuffled with numpy's RandomState({MNIST_SEED})"


def colored_mnist(files: list[Path], folder: Path, info: DatasetInfo, names: Mapping[str, str], limit: Limit) -> str:
    """Label: digit < 5, flipped with probability 0.25. Colour: the label, flipped with probability e.

    e = 0.1, 0.2, 0.9 in the domains +90%, +80%, -90%. Colour 0 is red, 1 green; the third channel is empty.
    """
    images, digits, random = shuffled_mnist(files)
    count = len(info.domains)
    for start, (domain, flip) in enumerate(zip(info.domains, (0.1, 0.2, 0.9), strict=True)):
        greys = images[start::count]
        labels = (digits[start::count] < 5) ^ (random.rand(len(greys)) < 0.25)
        colours = labels ^ (random.rand(len(greys)) < flip)
        pixels = np.zeros((*greys.shape, 3), np.uint8)
        pixels[np.arange(len(greys)), :, :, colours.astype(int)] = greys
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            save_png(Image.fromarray(image), folder / domain / str(int(label)), number)
    return f"made from MNIST as DomainBed does, in 28 x 28 pixels; random numbers of numpy's RandomState({MNIST_SEED})"


def save_png(image: Image.Image, folder: Path, number: int) -> None:
    path = folder / f"{number:05d}.png"
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)
        image.save(path)


ARRANGE: dict[str, Callable[[list[Path], Path, DatasetInfo, Mapping[str, str], Limit], str]] = {
    function.__name__: function
    for function in (folders, listed_folders, camera_traps, parquet, rotated_mnist, colored_mnist)
}
