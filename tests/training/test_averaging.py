"""Weight averages against means of the weights, written down step by step."""

import json
from collections.abc import Callable
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import torch
from torch import nn

from aidgn.errors import UnknownNameError
from aidgn.inference import load_model
from aidgn.runs.checkpoints import read_weights
from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, trainer
from aidgn.training.averaging import SMA, SWAD, create_average


def walk(steps: int) -> tuple[nn.Module, list[np.ndarray]]:
    """A module and the weights it will have after steps 1, 2, ..."""
    rng = np.random.default_rng(0)
    return nn.Linear(3, 2).double(), [rng.normal(size=(2, 3)) for _ in range(steps)]


def put(module: nn.Linear, weight: np.ndarray) -> None:
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(weight))


def test_running_average_is_the_mean_from_the_start_on() -> None:
    module, path = walk(12)
    average = create_average("sma:4", module)
    for step, weight in enumerate(path, 1):
        put(module, weight)
        average.after_step(step)
        expected = weight if step <= 4 else np.mean(path[3:step], axis=0)
        with average.applied():
            np.testing.assert_allclose(module.weight.detach().numpy(), expected, rtol=1e-12)
        np.testing.assert_array_equal(module.weight.detach().numpy(), weight)  # the trained weights are back


def test_steps_of_the_head_alone_are_not_averaged() -> None:
    module, path = walk(12)
    average = create_average("sma:2", module, warm_start=5)
    assert average.first_step(10) == 7
    for step, weight in enumerate(path, 1):
        put(module, weight)
        average.after_step(step)
        expected = weight if step <= 7 else np.mean(path[6:step], axis=0)
        with average.applied():
            np.testing.assert_allclose(module.weight.detach().numpy(), expected, rtol=1e-12)


def test_valley_begins_after_the_steps_of_the_head_alone() -> None:
    module, path = walk(12)
    average = create_average("swad", module, warm_start=4)
    for step, weight in enumerate(path, 1):
        put(module, weight)
        average.after_step(step)
        if step % 2 == 0:
            average.after_evaluation({2: 0.1, 4: 0.2}.get(step, 1.0))
    with average.applied():
        np.testing.assert_allclose(module.weight.detach().numpy(), np.mean(path[4:], axis=0), rtol=1e-12)


@pytest.mark.parametrize("name", ["ema", ":3"])
def test_other_averages_are_refused(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        create_average(name, nn.Linear(3, 2))
    assert caught.value.name == name


def test_the_start_is_part_of_a_runs_name(digits_run: Callable[..., Path], tmp_path: Path) -> None:
    plain, later, sooner = (digits_run(tmp_path, "ERM", average=average) for average in (None, "sma", "sma:1"))
    records = [RunFolder(folder).records for folder in (plain, later, sooner)]
    assert [each[-1]["args"]["algorithm"] for each in records] == ["ERM", "ERM+SMA", "ERM+SMA:1"]
    weights = [read_weights(folder / "last.safetensors")[0] for folder in (plain, later, sooner)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])  # of four steps none is averaged
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert load_model(sooner, "cpu").predict(np.zeros((1, 28, 28, 3), np.uint8)).labels


def valley_by_definition(losses: list[float]) -> tuple[int, int] | None:
    """First and last evaluation (0-based) of the valley, by its definition; None if it has not started."""
    for start in range(len(losses) - 2):
        if losses[start] == min(losses[start : start + 3]):
            break
    else:
        return None
    limit = 1.3 * np.mean(losses[start : start + 3])
    for t in range(start, len(losses) - 5):
        if all(loss > limit for loss in losses[t : t + 6]):
            return start, t - 1
    return start, max(t for t in range(start, len(losses)) if losses[t] <= limit)


@pytest.mark.parametrize("noise", [0.3, 5.0])  # with much of it the valley may end where it starts
@pytest.mark.parametrize("seed", range(12))
def test_swad_averages_every_step_of_the_valley(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    losses = (
        np.concatenate([np.linspace(2, 1, 4), np.ones(4), np.linspace(1, 2.5, 14)]) + rng.uniform(0, noise, 22)
    ).tolist()
    module, path = walk(3 * len(losses))
    average = SWAD(module)
    for number, loss in enumerate(losses):
        for step in range(3 * number, 3 * number + 3):
            put(module, path[step])
            average.after_step(step + 1)
        average.after_evaluation(loss)
        found = valley_by_definition(losses[: number + 1])
        expected = path[3 * number + 2] if found is None else np.mean(path[3 * found[0] : 3 * found[1] + 3], axis=0)
        with average.applied():
            np.testing.assert_allclose(module.weight.detach().numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("kind", [SMA, SWAD])
def test_saved_and_loaded_goes_on_alike(kind: type[SMA], tmp_path) -> None:  # type: ignore[no-untyped-def]
    losses = [3, 2, 1, 1.1, 1.2, 1.5, 1.0, 1.9, 1.9]
    module, path = walk(2 * len(losses))
    results = []
    for cut in (None, 5, 9, 12):
        average = kind(module)
        average.start = 3
        for step, weight in enumerate(path, 1):
            put(module, weight)
            average.after_step(step)
            if step % 2 == 0:
                average.after_evaluation(losses[step // 2 - 1])
            if step == cut:
                torch.save(average.state(), tmp_path / "state.pt")
                average = kind(module)
                average.start = 3
                average.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
        results.append(average.average[0].numpy())
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_benchmark_equals_training_with_the_option(
    digits_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SMA, "start", 1)
    alone = [digits_run(tmp_path / "alone", "ERM", average=average) for average in (None, "sma")]
    monkeypatch.setattr(trainer, "Trainer", trainer.Trainer)  # the benchmark puts its own there
    benchmark = run_path(str(Path(__file__).parents[2] / "benchmarks" / "averaging.py"))
    spec = RunSpec("digits", "ERM", "chalk", steps=4, eval_every=2, hyper_parameters={"batch_size": 8})
    benchmark["measure_averages"]()
    trainer.train(spec, tmp_path / "together", device="cpu")

    def records(folder: Path) -> list[dict[str, object]]:
        lines = (folder / "results.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if not key.endswith("_time")} for line in lines]

    plain, averaged = (records(folder) for folder in alone)
    assert len(plain) == 2 and plain != averaged
    assert [records(tmp_path / "together" / folder.name) for folder in alone] == [plain, averaged]
