"""Recognise images unlike anything the model was trained on, with a conformal p-value.

It compares the norm of an image's feature and the angle to the predicted class's vector with those of source images
that were set aside. This module is at the top level because training writes these values and inference reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aidgn.algorithms import Algorithm
from aidgn.errors import AidgnError

RATE = 0.01  # share of images like the sources' that get a warning (false alarms)
MOST = 4000  # images kept; with them a rate of 1 % is 1 +- 0.16 %
LARGEST = 1e30  # a norm for what is infinite


@dataclass(frozen=True, eq=False)
class Novelty:
    """Norms r = |z| and angles theta = arccos(z . w / |z||w|), w the vector of the predicted class, of n images of the
    source domains that were not trained on.

    Let a new image join the n. How unusual each of the n + 1 is: the largest of (r - median) / (q95 - median) and
    (median - r) / (median - q5) of the norms and (theta - median) / (q95 - median) of the angles, quantiles over the
    n + 1. p is the share of them at least as unusual as the new one: if that one comes from where the n come from,
    P(p <= a) <= a for every a, exactly, with both tests in it (full conformal prediction; Vovk et al. 2005).
    """

    norms: np.ndarray  # float64 [n]
    angles: np.ndarray  # float64 [n], in radians
    weight: np.ndarray | None  # [features, C], a vector for each class; None: by the norm alone
    _known: dict[bytes, np.ndarray] = field(default_factory=dict, init=False, repr=False)  # how unusual the n are

    @classmethod
    def of(
        cls, features: Tensor | np.ndarray, predicted: Tensor | np.ndarray, weight: Tensor | np.ndarray | None
    ) -> "Novelty":
        """From features [n, features] of images set aside, their predicted classes [n] or logits [n, C], and the
        classifier's class vectors [features, C]."""
        vectors = None if weight is None else as_array(weight)
        norms, angles = map(as_array, norms_and_angles(features, predicted, vectors))
        finite = np.isfinite(norms)
        norms, angles = norms[finite], angles[finite]
        if len(norms) > MOST:
            kept = np.random.default_rng(0).permutation(len(norms))[:MOST]
            norms, angles = norms[kept], angles[kept]
        # As the file has them, so that a model says the same before and after it is saved.
        norms, angles = (np.array([float(f"{value:.6g}") for value in values]) for values in (norms, angles))
        return cls(norms, angles, vectors)

    def __len__(self) -> int:
        return len(self.norms)

    def rate(self, wanted: float = RATE) -> float:
        """The false-alarm rate that warnings have: the one wanted, or what so few images can tell, 1 / (n + 1)."""
        return max(wanted, 1 / (len(self) + 1))

    def p_values(self, features: Tensor | np.ndarray, predicted: Tensor | np.ndarray) -> np.ndarray:
        """p of every image, float64 [N], from its feature and predicted class (or logits); small: unlike the n."""
        norms, angles = norms_and_angles(features, predicted, self.weight)
        return self.p_values_of(as_array(norms), as_array(angles))

    def p_values_of(self, norms: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """The same from norms [N] and angles [N] that were measured elsewhere."""
        norms, angles = np.minimum(norms, LARGEST), np.minimum(angles, np.pi)
        quantiles = np.stack(
            [np.clip(angles if of_angles else norms, *between) for of_angles, between in self._ranks], axis=1
        )
        p = np.empty(len(norms))
        # Quantiles are almost always the same few, as they depend only on which side of them the new image is.
        if len(self._known) > 100:
            self._known.clear()
        distinct, which = np.unique(quantiles, axis=0, return_inverse=True)
        for number, row in enumerate(distinct):
            new = np.flatnonzero(which.ravel() == number)
            known = self._known.get(row.tobytes())
            if known is None:
                known = self._known[row.tobytes()] = np.sort(unusual(self.norms, self.angles, row))
            as_unusual = len(self) - np.searchsorted(known, unusual(norms[new], angles[new], row), "left")
            p[new] = (as_unusual + 1) / (len(self) + 1)
        return p

    @cached_property
    def _ranks(self) -> list[tuple[bool, np.ndarray]]:
        """The quantiles of the n values and a new one: the order statistic of rank floor(q n), which is the new value
        itself if that is between these two. Of the norms and, where True, of the angles."""
        found = []
        for of_angles, quantiles in ((False, (0.05, 0.5, 0.95)), (True, (0.5, 0.95))):
            ordered = np.concatenate([[-np.inf], np.sort(self.angles if of_angles else self.norms), [np.inf]])
            ranks = (int(q * len(self)) for q in quantiles)
            found += [(of_angles, ordered[rank : rank + 2]) for rank in ranks]
        return found

    @cached_property
    def _usual(self) -> tuple[float, float, float]:
        """Between which norms, and up to which angle, 99 of 100 are."""
        low, high = np.quantile(self.norms, (0.005, 0.995)) if len(self) else (np.nan, np.nan)
        return low, high, np.quantile(self.angles, 0.99) if len(self) else np.nan

    def warnings(
        self, features: Tensor | np.ndarray, predicted: Tensor | np.ndarray, rate: float = RATE
    ) -> list[str | None]:
        """For every image None, or in words what is unusual about it, at this rate of false alarms."""
        norms, angles = norms_and_angles(features, predicted, self.weight)
        return self.warnings_of(as_array(norms), as_array(angles), rate)

    def warnings_of(self, norms: np.ndarray, angles: np.ndarray, rate: float = RATE) -> list[str | None]:
        p = self.p_values_of(norms, angles)
        found: list[str | None] = [None] * len(p)
        for number in np.flatnonzero(p <= self.rate(rate)).tolist():
            found[number] = self.sentence(p[number], norms[number], angles[number])
        return found

    def sentence(self, p: float, norm: float, angle: float) -> str:
        low, high, widest = self._usual
        text = f"unlike the training images (p = {p:.2g}): norm {norm:.3g}, usual {low:.3g} to {high:.3g}"
        if self.weight is None:
            return text
        return f"{text}; angle {np.degrees(angle):.0f}°, usual up to {np.degrees(widest):.0f}°"

    def to_dict(self) -> dict[str, Any]:
        """For JSON. The class vectors are those of the model, and not repeated."""
        return {
            "version": 1,
            "norms": self.norms.tolist(),
            "angles": self.angles.tolist(),
            "by_angle": self.weight is not None,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], weight: Tensor | np.ndarray | None) -> "Novelty":
        """What `to_dict` gave, with the classifier's class vectors [features, C]."""
        try:
            norms, angles = (np.asarray(values[name], np.float64) for name in ("norms", "angles"))
            if values["version"] != 1 or norms.ndim != 1 or norms.shape != angles.shape:
                raise ValueError("version or shapes")
            by_angle = bool(values["by_angle"])
        except (KeyError, TypeError, ValueError) as error:
            raise AidgnError(
                f"novelty.json cannot be used ({type(error).__name__}: {error}): it was changed, or "
                "written by another version of aidgn. Move it away to do without warnings."
            ) from None
        return cls(norms, angles, as_array(weight) if by_angle and weight is not None else None)


