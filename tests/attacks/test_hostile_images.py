"""Mutated image files give an error or a picture of the right shape, and never end the process."""

import io
import random

import numpy as np
import pytest
from PIL import Image

from aidgn.data.images import open_image, read_shrunk
from aidgn.errors import AidgnError
from tests.conftest import Tally

FORMATS = {"JPEG": {}, "PNG": {}, "WEBP": {}, "BMP": {}, "TIFF": {"compression": "tiff_lzw"}, "GIF": {}, "PPM": {}}
MUTANTS = 300
SLOT = 32


def mutate(content: bytes, dice: random.Random) -> bytes:
    """Flip bits, write extreme numbers, cut, repeat or remove a part."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 8))):
        at = dice.randrange(min(len(changed), dice.choice((32, 200, 10**6))))  # often in the header
        match dice.randrange(5):
            case 0:
                changed[at] ^= 1 << dice.randrange(8)
            case 1:
                changed[at : at + 4] = dice.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\1\0"))
            case 2:
                del changed[at + 1 :]
            case 3:
                changed[at:at] = changed[at : at + dice.randrange(1, 64)] * dice.choice((1, 2, 50))
            case 4:
                del changed[at : at + dice.randrange(1, 16)]
        if len(changed) < 2:
            break
    return bytes(changed)


@pytest.mark.parametrize("form", FORMATS)
def test_mutated_images(form: str, tmp_path_factory: pytest.TempPathFactory, tally: Tally) -> None:
    dice, pixels = random.Random(form), np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **FORMATS[form])
    path = tmp_path_factory.mktemp("mutants") / "image"
    read = 0
    for _ in range(MUTANTS):
        path.write_bytes(mutate(buffer.getvalue(), dice))
        try:
            with open_image(path) as image:
                if image.width * image.height > 4_000_000:  # right, but slow
                    continue
        except Exception:  # for read_shrunk to name
            pass
        with tally(f"mutated images: {form}"):
            try:
                picture, (height, width) = read_shrunk(str(path), SLOT)
            except AidgnError as error:
                assert str(path) in str(error)
            else:
                assert picture.mode == "RGB" and picture.size == (min(SLOT, width), min(SLOT, height))
                assert np.asarray(picture).shape == (picture.height, picture.width, 3)
                read += 1
    assert 0 < read < MUTANTS
