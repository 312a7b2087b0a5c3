"""The training and validation images of every domain, the same as DomainBed's."""

import hashlib

import numpy as np

VALIDATION_SHARE = 0.2


def train_val_indices(count: int, trial: int, domain: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide the positions 0 to count - 1 of a domain's images into training and validation.

    As in DomainBed, numpy's RandomState with the seed int(md5(str((trial, domain)))) mod 2^31 shuffles the positions.
    The first floor(0.2 count) are for validation, and both parts keep the shuffled order.

    Args:
        count: Images of the domain.
        trial: Seed of the split.
        domain: Number of the domain.
    """
    seed = int(hashlib.md5(str((int(trial), int(domain))).encode(), usedforsecurity=False).hexdigest(), 16) % 2**31
    positions = np.arange(count)
    np.random.RandomState(seed).shuffle(positions)
    validation = int(count * VALIDATION_SHARE)
    return positions[validation:], positions[:validation]
