"""Sweeps in real processes that are really killed: in the end the records are those of runs trained one by one."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aidgn.errors import UserError
from aidgn.sweep import local, plan
from aidgn.sweep.local import run_all
from aidgn.training import RunSpec, train
from aidgn.training.folder import RunFolder

WORKERS = 2
SCRIPT = """
import json, multiprocessing, sys
from aidgn.sweep import plan
from aidgn.sweep.local import run_all

def say(run, kind, what):
    print(json.dumps([run, kind, what, [process.pid for process in multiprocessing.active_children()]]), flush=True)

try:
    failed = run_all(plan(**json.loads(sys.argv[1])), sys.argv[2], workers=2, on_event=say, device="cpu",
                     save_seconds=float(sys.argv[3]))
except KeyboardInterrupt:
    sys.exit(130)
sys.exit(1 if failed else 0)
"""
SWEEP: dict[str, Any] = {"datasets": ["digits"], "algorithms": ["ERM", "AIDGN"], "targets": ["ink", "chalk"],
                         "trials": 1, "steps": 12, "eval_every": 2, "hyper_parameters": {"batch_size": 4}}


def one_by_one(specs: list[RunSpec], out: Path) -> dict[str, list[dict]]:
    """The records of runs trained in this process."""
    for spec in specs:
        train(spec, out, device="cpu")
    return records(out)


def records(out: Path) -> dict[str, list[dict]]:
    """By run folder, without times. Every run must be finished."""
    found = {}
    for path in out.iterdir():
        folder = RunFolder(path)
        assert folder.finished and not folder.state.exists()
        found[path.name] = [{key: value for key, value in record.items() if not key.endswith("_time")}
                            for record in folder.records()]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    found = one_by_one(plan(**SWEEP), tmp_path_factory.mktemp("undisturbed"))
    assert len(found) == 4
    return found


def start(sweep: dict[str, Any], out: Path, save_seconds: float = 60.0) -> subprocess.Popen:
    """A sweep in a process group of its own, as a terminal starts a command."""
    return subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(sweep), str(out), str(save_seconds)],
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def events(process: subprocess.Popen) -> Iterator[tuple[int, str, Any, list[int]]]:
    """Run number, kind, what, and the workers' process ids."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def ended(process: subprocess.Popen) -> str:
    """Wait until the process and all its children are gone (they hold its output open); what it said of errors."""
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 15, "workers linger"
    assert "Traceback" not in errors, errors
    return errors


def saved_steps(out: Path) -> list[int]:
    """The steps at which the runs in progress were saved. One that has begun and is not finished must be."""
    return [torch.load(path / "state.pt", weights_only=True)["step"] for path in out.iterdir()
            if (path / "log.txt").exists() and not RunFolder(path).finished]


# Workers that die ---------------------------------------------------------------------------------------------------


def test_three_killed_workers_change_nothing(undisturbed: dict[str, list[dict]], tmp_path: Path) -> None:
    specs = plan(**SWEEP)
    killed: list[int | None] = []
    seen: list[tuple[int, str]] = []

    def kill(run: int, kind: str, what: Any) -> None:
        seen.append((run, kind))
        workers = [worker for worker in multiprocessing.active_children() if worker.pid not in killed]
        # First both workers at once, then one of the two that replace them: no run dies more than twice.
        doomed = workers if not killed else workers[:1] if len(killed) == 2 and len(workers) == 2 else []
        if kind == "step" and what >= 4:
            for worker in doomed:
                os.kill(worker.pid or 0, signal.SIGKILL)
                killed.append(worker.pid)

    assert run_all(specs, tmp_path, workers=WORKERS, on_event=kill, device="cpu", save_seconds=0.1) == {}
    assert len(set(killed)) == 3
    assert Counter(run for run, kind in seen if kind == "done") == dict.fromkeys(range(4), 1)
    assert records(tmp_path) == undisturbed
    logs = [path.read_text() for path in tmp_path.glob("*/log.txt")]
    assert any("continued at step" in log for log in logs) and not multiprocessing.active_children()


OWN = """
import os, signal
from aidgn.algorithms.erm import ERM

class Dies(ERM):
    def update(self, minibatches):
        if self.updates == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(minibatches)

class Raises(ERM):
    def update(self, minibatches):
        raise ValueError("no such luck")
"""


