"""Sweeps on a real SLURM of one node, started here, whose jobs are really preempted."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aidgn.errors import AidgnError, ParameterError
from aidgn.runs.folder import RunFolder
from aidgn.sweeps import journal
from aidgn.sweeps.launchers import slurm
from aidgn.sweeps.launchers.slurm import SlurmLauncher
from aidgn.sweeps.plan import plan_runs
from aidgn.training import train

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel")
PATH = os.environ["PATH"] + os.pathsep + "/usr/sbin"
missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
real_slurm = pytest.mark.skipif(
    bool(missing) or os.geteuid() != 0,
    reason=(f"no {', '.join(missing)} on this machine" if missing else "SLURM can only be started here by root"),
)
CONFIGURATION = """
ClusterName=aidgn
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
MpiDefault=none
SwitchType=switch/none
KillWait=10
MaxArraySize=3
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=short Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
OWN = """
import os, time
from aidgn.algorithms.erm import ERM

class Slow(ERM):
    def update(self, minibatches):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        return super().update(minibatches)

class Raises(ERM):
    def update(self, minibatches):
        raise ValueError("no such luck")
"""
SWEEP: dict[str, Any] = {
    "datasets": ["digits"],
    "trials": 1,
    "steps": 60,
    "eval_every": 6,
    "hyper_parameters": {"batch_size": 4},
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def eventually(what: Callable[[], Any], seconds: float = 180) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.1)
    return found


def ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            folder=folder, host=socket.gethostname().split(".")[0], controller_port=free_port(), node_port=free_port()
        )
    )
    patch = pytest.MonkeyPatch()
    patch.setenv("PATH", PATH)
    patch.setenv("SLURM_CONF", str(configuration))
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    patch.setattr(slurm, "POLL", 0.5)
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    daemons = []
    try:
        with (folder / "log").open("wb") as log:
            for command in (
                ["munged", "--force", "--foreground", f"--socket={folder}/munge/socket", *munge],
                ["slurmctld", "-D"],
                ["slurmd", "-D"],
            ):
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
                if command[0] == "munged":
                    eventually((folder / "munge" / "socket").exists)
        eventually(
            lambda: (
                subprocess.run(["sinfo", "--noheader", "--format=%T"], capture_output=True).stdout.strip() == b"idle"
            )
        )
        yield folder
    finally:
        if len(daemons) == 3:
            subprocess.run(["scancel", "--user=root"], capture_output=True)
            eventually(lambda: not subprocess.run(["squeue", "--noheader"], capture_output=True).stdout)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)


def jobs() -> dict[str, str]:
    """Job and its state, of those in the queue."""
    return dict(line.split("|") for line in ask("squeue", "--noheader", "--array", "--format=%F_%K|%T").split())


def records(out: Path) -> dict[str, list[dict]]:
    found = {}
    for path in out.iterdir():
        if not path.name.startswith("."):
            assert RunFolder(path).finished
            found[path.name] = [
                {key: value for key, value in record.items() if not key.endswith("_time")}
                for record in RunFolder(path).records
            ]
    return found


