"""Calibrate probabilities for sites that a model never saw: divide logits by a temperature before the softmax.

The temperature is fitted to predictions for sites that the predicting model never saw. Guo, Pleiss, Sun & Weinberger,
"On calibration of modern neural networks", ICML 2017, fit it to images like the training images, which are too easy.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]
Predicted = tuple[Floats, Integers]  # logits [N, C] and right classes [N]

LOWEST, HIGHEST = 0.02, 100.0  # temperatures


def choose_temperature(sites: Mapping[str, Sequence[Predicted]]) -> float:
    """Return the median of the best temperatures of the sites; 1 if that does not help at left-out sites.

    It is the median because a site where a run fails has an unlimited temperature. The temperature helps if the median
    of the other sites lowers the mean negative log-likelihood of a site; with one site this is not tested.

    Args:
        sites: For each site, logits and labels in one or several trials, by models that never saw the site.
    """
    log_temperatures = {
        name: float(np.mean([np.log(fit_temperature(*predicted)) for predicted in trials]))
        for name, trials in sites.items()
    }
    if len(sites) > 1:
        before, after = [], []
        for name, trials in sites.items():
            others = np.exp(np.median([value for other, value in log_temperatures.items() if other != name]))
            before += [nll(*predicted) for predicted in trials]
            after += [nll(*predicted, temperature=float(others)) for predicted in trials]
        if np.mean(after) >= np.mean(before):
            return 1.0
    return float(f"{np.exp(np.median(list(log_temperatures.values()))):.4g}")


def fit_temperature(logits: Floats, labels: Integers) -> float:
    """Find the temperature with the lowest negative log-likelihood.

    Args:
        logits: [N, C].
        labels: Right class of each image [N].
    """

    def loss(log_temperature: float) -> float:
        return nll(logits, labels, float(np.exp(log_temperature)))

    bounds = (np.log(LOWEST), np.log(HIGHEST))
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4}).x))


def nll(logits: Floats, labels: Integers, temperature: float = 1.0) -> float:
    """Return the mean negative log-likelihood of the right classes."""
    return float(-log_probabilities(logits, temperature)[np.arange(len(labels)), labels].mean())


def log_probabilities(logits: Floats, temperature: float = 1.0) -> Floats:
    """Return log softmax(logits / temperature), float64 [N, C]."""
    return log_softmax(logits.astype(np.float64) / temperature, axis=1)
