"""Learning-rate schedules against PyTorch's schedulers, and a run that follows one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler

from aidgn.algorithms import Algorithm
from aidgn.data import load_dataset
from aidgn.errors import ParameterError
from aidgn.runs.spec import RunSpec
from aidgn.training.schedule import learning_rate_factor

STEPS = 20


def expected(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], steps: int) -> list[float]:
    """Learning rates that a PyTorch scheduler gives to an initial rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("constant", lambda optimizer: lr_scheduler.ConstantLR(optimizer, 1.0)),
        ("cosine", lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS)),
        ("linear", lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)),
        ("halve:5,12", lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [5, 12], 0.5)),
    ],
)
@pytest.mark.parametrize("warmup", [0, 4])
def test_factors_are_those_of_pytorch(schedule: str, make: Callable, warmup: int) -> None:
    if schedule.startswith("halve"):
        rates = expected(make, STEPS + warmup)[warmup:]  # milestones count from the first step of the run
    else:
        rates = expected(make, STEPS)
    factors = [learning_rate_factor(step, STEPS + warmup, schedule, warmup) for step in range(STEPS + warmup)]
    assert factors[:warmup] == [(n + 1) / warmup for n in range(warmup)]
    assert factors[warmup:] == pytest.approx(rates)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_decay_may_end_after_the_run(kind: str) -> None:
    whole = [learning_rate_factor(step, STEPS, kind, 4) for step in range(STEPS)]
    assert [learning_rate_factor(step, 9, f"{kind}:{STEPS}", 4) for step in range(9)] == whole[:9]


def test_without_a_schedule_rates_are_halved_at_the_milestones() -> None:
    factors = [learning_rate_factor(step, 6, milestones=(2, 4)) for step in range(6)]
    assert factors == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_a_run_trains_at_the_rates_of_its_schedule(
    digits_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    scale_lr = Algorithm.scale_lr

    def noted(algorithm: Algorithm, factor: float) -> None:
        rates.append(factor)
        scale_lr(algorithm, factor)

    monkeypatch.setattr(Algorithm, "scale_lr", noted)
    digits_run(tmp_path, "ERM", steps=4, schedule="linear", warmup=2)
    assert rates == [1 / 2, 1, 1 / 2]  # the third step has the rate of the second


def test_unset_schedules_keep_the_identity_and_the_milestones() -> None:
    digits = load_dataset("digits")
    plain = RunSpec("digits", "ERM", "ink").resolved(digits).identity(digits, "")
    assert not {"schedule", "warmup"} & plain.keys()
    cosine = RunSpec("digits", "ERM", "ink", schedule="cosine", warmup=5).resolved(digits).identity(digits, "")
    assert cosine == {**plain, "schedule": "cosine", "warmup": 5}


def test_a_schedule_replaces_the_milestones_of_the_data_set() -> None:
    digits = load_dataset("digits")
    digits = replace(digits, info=replace(digits.info, lr_milestones=(10,)))
    assert RunSpec("digits", "AIDGN", "ink").resolved(digits).lr_milestones == (10,)
    assert RunSpec("digits", "AIDGN", "ink", schedule="constant").resolved(digits).lr_milestones == ()


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "step"},
        {"schedule": "halve:"},
        {"schedule": "cosine:0"},
        {"schedule": "constant:9"},
        {"schedule": "linear:4", "steps": 5},
        {"warmup": -1},
        {"steps": 5, "warmup": 5},
    ],
)
def test_unusable_schedules_are_refused(options: dict) -> None:
    with pytest.raises(ParameterError):
        RunSpec("digits", "ERM", "ink", **options).resolved(load_dataset("digits"))
