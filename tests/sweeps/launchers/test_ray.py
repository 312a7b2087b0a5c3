"""Sweeps on a real Ray cluster of several nodes on this machine, whose nodes are really killed."""

import json
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

from aidgn.cli import app
from aidgn.errors import AidgnError
from aidgn.report.table import tables
from aidgn.runs.folder import RunFolder
from aidgn.selection import load_records
from aidgn.sweeps.journal import history
from aidgn.sweeps.launchers import ray
from aidgn.sweeps.launchers.local import LocalLauncher
from aidgn.sweeps.launchers.ray import RayLauncher
from aidgn.sweeps.plan import plan_runs
from aidgn.training import RunSpec, train

SWEEP: dict[str, Any] = {
    "datasets": ["digits"],
    "targets": ["ink", "chalk"],
    "trials": 2,
    "steps": 60,
    "eval_every": 20,
    "hyper_parameters": {"batch_size": 4},
}
OWN = """
import os, time
from aidgn.algorithms.erm import ERM

class Slow(ERM):
    def update(self, minibatches):
        time.sleep(float(os.environ["AIDGN_PAUSE"]))
        return super().update(minibatches)
"""
LEAST = 80 * 2**20  # bytes of a node's object store
SCRIPT = """
import json, sys
from aidgn.sweeps.plan import plan_runs
from aidgn.sweeps.launchers.ray import RayLauncher

def say(*event):
    print(json.dumps(event), flush=True)

try:
    failed = RayLauncher(ray_address=sys.argv[3]).run(
        plan_runs(**json.loads(sys.argv[1])), sys.argv[2], on_event=say, device="cpu", save_seconds=0.5, retries=5
    )
except KeyboardInterrupt:
    sys.exit(130)
sys.exit(1 if failed else 0)
"""


