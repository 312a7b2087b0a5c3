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
from textwrap import dedent
from typing import Any

import pytest
import torch

from aidgn.errors import AidgnError
from aidgn.report.table import tables
from aidgn.report.table_formats import to_markdown
from aidgn.runs.folder import RunFolder
from aidgn.runs.reader import read_runs
from aidgn.sweeps.journal import attempt
from aidgn.sweeps.launchers import base, local
from aidgn.sweeps.launchers.local import LocalLauncher
from aidgn.sweeps.plan import plan_runs
from aidgn.training import RunSpec, train

SCRIPT = """
import json, multiprocessing, sys
from aidgn.sweeps.plan import plan_runs
from aidgn.sweeps.launchers.local import LocalLauncher

def say(run, kind, what):
    print(json.dumps([run, kind, what, [process.pid for process in multiprocessing.active_children()]]), flush=True)

try:
    failed = LocalLauncher(workers=2).run(plan_runs(**json.loads(sys.argv[1])), sys.argv[2], on_event=say, device="cpu",
                     save_seconds=float(sys.argv[3]))
except KeyboardInterrupt:
    sys.exit(130)
sys.exit(1 if failed else 0)
"""
SWEEP: dict[str, Any] = {
    "datasets": ["digits"],
    "algorithms": ["ERM", "AIDGN"],
    "targets": ["ink", "chalk"],
    "trials": 1,
    "steps": 12,
    "eval_every": 2,
    "hyper_parameters": {"batch_size": 4},
}


def run_all(specs: list[RunSpec], out: Path, workers: int | None = None, **options: Any) -> dict[int, str]:
    return LocalLauncher(workers).run(specs, out, **options)


def one_by_one(specs: list[RunSpec], out: Path) -> dict[str, list[dict]]:
    """The records of runs trained in this process."""
    for spec in specs:
        train(spec, out, device="cpu")
    return records(out)


def records(out: Path) -> dict[str, list[dict]]:
    """By run folder, without times. Every run must be finished."""
    found = {}
    for path in (about.parent for about in out.glob("*/run.json")):
        folder = RunFolder(path)
        assert folder.finished and not folder.state.exists()
        found[path.name] = [
            {key: value for key, value in record.items() if not key.endswith("_time")} for record in folder.records
        ]
    return found


def start(sweep: dict[str, Any], out: Path, save_seconds: float = 60.0) -> subprocess.Popen:
    """A sweep in a separate process group, as a terminal starts a command."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(sweep), str(out), str(save_seconds)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def events(process: subprocess.Popen) -> Iterator[tuple[int, str, Any, list[int]]]:
    """Run number, kind, what, and the workers' process ids."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def ended(process: subprocess.Popen) -> str:
    """Wait until the process and all its children are gone (they hold its output open); what it said of errors."""
    _, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors, errors
    return errors


def saved_steps(out: Path) -> list[int]:
    """The steps at which the runs in progress were saved. One that has begun and is not finished must be."""
    return [
        torch.load(path / "state.pt", weights_only=True)["step"]
        for path in out.glob("*-draw0-*")
        if (path / "log.txt").exists() and not RunFolder(path).finished
    ]


# Workers that die ---------------------------------------------------------------------------------------------------


OWN = """
import ctypes, os, signal, time
from aidgn.algorithms.erm import ERM

class Dies(ERM):
    def update(self, minibatches):
        if self.updates == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(minibatches)

class Raises(ERM):
    def update(self, minibatches):
        raise ValueError("no such luck")

class Slow(ERM):
    def update(self, minibatches):
        time.sleep(1)
        return super().update(minibatches)

class Hangs(ERM):
    def update(self, minibatches):
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        while True:
            library.pthread_mutex_lock(mutex)
"""


def test_failing_runs_are_retried_then_set_aside(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    dies, raises = f"{tmp_path / 'own.py'}:Dies", f"{tmp_path / 'own.py'}:Raises"
    given = {**SWEEP, "targets": ["ink"], "steps": 4}
    specs = [
        plan_runs(**{**given, "algorithms": [name], "hyper_parameters": {"batch_size": 4, **more}})[0]
        for name, more in [("ERM", {}), (dies, {}), (raises, {}), ("ERM", {"lr": 1e30}), ("CORAL", {})]
    ]
    out = tmp_path / "out"
    finished = train(specs[0], out, device="cpu")
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in finished.iterdir()}
    assert attempt(specs[2], out, device="cpu")[0] == "crashed"  # counts, as if in a sweep before
    seen = []
    failed = run_all(specs, out, workers=1, retries=1, on_event=lambda *event: seen.append(event), device="cpu")

    assert sorted(failed) == [1, 2, 3]
    assert failed[1] == "its process died (exit code -9)"
    assert failed[2] == f"{raises} failed in `update`, line 13: ValueError: no such luck."
    assert "NaN or infinite" in failed[3] and "Traceback" not in failed[3]
    assert [event for event in seen if event[1] == "failed"] == [(run, "failed", failed[run]) for run in (1, 2, 3)]
    assert [run for run, kind, _ in seen if kind == "done"] == [0, 4]
    assert [run for run, kind, _ in seen if kind == "retry"] == [1, 3]
    assert sum((run, kind) == (1, "step") for run, kind, _ in seen) >= 2
    # The run that was finished is as it was, to the byte.
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in finished.iterdir()} == before
    assert not any(run == 0 and kind == "step" for run, kind, _ in seen)
    assert not multiprocessing.active_children()


