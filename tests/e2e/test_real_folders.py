"""What real folders contain, and how each ends: `data check`, `fit` and `predict` do the right thing or say a clear
sentence. CASES is the list."""

import os
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aidgn.cli import app
from aidgn.data import load_dataset
from aidgn.data.cache import prepare
from aidgn.errors import AidgnError
from aidgn.fitting import inspect
from aidgn.training import RunSpec, train

DOMAINS, CLASSES, EACH = ("barn", "field"), ("dark", "light"), 6


def picture(seed: int, level: int = 60, size: int = 32) -> Image.Image:
    noise = np.random.default_rng(seed).normal(level, 25, (size, size, 3))
    return Image.fromarray(noise.clip(0, 255).astype(np.uint8))


def good_folder(root: Path) -> Path:
    for d, domain in enumerate(DOMAINS):
        for c, name in enumerate(CLASSES):
            (root / domain / name).mkdir(parents=True)
            for number in range(EACH):
                picture(100 * d + 10 * c + number, 60 + 120 * c).save(root / domain / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    spec = RunSpec(
        str(good_folder(place / "good")),
        "ERM",
        (),
        steps=2,
        eval_every=2,
        image_size=32,
        hyper_parameters={"batch_size": 2},
    )
    return train(spec, place, device="cpu")


# What is put into the folder ------------------------------------------------------------------------------------------


def hidden(root: Path) -> None:
    (root / ".DS_Store").write_bytes(b"x")
    (root / "barn" / "dark" / "._0.png").write_bytes(b"x")
    (root / ".git" / "objects").mkdir(parents=True)
    (root / "__MACOSX" / "barn" / "dark").mkdir(parents=True)


def thumbs(root: Path) -> None:
    (root / "barn" / "dark" / "Thumbs.db").write_bytes(b"x")
    (root / "barn" / "desktop.ini").write_text("x")
    (root / "notes.txt").write_text("x")


def nested(root: Path) -> None:
    (root / "barn" / "dark" / "2024" / "may").mkdir(parents=True)
    picture(900).save(root / "barn" / "dark" / "2024" / "may" / "7.png")


def odd_names(root: Path) -> None:
    (root / "barn").rename(root / "the old barn, no. 1 [east]")
    picture(901).save(root / "field" / "dark" / "  a picture's (copy) #1 100% & more .png")
    picture(902).save(root / "field" / "dark" / "Größe_鳥_🦉.png")


def unicode_forms(root: Path) -> None:
    (root / "barn" / "dark").rename(root / "barn" / "d\u00e4mmrig")
    (root / "field" / "dark").rename(root / "field" / "da\u0308mmrig")


def symlink_loop(root: Path) -> None:
    (root / "barn" / "dark" / "loop").symlink_to(root)
    (root / "barn" / "dark" / "self.png").symlink_to(root / "barn" / "dark" / "self.png")


def dangling(root: Path) -> None:
    (root / "barn" / "dark" / "gone.png").symlink_to(root / "nowhere.png")


def long_name(root: Path) -> None:
    picture(903).save(root / "barn" / "dark" / ("x" * 251 + ".png"))


def suffixes(root: Path) -> None:
    picture(904).save(root / "barn" / "dark" / "a.JPG")
    picture(905).save(root / "barn" / "dark" / "b.JpEg")
    picture(906).save(root / "barn" / "dark" / "c.TIFF")
    picture(907).save(root / "barn" / "dark" / "d.WebP")


def sixteen_bits(root: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 65536, (32, 32)).astype(np.uint16)
    Image.fromarray(grey).save(root / "barn" / "dark" / "deep.png")
    Image.fromarray(grey).save(root / "barn" / "dark" / "deep.tif")


def animated(root: Path) -> None:
    frames = [picture(908 + number).convert("P") for number in range(3)]
    frames[0].save(root / "barn" / "dark" / "moves.gif", save_all=True, append_images=frames[1:])
    frames[0].save(root / "barn" / "dark" / "moves.webp", save_all=True, append_images=frames[1:])


def colours(root: Path) -> None:
    picture(911).convert("CMYK").save(root / "barn" / "dark" / "print.jpg")
    picture(912).convert("P").save(root / "barn" / "dark" / "palette.png", transparency=0)
    picture(913).convert("LA").save(root / "barn" / "dark" / "veil.png")
    picture(914).convert("1").save(root / "barn" / "dark" / "fax.tif")


def turned(root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(915).resize((32, 20)).save(root / "barn" / "dark" / "phone.jpg", exif=exif)


def empty_file(root: Path) -> None:
    (root / "barn" / "dark" / "zero.jpg").touch()


def text_file(root: Path) -> None:
    (root / "barn" / "dark" / "page.jpg").write_text("<html>404 not found</html>")


def truncated(root: Path) -> None:
    picture(916, size=200).save(root / "barn" / "dark" / "cut.jpg")
    whole = (root / "barn" / "dark" / "cut.jpg").read_bytes()
    (root / "barn" / "dark" / "cut.jpg").write_bytes(whole[: len(whole) // 2])


def bomb(root: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    (root / "barn" / "dark" / "bomb.png").write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10_000)))
        + chunk(b"IEND", b"")
    )


def across(root: Path) -> None:
    (root / "field" / "dark" / "copy.png").write_bytes((root / "barn" / "dark" / "0.png").read_bytes())


def contradictory(root: Path) -> None:
    (root / "barn" / "light" / "copy.png").write_bytes((root / "barn" / "dark" / "0.png").read_bytes())


def copies(root: Path) -> None:
    for number in range(EACH):  # some of them sit on the other side of the split
        source = root / "barn" / "dark" / f"{number}.png"
        source.with_name(f"{number} (copy).png").write_bytes(source.read_bytes())


def one_domain(root: Path) -> None:
    (root / "field").rename(root.parent / f"{root.name}-field")


def one_class(root: Path) -> None:
    for domain in DOMAINS:
        (root / domain / "light").rename(root.parent / f"{root.name}-{domain}-light")


def no_domains(root: Path) -> None:
    for domain in DOMAINS:
        for name in CLASSES:
            (root / domain / name).rename(root / f"{domain}_{name}")
        (root / domain).rmdir()


def missing_class(root: Path) -> None:
    (root / "barn" / "light").rename(root.parent / f"{root.name}-light")


def misspelt(root: Path) -> None:
    (root / "barn" / "light").rename(root / "barn" / "Light")


def tiny_domain(root: Path) -> None:
    (root / "shed" / "dark").mkdir(parents=True)
    picture(917).save(root / "shed" / "dark" / "0.png")


def empty_folder(root: Path) -> None:
    for path in root.rglob("*.png"):
        path.unlink()


@dataclass(frozen=True)
class Case:
    change: Callable[[Path], None]
    images: int = 24  # that are used
    check: str | None = None  # words of `data check`, which then ends with an error; None: all is in order
    fit: str = ""  # words among what `fit` says of the folder
    stops: str | None = None  # words of the error that stops `fit`, which `data check` finds too
    left_out: str = ""  # words of `predict` about a file it leaves out
    predicted: int | None = None  # images that `predict` classifies, if not as many as are used


CASES = {
    "nothing odd": Case(lambda root: None, fit="24 images, 2 domains (barn 12, field 12), 2 classes of 12 images each"),
    "hidden files": Case(hidden),
    "Thumbs.db, desktop.ini, notes": Case(thumbs, fit="3 other files ignored: barn/dark/Thumbs.db"),
    "nested folders": Case(nested, 25),
    "spaces, signs, Unicode in names": Case(odd_names, 26, fit="the old barn, no. 1 [east] 12"),
    "a class in two Unicode forms": Case(unicode_forms, fit="2 classes of 12 images each"),
    "symlink loops": Case(
        symlink_loop,
        check="self.png",
        fit="1 file left out, unreadable: barn/dark/self.png",
        left_out="self.png cannot be read: Too many levels of symbolic links",
    ),
    "pipes": Case(
        lambda root: os.mkfifo(root / "barn" / "dark" / "pipe.png"), fit="1 other file ignored: barn/dark/pipe.png"
    ),
    "a link to nothing": Case(dangling, check="gone.png", fit="barn/dark/gone.png", left_out="does not exist"),
    "very long names": Case(long_name, 25),
    "suffixes in other case": Case(suffixes, 28),
    "16-bit images": Case(sixteen_bits, 26),
    "animated images": Case(animated, 26),
    "CMYK, palette with transparency, grey with alpha, 1 bit": Case(colours, 28),
    "turned by EXIF": Case(turned, 25),
    "zero-byte files": Case(empty_file, check="empty (0 bytes)", fit="is empty (0 bytes)", left_out="empty (0 bytes)"),
    "text named .jpg": Case(text_file, check="not an image", fit="not an image", left_out="not an image"),
    "truncated": Case(truncated, check="damaged", fit="damaged", left_out="damaged"),
    "decompression bomb": Case(bomb, check="too large", fit="too large", left_out="too large"),
    "duplicates across domains": Case(
        across,
        25,
        check="the same image in several domains: barn/dark/0.png, field/dark/copy.png",
        fit="1 image in several domains",
    ),
    "an image in two classes": Case(contradictory, 25, fit="1 image in several classes"),
    "copies on both sides of the split": Case(copies, 30, fit="with a copy among the validation images"),
    "one domain only": Case(
        one_domain, 12, fit="Only one domain: the accuracy on an unseen domain cannot be estimated"
    ),
    "one class only": Case(one_class, stops="has only the class dark", predicted=12),
    "no domains, images in class folders": Case(no_domains, stops="if that is a class"),
    "a class missing in a domain": Case(missing_class, 18, fit="In one domain only: light (in field)"),
    "a class spelt in two ways": Case(misspelt, stops="rename one"),
    "a domain of one image": Case(tiny_domain, 25, stops="The domain shed has 1 image that", predicted=25),
    "folders without images": Case(empty_folder, stops="has no images", predicted=0),
}


def run(*arguments: str) -> None:
    app.main(list(arguments), standalone_mode=False)


@pytest.mark.parametrize("name", CASES)
def test_each_ends_well_or_in_a_clear_sentence(
    name: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case, root = CASES[name], good_folder(tmp_path / "pictures")
    case.change(root)

    if case.stops:
        with pytest.raises(AidgnError, match=case.stops):
            run("fit", str(root))
        with pytest.raises(AidgnError) as caught:
            run("data", "check", str(root))
        assert caught.value.exit_code == 2 and case.stops in capfd.readouterr().out + str(caught.value)
    elif case.check:
        with pytest.raises(AidgnError, match="is not in order") as caught:
            run("data", "check", str(root))
        assert caught.value.exit_code == 1 and case.check in capfd.readouterr().out
    else:
        run("data", "check", str(root))
        assert "Every image can be read" in capfd.readouterr().out

    if not case.stops:
        dataset = load_dataset(root)
        prepared = prepare(dataset, skip_broken=True, workers=1)
        assert len(prepared.dataset) == case.images
        try:
            said = " ".join(inspect(prepared))
        except AidgnError as error:
            said = f"ERROR {error}"
        assert case.fit in said

    expected = case.images if case.predicted is None else case.predicted
    if not expected:
        with pytest.raises(AidgnError, match="No image found"):
            run("predict", str(model), str(root))
        return
    run("predict", str(model), str(root), "--csv", "-", "--device", "cpu")
    output = capfd.readouterr()
    assert f"{expected} images classified" in output.err and case.left_out in output.err
    assert ("left out: " in output.err) == bool(case.left_out)


@pytest.mark.parametrize("command", [("fit",), ("train", "--target", "barn"), ("sweep", "--algorithm", "ERM", "--yes")])
def test_results_do_not_lie_among_the_images(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = good_folder(tmp_path / "pictures")
    monkeypatch.chdir(root)
    with pytest.raises(AidgnError, match=r"would lie in \., among the images"):
        run(command[0], ".", *command[1:])
    assert sorted(path.name for path in root.iterdir() if path.name != ".aidgn-cache") == ["barn", "field"]


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from aidgn.fitting import inspect
from aidgn.data.cache import prepare
from aidgn.data import inspect_dataset, load_dataset
from aidgn.errors import AidgnError
from aidgn.inference.image_stream import decode
import PIL.PngImagePlugin
root, cache = map(Path, sys.argv[1:])
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print("predict:", decode([str(root / "barn" / "dark" / "0.png")], 32)[0])
print("check:", inspect_dataset(load_dataset(root)).broken)
print("fit:", inspect(prepare(load_dataset(root), cache_dir=cache, workers=1, skip_broken=True)))
try:
    load_dataset(root.parent / "closed")
except AidgnError as error:
    print("folder:", error)
"""


def test_no_permission_to_read(tmp_path: Path) -> None:
    """As another user, where the tests run as one who may read everything."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    root, closed = good_folder(tmp_path / "pictures"), good_folder(tmp_path / "closed")
    (root / "barn" / "dark" / "0.png").chmod(0)
    (closed / "barn" / "dark").chmod(0)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    result = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER_USER, str(root), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (closed / "barn" / "dark").chmod(0o755)
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert result.returncode == 0, result.stderr
    assert "0.png cannot be read: permission denied." in lines["predict"]
    assert "0.png cannot be read: permission denied." in lines["check"]
    assert "23 images" in lines["fit"] and "1 file left out, unreadable: barn/dark/0.png" in lines["fit"]
    assert "The folder" in lines["folder"] and "cannot be read: permission denied" in lines["folder"]
