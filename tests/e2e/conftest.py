"""A command, as a person types it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aidgn.cli import main


@pytest.fixture
def aidgn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
          capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess]:
    """A command typed in tmp_path: in this process, which has imported everything already, or in one of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str, ok: bool = True, own_process: bool = False) -> subprocess.CompletedProcess:
        if own_process:
            done = subprocess.run([sys.executable, "-m", "aidgn", *arguments], capture_output=True, text=True,
                                  timeout=900)
        else:
            monkeypatch.setattr(sys, "argv", ["aidgn", *arguments])
            capfd.readouterr()
            code: str | int | None = 0
            try:
                main()
            except SystemExit as end:
                code = end.code
            done = subprocess.CompletedProcess(arguments, int(code or 0), *capfd.readouterr())
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done
    return run
