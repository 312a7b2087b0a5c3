"""Weight averages against means of the weights, written down step by step."""

import numpy as np
import pytest
import torch
from torch import nn

from aidgn.training.averaging import RunningAverage, Valley


def walk(steps: int) -> tuple[nn.Module, list[np.ndarray]]:
    """A module and the weights it will have after steps 1, 2, ..."""
    rng = np.random.default_rng(0)
    return nn.Linear(3, 2).double(), [rng.normal(size=(2, 3)) for _ in range(steps)]


def put(module: nn.Linear, weight: np.ndarray) -> None:
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(weight))


def test_running_average_is_the_mean_from_the_start_on() -> None:
    module, path = walk(12)
    average = RunningAverage(module, start=4)
    for step, weight in enumerate(path, 1):
        put(module, weight)
        average.after_step(step)
        expected = weight if step <= 4 else np.mean(path[3:step], axis=0)
        with average.in_place():
            np.testing.assert_allclose(module.weight.detach().numpy(), expected, rtol=1e-12)
        np.testing.assert_array_equal(module.weight.detach().numpy(), weight)  # the trained weights are back


def valley_by_definition(losses: list[float]) -> tuple[int, int] | None:
    """First and last evaluation (0-based) of the valley, by its definition; None if it has not started."""
    for start in range(len(losses) - 2):
        if losses[start] == min(losses[start:start + 3]):
            break
    else:
        return None
    limit = 1.3 * np.mean(losses[start:start + 3])
    for t in range(start + 3, len(losses) - 5):
        if all(loss > limit for loss in losses[t:t + 6]):
            return start, t - 1
    last = max(t for t in range(start, len(losses)) if losses[t] <= limit or t < start + 3)
    return start, last


@pytest.mark.parametrize("seed", range(12))
def test_swad_averages_every_step_of_the_valley(seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = (np.concatenate([np.linspace(2, 1, 4), np.ones(4), np.linspace(1, 2.5, 14)])
              + rng.uniform(0, 0.3, 22)).tolist()
    module, path = walk(3 * len(losses))
    average = Valley(module)
    for number, loss in enumerate(losses):
        for step in range(3 * number, 3 * number + 3):
            put(module, path[step])
            average.after_step(step + 1)
        average.after_evaluation(loss)
        found = valley_by_definition(losses[:number + 1])
        expected = path[3 * number + 2] if found is None else np.mean(path[3 * found[0]:3 * found[1] + 3], axis=0)
        with average.in_place():
            np.testing.assert_allclose(module.weight.detach().numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("kind", [RunningAverage, Valley])
def test_saved_and_loaded_goes_on_alike(kind: type[RunningAverage], tmp_path) -> None:  # type: ignore[no-untyped-def]
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
