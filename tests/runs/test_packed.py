"""A packed experiment is read like the folder it was made of; damage and excess are refused, and nothing is written."""

import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from aidgn.errors import AidgnError
from aidgn.report.adaptation import load_adaptation
from aidgn.report.table import tables
from aidgn.runs import packed
from aidgn.runs.folder import RunFolder
from aidgn.runs.packed import pack, unpack
from aidgn.runs.reader import read_runs
from aidgn.selection import load_records, select

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an experiment, unpacked by the standard library."""
    folder = tmp_path_factory.mktemp("unpacked")
    extract(RESULTS / "pacs-search.zip", folder)
    return folder / "pacs-search"


def extract(file: Path, folder: Path) -> None:
    shutil.unpack_archive(file, folder)
    shutil.unpack_archive(folder / "runs.zip", folder)
    (folder / "runs.zip").unlink()


def test_a_file_is_read_like_its_folder(experiment: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.zip"
    number = pack(experiment, file)
    assert number == len(RunFolder.find(experiment)) == 8
    runs, wanted = read_runs(file), read_runs(experiment)
    assert load_records(file) == load_records(experiment) and len(wanted) == 800
    assert [run.metadata for run in runs.runs] == [run.metadata for run in wanted.runs]
    assert (runs.unfinished, runs.twice) == (wanted.unfinished, wanted.twice)
    for method in ("training", "oracle"):
        assert select(read_runs(file), method) == select(read_runs(experiment), method)
    assert tables(runs) == tables(wanted)
    assert list(tmp_path.iterdir()) == [file]


def test_results_of_adaptation_are_read(tmp_path: Path) -> None:
    extract(RESULTS / "pacs-resnet50-he2015.zip", tmp_path)
    folder = tmp_path / "pacs-resnet50-he2015"
    wanted, _ = load_adaptation([folder])
    lines, _ = load_adaptation([RESULTS / "pacs-resnet50-he2015.zip"])
    assert lines == wanted and len(lines) > 600


def test_equal_runs_make_equal_files(experiment: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(experiment, tmp_path / "copy"))
    for path in copy.rglob("*"):
        path.touch()
    pack(experiment, tmp_path / "one" / "runs.zip")
    pack(copy, tmp_path / "other" / "runs.zip")
    assert (tmp_path / "one/runs.zip").read_bytes() == (tmp_path / "other/runs.zip").read_bytes()


def test_weights_and_folders_of_images_are_left_out(experiment: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(RunFolder.find(experiment)[0].path, tmp_path / "runs" / "run"))
    run.model.write_bytes(b"weights")
    values = json.loads(run.metadata_file.read_bytes())
    run.metadata_file.write_text(json.dumps({**values, "root": "/home/me/photos"}))
    pack(tmp_path / "runs", tmp_path / "runs.zip")
    with zipfile.ZipFile(tmp_path / "runs.zip") as outer, zipfile.ZipFile(outer.open("runs.zip")) as archive:
        assert sorted(archive.namelist()) == ["runs/run/results.jsonl", "runs/run/run.json"]
        assert json.loads(archive.read("runs/run/run.json")) == values


def test_other_programs_read_the_file() -> None:
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    subprocess.run(["unzip", "-tq", RESULTS / "pacs-search.zip"], check=True, capture_output=True)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    content = (RESULTS / "pacs-search.zip").read_bytes()
    path = tmp_path / "damaged.zip"
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damaged in (flipped, content[:-100], content[:middle], b"", b"text"):
        path.write_bytes(damaged)
        with pytest.raises(AidgnError):
            unpack(path)


def test_archives_without_an_inner_archive_are_read(experiment: Path, tmp_path: Path) -> None:
    shutil.make_archive(str(tmp_path / "plain"), "zip", experiment)
    assert load_records(tmp_path / "plain.zip") == load_records(experiment)


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MAX_BYTES", 1_000_000)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run/results.jsonl", bytes(2_000_000))
    with pytest.raises(AidgnError, match="at most 1 MB"):
        unpack(tmp_path / "bomb.zip")
    with zipfile.ZipFile(tmp_path / "nested.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.write(tmp_path / "bomb.zip", "runs.zip")
    with pytest.raises(AidgnError, match="at most 1 MB"):
        unpack(tmp_path / "nested.zip")


def test_paths_that_lead_out_of_the_archive_are_not_followed(experiment: Path, tmp_path: Path) -> None:
    """A name with .. is a name inside the archive; neither the file outside is read nor one written."""
    run = RunFolder.find(experiment)[0]
    (tmp_path / "inside").mkdir()
    (tmp_path / "results.jsonl").write_text("of the user")
    with zipfile.ZipFile(tmp_path / "inside" / "runs.zip", "w") as archive:
        archive.write(run.results, "../results.jsonl")
    before = sorted(tmp_path.rglob("*"))
    assert load_records(tmp_path / "inside" / "runs.zip") == load_records(run.results)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_without_runs(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(AidgnError, match=r"no results\.jsonl"):
        read_runs(tmp_path / "empty.zip")
