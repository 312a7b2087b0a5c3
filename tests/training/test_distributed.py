"""Several processes compute what one does: every algorithm in float64, whole runs, and whatever of them is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from aidgn.algorithms import ALGORITHMS, create
from aidgn.errors import AidgnError
from aidgn.runs.checkpoints import read_weights
from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, distributed, train
from aidgn.training.featurizer import Featurizer
from aidgn.training.worker_group import Worker, WorkerCrash, wait_for_result

Start = Callable[..., Any]
SIZES = (5, 3, 3)  # samples of the three source domains: 11 do not halve
BUSY: dict[str, dict[str, Any]] = {
    "IRM": {"irm_penalty_anneal_iters": 1},
    "VREx": {"vrex_penalty_anneal_iters": 1},
    "Fishr": {"penalty_anneal_iters": 1},
    "EQRM": {"eqrm_burnin_iters": 1, "eqrm_lr": 1e-3},
    "DANN": {"grad_penalty": 0.1, "mlp_dropout": 0.1},
    "CDANN": {"grad_penalty": 0.1},
    "MTL": {"mtl_ema": 0.5},
}


class Network(nn.Sequential):
    num_features = 5


def updated(name: str, processes: int, batch_norm: bool = False) -> dict[str, Tensor]:
    """All weights and buffers after four updates, on float64 images, the same in every process and number of them."""
    torch.manual_seed(7)
    layers = [
        nn.Conv2d(3 + ALGORITHMS[name].extra_channels, 5, 3),
        *[nn.BatchNorm2d(5)] * batch_norm,
        nn.ReLU(),
        nn.Conv2d(5, 5, 2),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    featurizer = Featurizer(Network(*layers), "float32", compiled=False)
    hook = None
    if processes > 1:
        featurizer, hook = distributed.shard_featurizer(featurizer)
    algorithm = (
        create(
            name, featurizer, 4, 3, **{"lr": 1e-2, "weight_decay": 1e-3, "resnet_dropout": 0.1, **BUSY.get(name, {})}
        )
        .double()
        .train()
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        torch.manual_seed(step)
        np.random.seed(step)
        batches = [
            (
                torch.randn(n, 3, 6, 6, generator=generator, dtype=torch.float64) + 0.3 * d,
                torch.randint(4, (n,), generator=generator),
            )
            for d, n in enumerate(SIZES)
        ]
        terms = algorithm.update(batches)
        distributed.sync_weights(algorithm)
    if hook:
        hook.remove()
    return {**algorithm.state_dict(), **terms}


CASES = [(name, False) for name in ALGORITHMS] + [
    (name, True) for name in ("ERM", "AIDGN", "MLDG", "DANN", "SagNet", "CORAL")
]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def of_processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two, or three, processes ends with, for every case."""
    count, folder = request.param, tmp_path_factory.mktemp("processes")
    group = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(count), str(folder)], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        for rank in range(count)
    ]
    assert [process.wait(600) for process in group] == [0] * count
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.mark.parametrize(("name", "batch_norm"), CASES)
def test_updates_are_those_of_one_process(name: str, batch_norm: bool, of_processes: list[dict[str, Any]]) -> None:
    expected = updated(name, 1, batch_norm)
    for results in of_processes:
        mine = results[f"{name} {batch_norm}"]
        assert mine.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-8, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")


def worker(rank: int, count: int, folder: str) -> None:
    distributed.init_process_group(rank, count, torch.device("cpu"), f"{folder}/rendezvous")
    results = {f"{name} {norm}": updated(name, count, norm) for name, norm in CASES}
    torch.save(results, f"{folder}/{rank}.pt")


# Whole runs -----------------------------------------------------------------------------------------------------------


def spec(**changes: Any) -> RunSpec:
    return RunSpec(
        **{
            "dataset": "digits",
            "algorithm": "AIDGN",
            "target": "chalk",
            "steps": 12,
            "eval_every": 4,
            "hyper_parameters": {"batch_size": 8, "resnet_dropout": 0.1},
            **changes,
        }
    )


