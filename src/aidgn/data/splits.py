"""The in and out split of every domain, the same as DomainBed's."""

import hashlib

import numpy as np

HOLDOUT = 0.2


def split(n: int, trial: int, domain: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions 0..n-1 shuffled by a seed made of (trial, domain number): (in, out), out the first floor(0.2 n).

    The seed is int(md5(str((trial, domain)))) mod 2^31, for numpy's RandomState, as in DomainBed; the order is kept
    as shuffled.
    """
    seed = int(hashlib.md5(str((int(trial), int(domain))).encode(), usedforsecurity=False).hexdigest(), 16) % 2**31
    positions = np.arange(n)
    np.random.RandomState(seed).shuffle(positions)
    out = int(n * HOLDOUT)
    return positions[out:], positions[:out]
