"""What all adaptations share: the stream of batches, the features of one batch, the entropy of predictions."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from aidgn.algorithms.base import Algorithm
from aidgn.errors import AidgnError


def batches(n: int, size: int = 32) -> list[range]:
    """The positions 0 .. n - 1 in order, `size` at a time; the last batch may be smaller, but a single image joins the
    batch before it, as one image has no batch statistics.

    >>> batches(65)
    [range(0, 32), range(32, 65)]
    """
    if size < 1:
        raise AidgnError(f"A batch must have at least 1 image; size is {size}.")
    starts = list(range(0, n, size))
    if len(starts) > 1 and n - starts[-1] == 1 < size:
        starts.pop()
    return [range(start, end) for start, end in pairwise([*starts, n])]


def check(algorithm: Algorithm) -> None:
    if not isinstance(getattr(algorithm, "classifier", None), nn.Module):
        raise AidgnError(
            f"{type(algorithm).__name__} has no classifier to adapt: an algorithm with `features(x)` and a "
            "module `classifier` is needed."
        )


@torch.no_grad()
def features(algorithm: Algorithm, x: Tensor) -> Tensor:
    """What the trained classifier sees of x."""
    with evaluating(algorithm):
        return algorithm.features(x)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards each of its parts has the mode back that it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def entropy(logits: Tensor) -> Tensor:
    """H = - sum_c p_c log p_c of p = softmax(logits), for every sample."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
