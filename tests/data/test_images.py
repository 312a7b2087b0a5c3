"""Image files of every kind, written by Pillow, against pixels worked out by hand or with numpy."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from aidgn.data.images import MAX_PIXELS, read_image
from aidgn.errors import AidgnError

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (20, 32, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (20, 32), dtype=np.uint8)


def read(path, at_least=None):
    image, original = read_image(path, at_least)
    assert image.mode == "RGB"
    return np.asarray(image), original


def smooth(height, width):
    """A picture that JPEG hardly changes."""
    y, x = np.mgrid[:height, :width]
    return np.stack([255 * y / height, 255 * x / width, 128 + 0 * x], -1).astype(np.uint8)


# Kinds of files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "ppm", "webp"])
def test_lossless_formats_keep_every_pixel(tmp_path, suffix):
    path = tmp_path / f"image.{suffix}"
    Image.fromarray(COLOUR).save(path, **({"lossless": True} if suffix == "webp" else {}))
    pixels, original = read(path)
    assert (pixels == COLOUR).all()
    assert original == (20, 32)


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg(tmp_path, progressive):
    picture = smooth(40, 60)
    Image.fromarray(picture).save(tmp_path / "a.jpg", quality=98, subsampling=0, progressive=progressive)
    pixels, original = read(tmp_path / "a.jpg")
    assert np.abs(pixels.astype(int) - picture).max() <= 4
    assert original == (40, 60)


def test_content_counts_not_the_suffix(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "image.jpg", format="PNG")
    assert (read(tmp_path / "image.jpg")[0] == COLOUR).all()


def test_names_with_spaces_and_unicode(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "ein schönes 画像.png")
    assert (read(tmp_path / "ein schönes 画像.png")[0] == COLOUR).all()
    assert (read(str(tmp_path / "ein schönes 画像.png"))[0] == COLOUR).all()


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_first_frame_of_an_animation(tmp_path, suffix):
    red, blue = (Image.new("RGB", (9, 7), colour) for colour in ("red", "blue"))
    red.save(
        tmp_path / f"a.{suffix}",
        save_all=True,
        append_images=[blue],
        duration=50,
        **({"lossless": True} if suffix == "webp" else {}),
    )
    assert (read(tmp_path / f"a.{suffix}")[0] == [255, 0, 0]).all()


# Modes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "pgm"])
def test_grey(tmp_path, suffix):
    Image.fromarray(GREY).save(tmp_path / f"a.{suffix}")
    assert (read(tmp_path / f"a.{suffix}")[0] == GREY[..., None]).all()


def test_grey_jpeg(tmp_path):
    picture = smooth(40, 60)[..., 0]
    Image.fromarray(picture).save(tmp_path / "a.jpg", quality=98)
    assert np.abs(read(tmp_path / "a.jpg")[0].astype(int) - picture[..., None]).max() <= 3


def test_black_and_white(tmp_path):
    bits = GREY > 127
    Image.fromarray(bits).save(tmp_path / "a.png")
    assert (read(tmp_path / "a.png")[0] == 255 * bits[..., None]).all()


def test_palette(tmp_path):
    palette = RNG.integers(0, 256, (16, 3), dtype=np.uint8)
    numbers = GREY % 16
    image = Image.fromarray(numbers).convert("P")
    image.putdata(numbers.ravel().tolist())
    image.putpalette(palette.ravel().tolist())
    image.save(tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").mode == "P"
    assert (read(tmp_path / "a.png")[0] == palette[numbers]).all()


def on_white(colours, alpha):
    alpha = alpha[..., None] / 255
    return colours * alpha + 255 * (1 - alpha)


def test_palette_with_transparency(tmp_path):
    palette = RNG.integers(0, 256, (4, 3), dtype=np.uint8)
    numbers = GREY % 4
    image = Image.new("P", (32, 20))
    image.putdata(numbers.ravel().tolist())
    image.putpalette(palette.ravel().tolist())
    image.save(tmp_path / "a.png", transparency=bytes([0, 255, 100, 255]))
    expected = on_white(palette[numbers], np.array([0, 255, 100, 255])[numbers])
    assert np.abs(read(tmp_path / "a.png")[0] - expected).max() <= 1


@pytest.mark.parametrize(("mode", "suffix"), [("RGBA", "png"), ("LA", "png"), ("RGBA", "webp"), ("RGBA", "tiff")])
def test_transparent_pixels_are_laid_on_white(tmp_path, mode, suffix):
    alpha = RNG.integers(0, 256, (20, 32), dtype=np.uint8)
    alpha[:5], alpha[5:10] = 0, 255
    colours = COLOUR if mode == "RGBA" else np.repeat(GREY[..., None], 3, -1)
    bands = [*np.moveaxis(COLOUR, -1, 0), alpha] if mode == "RGBA" else [GREY, alpha]
    options = {"lossless": True, "exact": True} if suffix == "webp" else {}
    Image.merge(mode, [Image.fromarray(np.ascontiguousarray(band)) for band in bands]).save(
        tmp_path / f"a.{suffix}", **options
    )
    pixels, _ = read(tmp_path / f"a.{suffix}")
    assert np.abs(pixels - on_white(colours, alpha)).max() <= 1
    assert (pixels[:5] == 255).all()
    assert (pixels[5:10] == colours[5:10]).all()


def test_transparent_colour_of_an_rgb_png(tmp_path):
    colours = COLOUR.copy()
    colours[:10] = [10, 20, 30]
    Image.fromarray(colours).save(tmp_path / "a.png", transparency=(10, 20, 30))
    pixels, _ = read(tmp_path / "a.png")
    assert (pixels[:10] == 255).all()
    assert (pixels[10:] == colours[10:]).all()


def test_transparent_gif(tmp_path):
    image = Image.new("P", (8, 8), 0)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.paste(1, (0, 0, 8, 4))
    image.save(tmp_path / "a.gif", transparency=1)
    pixels, _ = read(tmp_path / "a.gif")
    assert (pixels[:4] == 255).all()
    assert (pixels[4:] == [200, 0, 0]).all()


@pytest.mark.parametrize("suffix", ["jpg", "tiff"])
def test_cmyk(tmp_path, suffix):
    """Ink subtracts from white: red = (1 - C)(1 - K)."""
    inks = np.zeros((40, 60, 4), np.uint8)
    inks[:20, :, 0], inks[20:, :, 1], inks[:, 30:, 3] = 255, 200, 128
    bands = [Image.fromarray(np.ascontiguousarray(inks[..., band])) for band in range(4)]
    Image.merge("CMYK", bands).save(tmp_path / f"a.{suffix}", **({"quality": 99} if suffix == "jpg" else {}))
    expected = 255 * (1 - inks[..., :3] / 255) * (1 - inks[..., 3:] / 255)
    difference = np.abs(read(tmp_path / f"a.{suffix}")[0] - expected)
    assert np.median(difference) <= 1.5
    assert np.percentile(difference, 90) <= 6  # JPEG blurs the edges


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_grey_of_16_bits_is_divided_by_257(tmp_path, suffix):
    ramp = np.arange(0, 65536, 16, dtype=np.uint16).reshape(32, 128)
    ramp[-1, -1] = 65535
    Image.fromarray(ramp).save(tmp_path / f"a.{suffix}")
    pixels, _ = read(tmp_path / f"a.{suffix}")
    assert (pixels == np.round(ramp / 257)[..., None]).all()
    assert pixels[0, 0, 0] == 0
    assert pixels[-1, -1, 0] == 255


def test_dark_16_bit_image_stays_dark(tmp_path):
    Image.fromarray(np.full((8, 8), 2570, np.uint16)).save(tmp_path / "a.png")
    assert (read(tmp_path / "a.png")[0] == 10).all()


def test_big_endian_16_bit_tiff(tmp_path):
    values = np.array([[0, 257, 65535]], dtype=">u2")
    tags = [
        (256, 3, 3),
        (257, 3, 1),
        (258, 3, 16),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 110),
        (277, 3, 1),
        (278, 3, 1),
        (279, 4, 6),
    ]
    entries = b"".join(
        struct.pack(">HHI", tag, kind, 1) + (struct.pack(">HH", value, 0) if kind == 3 else struct.pack(">I", value))
        for tag, kind, value in tags
    )
    header = b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", len(tags)) + entries + struct.pack(">I", 0)
    header = header.ljust(110, b"\0")
    header = header.replace(struct.pack(">HHII", 273, 4, 1, 110), struct.pack(">HHII", 273, 4, 1, len(header)))
    (tmp_path / "a.tiff").write_bytes(header + values.tobytes())
    assert read(tmp_path / "a.tiff")[0][0, :, 0].tolist() == [0, 1, 255]


def test_whole_numbers_beyond_16_bits_and_fractions(tmp_path):
    Image.fromarray(np.array([[100_000, 150_000, 200_000]], np.int32)).save(tmp_path / "long.tiff")
    assert read(tmp_path / "long.tiff")[0][0, :, 0].tolist() == [0, 128, 255]  # stretched
    Image.fromarray(np.array([[0, 0.2, 0.5]], np.float32)).save(tmp_path / "fraction.tiff")
    assert read(tmp_path / "fraction.tiff")[0][0, :, 0].tolist() == [0, 51, 128]  # 1 is white
    Image.fromarray(np.array([[-1, 0, 3]], np.float32)).save(tmp_path / "wide.tiff")
    assert read(tmp_path / "wide.tiff")[0][0, :, 0].tolist() == [0, 64, 255]
    Image.fromarray(np.full((2, 2), 70_000, np.int32)).save(tmp_path / "flat.tiff")
    assert (read(tmp_path / "flat.tiff")[0] == 0).all()


# Orientation --------------------------------------------------------------------------------------------------------

UPRIGHT = {  # EXIF: where row 0 and column 0 of the stored picture belong
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "tiff", "webp"])
def test_exif_orientation(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(COLOUR).save(tmp_path / f"a.{suffix}", exif=exif, **options)
    expected = UPRIGHT[orientation](COLOUR)
    pixels, original = read(tmp_path / f"a.{suffix}")
    assert original == expected.shape[:2]
    assert (pixels == expected).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("at_least", [None, 50])
def test_exif_orientation_of_jpeg(tmp_path, orientation, at_least):
    picture = smooth(160, 240)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(picture).save(tmp_path / "a.jpg", exif=exif, quality=98, subsampling=0)
    expected = UPRIGHT[orientation](picture)
    pixels, original = read(tmp_path / "a.jpg", at_least)
    assert original == expected.shape[:2]
    if at_least:
        assert pixels.shape[:2] == (expected.shape[0] // 2, expected.shape[1] // 2)
        height, width = pixels.shape[:2]
        expected = expected.reshape(height, 2, width, 2, 3).mean((1, 3))
    assert np.abs(pixels - expected.astype(float)).max() <= 6


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_orientation_out_of_range_means_upright(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(COLOUR).save(tmp_path / "a.png", exif=exif)
    assert (read(tmp_path / "a.png")[0] == COLOUR).all()


def test_unreadable_exif_does_not_matter(tmp_path):
    Image.fromarray(smooth(16, 16)).save(tmp_path / "a.jpg", exif=b"Exif\0\0not a directory")
    assert read(tmp_path / "a.jpg")[1] == (16, 16)


# Reduced decoding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "at_least", "scale"),
    [
        ((600, 800), 256, 2),
        ((600, 800), 300, 2),
        ((600, 800), 301, 1),
        ((1100, 1600), 130, 8),
        ((100, 80), 256, 1),
        ((1023, 1500), 256, 2),
        ((1024, 1500), 256, 4),
    ],
)
def test_at_least_keeps_both_sides_that_long(tmp_path, size, at_least, scale):
    Image.fromarray(smooth(*size)).save(tmp_path / "a.jpg")
    pixels, original = read(tmp_path / "a.jpg", at_least)
    assert original == size
    assert pixels.shape[:2] == (-(-size[0] // scale), -(-size[1] // scale))


def test_at_least_leaves_other_formats_alone(tmp_path):
    Image.fromarray(smooth(600, 800)).save(tmp_path / "a.png")
    assert read(tmp_path / "a.png", 100)[0].shape == (600, 800, 3)


# What is wrong with a file ------------------------------------------------------------------------------------------


def expect_error(path, *words, at_least=None):
    with pytest.raises(AidgnError) as caught:
        read_image(path, at_least)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_truncated(tmp_path, format_name, part):
    buffer = io.BytesIO()
    noise = RNG.integers(0, 256, (120, 90, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, format=format_name)
    path = tmp_path / "a.jpg"
    path.write_bytes(buffer.getvalue()[: int(part * len(buffer.getvalue()))])
    expect_error(path, "damaged")
    expect_error(path, "damaged", at_least=20)


def test_truncated_even_if_pillow_was_told_to_accept_it(tmp_path, monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    Image.fromarray(COLOUR).save(tmp_path / "whole.jpg")
    content = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(content[: len(content) * 2 // 3])
    expect_error(tmp_path / "a.jpg", "damaged")


def test_progressive_jpeg_truncated(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(smooth(200, 300)).save(buffer, format="JPEG", progressive=True)
    (tmp_path / "a.jpg").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) * 3 // 4])
    expect_error(tmp_path / "a.jpg", "damaged")


def test_damaged_in_the_middle(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "whole.png")
    content = bytearray((tmp_path / "whole.png").read_bytes())
    start = content.index(b"IDAT") + 10
    content[start : start + 200] = bytes(200)
    (tmp_path / "a.png").write_bytes(content)
    expect_error(tmp_path / "a.png", "damaged")


def test_empty_fake_missing_and_folder(tmp_path):
    (tmp_path / "empty.jpg").touch()
    expect_error(tmp_path / "empty.jpg", "empty")
    (tmp_path / "fake.jpg").write_text("<html>404 Not Found</html>")
    expect_error(tmp_path / "fake.jpg", "not an image")
    expect_error(tmp_path / "missing.jpg", "does not exist")
    (tmp_path / "folder.jpg").mkdir()
    expect_error(tmp_path / "folder.jpg", "folder")


def test_a_pipe_and_a_link_to_itself(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    expect_error(tmp_path / "pipe.jpg", "a pipe")
    (tmp_path / "self.jpg").symlink_to("self.jpg")
    expect_error(tmp_path / "self.jpg", "cannot be read: Too many levels of symbolic links")


def test_too_little_memory_is_no_damage(tmp_path, monkeypatch):
    def load(self):
        raise MemoryError

    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
    expect_error(tmp_path / "a.png", "cannot be read: there is not enough memory for it.")


def test_formats_that_start_programs_are_not_tried(tmp_path):
    (tmp_path / "a.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    expect_error(tmp_path / "a.jpg", "not an image")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "a.png")
    (tmp_path / "a.png").chmod(0)
    expect_error(tmp_path / "a.png", "permission")


@pytest.mark.parametrize("side", [13_400, 60_000])
def test_decompression_bomb(tmp_path, side):
    """A PNG of a few bytes that says it is huge."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    assert side**2 > MAX_PIXELS
    (tmp_path / "a.png").write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )
    expect_error(tmp_path / "a.png", "too large", "178 megapixels")


def test_compressed_text_bomb(tmp_path):
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "a" * 80_000_000, zip=True)
    Image.fromarray(COLOUR).save(tmp_path / "a.png", pnginfo=info)
    expect_error(tmp_path / "a.png", "damaged")