def unusual(norms: np.ndarray, angles: np.ndarray, quantiles: np.ndarray) -> np.ndarray:
    """How far from the median, in units of the 5 % and 95 % quantiles' distances from it: the largest of three."""
    low, middle, high, angle, wide = quantiles
    least = 1e-9 * (1 + abs(middle))  # where all are the same
    return np.max(
        [
            (norms - middle) / max(high - middle, least),
            (middle - norms) / max(middle - low, least),
            (angles - angle) / max(wide - angle, 1e-9),
        ],
        axis=0,
    )


def norms_and_angles(
    features: Tensor | np.ndarray, predicted: Tensor | np.ndarray, weight: Tensor | np.ndarray | None
) -> tuple[Tensor, Tensor]:
    """Norms [N] and angles [N] to the vector of the predicted class, float64, where the features are; of a feature
    that is not a number the largest there are."""
    z = torch.as_tensor(features).double()
    norms = torch.linalg.vector_norm(z, dim=1)
    if weight is None:
        angles = torch.zeros_like(norms)
    else:
        predicted, weight = (torch.as_tensor(each).to(z.device) for each in (predicted, weight))
        vectors = weight.T.double()[predicted.argmax(1) if predicted.ndim == 2 else predicted.long()]
        lengths = norms * torch.linalg.vector_norm(vectors, dim=1)
        cosines = (z * vectors).sum(1) / lengths.clamp(min=1e-300)
        angles = cosines.nan_to_num(nan=-1).clamp(-1, 1).acos()
    return norms.nan_to_num(nan=torch.inf, posinf=torch.inf), angles


def as_array(values: Tensor | np.ndarray) -> np.ndarray:
    if not isinstance(values, Tensor):
        return np.asarray(values)
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).detach().cpu().numpy()


def outputs(algorithm: Algorithm, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the classifier sees of x, and the logits; one pass, unless an own algorithm predicts in its own way."""
    features = algorithm.features(x)
    return features, algorithm.classifier(features) if predicts_by_classifier(algorithm) else algorithm.predict(x)


def predicts_by_classifier(algorithm: Algorithm) -> bool:
    return type(algorithm).predict is Algorithm.predict
