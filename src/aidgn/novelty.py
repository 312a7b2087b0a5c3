"""Recognise images that are unlike the training images, with a conformal p-value.

The norm of an image's feature and its angle to the predicted class's vector are compared with those of validation
images of the sources. This module is at the top level because training writes these values and inference reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aidgn.errors import AidgnError
from aidgn.runs import names

FALSE_ALARM_RATE = 0.01  # share of images like the sources' that get a warning
CALIBRATION_IMAGES = 4000  # the most images to compare with; with this number a rate of 1 % is 1 +- 0.16 %
MAX_NORM = 1e30  # replaces infinite norms
MAX_CACHED_SCORES = 100


@dataclass(frozen=True, eq=False)
class Novelty:
    """Norms and angles of the features of n images from the source domains that were not trained on.

    A feature z has the norm r = |z| and the angle theta = arccos(z . w / |z||w|), w the predicted class's vector.

    Full conformal prediction (Vovk et al. 2005): a new image joins the n. The score of each of the n + 1 images is the
    largest of (r - median) / (q95 - median) and (median - r) / (median - q5) of the norms and
    (theta - median) / (q95 - median) of the angles, with quantiles over the n + 1. The p-value is the share of scores
    that are at least as large as the new one. If the new image comes from the same distribution as the n,
    P(p <= a) <= a for every a, exactly.
    """

    norms: np.ndarray  # float64 [n]
    angles: np.ndarray  # in radians, float64 [n]
    weight: np.ndarray | None  # class vectors [features, C]; None: only norms are compared
    _sorted_scores: dict[bytes, np.ndarray] = field(default_factory=dict, init=False, repr=False)  # by quantiles

    @classmethod
    def from_features(
        cls, features: Tensor | np.ndarray, predicted: Tensor | np.ndarray, weight: Tensor | np.ndarray | None
    ) -> "Novelty":
        """Measure norms and angles.

        Args:
            features: Features of images that were not trained on [n, features].
            predicted: Predicted classes [n] or logits [n, C].
            weight: Class vectors of the classifier [features, C], if it has them.
        """
        vectors = None if weight is None else to_array(weight)
        norms, angles = map(to_array, norms_and_angles(features, predicted, vectors))
        finite = np.isfinite(norms)
        norms, angles = norms[finite], angles[finite]
        if len(norms) > CALIBRATION_IMAGES:
            sample = np.random.default_rng(0).permutation(len(norms))[:CALIBRATION_IMAGES]
            norms, angles = norms[sample], angles[sample]
        return cls(round_as_saved(norms), round_as_saved(angles), vectors)

    def __len__(self) -> int:
        return len(self.norms)

    def false_alarm_rate(self, requested: float = FALSE_ALARM_RATE) -> float:
        """Return the rate of false alarms that warnings have: the requested rate, but at least 1 / (n + 1)."""
        return max(requested, 1 / (len(self) + 1))

    def p_values(self, norms: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """Return the p-values of images, float64 [N]; small values mean unlike the n.

        Args:
            norms: Norms of the images' features, float64 [N].
            angles: Angles to the vectors of their predicted classes, float64 [N].
        """
        norms = np.minimum(norms, MAX_NORM)
        angles = np.minimum(angles, np.pi)
        # A quantile over the n + 1 is an order statistic of the n, or the new value if it lies between two of them.
        quantiles = np.stack(
            [np.clip(norms, low, high) for low, high in self._norm_bounds]
            + [np.clip(angles, low, high) for low, high in self._angle_bounds],
            axis=1,
        )
        p = np.empty(len(norms))
        # Few quantiles occur, because they depend only on the side on which the new value lies: cache their scores.
        if len(self._sorted_scores) > MAX_CACHED_SCORES:
            self._sorted_scores.clear()
        distinct, row_of_image = np.unique(quantiles, axis=0, return_inverse=True)
        for number, row in enumerate(distinct):
            images = np.flatnonzero(row_of_image.ravel() == number)
            known_scores = self._sorted_scores.get(row.tobytes())
            if known_scores is None:
                known_scores = np.sort(compute_scores(self.norms, self.angles, row))
                self._sorted_scores[row.tobytes()] = known_scores
            scores = compute_scores(norms[images], angles[images], row)
            at_least_as_large = len(self) - np.searchsorted(known_scores, scores, "left")
            p[images] = (at_least_as_large + 1) / (len(self) + 1)
        return p

    @cached_property
    def _norm_bounds(self) -> list[np.ndarray]:
        return find_quantile_bounds(self.norms, (0.05, 0.5, 0.95))

    @cached_property
    def _angle_bounds(self) -> list[np.ndarray]:
        return find_quantile_bounds(self.angles, (0.5, 0.95))

    @cached_property
    def _usual_range(self) -> tuple[float, float, float]:
        """The smallest and largest norm and the largest angle that are usual: those of 99 of 100 images."""
        if not len(self):
            return np.nan, np.nan, np.nan
        low, high = np.quantile(self.norms, (0.005, 0.995))
        return low, high, np.quantile(self.angles, 0.99)

    def warnings(
        self, norms: np.ndarray, angles: np.ndarray, false_alarms: float = FALSE_ALARM_RATE
    ) -> list[str | None]:
        """Return for each image a description if it is unusual, or None.

        Args:
            norms: Norms of the images' features, float64 [N].
            angles: Angles to the vectors of their predicted classes, float64 [N].
            false_alarms: Share of images like those of the sources that get a warning.
        """
        p = self.p_values(norms, angles)
        texts: list[str | None] = [None] * len(p)
        for i in np.flatnonzero(p <= self.false_alarm_rate(false_alarms)).tolist():
            texts[i] = self.describe(p[i], norms[i], angles[i])
        return texts

    def describe(self, p: float, norm: float, angle: float) -> str:
        """Describe how an image differs from the n."""
        low, high, widest = self._usual_range
        text = f"unlike the training images (p = {p:.2g}): norm {norm:.3g}, usual {low:.3g} to {high:.3g}"
        if self.weight is None:
            return text
        return f"{text}; angle {np.degrees(angle):.0f}°, usual up to {np.degrees(widest):.0f}°"

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON, without the class vectors, which the model has."""
        return {
            "version": 1,
            "norms": self.norms.tolist(),
            "angles": self.angles.tolist(),
            "by_angle": self.weight is not None,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], weight: Tensor | np.ndarray | None) -> "Novelty":
        """Restore the result of `to_dict`.

        Args:
            values: The result.
            weight: Class vectors of the classifier [features, C], if it has them.
        """
        try:
            norms = np.asarray(values["norms"], np.float64)
            angles = np.asarray(values["angles"], np.float64)
            if values["version"] != 1 or norms.ndim != 1 or norms.shape != angles.shape:
                raise ValueError("version or shapes")
            by_angle = bool(values["by_angle"])
        except (KeyError, TypeError, ValueError) as error:
            raise AidgnError(
                f"{names.NOVELTY} cannot be used ({type(error).__name__}: {error}): it was changed, or written by "
                "another version of aidgn. Move it away to do without warnings."
            ) from None
        return cls(norms, angles, to_array(weight) if by_angle and weight is not None else None)


