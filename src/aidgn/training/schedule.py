"""Learning-rate schedules."""

import math
from collections.abc import Sequence


def learning_rate_factor(
    step: int, steps: int, schedule: str | None = None, warmup: int = 0, milestones: Sequence[int] = ()
) -> float:
    """Return the factor on the initial learning rate.

    Args:
        step: Updates done so far.
        steps: Updates of the whole run.
        schedule: constant, cosine, linear, or halve:N,M,...; None halves at `milestones`.
        warmup: Updates over which the rate first rises linearly to its initial value.
        milestones: Steps at which the rate is halved if there is no schedule.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if schedule == "linear":
        return 1 - progress
    if schedule is not None:
        milestones = [int(number) for number in schedule.removeprefix("halve:").split(",")]
    return 0.5 ** sum(step >= milestone for milestone in milestones)