@real_slurm
def test_a_run_as_a_job(cluster: Path, tmp_path: Path) -> None:
    specs, seen = plan_runs(**{**SWEEP, "steps": 6}, algorithms=["ERM"], targets=["ink"]), []
    assert SlurmLauncher(workers=1).run(specs, tmp_path, on_event=lambda *event: seen.append(event), device="cpu") == {}
    (folder,) = (path for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert RunFolder(folder).finished and [record["step"] for record in RunFolder(folder).records] == [6]
    assert [event for event in seen if event[1] != "step"] == [(0, "done", str(folder))]
    assert SlurmLauncher().run(specs, tmp_path, device="cpu") == {}  # finished: no other job
    assert len(list(tmp_path.glob(".sweep/slurm/*.json"))) == 1 and not jobs()


@real_slurm
@pytest.mark.slow
def test_preempted_jobs_and_a_stopped_launcher_change_nothing(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    specs = plan_runs(**SWEEP, algorithms=[f"{tmp_path / 'own.py'}:Slow"], targets=["ink", "chalk"])
    out = tmp_path / "disturbed"
    monkeypatch.setenv("PAUSE", "0.1")

    def interrupt(run: int, kind: str, what: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(AidgnError, match=r"the jobs go on.*scancel --name=aidgn-") as stopped:
        launcher = SlurmLauncher(partition="short", time_limit="30", slurm=("comment=a test",))
        launcher.run(specs, out, on_event=interrupt, device="cpu", save_seconds=60.0)
    assert stopped.value.exit_code == 130
    first, second = sorted(jobs())
    assert "Comment=a test" in ask("scontrol", "show", "job", first)
    eventually(lambda: len(list(out.glob("*/results.jsonl"))) == 2)
    ask("scontrol", "requeue", first)  # as SLURM itself preempts: SIGTERM, and the job is queued again
    ask("scancel", "--signal=USR2", second)  # as before the end of a job's time: it queues itself again
    monkeypatch.setenv("PAUSE", "0")

    seen: list[tuple[int, str, Any]] = []
    failed = SlurmLauncher(time_limit="30").run(specs, out, on_event=lambda *event: seen.append(event), device="cpu")
    assert failed == {}
    assert Counter(run for run, kind, _ in seen if kind == "done") == {0: 1, 1: 1}
    assert not any(kind in ("retry", "failed") for _, kind, _ in seen)
    (array,) = (out / ".sweep" / "slurm").glob("*.json")  # nothing was submitted twice
    assert json.loads(array.read_text()) == [spec.key() for spec in specs]
    for log in out.glob("*/log.txt"):
        saved = [line.split()[-1] for line in log.read_text().splitlines() if "interrupted at step" in line]
        assert len(saved) == 1 and f"continued at step {saved[0]} of 60" in log.read_text()
    for spec in specs:
        train(spec, tmp_path / "undisturbed", device="cpu")
    assert records(out) == records(tmp_path / "undisturbed") and len(records(out)) == 2
    assert SlurmLauncher().run(specs, out, device="cpu") == {} and not jobs()  # finished runs need no job


@real_slurm
@pytest.mark.slow
def test_broken_and_cancelled_jobs_are_retried_then_set_aside(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More runs than an array may have here (2); one raises, one is killed, one is cancelled."""
    (tmp_path / "own.py").write_text(OWN)
    own = str(tmp_path / "own.py")
    specs = [
        *plan_runs(**SWEEP, algorithms=[f"{own}:Raises"], targets=["ink"]),
        *plan_runs(**SWEEP, algorithms=[f"{own}:Slow"], targets=["ink", "chalk"]),
    ]
    monkeypatch.setenv("PAUSE", "0.2")
    out, seen, done = tmp_path / "out", [], set()

    def disturb(run: int, kind: str, what: Any) -> None:
        seen.append((run, kind, what))
        if kind == "step" and run in (1, 2) and run not in done:
            done.add(run)
            attempt = journal.history(out, specs[run].key()).running
            assert attempt is not None
            if run == 1:
                os.kill(attempt.pid, signal.SIGKILL)
            else:
                array = next(
                    path for path in (out / ".sweep" / "slurm").glob("*.json") if specs[run].key() in path.read_text()
                )
                ask("scancel", f"--name={array.stem}")
        if len(done) == 2:
            monkeypatch.setenv("PAUSE", "0")

    failed = SlurmLauncher().run(specs, out, on_event=disturb, device="cpu", retries=1)
    assert list(failed) == [0] and "ValueError: no such luck" in failed[0]
    retried = Counter(run for run, kind, _ in seen if kind == "retry")
    assert retried == {0: 1, 1: 1, 2: 1}
    assert {run for run, kind, _ in seen if kind == "done"} == {1, 2}
    assert any("died" in {one.kind for one in journal.history(out, spec.key()).attempts} for spec in specs)
    with pytest.raises(AidgnError, match=r"SLURM did not take the jobs: .*partition"):
        SlurmLauncher(partition="nowhere").run(specs[:1], tmp_path / "other", device="cpu")
    assert not list((tmp_path / "other").glob(".sweep/slurm/*.json"))


# Mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("90", 90), ("30:00", 30), ("0:30", 1), ("12:00:00", 720), ("1-12", 2160), ("2-0:30", 2910), ("1-00:00:01", 1441)],
)
def test_time_limits_are_those_of_sbatch(limit: str, minutes: int) -> None:
    assert slurm._minutes(limit) == minutes


@pytest.mark.parametrize("limit", ["", "0", "soon", "1:2:3:4", "-5", "1-", "1.5"])
def test_what_is_no_time_limit(limit: str) -> None:
    with pytest.raises(ParameterError):
        slurm._minutes(limit)


def test_mistakes_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = plan_runs(**SWEEP, algorithms=["ERM"], targets=["ink"])
    with pytest.raises(AidgnError, match=r"gpus_per_run is 0\.5; expected a whole number"):
        SlurmLauncher(gpus_per_run=0.5).run(specs, tmp_path)
    with pytest.raises(AidgnError, match="workers is 0"):
        SlurmLauncher(workers=0).run(specs, tmp_path)
    with pytest.raises(AidgnError, match="slurm is =5; expected NAME=VALUE"):
        SlurmLauncher(slurm=("=5",)).run(specs, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AidgnError, match="--launcher slurm needs sbatch"):
        SlurmLauncher().run(specs, tmp_path)
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\necho not today >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(AidgnError, match="SLURM does not answer: not today"):
        SlurmLauncher().run(specs, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(AidgnError, match=r"pip install 'aidgn\[slurm\]'"):
        SlurmLauncher().run(specs, tmp_path)
