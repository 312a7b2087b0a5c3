"""A command, as a person types it, and a real browser."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aidgn.cli import main


@pytest.fixture
def aidgn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess]:
    """A command typed in tmp_path: in this process, which has imported everything already, or in a new one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str, ok: bool = True, own_process: bool = False) -> subprocess.CompletedProcess:
        if own_process:
            done = subprocess.run(
                [sys.executable, "-m", "aidgn", *arguments], capture_output=True, text=True, timeout=900
            )
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()
