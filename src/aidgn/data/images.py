"""Decode image files of common formats into upright RGB, or name the problem of a file."""

import io
import os
import warnings
from contextlib import nullcontext, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from re import Pattern, compile
from stat import S_ISDIR, S_ISREG
from typing import IO, NamedTuple

import numpy as np
from PIL import Image, ImageFile

from aidgn.errors import AidgnError, FormatError


class ImageFormat(NamedTuple):
    """A format of image files."""

    name: str  # name for people
    suffixes: tuple[str, ...]  # suffixes of its files
    paged: bool = False  # whether a file may hold several pictures that are no animation
    module: str = ""  # reads it, where Pillow alone does not
    install: str = ""  # the command that installs this module
    start: Pattern[bytes] | None = None  # how the content starts, where Pillow alone does not read it


# By Pillow's names. No other format is tried, whatever a file's suffix: some of Pillow's decoders start other programs.
IMAGE_FORMATS = {
    "JPEG": ImageFormat("JPEG", (".jpg", ".jpeg", ".jfif")),
    "PNG": ImageFormat("PNG", (".png",)),
    "WEBP": ImageFormat("WebP", (".webp",)),
    "BMP": ImageFormat("BMP", (".bmp",)),
    "TIFF": ImageFormat("TIFF", (".tif", ".tiff"), paged=True),
    "GIF": ImageFormat("GIF", (".gif",)),
    "PPM": ImageFormat("PPM", (".ppm", ".pgm")),
    "AVIF": ImageFormat(
        "AVIF", (".avif",), False, "PIL._avif", 'pip install "pillow>=11.3"', compile(rb"(?s).{4}ftypavi[fs]")
    ),
    "HEIF": ImageFormat(
        "HEIC",
        (".heic", ".heif"),
        False,
        "pillow_heif",
        'pip install "aidgn[heic]"',
        compile(rb"(?s).{4}ftyp(he[iv][cmsx]|m[is]f1)"),
    ),
    "DICOM": ImageFormat(
        "DICOM", (".dcm", ".dicom"), True, "pydicom", 'pip install "aidgn[dicom]"', compile(rb"(?s).{128}DICM")
    ),
}
IMAGE_SUFFIXES = frozenset(suffix for known in IMAGE_FORMATS.values() for suffix in known.suffixes)
PAGED_SUFFIXES = tuple(suffix for known in IMAGE_FORMATS.values() if known.paged for suffix in known.suffixes)
BUILT_IN = tuple(name for name, known in IMAGE_FORMATS.items() if not known.module)
_names = [known.name for known in IMAGE_FORMATS.values()]
FORMAT_NAMES = f"{', '.join(_names[:-1])} or {_names[-1]}"  # for messages

MAX_PIXELS = 178_956_970  # Pillow's own limit for decompression bombs: 512 MiB of RGB
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # large, but below MAX_PIXELS
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")  # some DICOM files begin as TIFF files do

ORIENTATION = 0x0112  # EXIF tag
NEW_SUBFILE_TYPE = 0x00FE  # TIFF tag; bit 0 marks a smaller copy of another page
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TURNS_SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange height and width


def open_image(file: str | Path | IO[bytes]) -> Image.Image:
    """Read the header of an image file with Pillow, in one of `IMAGE_FORMATS`.

    Raises:
        FormatError: The module that reads the format is not installed; the message goes on after the file's name.
    """
    try:
        return Image.open(file, formats=BUILT_IN)
    except Image.UnidentifiedImageError:
        with open(file, "rb") if isinstance(file, str | Path) else nullcontext(file) as content:  # noqa: PTH123
            content.seek(0)
            start = content.read(132)
            content.seek(0)
        for name, known in IMAGE_FORMATS.items():
            if known.start is not None and known.start.match(start):
                add_format(name)
                return Image.open(file, formats=(name,))
        raise


@cache
def add_format(name: str) -> None:
    """Let Pillow read one of `IMAGE_FORMATS` with its module."""
    known = IMAGE_FORMATS[name]
    try:
        module = import_module(known.module)
    except ImportError as error:
        package = known.module.partition(".")[0]
        needed = "a newer Pillow" if package == "PIL" else f"{package.replace('_', '-')}, which is not installed"
        raise FormatError(f"is {known.name}, which needs {needed}: {known.install}") from error
    if name == "HEIF":
        module.register_heif_opener(thumbnails=False)
    if name == "DICOM":
        import_module("aidgn.data.dicom").register()


@cache
def add_installed_formats() -> None:
    """Import the modules of all formats now, so that a limit on CPU time counts the pictures alone."""
    for name in IMAGE_FORMATS.keys() - set(BUILT_IN):
        with suppress(FormatError):
            add_format(name)


def suffix_of(content: bytes) -> str | None:
    """Return the suffix that suits the content of an image file; None if it is not an image."""
    try:
        with open_image(io.BytesIO(content)) as image:
            return IMAGE_FORMATS[str(image.format)].suffixes[0]
    except Exception:  # decoders fail on damaged files with exceptions of all kinds
        return None


