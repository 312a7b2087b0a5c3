"""Pillow's access to DICOM files, by pydicom: the picture as a viewer shows it at first.

Grey values pass the file's modality and VOI transformations (window), or are stretched from the least to the greatest
value where the file names no window. MONOCHROME1 is inverted, palettes and YBR become RGB.
"""

import copy
import warnings
from typing import IO, Any, cast

import numpy as np
import pydicom
from PIL import Image, ImageFile
from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi_lut, get_decoder, pixel_array

from aidgn.errors import FormatError

warnings.filterwarnings("ignore", module="pydicom")  # of odd attributes, which pictures do not need
# An enhanced file keeps these for each frame, or for all, in sequences.
FRAME_SEQUENCES = ("FrameVOILUTSequence", "PixelValueTransformationSequence")


class DicomImageFile(ImageFile.ImageFile):
    """A DICOM file, whose frames are Pillow's frames."""

    format = "DICOM"
    format_description = "Digital Imaging and Communications in Medicine"

    def _open(self) -> None:
        self.header = pydicom.dcmread(cast(IO[bytes], self.fp), stop_before_pixels=True)
        if not {"Rows", "Columns", "PhotometricInterpretation"} <= set(self.header.dir()):
            raise FormatError(f"is DICOM without a picture (modality {self.header.get('Modality', 'unknown')}).")
        self._size = int(self.header.Columns), int(self.header.Rows)
        self._mode = "L" if self.header.PhotometricInterpretation.startswith("MONOCHROME") else "RGB"
        self.n_frames = int(self.header.get("NumberOfFrames") or 1)
        self.frame: int | None = 0
        self.shown: int | None = None

    @property
    def is_animated(self) -> bool:
        return self.n_frames > 1

    def getexif(self) -> Image.Exif:
        return Image.Exif()

    def tell(self) -> int:
        return self.frame or 0

    def seek(self, frame: int) -> None:
        if not 0 <= frame < self.n_frames:
            raise EOFError
        self.frame = frame

    def load(self) -> Any:
        if self.shown != self.frame:
            pixels = read_frame(self.fp, self.header, self.tell())
            self.load_prepare()
            self.frombytes(pixels.tobytes())
            self.shown = self.frame
        return Image.Image.load(self)


def read_frame(file: Any, header: pydicom.Dataset, frame: int) -> np.ndarray:
    """Decode a frame to uint8 [H, W] for grey, [H, W, 3] for colour."""
    compression = header.file_meta.TransferSyntaxUID
    try:
        available = get_decoder(compression).is_available
    except NotImplementedError:
        raise FormatError(f"is DICOM compressed by {compression.name}, which pydicom does not decode.") from None
    if not available:
        raise FormatError(
            f'is DICOM compressed by {compression.name}, which needs python-gdcm: pip install "aidgn[dicom]"'
        )
    file.seek(0)
    pixels = pixel_array(file, index=frame)
    header = flatten_frame(header, frame)
    if header.PhotometricInterpretation == "PALETTE COLOR":
        pixels = apply_color_lut(pixels, header)
    if pixels.ndim == 3:
        bits = 8 * pixels.itemsize if header.PhotometricInterpretation == "PALETTE COLOR" else header.BitsStored
        return (pixels >> max(bits - 8, 0)).astype(np.uint8)
    values = apply_modality_lut(pixels, header).astype(np.float64)
    low, high = values.min(), values.max()
    if header.get("VOILUTSequence"):
        values = apply_voi_lut(values.astype(np.int64), header)
        low, high = 0, 2 ** header.VOILUTSequence[0].LUTDescriptor[2] - 1
    elif "WindowCenter" in header and "WindowWidth" in header:
        far = 1e4 * max(abs(low), abs(high), np.max(header.WindowWidth), abs(np.max(header.WindowCenter)))
        with np.errstate(over="ignore"):
            windowed = apply_voi_lut(np.append(values, [-far, far]), header)
        values, low, high = windowed[:-2].reshape(pixels.shape), *windowed[-2:]
    elif "PixelPaddingValue" in header and (pixels != header.PixelPaddingValue).any():
        shown = values[pixels != header.PixelPaddingValue]  # padding lies outside what was measured
        low, high = shown.min(), shown.max()
    share = np.clip((values - low) / max(high - low, 1e-9), 0, 1)
    if header.PhotometricInterpretation == "MONOCHROME1":
        share = 1 - share
    return np.round(255 * share).astype(np.uint8)


def flatten_frame(header: pydicom.Dataset, frame: int) -> pydicom.Dataset:
    """Return the header with the attributes that an enhanced file keeps in its functional groups."""
    groups = [*header.get("SharedFunctionalGroupsSequence", [])[:1]]
    groups += header.get("PerFrameFunctionalGroupsSequence", [])[frame : frame + 1]
    flat = copy.copy(header)
    for group in groups:
        for name in FRAME_SEQUENCES:
            for item in group.get(name, []):
                flat.update(item)
    return flat


def register() -> None:
    """Add DICOM to Pillow's formats."""
    Image.register_open(DicomImageFile.format, DicomImageFile, lambda prefix: True)
