"""Batches of one (x, y) per source domain, and functions on them that objectives share."""

from collections.abc import Sequence

import torch
from torch import Tensor

Minibatches = Sequence[tuple[Tensor, Tensor]]  # one (x, y) per source domain


def join(minibatches: Minibatches) -> tuple[Tensor, Tensor]:
    """Join the batches of all domains into one (x, y), so that the network runs once."""
    return torch.cat([x for x, _ in minibatches]), torch.cat([y for _, y in minibatches])


def split(joined: Tensor, minibatches: Minibatches) -> tuple[Tensor, ...]:
    """Split a tensor over the joined batch into one per domain."""
    return joined.split([len(y) for _, y in minibatches])


def domain_ids(minibatches: Minibatches) -> Tensor:
    """Return the number of the domain of every sample of the joined batch."""
    return torch.cat([torch.full_like(y, domain) for domain, (_, y) in enumerate(minibatches)])


def paired(minibatches: Minibatches, i: int, j: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x_i, y_i, x_j, y_j of two domains, cut to the shorter batch."""
    (x_i, y_i), (x_j, y_j) = minibatches[i], minibatches[j]
    n = min(len(y_i), len(y_j))
    return x_i[:n], y_i[:n], x_j[:n], y_j[:n]


def random_cycle(n: int) -> list[tuple[int, int]]:
    """Return the n pairs of neighbours of n domains in a random circle."""
    order = torch.randperm(n).tolist()
    return [(order[k], order[(k + 1) % n]) for k in range(n)]
