"""Find out whether the last layers of a network fix the norm of its features."""

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from aidgn.backbones.registry import DEFAULT, create
from aidgn.backbones.small import SMALL

FeatureNorm = Literal["free", "averaged", "fixed"]
NORM_LAYERS = ("LayerNorm", "LayerNorm2d", "LayerNormFp32", "RmsNorm", "RmsNorm2d", "SimpleNorm", "SimpleNorm2d")


@lru_cache(16)
def feature_norm(name: str, image_size: int) -> FeatureNorm:
    """Find out what a network's last layer norm does to the norm of its features, by a pass with random weights.

    Returns:
        `fixed` if the features are the output of a layer norm, so that all have about the same norm; `averaged` if they
        are an average of such outputs, whose norm falls as places in the image differ; else `free`.
    """
    if name in (SMALL, DEFAULT):  # known without importing timm
        return "free"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        network = create(name, weights="none", image_size=image_size).eval()
        outputs: list[Tensor] = []
        for layer in network.modules():
            if type(layer).__name__ in NORM_LAYERS:
                layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
        features = network(torch.randn(1, 3, image_size, image_size))
    return compare_with_norms(features, outputs)


def compare_with_norms(features: Tensor, outputs: list[Tensor]) -> FeatureNorm:
    """Compare features [1, n] with the outputs of norm layers: tokens [1, L, n] or maps, channels first or last."""
    width = features.shape[1]
    result: FeatureNorm = "free"
    for output in outputs:
        for channel in {dim for dim in range(1, output.ndim) if output.shape[dim] == width}:
            places = output.movedim(channel, -1).reshape(-1, width)
            if torch.isclose(places, features, atol=1e-5).all(dim=1).any():
                return "fixed"
            # Networks average all tokens, or leave out the first few, which stand for no place in the image; distilled
            # networks average the first two.
            averages = [places[first:].mean(0) for first in range(min(6, len(places)))] + [places[:2].mean(0)]
            if any(torch.allclose(average, features[0], atol=1e-5) for average in averages):
                result = "averaged"
    return result
