"""Probabilities that hold at sites a model never saw: logits are divided by a temperature before the softmax.

The temperature is fitted to predictions for sites that the predicting model never saw. Guo, Pleiss, Sun & Weinberger,
"On calibration of modern neural networks", ICML 2017, fit it to images like the training images, which are too easy.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]

LOWEST, HIGHEST = 0.02, 100.0  # temperatures


def fit_temperature(logits: Sequence[Floats], labels: Sequence[Integers]) -> float:
    """Find the temperature with the lowest negative log-likelihood, averaged over images and then over sites.

    Each site counts alike, because a new one is a draw from them.

    Args:
        logits: Logits [N, C] of each site's images, by a model that never saw the site.
        labels: Right classes [N] of each site's images.
    """

    def loss(log_temperature: float) -> float:
        temperature = np.exp(log_temperature)
        return float(np.mean([nll(values, right, temperature) for values, right in zip(logits, labels, strict=True)]))

    result = minimize_scalar(loss, bounds=(np.log(LOWEST), np.log(HIGHEST)), method="bounded", options={"xatol": 1e-4})
    return float(f"{np.exp(result.x):.4g}")


def nll(logits: Floats, labels: Integers, temperature: float = 1.0) -> float:
    """Return the mean negative log-likelihood of the right classes."""
    return float(-log_probabilities(logits, temperature)[np.arange(len(labels)), labels].mean())


def log_probabilities(logits: Floats, temperature: float = 1.0) -> Floats:
    """Return log softmax(logits / temperature), float64 [N, C]."""
    return log_softmax(logits.astype(np.float64) / temperature, axis=1)
