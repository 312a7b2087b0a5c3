"""Scores that rank predictions by trust, from the features and logits of images.

This module is at the top level because analyses of runs choose a score and inference computes the chosen one.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp

from aidgn.novelty import MAX_NORM, norms_and_angles

Floats = NDArray[np.floating]

# The scores by name. A higher score means a prediction that is more likely to be right.
SCORES = {
    "probability": "the highest probability",
    "margin": "the difference between the two highest logits",
    "energy": "the logarithm of the sum of the exponentiated logits",
    "norm": "the norm of the feature",
    "negative-aware norm": "the norm of the feature relative to its number of positive entries",
    "angle": "the angle to the vector of the predicted class",
    "distance": "the angle to the nearest feature of a training image",
}
REFERENCES = 1000  # the most training features that are kept; 4 MB with a ResNet-50
CHUNK = 1024  # images whose distances to all references are in memory at a time


def trust_scores(
    features: Floats, logits: Floats, vectors: Floats | None, references: Floats, temperature: float = 1.0
) -> dict[str, Floats]:
    """Compute every score in `SCORES` for N images; those that the network does not have are left out.

    Args:
        features: [N, n].
        logits: [N, C].
        vectors: Class vectors [n, C], if the classifier has them.
        references: Features of training images of length 1, [R, n]; none: no distances.
        temperature: Divides the logits, which changes the order of probabilities.
    """
    norms, angles = (values.numpy() for values in norms_and_angles(features, logits, vectors))
    scores = logit_scores(logits, temperature) | {
        "norm": np.minimum(norms, MAX_NORM),
        "negative-aware norm": negative_aware_norms(features),
    }
    if vectors is not None:
        scores["angle"] = -angles
    if len(references):
        scores["distance"] = -nearest_angles(features, references)
    return scores


def logit_scores(logits: Floats, temperature: float = 1.0) -> dict[str, Floats]:
    """Compute the scores that depend on logits [N, C] alone, each float64 [N]."""
    scaled = logits.astype(np.float64) / temperature
    ordered = np.sort(scaled, axis=1)
    return {
        "probability": log_softmax(scaled, axis=1).max(axis=1),
        "margin": ordered[:, -1] - ordered[:, -2],
        "energy": logsumexp(scaled, axis=1),
    }


def negative_aware_norms(features: Floats) -> Floats:
    """Compute sum max(z, 0) / number of positive entries of each feature z (Park, Chai, Yoon & Kim, ICCV 2023)."""
    positive = np.clip(features.astype(np.float64), 0, None)
    return np.minimum(positive.sum(1) / np.maximum((positive > 0).sum(1), 1), MAX_NORM)


def sample_references(features: Floats, seed: int = 0) -> Floats:
    """Choose at most `REFERENCES` features at random, and give each the length 1; float32, rounded as in files."""
    if len(features) > REFERENCES:
        features = features[np.sort(np.random.default_rng(seed).permutation(len(features))[:REFERENCES])]
    return unit_rows(features).astype(np.float16).astype(np.float32)


def encode_references(references: Floats) -> dict[str, Any]:
    """Return references [R, n] as values for JSON: their width, and numbers of half precision in base64."""
    content = references.astype("<f2").tobytes()
    return {"width": references.shape[1], "float16": base64.b64encode(content).decode()}


def decode_references(values: Mapping[str, Any]) -> Floats:
    """Restore the argument of `encode_references`; raise ValueError if it is none."""
    content = np.frombuffer(base64.b64decode(values["float16"], validate=True), "<f2").astype(np.float32)
    references = content.reshape(-1, values["width"])
    if not len(references) or not np.isfinite(references).all():
        raise ValueError("references")
    return references


def nearest_angles(features: Floats, references: Floats) -> Floats:
    """Return the angle in radians between each feature and the nearest reference, float64 [N]."""
    parts = [unit_rows(features[start : start + CHUNK]) @ references.T for start in range(0, len(features), CHUNK)]
    cosines = np.concatenate([part.max(axis=1) for part in parts]) if parts else np.empty(0)
    return np.arccos(np.clip(cosines.astype(np.float64), -1, 1))


def unit_rows(features: Floats) -> Floats:
    """Divide each row by its length, float32; a row of zeros stays zero."""
    rows = features.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.maximum(lengths, 1e-300)).astype(np.float32)
