"""NVIDIA's two commands are scripts here, as there is no GPU; the processes that they start and see are real."""

import os
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from aidgn.runs.folder import RunFolder
from aidgn.sweeps.launchers import gpu_sharing, local
from aidgn.sweeps.launchers.local import LocalLauncher
from aidgn.sweeps.plan import plan_runs

Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a shell script on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)

    def write(name: str, script: str) -> Path:
        path = folder / name
        path.write_text("#!/bin/sh\n" + dedent(script))
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def server(install: Install, tmp_path: Path) -> Path:
    """The file to which the command of MPS writes how it was called."""
    calls = tmp_path / "calls"
    install(
        gpu_sharing.CONTROL,
        f"""
        echo "$1$([ -z "$1" ] && cat) $CUDA_MPS_PIPE_DIRECTORY ${{CUDA_VISIBLE_DEVICES:-all}}" >> {calls}
        """,
    )
    return calls


@pytest.mark.parametrize(
    ("printed", "gpus", "cores", "expected"),
    [
        ("9400, 143771", 1, 16, 4),  # memory for nine, cores for eight
        ("9400, 40960", 1, 16, 2),
        ("9400, 24576", 1, 16, 1),
        ("9400, 143771", 1, 6, 3),
        ("9400, 143771", 4, 16, 2),
        ("9400, 143771", 8, 8, 1),
        ("0, 143771", 1, 16, 1),
        ("[N/A], [N/A]", 1, 16, 1),
    ],
)
def test_memory_and_cores_limit_runs(printed: str, gpus: int, cores: int, expected: int, install: Install) -> None:
    install("nvidia-smi", f'case "$*" in *--id=GPU-9a2*memory.used,memory.total*) echo "{printed}";; *) exit 9;; esac')
    assert gpu_sharing.count_runs("GPU-9a2", gpus, cores) == expected


def test_no_nvidia_smi_is_one_run(install: Install) -> None:
    assert gpu_sharing.count_runs("0", 1, 16) == 1


def test_server_lives_as_long_as_the_block(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr(gpu_sharing, "PROBE", "import os; assert os.path.isdir(os.environ['CUDA_MPS_PIPE_DIRECTORY'])")
    with gpu_sharing.start_mps() as works:
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert works and server.read_text() == f"-d {folder} all\n"
        with gpu_sharing.start_mps() as again:  # a sweep below a server that somebody started
            assert again and os.environ["CUDA_MPS_PIPE_DIRECTORY"] == folder
        assert len(server.read_text().splitlines()) == 1
    assert server.read_text().splitlines()[1:] == [f"quit {folder} all"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and not Path(folder).exists()


@pytest.mark.parametrize(
    "probe", ["import sys; sys.exit('MPS client failed to connect')", "import time; time.sleep(9)"]
)
def test_server_that_serves_nobody_is_ended(probe: str, server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sharing, "PROBE", probe)
    monkeypatch.setattr(gpu_sharing, "SECONDS", 2.0)
    with gpu_sharing.start_mps() as works:
        assert not works and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert [line.split()[0] for line in server.read_text().splitlines()] == ["-d", "quit"]


def test_no_server_without_nvidias_command(install: Install) -> None:
    with gpu_sharing.start_mps() as works:
        assert not works


def test_more_workers_start_when_a_run_shows_its_memory(
    server: Path, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_sharing, "PROBE", "pass")
    monkeypatch.setattr("aidgn.data.row_cache.usable_cores", lambda: 6)
    monkeypatch.setattr(local, "choose_places", lambda *_: [local.WorkerDevice("cpu", "0")])
    install("nvidia-smi", "echo 1000, 10000")
    started: list[int] = []
    start = local.WorkerPool.start

    def count(pool: local.WorkerPool, place: local.WorkerDevice) -> None:
        start(pool, place)
        started.append(sum(event == "step" and steps > 1 for _, event, steps in events))

    monkeypatch.setattr(local.WorkerPool, "start", count)
    events: list[tuple[int, str, object]] = []
    settings = {"algorithms": ["ERM"], "trials": 2, "steps": 4, "eval_every": 1, "hyper_parameters": {"batch_size": 4}}
    specs = plan_runs(datasets=["digits"], **settings)
    launcher = LocalLauncher(share_gpus=True)
    failed = launcher.run(specs, tmp_path / "out", on_event=lambda *event: events.append(event), device="cpu")
    assert failed == {} and len(RunFolder.find(tmp_path / "out", "*")) == len(specs) == 8
    assert len(started) == 3  # by the six cores
    assert started[0] == 0 and all(started[1:])  # the others after the first has evaluated
    assert "quit" in server.read_text()


def test_a_number_of_workers_is_kept(server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sharing, "PROBE", "pass")
    monkeypatch.setattr(local, "choose_places", lambda _, workers, __: [local.WorkerDevice("cpu", "0")] * workers)
    monkeypatch.setattr(local, "count_runs", lambda *_: pytest.fail("the number was given"))
    specs = plan_runs(
        datasets=["digits"], algorithms=["ERM"], targets=["ink"], trials=2, steps=2, hyper_parameters={"batch_size": 4}
    )
    assert LocalLauncher(2, share_gpus=True).run(specs, tmp_path / "out", device="cpu") == {}
