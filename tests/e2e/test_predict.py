"""aidgn predict, as a person types it."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aidgn.data import load_dataset
from aidgn.data.table_reader import read_table
from aidgn.inference import load_model, output
from aidgn.training import RunSpec, train

Aidgn = Callable[..., subprocess.CompletedProcess]
DIGITS = load_dataset("digits")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, `run`, and 80 pictures, two of them broken, in `pictures`."""
    place = tmp_path_factory.mktemp("place")
    spec = RunSpec("digits", "ERM", "chalk", steps=4, eval_every=4, hyper_parameters={"batch_size": 8})
    train(spec, place, device="cpu").rename(place / "run")
    for domain in ("ink", "poster"):
        (place / "pictures" / domain).mkdir(parents=True)
        for index in DIGITS.indices(DIGITS.domains.index(domain))[:40]:
            Image.fromarray(DIGITS.pixels[index]).save(place / "pictures" / domain / f"{index}.png")
    for path in sorted((place / "pictures" / "poster").iterdir())[:2]:
        path.write_bytes(path.read_bytes()[:90])
    return place


def predict(place: Path, *arguments: str, code: int = 0, stdin: bytes = b"") -> subprocess.CompletedProcess:
    result = subprocess.run(
        [sys.executable, "-m", "aidgn", "predict", *arguments],
        capture_output=True,
        cwd=place,
        timeout=900,
        input=stdin,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    errors = result.stderr.decode()
    assert result.returncode == code and "Traceback" not in errors, errors
    return result


def test_forms_agree_with_the_library(place: Path) -> None:
    result = predict(place, "run", "pictures", "--csv", "out/labels.csv", "--json", "--top", "3")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    rows = list(csv.DictReader((place / "out" / "labels.csv").open(newline="")))
    assert len(objects) == len(rows) == 78
    assert result.stderr.decode().count("left out: pictures/poster/") == 2
    assert "78 images classified, 2 left out; in out/labels.csv." in result.stderr.decode()
    warned = [each["warning"] for each in objects if each["warning"]]
    assert (
        f"{len(warned)} with a warning, {len(warned) / 78:.1%}; of new images of the training domains 1.0% get one"
    ) in result.stderr.decode()
    found = load_model(place / "run", "cpu").predict([place / each["file"] for each in objects])
    assert [each["warning"] for each in objects] == found.warnings
    for each, row, best in zip(objects, rows, found.top(3), strict=True):
        assert (each["warning"] or "") == row["warning"]
        assert each["file"] == row["file"] and each["label"] == row["label"] == best[0][0]
        assert [entry["label"] for entry in each["top"]] == [label for label, _ in best]
        assert [float(row[key]) for key in ("probability", "probability_2", "probability_3")] == pytest.approx(
            [p for _, p in best], abs=2e-6
        )
    assert os.listdir(place / "out") == ["labels.csv"]  # noqa: PTH208


def test_table_list_and_pattern(place: Path) -> None:
    files = sorted((place / "pictures" / "ink").glob("*.png"))
    odd = os.fsencode(place) + b"/\xff.png"  # a name that is no text
    with open(odd, "wb") as file:  # noqa: PTH123
        file.write(files[0].read_bytes())
    result = predict(place, "run", "-", "pictures/ink/*.png", stdin=odd + b"\n\nmissing.png\n")
    head, first, *rest = result.stdout.splitlines()
    assert head.split() == [b"file", b"label", b"probability"] and first.startswith(odd)
    assert [row.split()[0].decode() for row in rest] == [str(path.relative_to(place)) for path in files]
    assert all(row.split(b"  unlike")[0].endswith(b"%") for row in rest)
    assert b"left out: missing.png does not exist." in result.stderr


def test_lists_from_elsewhere_and_a_full_disk(place: Path) -> None:
    files = [str(path.relative_to(place)) for path in sorted((place / "pictures" / "ink").glob("*.png"))[:2]]
    for text in ("".join(f"{file}\r\n" for file in files), "".join(f"{file}\0" for file in files)):
        result = predict(place, "run", "-", "--json", stdin=text.encode())
        assert [json.loads(line)["file"] for line in result.stdout.splitlines()] == files
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "aidgn", "predict", "run", *files],
            cwd=place,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=900,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert result.returncode == 2 and result.stderr.startswith(b"Error: The disk is full: standard output")