class Nodes:
    """A cluster of a head and further nodes, each of one CPU, that can be killed and added."""

    def __init__(self, nodes: int):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "object_store_memory": LEAST, "include_dashboard": False},
        )
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add()

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=LEAST, wait=False))

    def kill(self, with_workers: bool = True) -> int:
        """The oldest but the head, as a power cut does it; or only its manager, whose workers may outlive it a bit."""
        raylet, workers = self.processes()
        self.nodes.pop(0)
        for pid in (raylet, *workers) if with_workers else (raylet,):
            os.kill(pid, signal.SIGKILL)
        return raylet

    def processes(self) -> tuple[int, list[int]]:
        """Of the oldest node but the head: its manager and its workers."""
        raylet = self.nodes[0].all_processes["raylet"][0].process.pid
        return raylet, [int(pid) for pid in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Lost nodes are noticed after one second instead of fifteen."""
    patch = pytest.MonkeyPatch()
    for name, value in (
        ("USAGE_STATS_ENABLED", 0),
        ("health_check_period_ms", 250),
        ("health_check_timeout_ms", 1000),
        ("health_check_failure_threshold", 3),
        ("health_check_initial_delay_ms", 1000),
    ):
        patch.setenv(f"RAY_{name}", str(value))
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    started = Nodes(1)
    yield started
    started.cluster.shutdown()
    patch.undo()


def records(out: Path) -> dict[str, list[dict]]:
    """By run folder, without times. Every run must be finished."""
    found = {}
    for path in out.iterdir():
        if not path.name.startswith("."):
            assert RunFolder(path).finished and not RunFolder(path).state.exists()
            found[path.name] = [
                {key: value for key, value in record.items() if not key.endswith("_time")}
                for record in RunFolder(path).records
            ]
    return found


def assert_same(disturbed: Path, undisturbed: Path, runs: int) -> None:
    assert records(disturbed) == records(undisturbed) and len(records(disturbed)) == runs
    assert tables(load_records(disturbed)) == tables(load_records(undisturbed))


class Sweep:
    """A sweep in a separate process group, as a terminal starts a command. All it prints is events."""

    def __init__(self, sweep: dict[str, Any], out: Path, address: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(sweep), str(out), address],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.seen: list[tuple[int, str, Any]] = []

    def events(self) -> Iterator[tuple[int, str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(tuple(json.loads(line)))
            yield self.seen[-1]

    def until(self, kind: str, more_than: Any = 0) -> None:
        for event in self.events():
            if event[1] == kind and (kind != "step" or event[2] > more_than):
                return
        raise AssertionError(self.process.communicate(timeout=300)[1])

    def end(self) -> int:
        """Wait for it; its exit code. It must have said nothing but events."""
        for _ in self.events():
            pass
        _, errors = self.process.communicate(timeout=300)
        assert errors == ""
        return self.process.returncode


def running(specs: list[RunSpec], out: Path) -> list[int]:
    """The processes that train."""
    return [attempt.pid for spec in specs if (attempt := history(out, spec.key()).running)]


def slow_sweep(folder: Path, **changes: Any) -> dict[str, Any]:
    """Runs that take as long as $AIDGN_PAUSE says and come to the same."""
    (folder / "own.py").write_text(OWN)
    return {**SWEEP, "algorithms": [f"{folder / 'own.py'}:Slow"], **changes}


def test_a_lost_node_and_ctrl_c_change_nothing(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = slow_sweep(tmp_path), tmp_path / "disturbed"
    specs = plan_runs(**given)
    monkeypatch.setenv("AIDGN_PAUSE", "0")
    finished = train(specs[0], out, device="cpu")
    before = {path.name: path.stat().st_mtime_ns for path in finished.iterdir()}

    monkeypatch.setenv("AIDGN_PAUSE", "0.3")
    sweep = Sweep(given, out, nodes.cluster.address)
    sweep.until("step")
    while not {*running(specs, out)} & {*nodes.processes()[1]}:
        next(sweep.events())
    nodes.kill()
    sweep.until("retry")
    assert sweep.seen[-1][2] == "its node was lost"
    sweep.until("step")
    os.killpg(sweep.process.pid, signal.SIGINT)
    assert sweep.end() == 130
    logs = [path.read_text() for path in out.glob("*/log.txt")]
    assert any(log.splitlines()[-1].split()[2:5] == ["interrupted", "at", "step"] for log in logs)

    monkeypatch.setenv("AIDGN_PAUSE", "0")
    sweep = Sweep(given, out, nodes.cluster.address)
    assert sweep.end() == 0
    assert Counter(run for run, kind, _ in sweep.seen if kind == "done") == dict.fromkeys(range(4), 1)
    assert {path.name: path.stat().st_mtime_ns for path in finished.iterdir()} == before
    for spec in specs:
        train(spec, tmp_path / "undisturbed", device="cpu")
    assert_same(out, tmp_path / "undisturbed", len(specs))


@pytest.mark.slow
def test_kills_before_the_first_save_are_no_failures(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIDGN_PAUSE", "0.3")
    (spec,) = plan_runs(**slow_sweep(tmp_path, targets=["ink"], trials=1, steps=20))
    killed: list[int] = []

    def kill(run: int, kind: str, value: Any) -> None:
        if kind == "step" and len(killed) < 3 and (pids := running([spec], tmp_path / "out")):
            killed.extend(pids)
            os.kill(pids[0], signal.SIGKILL)

    launcher = RayLauncher(workers=1, ray_address=nodes.cluster.address)
    assert launcher.run([spec], tmp_path / "out", device="cpu", save_seconds=1e9, retries=0, on_event=kill) == {}
    kinds = [attempt.kind for attempt in history(tmp_path / "out", spec.key()).attempts]
    assert kinds == ["killed"] * 3 + ["done"] and len(set(killed)) == 3


@pytest.mark.slow
def test_twenty_kills_at_random_moments(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per start a worker, a node, then the launcher: by SIGKILL or Ctrl-C in turn."""
    sweep = slow_sweep(tmp_path, targets=[], steps=200)
    specs, dice, out = plan_runs(**sweep), random.Random(20), tmp_path / "disturbed"
    killed: list[int] = []

    def kill_worker(started: Sweep) -> None:
        while not (pids := running(specs, out)):
            next(started.events())
        killed.append(dice.choice(pids))
        os.kill(killed[-1], signal.SIGKILL)

    def kill_node(started: Sweep) -> None:
        started.until("step")
        time.sleep(dice.uniform(0, 2))
        killed.append(nodes.kill(with_workers=dice.random() < 0.5))

    monkeypatch.setenv("AIDGN_PAUSE", "0.3")
    for start in range(6):
        nodes.add()
        started = Sweep(sweep, out, nodes.cluster.address)
        for kill in dice.sample((kill_worker, kill_node), 2):
            started.until("step")
            time.sleep(dice.uniform(0, 1))
            kill(started)
        if dice.random() < 0.5:  # else while the others are being replaced
            started.until("step")
        time.sleep(dice.uniform(0, 1))
        killed.append(started.process.pid)
        assert started.process.poll() is None, "the sweep ended before it was killed often enough"
        if start % 2:
            os.killpg(started.process.pid, signal.SIGINT)
            assert started.end() == 130
        else:
            started.process.kill()
            assert started.end() == -signal.SIGKILL
    monkeypatch.setenv("AIDGN_PAUSE", "0.05")
    nodes.add()
    started = Sweep(sweep, out, nodes.cluster.address)
    started.until("step")
    kill_worker(started)
    kill_node(started)
    assert started.end() == 0 and len(set(killed)) == 20
    assert Counter(run for run, kind, _ in started.seen if kind == "done") == dict.fromkeys(range(8), 1)
    monkeypatch.setenv("AIDGN_PAUSE", "0")
    assert LocalLauncher(workers=2).run(plan_runs(**sweep), tmp_path / "undisturbed", device="cpu") == {}
    assert_same(out, tmp_path / "undisturbed", 8)


# Mistakes -----------------------------------------------------------------------------------------------------------


def test_room_is_counted_by_node() -> None:
    class Cluster:
        @staticmethod
        def nodes() -> list[dict]:
            return [
                {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}},
                {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 1.0}},
                {"Alive": True, "Resources": {"CPU": 8.0}},
                {"Alive": False, "Resources": {"CPU": 64.0}},
            ]

    assert ray.count_room(Cluster, 1, 0) == 16 + 3 + 8
    assert ray.count_room(Cluster, 1, 0.25) == 8 + 3 + 0  # quarters of two GPUs; three processors
    assert ray.count_room(Cluster, 2, 0.3) == 6 + 1 + 0  # three thirds-or-less per GPU; one pair of processors
    assert ray.count_room(Cluster, 1, 2) == 1 + 0 + 0


