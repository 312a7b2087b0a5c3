"""What is written is written whole, or to what is no file."""

import os
from pathlib import Path

import pytest

from aidgn.files import StorageError, write_text


def test_a_pipe_is_written_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert [*tmp_path.iterdir()] == [pipe] and pipe.is_fifo()


def test_a_folder_is_said_and_stays(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path} could not be written: Is a directory"):
        write_text(tmp_path, "text")
    assert not [*tmp_path.iterdir()]
