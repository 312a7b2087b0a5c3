"""Parts that all adaptation methods share: batches, the features of a batch, the entropy of predictions."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from aidgn.algorithms.base import Algorithm
from aidgn.errors import AidgnError, ParameterError


def batches(n: int, size: int = 32) -> list[range]:
    """Cut the positions 0 .. n - 1 into batches, in order.

    The last batch may be smaller. A single last image joins the batch before it, because one image has no statistics.

    Args:
        n: Number of images.
        size: Images per batch.

    >>> batches(65)
    [range(0, 32), range(32, 65)]
    """
    if size < 1:
        raise ParameterError("size", size, "at least 1 image per batch")
    starts = list(range(0, n, size))
    if len(starts) > 1 and n - starts[-1] == 1 < size:
        starts.pop()
    return [range(start, end) for start, end in pairwise([*starts, n])]


def check_classifier(algorithm: Algorithm) -> None:
    """Raise an error if an algorithm has no classifier module."""
    if not isinstance(getattr(algorithm, "classifier", None), nn.Module):
        raise AidgnError(
            f"{type(algorithm).__name__} has no classifier to adapt: adaptation needs `features(x)` and a module "
            "`classifier`."
        )


@torch.no_grad()
def compute_features(algorithm: Algorithm, x: Tensor) -> Tensor:
    """Compute the features of images in evaluation mode."""
    with evaluation_mode(algorithm):
        return algorithm.features(x)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch a module to evaluation mode inside the context, then restore the mode of each of its parts."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def entropy(logits: Tensor) -> Tensor:
    """Compute H = - sum_c p_c log p_c of p = softmax(logits) for every sample."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