def test_a_worker_that_hears_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in the code of a library, for ever, where signals only wait to be handled."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setattr(local, "GRACE", 1.0)
    specs = plan_runs(**{**SWEEP, "algorithms": [f"{tmp_path / 'own.py'}:Hangs"], "targets": ["ink"]})

    def enough(run: int, kind: str, what: Any) -> None:
        raise AidgnError(f"enough, {kind}")

    with pytest.raises(AidgnError, match="enough, step"):
        run_all(specs, tmp_path / "out", workers=1, on_event=enough, device="cpu")
    assert not multiprocessing.active_children()


def test_no_workers_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match="workers is -1"):
        run_all(plan_runs(**SWEEP), tmp_path, workers=-1)
    assert run_all([], tmp_path, workers=3) == {}


# The end of the parent ----------------------------------------------------------------------------------------------


def test_ctrl_c_and_a_killed_parent_lose_nothing(tmp_path: Path) -> None:
    """State is saved once a minute, so what is saved here is saved because of the end."""
    out = tmp_path / "disturbed"
    sweep = {**SWEEP, "algorithms": ["AIDGN"], "targets": ["poster"], "steps": 200, "eval_every": 20}
    process = start(sweep, out)
    next(event for event in events(process) if event[1] == "step" and event[2] > 0)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C goes to the workers too
    assert ended(process) == "" and process.returncode == 130
    (first,) = saved_steps(out)

    process = start(sweep, out)
    next(event for event in events(process) if event[1] == "step" and event[2] > first)
    process.kill()
    ended(process)
    assert process.returncode == -signal.SIGKILL
    (second,) = saved_steps(out)
    assert 0 < first < second < 200

    assert one_by_one(plan_runs(**sweep), out) == one_by_one(plan_runs(**sweep), tmp_path / "undisturbed")
    log = next(out.glob("*/log.txt")).read_text()
    assert f"continued at step {first} of 200" in log and f"continued at step {second} of 200" in log


def test_a_signal_to_all_processes_at_once_lets_runs_be_saved(tmp_path: Path) -> None:
    """As `timeout` and service managers end a command: the launcher is gone at once, the workers are told twice."""
    (tmp_path / "own.py").write_text(OWN)
    process = start({**SWEEP, "algorithms": [f"{tmp_path / 'own.py'}:Slow"], "targets": ["poster"]}, tmp_path)
    next(event for event in events(process) if event[1] == "step")
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGTERM)
    ended(process)
    (step,) = saved_steps(tmp_path)
    assert 0 < step < SWEEP["steps"]


@pytest.mark.parametrize(
    ("kills", "changes"),
    [
        (3, {"targets": ["ink"], "steps": 200, "eval_every": 20}),
        pytest.param(20, {"targets": [], "steps": 600, "eval_every": 10}, marks=pytest.mark.slow),
    ],
)
def test_kills_at_random_moments(kills: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """Per start two workers, then the parent: by SIGKILL or Ctrl-C in turn."""
    sweep = {**SWEEP, **changes}
    dice, out, starts = random.Random(20), tmp_path / "disturbed", 0
    killed: list[int] = []
    while len(killed) < kills:
        process = start(sweep, out, save_seconds=0.2)
        starts += 1
        happening = events(process)

        def someone_training(happening: Iterator[tuple] = happening) -> int:
            return dice.choice(
                next(
                    alive
                    for _, kind, _, pids in happening
                    if kind == "step" and (alive := sorted({*pids}.difference(killed)))
                )
            )

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
    specs = plan_runs(**sweep)
    seen: list[tuple[int, str]] = []
    assert run_all(specs, out, workers=1, on_event=lambda run, kind, _: seen.append((run, kind)), device="cpu") == {}
    assert Counter(run for run, kind in seen if kind == "done") == dict.fromkeys(range(len(specs)), 1)
    found = records(out)
    assert len(found) == len(specs) and found == one_by_one(specs, tmp_path / "undisturbed")
    shown = [
        [to_markdown(table) for table in tables(read_runs(folder), "training", "sd", False)]
        for folder in (out, tmp_path / "undisturbed")
    ]
    assert shown[0] == shown[1] and read_runs(out).twice == 0


# Where workers compute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "workers", "visible", "expected"),
    [
        ([0, 1, 2, 3], None, None, ["0", "1", "2", "3"]),
        ([0, 1], 5, None, ["0", "1", "0", "1", "0"]),
        ([0], 3, None, ["0", "0", "0"]),
        ([0, 1, 2, 3], 2, None, ["0", "1"]),
        ([0, 1], None, "6,7", ["6", "7"]),
        ([1], 2, "GPU-3f1, GPU-9a2", ["GPU-9a2", "GPU-9a2"]),
    ],
)
def test_workers_share_the_gpus_in_turn(
    numbers: list[int], workers: int | None, visible: str | None, expected: list[str]
) -> None:
    places = local.share_gpus(numbers, workers, visible)
    assert [place.visible for place in places] == expected and {place.device for place in places} == {"cuda"}


