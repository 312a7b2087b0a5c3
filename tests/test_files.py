"""What is written is written whole, or to what is no file."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aidgn.files import FolderLock, StorageError, is_of_type, temporary_folder, write_text, written_at_last


def test_a_pipe_is_written_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert [*tmp_path.iterdir()] == [pipe] and pipe.is_fifo()


def test_a_folder_is_said_and_stays(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Is a directory"):
        write_text(tmp_path, "text")
    assert not [*tmp_path.iterdir()]


def test_temporary_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import sys, time
from aidgn.files import temporary_folder
with temporary_folder("mine-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    time.sleep(600)
"""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine-link").symlink_to(tmp_path / "elsewhere")
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, live = (Path(process.stdout.readline().strip()) for process in processes)  # type: ignore[union-attr]
        processes[0].kill()
        processes[0].wait()
        assert (dead / "file").exists()
        with temporary_folder("mine-") as folder:
            assert folder.is_dir() and not dead.exists() and (live / "file").exists()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert not folder.exists() and (tmp_path / "elsewhere").is_dir()


def test_killed_process_leaves_no_temporary_file(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from aidgn.files import written_at_last
with written_at_last(Path(sys.argv[1])) as file:
    file.write("half")
    file.flush()
    print("written", flush=True)
    sys.stdin.read()
"""
    path = tmp_path / "labels.csv"
    path.write_text("before")
    with subprocess.Popen(
        [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline() == b"written\n"
        process.kill()
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "before"


@pytest.mark.parametrize("unnamed", [True, False])
def test_written_at_last_holds_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool) -> None:
    if not unnamed:  # a file system without files that have no name
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path, text = tmp_path / "folder" / "labels.csv", '"a\r\nb"\n\udcff\r' * 9999
    with written_at_last(path) as file:
        file.write(text)
        assert not [*path.parent.iterdir()]
    assert path.read_bytes() == text.encode(errors="surrogateescape") and [*path.parent.iterdir()] == [path]
    with pytest.raises(KeyError), written_at_last(path) as file:
        file.write("other")
        raise KeyError
    assert path.read_bytes() == text.encode(errors="surrogateescape") and [*path.parent.iterdir()] == [path]


def test_one_lock_at_a_time_or_several_shared(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path / "new" / "lock"), FolderLock(tmp_path / "new" / "lock")
    with first:
        assert not second.try_acquire()
    assert second.try_acquire()
    second.acquire(shared=True)
    assert not first.try_acquire()
    first.acquire(shared=True)
    second.release()
    first.release()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from aidgn.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print(lock.try_acquire(), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        assert not FolderLock(tmp_path / "lock").try_acquire()
        process.kill()
    assert FolderLock(tmp_path / "lock").try_acquire()


def test_a_link_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError):
        FolderLock(tmp_path / "lock").acquire()
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (1.0, int, False),
        (None, str | None, True),
        (3, str | None, False),
        (["a"], list[str], True),
        (["a", 1], list[str], False),
        ("a", list[str], False),
        ({"a": 1}, dict[str, int], True),
        ([1], dict, False),
        ([1], Any, True),
    ],
)
def test_types_of_values_from_json(value: Any, hint: Any, fits: bool) -> None:
    assert is_of_type(value, hint) == fits