def children(process: subprocess.Popen) -> list[int]:
    """Process ids, the run's first process first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == process.pid and state != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def same_run(folder: Path, alone: Path, names: tuple[str, ...] = ("model", "last")) -> None:
    """Within rounding, which twelve steps of Adam have spread a little."""
    assert folder.name == alone.name  # the number of devices is no part of what a run is
    ours, theirs = RunFolder(folder).records, RunFolder(alone).records
    assert [record["step"] for record in ours] == [record["step"] for record in theirs] == [4, 8, 12]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        for key in mine:
            if key.endswith("_acc"):
                assert mine[key] == pytest.approx(other[key], abs=0.012)  # one image of 89
    for name in names:
        mine, other = (read_weights(each / f"{name}.safetensors")[0] for each in (folder, alone))
        assert mine.keys() == other.keys()
        for key in mine:
            assert (mine[key] - other[key]).norm() <= 1e-3 * other[key].norm() + 1e-6, key


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(spec(), tmp_path_factory.mktemp("alone"), device="cpu")


def test_killed_process_is_replaced(alone: Path, start: Start, tmp_path: Path) -> None:
    process = start(spec(), tmp_path, devices=2)
    process.wait_for("train 5")
    os.kill(children(process)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "Process 2 of 2 of this run was killed (SIGKILL). The run goes on" in errors
    assert "Traceback" not in errors
    folder = next(tmp_path.iterdir())
    same_run(folder, alone)
    log = (folder / "log.txt").read_text()
    assert "started at step 0 of 12 on 2 x" in log and "continued at step" in log


@pytest.mark.parametrize("then", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ctrl_c_saves_and_another_number_of_devices_goes_on(
    then: int, alone: Path, start: Start, tmp_path: Path
) -> None:
    process = start(spec(), tmp_path, devices=2)
    process.wait_for("train 5")
    crew = children(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0 and "The same command continues" in errors
    assert len(crew) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in crew)
    assert train(spec(), tmp_path, device="cpu", devices=then) == next(tmp_path.iterdir())
    same_run(next(tmp_path.iterdir()), alone)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["train 0", "train 3", "train 8"])
def test_who_started_it_is_killed(moment: str, alone: Path, start: Start, tmp_path: Path) -> None:
    """The processes save and end by themselves; the same command, at once, waits for nothing but the lock."""
    process = start(spec(), tmp_path, devices=2)
    process.wait_for(moment)
    crew = children(process)
    process.kill()
    process.wait()
    until = time.monotonic() + 300
    while any(Path(f"/proc/{pid}").exists() for pid in crew[:1]) and time.monotonic() < until:
        time.sleep(0.1)
    assert time.monotonic() < until
    assert start(spec(), tmp_path, devices=2).wait(300) == 0
    same_run(next(tmp_path.iterdir()), alone)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_again_and_again(rank: int, start: Start, tmp_path: Path) -> None:
    """A process that is killed at every start ends the run with a sentence, not with a hang."""
    process = start(spec(), tmp_path, devices=2)
    killed: set[int] = set()
    while process.poll() is None:
        crew = children(process)
        if len(crew) == 2 and crew[rank] not in killed:
            time.sleep(0.5)
            killed.add(crew[rank])
            with suppress(ProcessLookupError):
                os.kill(crew[rank], signal.SIGKILL)
        time.sleep(0.05)
    assert len(killed) == 3 and "given up" in str(process.stderr and process.stderr.read())


def test_no_devices(tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match="devices is 0"):
        train(spec(), tmp_path, device="cpu", devices=0)


def test_of_several_errors_the_first_is_told() -> None:
    """An error in one process leads to others where they wait for it."""
    crew = []
    for _ in range(2):
        ours, theirs = Pipe()
        crew.append((Worker(subprocess.Popen(["true"]), ours), theirs))
    crew[1][1].send(("end", WorkerCrash("the reason")))
    threading.Timer(0.5, crew[0][1].send, [("end", WorkerCrash("what followed"))]).start()
    with pytest.raises(WorkerCrash, match="the reason"):
        wait_for_result([worker for worker, _ in crew], lambda *_: None, threading.Event())


@pytest.mark.slow
def test_fewer_batches_to_evaluate_than_devices(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (3, 2, 8, 32, 32, 3), dtype=np.uint8)
    for domain, label, number in np.ndindex(pixels.shape[:3]):
        path = tmp_path / "data" / "abc"[domain] / "xy"[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[domain, label, number]).save(path)
    few = RunSpec(str(tmp_path / "data"), "ERM", "a", steps=2, image_size=32, hyper_parameters={"batch_size": 4})
    ours, theirs = (
        RunFolder(train(few, tmp_path / str(devices), device="cpu", devices=devices)).records[-1] for devices in (3, 1)
    )
    for key in theirs:
        if key.endswith("_acc"):
            assert ours[key] == theirs[key]


@pytest.mark.slow
def test_a_mistake_that_the_processes_find_is_told_here(tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match=r"1 images .*2 devices.*--batch-size"):
        train(
            spec(algorithm="MLDG", target=("chalk", "ink"), hyper_parameters={"batch_size": 1}),
            tmp_path,
            device="cpu",
            devices=2,
        )


def test_a_backbone_with_random_layers_is_refused() -> None:
    from aidgn import backbones

    network = backbones.create("torchvision/mobilenet_v3_small", weights="none")
    with pytest.raises(AidgnError, match=r"random numbers inside \(Dropout\).*--devices 1"):
        distributed.shard_featurizer(Featurizer(network, "float32", compiled=False))


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
