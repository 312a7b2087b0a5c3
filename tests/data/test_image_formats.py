"""AVIF, HEIC, DICOM and files with several pages, against pixels worked out apart from the code."""

import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from aidgn.cli import app
from aidgn.data import images, inspect_dataset, load_dataset, read_image
from aidgn.data.cache import prepare
from aidgn.errors import AidgnError
from aidgn.inference import find_images
from aidgn.sklearn import save_pictures

pydicom = pytest.importorskip("pydicom")
pillow_heif = pytest.importorskip("pillow_heif")

GREY = np.random.default_rng(0).integers(-1000, 3000, (12, 10)).astype(np.int16)


def read(path):
    return np.asarray(read_image(path)[0]).astype(int)


def smooth(height=48, width=64):
    y, x = np.mgrid[:height, :width]
    return np.stack([255 * y / height, 255 * x / width, 128 + 0 * x], -1).astype(np.uint8)


# Formats with a module ------------------------------------------------------------------------------------------------


def save_as(path, pixels, **options):
    if path.suffix == ".avif":
        pytest.importorskip("PIL._avif")
        Image.fromarray(pixels).save(path, quality=100, subsampling="4:4:4", **options)
    else:
        pillow_heif.from_pillow(Image.fromarray(pixels)).save(path, quality=-1, chroma=444, **options)
    return path


@pytest.mark.parametrize("suffix", [".avif", ".heic"])
def test_pixels_of_avif_and_heic(tmp_path, suffix):
    pixels = smooth()
    assert np.abs(read(save_as(tmp_path / f"a{suffix}", pixels)) - pixels).max() <= 4
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = read(save_as(tmp_path / f"turned{suffix}", pixels, exif=exif.tobytes()))
    assert turned.shape == (64, 48, 3) and np.abs(turned - np.rot90(pixels, 3)).max() <= 4


def test_a_missing_format_is_named_with_its_install_command(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for place in ("a/x", "a/y", "b/x", "b/y"):
        (tmp_path / "photos" / place).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / place / f"{number}.png")
    photo = save_as(tmp_path / "photos" / "a" / "x" / "phone.heic", smooth(32, 32))
    scan = write_dicom(tmp_path / "photos" / "b" / "x" / "scan.dcm", GREY)
    options = {"cache_dir": tmp_path / "cache", "workers": 1}
    with monkeypatch.context() as without:
        images.add_format.cache_clear()
        without.setitem(sys.modules, "pillow_heif", None)
        without.setitem(sys.modules, "pydicom", None)
        with pytest.raises(AidgnError, match=r'is HEIC, which needs pillow-heif.*pip install "aidgn\[heic\]"'):
            read_image(photo)
        with pytest.raises(AidgnError, match=r'is DICOM, which needs pydicom.*pip install "aidgn\[dicom\]"'):
            read_image(scan)
        found = CliRunner().invoke(app, ["data", "check", str(tmp_path / "photos")])
        assert found.output.count("pip install") == 2 and found.exception.exit_code == 1
        assert len(prepare(load_dataset(tmp_path / "photos"), skip_broken=True, **options).dataset) == 16
    assert len(prepare(load_dataset(tmp_path / "photos"), **options).dataset) == 18  # installed now: no new file needed


def test_the_table_of_formats_is_what_is_found(tmp_path):
    for suffix in images.IMAGE_SUFFIXES:
        (tmp_path / f"a{suffix.upper()}").touch()
    (tmp_path / "a.txt").touch()
    assert len(find_images([str(tmp_path)])) == len(images.IMAGE_SUFFIXES)
    assert {".heic", ".avif", ".dcm", ".jpg"} <= images.IMAGE_SUFFIXES
    assert "HEIC" in images.FORMAT_NAMES


# DICOM ----------------------------------------------------------------------------------------------------------------


def write_dicom(path, pixels, photometric="MONOCHROME2", bits=None, **attributes):
    header = pydicom.Dataset()
    header.file_meta = pydicom.dataset.FileMetaDataset()
    header.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    header.file_meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    header.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    header.PhotometricInterpretation = photometric
    colour = photometric in ("RGB", "YBR_FULL")
    header.SamplesPerPixel = 3 if colour else 1
    if colour:
        header.PlanarConfiguration = 0
    frames = pixels if pixels.ndim == 3 + colour else pixels[None]
    header.NumberOfFrames, header.Rows, header.Columns = frames.shape[:3]
    header.BitsAllocated = 8 * pixels.itemsize
    header.BitsStored = bits or header.BitsAllocated
    header.HighBit = header.BitsStored - 1
    header.PixelRepresentation = int(pixels.dtype.kind == "i")
    header.PixelData = pixels.tobytes()
    for name, value in attributes.items():
        setattr(header, name, value)
    header.save_as(path, enforce_file_format=True)
    return path


