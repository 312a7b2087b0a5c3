"""Every algorithm through `train`: interrupted and continued, it is what it would have been, to the bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from aidgn.algorithms import ALGORITHMS
from aidgn.errors import ParameterError
from aidgn.runs.checkpoints import read_weights
from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, train

# Settings under which everything that can change in four updates does.
BUSY: dict[str, dict[str, Any]] = {
    "IRM": {"irm_penalty_anneal_iters": 2},
    "VREx": {"vrex_penalty_anneal_iters": 2},
    "Fishr": {"penalty_anneal_iters": 2},
    "EQRM": {"eqrm_burnin_iters": 2, "eqrm_lr": 1e-3},
    "DANN": {"grad_penalty": 0.1, "mlp_dropout": 0.1},
    "CDANN": {"grad_penalty": 0.1},
    "MTL": {"mtl_ema": 0.5},
}


class Stop(Exception):
    pass


def check(
    algorithm: str,
    cuts: tuple[int, ...],
    out: Path,
    steps: int = 4,
    every: int = 2,
    average: str | None = None,
    warm_start: int = 0,
) -> None:
    """The run in one go, and the run that is thrown over after each of these steps, right after a save."""
    spec = RunSpec(
        "digits",
        algorithm,
        "chalk",
        steps=steps,
        eval_every=every,
        average=average,
        warm_start=warm_start,
        hyper_parameters={"batch_size": 4, "resnet_dropout": 0.1, **BUSY.get(algorithm, {})},
    )

    def stop(at: int) -> Any:
        def report(what: str, done: int, total: int, record: Mapping[str, Any] | None) -> None:
            if what == "train" and done == at:
                raise Stop

        return report

    whole = RunFolder(train(spec, out / "whole", device="cpu"))
    for cut in cuts:
        torch.rand(cut)  # the state of the global generators is the run's own
        with pytest.raises(Stop):
            train(spec, out / "cut", device="cpu", save_seconds=0.0, on_progress=stop(cut))
    cut_short = RunFolder(train(spec, out / "cut", device="cpu"))
    assert without_times(cut_short) == without_times(whole)
    assert [record["step"] for record in without_times(whole)] == list(range(every, steps + 1, every))
    for mine, other in ((cut_short.last, whole.last), (cut_short.model, whole.model)):
        assert content(mine) == content(other)
    log = (cut_short.path / "log.txt").read_text()
    assert all(f"continued at step {cut} of" in log for cut in cuts)


def content(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """The bytes of every tensor, and the metadata, which safetensors writes in any order."""
    tensors, metadata = read_weights(path)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, metadata


def without_times(folder: RunFolder) -> list[dict]:
    return [{key: value for key, value in record.items() if not key.endswith("_time")} for record in folder.records]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_continued_is_uninterrupted(algorithm: str, tmp_path: Path) -> None:
    # ARM's context network makes its evaluation the slowest by far.
    check(algorithm, (2, 3) if algorithm in BUSY else (3,), tmp_path, every=4 if algorithm == "ARM" else 2)


@pytest.mark.parametrize("average", ["sma", "swad"])
@pytest.mark.parametrize("algorithm", ["AIDGN", "ERM"])
def test_continued_average_is_uninterrupted(
    algorithm: str, average: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps enough for both averages to begin, the valley's at its third evaluation, and cuts before and after."""
    from aidgn.training.averaging import SMA

    monkeypatch.setattr(SMA, "start", 2)
    check(algorithm, (3, 7, 9), tmp_path, average=average, steps=10)


@pytest.mark.parametrize("average", [None, "sma:1"])
def test_continued_warm_start_is_uninterrupted(average: str | None, tmp_path: Path) -> None:
    check("AIDGN", (2, 4, 5), tmp_path, average=average, steps=6, warm_start=4)


def test_warm_start_trains_the_head_alone(tmp_path: Path) -> None:
    folders = {
        (steps, warm_start): train(
            RunSpec("digits", "ERM", "chalk", steps=steps, eval_every=steps, warm_start=warm_start),
            tmp_path,
            device="cpu",
        )
        for steps, warm_start in ((4, 3), (5, 3), (4, 0))
    }
    first, later, without = (read_weights(folder / "last.safetensors")[0] for folder in folders.values())
    conv = next(name for name in first if name.startswith("featurizer") and first[name].dim() == 4)
    # Adam's first step moves a weight by the learning rate at most, here after three steps of the head alone.
    assert (first[conv] - later[conv]).abs().max() <= 1.01e-3
    assert (first[conv] - without[conv]).abs().max() > 1.5e-3
    assert RunFolder(folders[4, 3]).identity["warm_start"] == 3
    assert "warm_start" not in RunFolder(folders[4, 0]).identity
    with pytest.raises(ParameterError):
        train(RunSpec("digits", "ERM", "chalk", steps=4, warm_start=4), tmp_path, device="cpu")