def read_image(path: str | Path, at_least: int | None = None) -> tuple[Image.Image, tuple[int, int]]:
    """Decode an image file to mode RGB, turned upright as its EXIF data say.

    Transparent pixels are laid on white. Of an animation or a file with several pages the first is read.

    Args:
        path: The file.
        at_least: Decode a JPEG at 1/2, 1/4 or 1/8 of its size, as long as both sides keep this many pixels. That is
            several times faster for photographs.

    Returns:
        The image, and (height, width) of the upright original.
    """
    try:
        stat = os.stat(path)  # noqa: PTH116, for many files
        if not (S_ISREG(stat.st_mode) or S_ISDIR(stat.st_mode)):
            raise AidgnError(f"{path} is not a file but a pipe, socket or device.")
        with open_image(path) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise Image.DecompressionBombError
            if at_least is not None:
                image.draft(None, (at_least, at_least))  # type: ignore[arg-type]
            reduced = image.size != (width, height)
            ImageFile.LOAD_TRUNCATED_IMAGES = False  # other code may have set it for the whole process
            image.load()
            upright = turn_upright(image)
            if not reduced:
                width, height = upright.size
            elif orientation(image) in TURNS_SIDEWAYS:
                width, height = height, width
            return upright, (height, width)
    except FormatError as error:
        raise AidgnError(f"{path} {error}") from error
    except AidgnError:
        raise
    except FileNotFoundError:
        raise AidgnError(f"{path} does not exist.") from None
    except PermissionError:
        raise AidgnError(f"{path} cannot be read: permission denied.") from None
    except IsADirectoryError:
        raise AidgnError(f"{path} is a folder, not an image.") from None
    except Image.DecompressionBombError:
        limit = MAX_PIXELS // 1_000_000
        raise AidgnError(f"{path} is too large, with more than {limit} megapixels. Shrink or remove it.") from None
    except Image.UnidentifiedImageError:
        if stat.st_size == 0:
            raise AidgnError(f"{path} is empty (0 bytes).") from None
        raise AidgnError(f"{path} is not an image: its content is not {FORMAT_NAMES}.") from None
    except MemoryError as error:
        raise AidgnError(f"{path} cannot be read: there is not enough memory for it.") from error
    except Exception as error:  # decoders fail on damaged files with exceptions of all kinds
        if isinstance(error, OSError) and error.strerror:  # a link to itself, a fault of the disk
            raise AidgnError(f"{path} cannot be read: {error.strerror}.") from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise AidgnError(f"{path} is damaged: {reason}. Get the file again or remove it.") from error


def count_pages(path: str | Path) -> int:
    """Count the pages of a file; 1 if it cannot be read."""
    try:
        with open_image(path) as image:
            return len(list_pages(image))
    except Exception:  # decoding will name the problem
        return 1


def list_pages(image: Image.Image) -> list[int]:
    """List the frames of an open TIFF or DICOM file that are pages, not smaller copies of one; [0] of other formats."""
    if not IMAGE_FORMATS[str(image.format)].paged:
        return [0]
    pages = []
    for frame in range(getattr(image, "n_frames", 1)):
        image.seek(frame)
        if not getattr(image, "tag_v2", {}).get(NEW_SUBFILE_TYPE, 0) & 1:
            pages.append(frame)
    return pages


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, of a loaded image: Pillow turns a TIFF upright while loading it."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # unreadable EXIF data do not concern the pixels
        return 1


def turn_upright(image: Image.Image) -> Image.Image:
    """Convert a loaded image to RGB and turn it as its EXIF data say."""
    turn = UPRIGHT.get(orientation(image))
    return to_rgb(image) if turn is None else to_rgb(image).transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB, transparent pixels on white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F" or image.mode.startswith("I"):
        return to_eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Convert grey of 16 bits or more to 8 bits.

    Black is 0 and white is 65535 for whole numbers, 1 for fractions. An image with values outside that range has no
    known white, so its least and greatest values become black and white.
    """
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    low, high = 0.0, 1.0 if image.mode == "F" else 65535.0
    if values.min() < low or values.max() > high:
        low, high = values.min(), max(values.max(), values.min() + 1)
    return Image.fromarray(np.round((values - low) * (255 / (high - low))).astype(np.uint8))


# Shrunk images ------------------------------------------------------------------------------------------------------


def largest_slot(image_size: int) -> int:
    """Return the longest side that is stored for a network with this input, so that random crops stay sharp."""
    return round(image_size * 256 / 224)


def longest_side(path: str) -> int:
    """Return the longest side of an image from the file's header; 1 if the file is broken."""
    try:
        with open_image(path) as image:
            return max(image.size)
    except Exception:  # decoding will name the problem
        return 1


def read_shrunk(path: str, slot: int) -> tuple[Image.Image, tuple[int, int]]:
    """Decode an image with each side shrunk to at most `slot`.

    Resizing is bilinear with antialiasing, from a JPEG decoded at 1/2, 1/4 or 1/8 of its size where that leaves two
    pixels or more for each stored one, and after box reduction that leaves three. On photographs this differs from the
    exact result by 0.6 of 255 on average, and by at most 3 in 99 of 100 values.

    Returns:
        The image, and (height, width) of the upright original.
    """
    image, (height, width) = read_image(path, at_least=2 * slot)
    size = min(slot, width), min(slot, height)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR, box=covered_box(image, width, height), reducing_gap=3.0)
    return image, (height, width)


def covered_box(image: Image.Image, width: int, height: int) -> tuple[float, float, float, float]:
    """Return the part of a JPEG decoded at a fraction of its size that the original covers.

    The last column and row of the decoded image may lie partly outside the original, on the side that EXIF, which the
    upright image still has, turned them to.
    """
    scale = next(scale for scale in (1, 2, 4, 8) if image.size == (-(-width // scale), -(-height // scale)))
    exact_width, exact_height = width / scale, height / scale
    left = top = 0.0
    if (exact_width, exact_height) != image.size:
        turn = orientation(image)
        left = image.width - exact_width if turn in (2, 3, 6, 7) else 0.0
        top = image.height - exact_height if turn in (3, 4, 7, 8) else 0.0
    return left, top, left + exact_width, top + exact_height
