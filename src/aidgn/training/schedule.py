"""Learning-rate schedules."""

import math
from collections.abc import Sequence

from aidgn.runs.options import parse_schedule


def learning_rate_factor(
    step: int, steps: int, schedule: str | None = None, warmup: int = 0, milestones: Sequence[int] = ()
) -> float:
    """Return the factor on the initial learning rate.

    Args:
        step: Updates done so far.
        steps: Updates of the whole run.
        schedule: constant, cosine or linear, which fall to 0 at the last step, cosine:N or linear:N, which fall to 0 at
            step N, or halve:N,M,...; None halves at `milestones`.
        warmup: Updates over which the rate first rises linearly to its initial value.
        milestones: Steps at which the rate is halved if there is no schedule.
    """
    if step < warmup:
        return (step + 1) / warmup
    shape, numbers = parse_schedule(schedule)
    end = numbers[0] if numbers else steps
    progress = (step - warmup) / max(end - warmup, 1)
    if shape == "constant":
        return 1.0
    if shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if shape == "linear":
        return 1 - progress
    if shape == "halve":
        milestones = numbers
    return 0.5 ** sum(step >= milestone for milestone in milestones)