def grey(values):
    return np.stack([values] * 3, -1)


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_a_window_in_rescaled_units(tmp_path, photometric):
    """PS3.3 C.11.2.1.2.1, pixel by pixel: the window of soft tissue in Hounsfield units."""
    center, width = 40.0, 400.0
    path = write_dicom(
        tmp_path / "a.dcm", GREY, photometric, RescaleSlope=2, RescaleIntercept=-24, WindowCenter=[center, 0],
        WindowWidth=[width, 9],
    )  # fmt: skip
    expected = np.zeros(GREY.shape)
    for place, stored in np.ndenumerate(GREY.astype(float)):
        x = 2 * stored - 24
        if x <= center - 0.5 - (width - 1) / 2:
            share = 0.0
        elif x > center - 0.5 + (width - 1) / 2:
            share = 1.0
        else:
            share = (x - (center - 0.5)) / (width - 1) + 0.5
        expected[place] = 255 * (1 - share if photometric == "MONOCHROME1" else share)
    assert np.abs(read(path) - grey(expected)).max() <= 0.5


def test_a_sigmoid_window(tmp_path):
    path = write_dicom(tmp_path / "a.dcm", GREY, WindowCenter=500, WindowWidth=900, VOILUTFunction="SIGMOID")
    assert np.abs(read(path) - grey(255 / (1 + np.exp(-4 * (GREY - 500.0) / 900)))).max() <= 0.51


def test_without_a_window_all_values_are_shown_but_padding(tmp_path):
    pixels = GREY.copy()
    pixels[:3] = -2000
    low, high = pixels[3:].min(), pixels[3:].max()
    expected = 255 * (np.clip(pixels, low, high).astype(float) - low) / (high - low)
    path = write_dicom(tmp_path / "a.dcm", pixels, PixelPaddingValue=-2000)
    assert np.abs(read(path) - grey(expected)).max() <= 0.5
    all_values = 255 * (pixels + 2000.0) / (high + 2000.0)
    assert np.abs(read(write_dicom(tmp_path / "b.dcm", pixels)) - grey(all_values)).max() <= 0.5


def test_a_table_of_grey_values(tmp_path):
    item = pydicom.Dataset()
    item.LUTDescriptor = [4, 2, 12]
    item.LUTData = np.array([0, 100, 1000, 4095], np.uint16).tobytes()
    path = write_dicom(tmp_path / "a.dcm", np.arange(8, dtype=np.uint16).reshape(2, 4), VOILUTSequence=[item])
    looked_up = np.array([0, 0, 0, 100, 1000, 4095, 4095, 4095]).reshape(2, 4)
    assert (read(path) == grey(np.round(looked_up * 255 / 4095))).all()


def test_colours_and_an_enhanced_window(tmp_path):
    pixels = smooth(12, 10)
    assert (read(write_dicom(tmp_path / "rgb.dcm", pixels, "RGB")) == pixels).all()
    y = np.full((2, 2, 3), (76, 85, 255), np.uint8)  # red, by ITU-R BT.601
    assert np.abs(read(write_dicom(tmp_path / "ybr.dcm", y, "YBR_FULL")) - [255, 0, 0]).max() <= 2
    window, group = pydicom.Dataset(), pydicom.Dataset()
    window.WindowCenter, window.WindowWidth, window.VOILUTFunction = 0, 2000, "LINEAR_EXACT"
    group.FrameVOILUTSequence = [window]
    path = write_dicom(tmp_path / "enhanced.dcm", GREY, SharedFunctionalGroupsSequence=[group])
    assert np.abs(read(path) - grey(255 * np.clip(GREY / 2000 + 0.5, 0, 1))).max() <= 0.5


def test_compressed_files_have_the_pixels_of_the_others():
    """Files of pydicom's own tests: one picture, uncompressed and without loss compressed in three ways."""
    folder = Path(pydicom.__file__).parent / "data" / "test_files"
    whole = read(folder / "MR_small.dcm")
    for name in ("MR_small_RLE", "MR_small_jp2klossless", "MR_small_jpeg_ls_lossless"):
        assert (read(folder / f"{name}.dcm") == whole).all()
    bars = read(folder / "SC_rgb_jpeg_dcmtk.dcm")[5::10, 50]
    assert np.abs(bars[:3] - [[255, 0, 0], [255, 128, 128], [0, 255, 0]]).max() <= 5