def test_failing_runs_are_reported_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ATTEMPTS", 2)  # instead of 3, to be quicker
    (tmp_path / "own.py").write_text(OWN)
    dies, raises = f"{tmp_path / 'own.py'}:Dies", f"{tmp_path / 'own.py'}:Raises"
    given = {**SWEEP, "targets": ["ink"], "steps": 4}
    specs = [plan(**{**given, "algorithms": [name], "hyper_parameters": {"batch_size": 4, **more}})[0]
             for name, more in [("ERM", {}), (dies, {}), (raises, {}), ("ERM", {"lr": 1e30}), ("CORAL", {})]]
    out = tmp_path / "out"
    finished = train(specs[0], out, device="cpu")
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in finished.iterdir()}
    seen = []
    failed = run_all(specs, out, workers=1, on_event=lambda *event: seen.append(event), device="cpu")

    assert sorted(failed) == [1, 2, 3]
    assert failed[1] == "its process died 2 times (exit code -9)"
    assert "ValueError: no such luck" in failed[2] and "Traceback" in failed[2]
    assert "NaN or infinite" in failed[3] and "Traceback" not in failed[3]
    assert [event for event in seen if event[1] == "failed"] == [(run, "failed", failed[run]) for run in (1, 2, 3)]
    assert [run for run, kind, _ in seen if kind == "done"] == [0, 4]
    # The second attempt went on from the state saved at step 2.
    assert [what for run, kind, what in seen if (run, kind) == (1, "step")] == [0, 2]
    # The run that was finished is as it was, to the byte.
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in finished.iterdir()} == before
    assert not any(run == 0 and kind == "step" for run, kind, _ in seen)


def test_no_workers_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--workers is -1"):
        run_all(plan(**SWEEP), tmp_path, workers=-1)
    assert run_all([], tmp_path, workers=3) == {}


# The end of the parent ----------------------------------------------------------------------------------------------


def test_ctrl_c_and_a_killed_parent_lose_nothing(tmp_path: Path) -> None:
    """State is saved once a minute, so what is saved here is saved because of the end."""
    sweep, out = {**SWEEP, "algorithms": ["AIDGN"], "targets": ["poster"], "steps": 40}, tmp_path / "disturbed"
    process = start(sweep, out)
    next(event for event in events(process) if event[1] == "step" and event[2] > 0)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C goes to the workers too
    assert ended(process) == "" and process.returncode == 130
    first, = saved_steps(out)

    process = start(sweep, out)
    next(event for event in events(process) if event[1] == "step" and event[2] > first)
    process.kill()
    ended(process)
    assert process.returncode == -signal.SIGKILL
    second, = saved_steps(out)
    assert 0 < first < second < 40

    assert run_all(plan(**sweep), out, workers=WORKERS, device="cpu") == {}
    assert records(out) == one_by_one(plan(**sweep), tmp_path / "undisturbed")
    log = next(out.glob("*/log.txt")).read_text()
    assert f"continued at step {first} of 40" in log and f"continued at step {second} of 40" in log


@pytest.mark.slow
def test_twenty_kills_at_random_moments(tmp_path: Path) -> None:
    """Per start two workers, then the parent: by SIGKILL or Ctrl-C in turn."""
    sweep = {**SWEEP, "targets": [], "steps": 600, "eval_every": 10}
    dice, out, starts = random.Random(20), tmp_path / "disturbed", 0
    killed: list[int] = []
    while len(killed) < 20:
        process = start(sweep, out, save_seconds=0.2)
        starts += 1
        happening = events(process)

        def someone_training(happening: Iterator[tuple] = happening) -> int:
            return dice.choice(next(alive for _, kind, _, pids in happening
                                    if kind == "step" and (alive := sorted({*pids}.difference(killed)))))

        for _ in range(2):
            killed.append(someone_training())
            time.sleep(dice.uniform(0, 0.5))
            os.kill(killed[-1], signal.SIGKILL)
        if starts % 4 < 2:  # else before the new workers are there
            someone_training()
        time.sleep(dice.uniform(0, 1))
        assert process.poll() is None, "the sweep ended before it was killed often enough"
        killed.append(process.pid)
        if starts % 2:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)
        ended(process)
    process = start(sweep, out)
    assert sum(event[1] == "done" for event in events(process)) == 8
    ended(process)
    assert process.returncode == 0
    found = records(out)
    assert len(found) == 8 and found == one_by_one(plan(**sweep), tmp_path / "undisturbed")
