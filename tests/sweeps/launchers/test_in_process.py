"""Runs one after another in this process."""

import errno
import signal
from pathlib import Path
from typing import Any

import pytest

from aidgn.data import load_dataset
from aidgn.errors import AidgnError, Interrupted
from aidgn.runs.folder import RunFolder
from aidgn.runs.spec import RunSpec
from aidgn.sweeps.launchers.in_process import InProcessLauncher

DIGITS = load_dataset("digits")


def spec(algorithm: str = "ERM", steps: int = 2) -> RunSpec:
    return RunSpec("digits", algorithm, "ink", steps=steps, eval_every=2).resolved(DIGITS)


def test_runs_are_trained_and_a_broken_one_is_set_aside(own: str, tmp_path: Path) -> None:
    file = Path(own.partition(":")[0])
    file.write_text(file.read_text().replace('return {"loss"', '1 / 0\n        return {"loss"'))
    events: list[tuple[int, str, Any]] = []
    launcher = InProcessLauncher()
    specs = [spec(own), spec("ERM"), spec("SD")]
    failed = launcher.run(
        specs, tmp_path, on_event=lambda *event: events.append(event), retries=1, device="cpu", cache_dir=tmp_path
    )
    assert list(failed) == [0] and "division by zero" in failed[0]
    folders = {number: value for number, kind, value in events if kind == "done"}
    assert sorted(folders) == [1, 2] and all(RunFolder(path).finished for path in folders.values())
    assert [kind for number, kind, _ in events if number == 0 and kind != "step"] == ["retry", "failed"]


def test_a_signal_saves_the_run_and_ends(tmp_path: Path) -> None:
    steps: list[int] = []

    def stop(number: int, kind: str, value: Any) -> None:
        if kind == "step" and value >= 4 and not steps:
            steps.append(value)
            signal.raise_signal(signal.SIGINT)  # a second one would end the tests

    with pytest.raises(Interrupted, match="continues"):
        InProcessLauncher().run([spec(steps=30), spec("SD")], tmp_path, on_event=stop, device="cpu")
    assert InProcessLauncher().run([spec(steps=30)], tmp_path, device="cpu") == {}


def test_a_full_disk_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("aidgn.runs.folder.open_no_link", fail)
    with pytest.raises(AidgnError, match="disk is full"):
        InProcessLauncher().run([spec()], tmp_path, device="cpu")
