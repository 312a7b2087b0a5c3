"""The training and validation images of every domain, the same as DomainBed's."""

import hashlib

import numpy as np

VALIDATION_SHARE = 0.2


def train_val_indices(
    count: int, trial: int, domain: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Divide the positions 0 to count - 1 of a domain's images into training and validation.

    As in DomainBed, numpy's RandomState with the seed int(md5(str((trial, domain)))) mod 2^31 shuffles the positions.
    The first floor(0.2 count) are for validation, and both parts keep the shuffled order.

    With groups, whole groups are for validation. They are taken in the order in which they first appear among the
    shuffled positions, as long as a group keeps the number of images at floor(0.2 count) or less. If every group is
    larger, the smallest one is taken.

    Args:
        count: Images of the domain.
        trial: Seed of the split.
        domain: Number of the domain.
        groups: Group of each image, int64 [count]; -1 stands for images that are for training. None without groups.
    """
    seed = int(hashlib.md5(str((int(trial), int(domain))).encode(), usedforsecurity=False).hexdigest(), 16) % 2**31
    positions = np.arange(count)
    np.random.RandomState(seed).shuffle(positions)
    validation = int(count * VALIDATION_SHARE)
    if groups is None:
        return positions[validation:], positions[:validation]
    chosen = np.isin(groups[positions], choose_groups(groups[positions], validation))
    return positions[~chosen], positions[chosen]


def choose_groups(groups: np.ndarray, limit: int) -> list[int]:
    """Choose groups with at most `limit` images together; at least one, but never all.

    Args:
        groups: Group of each image in shuffled order; -1 is never chosen.
        limit: Number of images.
    """
    names, first, sizes = np.unique(groups, return_index=True, return_counts=True)
    order = [number for number in np.argsort(first).tolist() if names[number] >= 0]
    if limit < 1 or len(names) < 2 or not order:
        return []
    chosen: list[int] = []
    total = 0
    for number in order:
        if total + sizes[number] <= limit:
            chosen.append(int(names[number]))
            total += sizes[number]
    return chosen or [int(names[min(order, key=lambda number: sizes[number])])]