def test_places_of_a_machine_with_gpus_and_of_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [RunSpec("digits", image_size=28)] * 10_000
    assert local.choose_places("cpu", 3, specs[:10]) == [local.WorkerDevice("cpu")] * 3
    cores = os.sched_getaffinity(0)  # of which a container or a job may have but some
    assert len(local.choose_places("cpu", None, specs)) == len(cores)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert len(local.choose_places("cpu", None, specs)) == 1
    finally:
        os.sched_setaffinity(0, cores)
    assert len(local.choose_places("cpu", 8, specs[:2])) == 2  # not more than runs
    large = [RunSpec("photos/", image_size=224)] * 10
    assert len(local.choose_places("cpu", None, large)) == 1 and len(local.choose_places("cpu", 2, large)) == 2
    monkeypatch.setattr("aidgn.devices.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [place.visible for place in local.choose_places("cuda", None, large)] == list("01234567")
    assert [place.visible for place in local.choose_places("cuda:5", 2, large)] == ["5", "5"]


def test_a_worker_sees_its_own_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of real workers, as there are no GPUs to look at."""
    (tmp_path / "own.py").write_text(
        dedent("""
                import os, pathlib
                from aidgn.algorithms.erm import ERM

                class Tells(ERM):
                    def build(self):
                        with open(pathlib.Path(__file__).with_name("told"), "a") as file:
                            file.write(os.environ["CUDA_VISIBLE_DEVICES"] + chr(10))
                """)
    )
    monkeypatch.setattr(local, "choose_places", lambda *_: [local.WorkerDevice("cpu", "5")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    specs = plan_runs(**{**SWEEP, "algorithms": [f"{tmp_path / 'own.py'}:Tells"], "steps": 1})
    assert run_all(specs, tmp_path / "out") == {}
    assert (tmp_path / "told").read_text().split() == ["5", "5"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"


# Several launchers, and storage -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_launchers_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BUSY_SECONDS", 1.0)
    sweep, out = {**SWEEP, "steps": 60, "eval_every": 20}, tmp_path / "out"
    process = start(sweep, out)
    next(event for event in events(process) if event[1] == "step")
    assert run_all(plan_runs(**sweep), out, workers=1, device="cpu") == {}
    assert sum(event[1] == "done" for event in events(process)) > 0
    ended(process)
    assert process.returncode == 0
    assert records(out) == one_by_one(plan_runs(**sweep), tmp_path / "alone")
    logs = "".join(path.read_text() for path in out.glob("*/log.txt"))
    assert logs.count("started at step 0") == logs.count("finished;") == 4


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_or_read_only_disk_stops_the_sweep(tiny_disk: Path, tmp_path: Path) -> None:
    specs = plan_runs(**SWEEP)
    seen: list[tuple[int, str]] = []
    with pytest.raises(AidgnError, match=r"The disk is full: .* could not be written"):
        run_all(
            specs, tiny_disk / "out", workers=1, device="cpu", on_event=lambda run, kind, _: seen.append((run, kind))
        )
    assert not {kind for _, kind in seen} & {"retry", "failed"} and not multiprocessing.active_children()
    kept = {path: path.read_bytes() for path in (tiny_disk / "out").rglob("last.safetensors")}

    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(AidgnError, match=r"cannot be written .*Read-only"):
        run_all(specs, tiny_disk / "out", workers=1, device="cpu")

    subprocess.run(["mount", "-o", "remount,rw,size=64m", str(tiny_disk)], check=True)
    assert run_all(specs, tiny_disk / "out", workers=1, device="cpu", retries=0) == {}
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert records(tiny_disk / "out") == one_by_one(specs, tmp_path / "undisturbed")


def test_what_is_true_of_many_runs_is_said_once_a_worker(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    specs = plan_runs(**{**SWEEP, "algorithms": ["IRM"], "steps": 2})
    assert not run_all(specs, tmp_path, workers=1, device="cpu") and len(specs) == 2
    assert capfd.readouterr().err.count("IRM begins after step 500, this run has 2") == 1


@pytest.mark.parametrize(
    "call",
    [
        'aidgn.sweep(["digits"], ["ERM"], steps=4, trials=1, workers=1, device="cpu")',
        'aidgn.fit("digits", algorithm="ERM", steps=4, workers=1, device="cpu", report=False)',
    ],
    ids=["sweep", "fit"],
)
def test_a_script_without_a_guard_is_told_at_once(call: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import aidgn\n\n{call}\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert 'below `if __name__ == "__main__":`' in done.stderr.strip().splitlines()[-1]
    assert done.stderr.count("Traceback") == 1