def find_quantile_bounds(values: np.ndarray, quantiles: Sequence[float]) -> list[np.ndarray]:
    """Return the two order statistics of n values between which each quantile of the n and one more value lies."""
    ordered = np.concatenate([[-np.inf], np.sort(values), [np.inf]])
    ranks = [int(q * len(values)) for q in quantiles]
    return [ordered[rank : rank + 2] for rank in ranks]


def compute_scores(norms: np.ndarray, angles: np.ndarray, quantiles: np.ndarray) -> np.ndarray:
    """Return the largest of three distances from a median, each divided by the distance of a 5 % or 95 % quantile."""
    norm_low, norm_median, norm_high, angle_median, angle_high = quantiles
    smallest = 1e-9 * (1 + abs(norm_median))  # avoids a division by 0 if all values are equal
    return np.max(
        [
            (norms - norm_median) / max(norm_high - norm_median, smallest),
            (norm_median - norms) / max(norm_median - norm_low, smallest),
            (angles - angle_median) / max(angle_high - angle_median, 1e-9),
        ],
        axis=0,
    )


def norms_and_angles(
    features: Tensor | np.ndarray, predicted: Tensor | np.ndarray, weight: Tensor | np.ndarray | None
) -> tuple[Tensor, Tensor]:
    """Return norms [N] and angles [N] to the vector of the predicted class, float64, on the device of the features.

    The norm of a feature with NaN is infinite, and its angle is pi.

    Args:
        features: [N, features].
        predicted: Predicted classes [N] or logits [N, C].
        weight: Class vectors [features, C]; without them the angles are 0.
    """
    z = torch.as_tensor(features)
    z = (z.cpu() if z.device.type == "mps" else z).double()  # which has no float64
    norms = torch.linalg.vector_norm(z, dim=1)
    if weight is None:
        angles = torch.zeros_like(norms)
    else:
        predicted = torch.as_tensor(predicted).to(z.device)
        weight = torch.as_tensor(weight).to(z.device)
        vectors = weight.T.double()[predicted.argmax(1) if predicted.ndim == 2 else predicted.long()]
        lengths = norms * torch.linalg.vector_norm(vectors, dim=1)
        cosines = (z * vectors).sum(1) / lengths.clamp(min=1e-300)
        angles = cosines.nan_to_num(nan=-1).clamp(-1, 1).acos()
    return norms.nan_to_num(nan=torch.inf, posinf=torch.inf), angles


def to_array(values: Tensor | np.ndarray) -> np.ndarray:
    """Convert to an array on the CPU; NumPy has neither bfloat16 nor gradients."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).detach().cpu().numpy()


def round_as_saved(values: np.ndarray) -> np.ndarray:
    """Round to the digits in the file, so that a model answers the same before and after it is saved."""
    return np.array([float(f"{value:.6g}") for value in values])
