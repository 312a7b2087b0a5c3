"""Data sets from tables: the same images and labels whatever the format, order and place; what is refused."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aidgn.data import Dataset, load_dataset
from aidgn.data.labelled import find_labelled
from aidgn.data.source import DataSource
from aidgn.data.table import find_source
from aidgn.errors import AidgnError

COLUMNS = {"file": "path", "label": "diagnosis", "domain": "hospital", "group": "patient"}
Row = dict[str, object]


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    """Ten images per hospital, two per patient, in one folder below the table."""
    made: list[Row] = []
    (tmp_path / "img").mkdir()
    for number in range(30):
        path = tmp_path / "img" / f"{number}.png"
        Image.fromarray(np.full((8, 8, 3), 8 * number, np.uint8)).save(path)
        made.append(
            {
                "path": f"img/{number}.png",
                "diagnosis": ["ill", "well"][number % 2],
                "hospital": ["north", "south", "west"][number // 10],
                "patient": number // 2,
                "note": "a, b",
            }
        )
    return made


def write_separated(rows: list[Row], path: Path, delimiter: str) -> Path:
    lines = [list(rows[0]), *(row.values() for row in rows)]
    text = "\n".join(delimiter.join(f'"{cell}"' for cell in line) for line in lines)
    path.write_text(text, encoding="utf-8-sig")
    return path


def rewrite(path: Path, old: str, new: str) -> Path:
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))
    return path


def write_parquet(rows: list[Row], path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_lines(rows: list[Row], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


WRITERS: dict[str, Callable[[list[Row], Path], Path]] = {
    "pictures.csv": lambda rows, path: write_separated(rows, path, ","),
    "excel.csv": lambda rows, path: write_separated(rows, path, ";"),
    "bars.csv": lambda rows, path: write_separated(rows, path, "|"),
    "commas.tsv": lambda rows, path: write_separated(rows, path, ","),
    "windows.csv": lambda rows, path: rewrite(write_separated(rows, path, ","), "\n", "\r\n"),
    "mac.csv": lambda rows, path: rewrite(write_separated(rows, path, ","), "\n", "\r"),
    "pictures.tsv": lambda rows, path: write_separated(rows, path, "\t"),
    "pictures.jsonl": write_lines,
    "pictures.parquet": write_parquet,
}


def facts(dataset: Dataset) -> set[tuple[str, str, str, int]]:
    assert dataset.groups is not None
    return {
        (file, dataset.classes[label], dataset.domains[domain], group)
        for file, label, domain, group in zip(
            dataset.files, dataset.labels, dataset.domain_of, dataset.groups.tolist(), strict=True
        )
    }


@pytest.mark.parametrize("name", WRITERS)
def test_formats(rows: list[Row], tmp_path: Path, name: str) -> None:
    dataset = load_dataset(WRITERS[name](rows, tmp_path / name), **COLUMNS)
    assert dataset.name == name.partition(".")[0] and dataset.root == tmp_path / "img"
    assert dataset.classes == ["ill", "well"] and dataset.domains == ["north", "south", "west"]
    same_patient = {}
    for file, label, domain, group in facts(dataset):
        row = rows[int(file.removesuffix(".png"))]
        assert (label, domain) == (row["diagnosis"], row["hospital"])
        assert same_patient.setdefault(group, row["patient"]) == row["patient"]
    assert len(dataset) == 30 and len(same_patient) == 15


def test_frames(rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = load_dataset(write_lines(rows, tmp_path / "pictures.jsonl"), **COLUMNS)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    frames: list[object] = [columns]
    for package, make in {"pandas": "DataFrame", "pyarrow": "table", "polars": "DataFrame"}.items():
        try:
            frames.append(getattr(__import__(package), make)(columns))
        except ImportError:
            continue
    for frame in frames:
        saved = find_source(frame, tmp_path / "out", **COLUMNS)
        for dataset in (load_dataset(frame, **COLUMNS), load_dataset(str(saved))):
            assert facts(dataset) == facts(expected) and dataset.fingerprint == expected.fingerprint


def test_identity_is_the_content(rows: list[Row], tmp_path: Path) -> None:
    """Neither the order of the rows nor the place of table and images matters; labels, domains and groups do."""
    first = load_dataset(write_lines(rows, tmp_path / "a.jsonl"), **COLUMNS)
    absolute = [{**row, "path": str(tmp_path / str(row["path"]))} for row in reversed(rows)]
    (tmp_path / "far").mkdir()
    second = load_dataset(write_lines(absolute, tmp_path / "far" / "b.jsonl"), **COLUMNS)
    assert second.files == first.files and second.fingerprint == first.fingerprint
    renamed = [{**row, "patient": f"p{row['patient']}"} for row in rows]
    assert load_dataset(write_lines(renamed, tmp_path / "c.jsonl"), **COLUMNS).fingerprint == first.fingerprint
    changes: list[Row] = [{"diagnosis": "well"}, {"hospital": "south"}, {"patient": 7}]
    prints = {first.fingerprint}
    for number, change in enumerate(changes):
        changed = [{**rows[0], **change}, *rows[1:]]
        prints.add(load_dataset(write_lines(changed, tmp_path / f"{number}.jsonl"), **COLUMNS).fingerprint)
    assert len(prints) == 4


def test_folders_of_hugging_face(rows: list[Row], tmp_path: Path) -> None:
    renamed = [{"file_name": row["path"], **row} for row in rows]
    write_separated(renamed, tmp_path / "metadata.csv", ",")
    dataset = load_dataset(tmp_path, label="diagnosis", domain="hospital")
    assert len(dataset) == 30 and dataset.name == tmp_path.name
    assert DataSource.parse(tmp_path, label="diagnosis").name == dataset.name


def test_saved_data_set_of_hugging_face(rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    saved = datasets.Dataset.from_list([{**row, "path": str(tmp_path / str(row["path"]))} for row in rows])
    saved = saved.class_encode_column("diagnosis")
    saved.save_to_disk(tmp_path / "saved")
    from_disk = load_dataset(tmp_path / "saved", **COLUMNS)
    in_memory = load_dataset(saved.select(range(20)), **COLUMNS)
    assert from_disk.classes == in_memory.classes == ["ill", "well"]  # stored as numbers
    without_groups = [{fact[:3] for fact in facts(dataset)} for dataset in (in_memory, from_disk)]
    assert without_groups[0] == {fact for fact in without_groups[1] if fact[2] != "west"} and len(in_memory) == 20


def test_what_is_wrong_is_said_at_once(rows: list[Row], tmp_path: Path) -> None:
    rows[3]["diagnosis"] = None
    rows[5]["path"] = rows[4]["path"]
    table = write_lines(rows, tmp_path / "pictures.jsonl")
    with pytest.raises(AidgnError) as error:
        load_dataset(table, file="path", label="diagnosis", domain="hospitals")
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert "Did you mean hospital?" in lines[0] and "--domain" in lines[0]
    assert "diagnosis" in lines[1] and "row 4" in lines[1]
    assert "img/4.png" in lines[2] and "rows 5, 6" in lines[2]


def test_paths_of_windows(rows: list[Row], tmp_path: Path) -> None:
    expected = load_dataset(write_lines(rows, tmp_path / "a.jsonl"), **COLUMNS)
    windows = [{**row, "path": str(row["path"]).replace("/", "\\")} for row in rows]
    found = load_dataset(write_lines(windows, tmp_path / "b.jsonl"), **COLUMNS)
    assert found.files == expected.files and found.fingerprint == expected.fingerprint
    if os.sep == "/":  # a backslash belongs to a name here
        strange = tmp_path / "img" / "a\\b.png"
        strange.write_bytes((tmp_path / "img" / "0.png").read_bytes())
        windows[0]["path"] = "img/a\\b.png"
        assert "a\\b.png" in load_dataset(write_lines(windows, tmp_path / "c.jsonl"), **COLUMNS).files


def test_missing_columns_are_named_in_one_line(rows: list[Row], tmp_path: Path) -> None:
    table = write_separated(rows, tmp_path / "pictures.csv", ",")
    with pytest.raises(AidgnError) as error:
        load_dataset(table)
    assert "\n" not in str(error.value) and "--file NAME --label NAME --domain NAME" in str(error.value)
    with pytest.raises(AidgnError, match="--file NAME --label NAME,"):
        find_labelled(table, ["ill", "well"])


def test_a_table_that_is_read_as_one_column(rows: list[Row], tmp_path: Path) -> None:
    table = write_separated([{**row, "note": ""} for row in rows], tmp_path / "pictures.csv", "/")
    with pytest.raises(AidgnError, match="semicolons"):
        load_dataset(table, **COLUMNS)


@pytest.mark.parametrize("again", [str, lambda path: f"./{path}", lambda path: f"img/../{path}", os.path.abspath])
def test_repeated_files(
    rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: Callable[[str], str]
) -> None:
    """Whatever the way in which a table writes the path."""
    monkeypatch.chdir(tmp_path)
    rows.append({**rows[4], "path": again(str(rows[4]["path"]))})
    table = write_lines(rows, Path("pictures.jsonl"))
    with pytest.raises(AidgnError, match="rows 5, 31"):
        load_dataset(table, **COLUMNS)
    with pytest.raises(AidgnError, match="rows 5, 31"):
        find_labelled(table, ["ill", "well"], "path", "diagnosis")


def test_files_that_all_are_absent_are_one_mistake(rows: list[Row], tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    table = write_lines(rows, tmp_path / "far" / "pictures.jsonl")
    for tolerant in (False, True):
        with pytest.raises(AidgnError) as error:
            load_dataset(table, **COLUMNS, tolerant=tolerant)
        assert "\n" not in str(error.value) and str(tmp_path / "far") in str(error.value)


@pytest.mark.parametrize("marker", ["metadata.csv", "dataset_info.json", "dataset_dict.json"])
def test_folders_of_hugging_face_without_columns(tmp_path: Path, marker: str) -> None:
    (tmp_path / marker).touch()
    for _ in range(2):
        with pytest.raises(AidgnError, match="name a column"):
            load_dataset(tmp_path)
        (tmp_path / "train").mkdir(exist_ok=True)


@pytest.mark.parametrize("address", ["https://example.org/1.png", "s3://bucket/1.png", "data:image/png;base64,AA"])
def test_addresses_are_refused(rows: list[Row], tmp_path: Path, address: str) -> None:
    rows[0]["path"] = address
    with pytest.raises(AidgnError, match="Download the images"):
        load_dataset(write_lines(rows, tmp_path / "pictures.jsonl"), **COLUMNS)


@pytest.mark.parametrize("wrap", [bytes, lambda data: {"bytes": bytes(data), "path": "a.png"}])
def test_images_in_the_table_are_refused(rows: list[Row], tmp_path: Path, wrap: Callable[[bytes], object]) -> None:
    table = write_parquet([{**row, "path": wrap(b"png")} for row in rows], tmp_path / "pictures.parquet")
    with pytest.raises(AidgnError, match="the images themselves"):
        load_dataset(table, **COLUMNS)


def test_parquet_without_pyarrow(rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_parquet(rows, tmp_path / "pictures.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(AidgnError, match=r"aidgn\[parquet\]"):
        load_dataset(table, **COLUMNS)


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "a.csv": "",
        "b.csv": "path,path\nx,y\n",
        "c.csv": "path,diagnosis,hospital\nx,y\n",
        "d.jsonl": "{",
        "e.jsonl": "[1]",
        "f.parquet": "PAR1",
        "g.csv": "path,diagnosis,hospital\n",
        "h.csv": "path,diagnosis,hospital\nnowhere.png,a,b\nnowhere2.png,c,d\n",
    }.items(),
)
def test_broken_tables(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(AidgnError, match=name):
        load_dataset(tmp_path / name, file="path", label="diagnosis", domain="hospital")


def features(label: object) -> str:
    return json.dumps({"info": {"features": {"diagnosis": label}}})


NAMED = {"_type": "ClassLabel", "names": ["ill", "well"]}
ODD_METADATA = ["x", "[" * 100_000, "[]", "null", '{"info": null}', '{"info": {"features": []}}', features([])]
ODD_METADATA += [features({**NAMED, "names": names}) for names in (5, None, [])]


@pytest.mark.parametrize("metadata", ODD_METADATA)
def test_odd_metadata_of_parquet_name_no_classes(metadata: str, rows: list[Row], tmp_path: Path) -> None:
    assert load_parquet(metadata, rows, tmp_path).classes == ["0", "1"]


def test_class_names_of_parquet(rows: list[Row], tmp_path: Path) -> None:
    assert load_parquet(features(NAMED), rows, tmp_path).classes == ["ill", "well"]
    for names in (["ill"], {"ill": 0}):  # fewer than the classes, or no list
        with pytest.raises(AidgnError, match="no value in the column diagnosis"):
            load_parquet(features({**NAMED, "names": names}), rows, tmp_path)


def load_parquet(metadata: str, rows: list[Row], folder: Path) -> Dataset:
    """Load a table whose classes are numbers, with Hugging Face's metadata."""
    pyarrow = pytest.importorskip("pyarrow")
    numbered = [{**row, "diagnosis": number % 2} for number, row in enumerate(rows)]
    table = pyarrow.Table.from_pylist(numbered).replace_schema_metadata({"huggingface": metadata})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "numbers.parquet")
    return load_dataset(folder / "numbers.parquet", **COLUMNS)


def test_source_as_text(tmp_path: Path) -> None:
    source = DataSource("my photos/a&b.csv", "a b", "ü=?", domain="x/y", group="#")
    assert DataSource.parse(str(source)) == source
    assert str(DataSource.parse("photos", layout="{class}/{domain}")) == "photos?layout={class}/{domain}"
    folder = tmp_path / "x?layout=y"
    folder.mkdir()
    assert DataSource.parse(str(folder)) == DataSource(str(folder))
    with pytest.raises(AidgnError, match="for folders"):
        DataSource.parse("a.csv", layout="{class}/{domain}")