@pytest.mark.parametrize("options", [(), ("--json", "--csv", "unread.csv")])
def test_closed_output_pipe(place: Path, options: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "aidgn", "predict", "run", "pictures/ink", *options],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert b"Error" not in process.stderr.read()
    assert process.returncode == 141 and not (place / "unread.csv").exists()


def test_closed_standard_streams(place: Path) -> None:
    result = subprocess.run(
        [
            "sh",
            "-c",
            'exec "$0" "$@" <&- >&- 2>&-',
            sys.executable,
            "-m",
            "aidgn",
            "predict",
            "run",
            "pictures/ink",
            "--csv",
            "closed.csv",
        ],
        cwd=place,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0 and (place / "closed.csv").read_text().startswith("file,label,probability")


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch, aidgn: Aidgn) -> Aidgn:
    """`aidgn predict`, in this process, typed in that folder."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    return lambda *arguments, ok=True: aidgn("predict", *arguments, ok=ok)


def test_warnings_of_an_unlike_image_and_of_an_older_run(place: Path, here: Aidgn) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    Image.fromarray(noise).save(place / "noise.png")
    result = here("run", "noise.png", "--false-alarms", "0.9999")  # anything but the most usual image
    assert "unlike the training images (p = " in result.stdout and "1 with a warning" in result.stderr
    older = Path(shutil.copytree(place / "run", place / "older"))
    (older / "novelty.json").unlink()
    result = here("older", "noise.png", "--csv", "-")
    assert result.stdout.splitlines()[0] == "file,label,probability"
    assert "not available" in result.stderr


def test_killed_process_leaves_no_temporary_csv(place: Path, here: Aidgn, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = list[Path]()
    format_csv = output.format_csv

    def look(*arguments: object) -> str:
        beside.extend((place / "alone").iterdir())
        return format_csv(*arguments)

    monkeypatch.setattr(output, "format_csv", look)
    here("run", "pictures/ink", "--csv", "alone/labels.csv")
    assert not beside and len((place / "alone" / "labels.csv").read_text().splitlines()) == 41


def test_a_csv_file_that_excel_reads_as_utf_8(place: Path, here: Aidgn) -> None:
    here("run", "pictures/ink", "--csv", "excel.csv", "--bom")
    content = (place / "excel.csv").read_bytes()
    here("run", "pictures/ink", "--csv", "plain.csv")
    assert content == b"\xef\xbb\xbf" + (place / "plain.csv").read_bytes()
    assert len(read_table(place / "excel.csv").files("file")) == 40


def test_ignored_files_are_named(place: Path, here: Aidgn) -> None:
    folder = place / "mixed"
    folder.mkdir()
    first = next((place / "pictures" / "ink").glob("*.png"))
    Image.open(first).convert("RGB").save(folder / "from a browser.jfif", "JPEG")
    for name in ("1.psd", "2.psd", "3.psd", "notes.txt"):
        (folder / name).touch()
    result = here("run", "mixed", "--json")
    assert [json.loads(line)["file"] for line in result.stdout.splitlines()] == ["mixed/from a browser.jfif"]
    assert "mixed/1.psd, mixed/2.psd, mixed/3.psd and 1 more" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "missing.png"), "missing.png"),
        (("run", "run"), "No image found in run"),
        (("run", "run/*.json*"), "run/novelty.json, run/results.jsonl, run/run.json"),
        (("run", "-"), "No image found"),
        (("nowhere", "pictures"), "nowhere"),
        (("run", "pictures", "--csv", "-", "--json"), "choose one"),
        (("run", "pictures", "--csv", "-", "--bom"), "--bom is for --csv FILE"),
        (("run",), "IMAGES"),
    ],
)
def test_mistakes_get_one_clear_sentence(arguments: tuple[str, ...], words: str, here: Aidgn) -> None:
    result = here(*arguments, ok=False)
    assert result.returncode == 2 and words in result.stderr and not result.stdout


def test_wide_letters_keep_columns_straight() -> None:
    rows = [output.PredictionRow("漢字.png", [("cat", 0.5)], ""), output.PredictionRow("a.png", [("犬", 0.25)], "")]
    assert output.format_text(rows, True, 8, 5).splitlines() == [
        "file      label  probability",
        "漢字.png  cat     50.0%",
        "a.png     犬      25.0%",
    ]


def test_help_has_examples(here: Aidgn) -> None:
    assert "aidgn predict RUN photos/ --csv labels.csv" in here("--help").stdout