def test_dicom_without_a_picture_or_cut_short(tmp_path):
    folder = Path(pydicom.__file__).parent / "data" / "test_files"
    with pytest.raises(AidgnError, match=r"test-SR.dcm .*modality SR"):
        read_image(folder / "test-SR.dcm")
    path = write_dicom(tmp_path / "a.dcm", GREY)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(AidgnError, match=r"a.dcm is damaged"):
        read_image(path)


def test_a_compression_without_a_decoder_is_named(tmp_path):
    path = write_dicom(tmp_path / "a.dcm", GREY)
    header = pydicom.dcmread(path)
    header.file_meta.TransferSyntaxUID = pydicom.uid.MPEG2MPML
    header.PixelData = pydicom.encaps.encapsulate([header.PixelData])
    header["PixelData"].VR = "OB"
    header.save_as(path)
    with pytest.raises(AidgnError, match=r"a.dcm .*MPEG2 Main Profile.*pydicom"):
        read_image(path)


# Pages ----------------------------------------------------------------------------------------------------------------


def test_pages_become_pictures_of_one_group(tmp_path):
    rng = np.random.default_rng(1)
    scans = tmp_path / "scans"
    frames = rng.integers(0, 255, (3, 16, 16, 3), dtype=np.uint8)
    for place in ("a/x", "a/y", "b/x", "b/y"):
        (scans / place).mkdir(parents=True)
        for number in range(3):
            pages = [Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(2)]
            pages[0].save(scans / place / f"{number}.tif", save_all=True, append_images=pages[1:])
    pages = [Image.fromarray(frame) for frame in frames]
    pages[0].save(scans / "a" / "x" / "0.tif", save_all=True, append_images=pages[1:])
    write_dicom(scans / "a" / "x" / "film.dcm", frames[:, :, :, 0].copy(), WindowCenter=128, WindowWidth=256)
    (scans / "b" / "x" / "broken.tif").write_bytes(b"II*\0")
    assert (read(scans / "a" / "x" / "0.tif") == frames[0]).all()
    dataset = load_dataset(scans)
    assert len(inspect_dataset(dataset).paged) == 13

    out = tmp_path / "pages"
    result = CliRunner().invoke(app, ["data", "pages", str(scans), "--out", str(out)])
    assert result.exit_code == 0 and "28 pages" in result.stdout and "broken.tif" in result.stderr
    for number, frame in enumerate(frames, 1):
        assert (np.asarray(Image.open(out / "a" / "x" / "0.tif" / f"{number}.png")) == frame).all()
    film = np.asarray(Image.open(out / "a" / "x" / "film.dcm" / "3.png")).astype(int)
    assert np.abs(film - grey(frames[2, :, :, 0].astype(int))).max() <= 1
    grouped = load_dataset(out, layout="{domain}/{class}/{group}")
    assert len(grouped) == 28 and len(np.unique(grouped.groups)) == 7
    assert load_dataset(scans).files == dataset.files


def test_a_smaller_copy_is_no_page(tmp_path):
    big, small = (Image.fromarray(smooth(size, size)) for size in (32, 16))
    big.save(tmp_path / "a.tif", save_all=True, append_images=[small])
    assert images.count_pages(tmp_path / "a.tif") == 2
    content = bytearray((tmp_path / "a.tif").read_bytes())
    start = int.from_bytes(content[4:8], "little")
    entries = int.from_bytes(content[start : start + 2], "little")
    second = int.from_bytes(content[start + 2 + 12 * entries :][:4], "little")
    content[second + 2 : second + 14] = (254).to_bytes(2, "little") + (4).to_bytes(2, "little") + b"\1\0\0\0\1\0\0\0"
    (tmp_path / "b.tif").write_bytes(content)
    assert images.count_pages(tmp_path / "b.tif") == 1


def test_pictures_in_memory_and_files_of_all_formats_mix(tmp_path):
    path = write_dicom(tmp_path / "a.dcm", smooth(12, 10), "RGB")
    first, second = save_pictures([path, smooth(12, 10)], tmp_path / "pictures")
    assert (read(first) == read(second)).all()
