"""The global random generators that a run draws from: Python's, NumPy's and PyTorch's."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator, in types that load without running code."""
    version, numbers, gauss = random.getstate()
    algorithm, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
    }
    if device.type == "mps":
        state["mps"] = [torch.mps.get_rng_state()]
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put a state from `random_state` back."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"]:
        torch.cuda.set_rng_state(state["cuda"][0], device)
    if device.type == "mps" and state.get("mps"):
        torch.mps.set_rng_state(state["mps"][0])