def test_mistakes_are_said(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = plan_runs(**SWEEP, algorithms=["ERM"])
    with pytest.raises(AidgnError, match=r"gpus_per_run is 1.5; expected a fraction"):
        RayLauncher(gpus_per_run=1.5).run(specs, tmp_path)
    with pytest.raises(AidgnError, match="workers is -1"):
        RayLauncher(workers=-1).run(specs, tmp_path)
    assert RayLauncher().run([], tmp_path) == {}
    with pytest.raises(AidgnError, match="64 CPUs and 0 GPUs"):
        RayLauncher(ray_address=nodes.cluster.address, cpus_per_run=64).run(specs, tmp_path)
    for address in ("127.0.0.1:1", "nonsense"):
        with pytest.raises(AidgnError, match=f"--ray-address {address}: "):
            RayLauncher(ray_address=address).run(specs, tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AidgnError, match=r"pip install 'aidgn\[ray\]'"):
        RayLauncher().run(specs, tmp_path)
    with pytest.raises(AidgnError, match="--partition is not for --launcher ray"):
        app(
            [
                "sweep",
                "digits",
                "--algorithm",
                "ERM",
                "--launcher",
                "ray",
                "--partition",
                "gpu",
                "--out",
                str(tmp_path),
            ],
            standalone_mode=False,
        )
    assert not list(tmp_path.iterdir())
