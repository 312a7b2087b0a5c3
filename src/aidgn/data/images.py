"""Any image file as upright RGB, or an error that names the file: nothing truncated, faked or huge gets through."""

import os
import warnings
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import numpy as np
from PIL import Image, ImageFile

from aidgn.errors import AidgnError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})
# Only these are tried, whatever the file's name says: Pillow also opens formats that start other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
MAX_PIXELS = 178_956_970  # where Pillow too sees a decompression bomb: 512 MiB of RGB
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # large, but below MAX_PIXELS

ORIENTATION = 0x0112  # EXIF tag
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(path: str | Path, at_least: int | None = None) -> tuple[Image.Image, tuple[int, int]]:
    """The image in mode RGB, turned upright as EXIF says, and the (height, width) of the upright original.

    With `at_least`, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, as long as both sides keep that many
    pixels: several times faster for photographs. Transparent pixels are laid on white. Of an animation: frame one.
    """
    try:
        stat = os.stat(path)  # noqa: PTH116, for many files
        if not (S_ISREG(stat.st_mode) or S_ISDIR(stat.st_mode)):
            raise AidgnError(f"{path} is not a file but a pipe, socket or device.")
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise Image.DecompressionBombError
            if at_least is not None:
                image.draft(None, (at_least, at_least))  # type: ignore[arg-type]
            reduced = image.size != (width, height)
            ImageFile.LOAD_TRUNCATED_IMAGES = False  # others set it for the whole process
            image.load()
            upright = to_rgb(image)
            turn = UPRIGHT.get(orientation(image))
            if turn is not None:
                upright = upright.transpose(turn)
            if not reduced:
                width, height = upright.size
            elif turn in (
                Image.Transpose.TRANSPOSE,
                Image.Transpose.ROTATE_270,
                Image.Transpose.TRANSVERSE,
                Image.Transpose.ROTATE_90,
            ):
                width, height = height, width
            return upright, (height, width)
    except AidgnError:
        raise
    except FileNotFoundError:
        raise AidgnError(f"{path} does not exist.") from None
    except PermissionError:
        raise AidgnError(f"{path} cannot be read: permission denied.") from None
    except IsADirectoryError:
        raise AidgnError(f"{path} is a folder, not an image.") from None
    except Image.DecompressionBombError:
        raise AidgnError(
            f"{path} is too large: images of up to {MAX_PIXELS // 1_000_000} megapixels are read. "
            "Make it smaller or remove it."
        ) from None
    except Image.UnidentifiedImageError:
        raise AidgnError(
            f"{path} is "
            + (
                "empty (0 bytes)."
                if stat.st_size == 0
                else "not an image: its content is not JPEG, PNG, WebP, BMP, TIFF, GIF or PPM."
            )
        ) from None
    except MemoryError as error:
        raise AidgnError(f"{path} cannot be read: there is not enough memory for it.") from error
    except Exception as error:  # decoders fail on damaged files with exceptions of every kind
        if isinstance(error, OSError) and error.strerror:  # a link to itself, a fault of the disk
            raise AidgnError(f"{path} cannot be read: {error.strerror}.") from error
        raise AidgnError(
            f"{path} is damaged: {str(error) or type(error).__name__}. Get the file again or remove it."
        ) from error


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8. Asked after loading, for Pillow turns a TIFF upright itself while it loads."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # unreadable EXIF data say nothing about the pixels
        return 1


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F" or image.mode.startswith("I"):
        return eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), colours).convert("RGB")
    return image.convert("RGB")


def eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits and more as 8 bits: white is 65535 for whole numbers, 1 for fractions, black is 0, the same for
    every file. Values outside that range have no known white; they are stretched from the least to the greatest."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    low, high = 0.0, 1.0 if image.mode == "F" else 65535.0
    if values.min() < low or values.max() > high:
        low, high = values.min(), max(values.max(), values.min() + 1)
    return Image.fromarray(np.round((values - low) * (255 / (high - low))).astype(np.uint8))
