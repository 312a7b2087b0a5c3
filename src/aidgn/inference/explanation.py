"""Explain a label by a heatmap of the places in a picture that support its class.

With A the output of a layer with positions, C channels each, and s the log odds of the class (its logit less the
logarithm of the sum of the exponentials of the others), the map is

    max(0, sum_c ds/dA_cij A_cij)   at position (i, j),

divided by its maximum. The gradient of the logit alone would miss evidence against the other classes, and with two
classes a network may have no other evidence. The layer is the last one whose positions reach the logits. For a
convolutional network that averages over positions, this is Grad-CAM (Selvaraju et al., ICCV 2017); for heads that read
each position separately, Grad-CAM's mean of gradients would point to the wrong places (HiResCAM, arXiv:2011.08891). In
a transformer the positions are the tokens of the picture; with a class token, the tokens that enter the last block.

A layer norm ignores the length of its input at each position. If nothing else reads A, the sum over channels is 0 up
to rounding, so the output of the norm takes the place of A.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.modules.batchnorm import _BatchNorm

from aidgn.backbones.stages import channel_axis, list_layers
from aidgn.errors import AidgnError
from aidgn.inference.ensemble import Ensemble
from aidgn.inference.image_stream import ImageLike, streamed
from aidgn.inference.model import Model

BATCH = 16  # pictures whose gradients are in memory at a time
LONGEST_STEM = 60  # characters of a picture's name in the name of its map
# Colours from cold to hot, in equal steps
COLOURS = np.array([[13, 8, 135], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]], np.float64)
STRENGTH = 0.75  # share of the colour at the hottest place
CANCELLED = 1e-3  # a sum smaller than this share of its terms is 0 up to rounding

Maps = NDArray[np.float32]


def explain(model: Model, pixels: Sequence[NDArray[np.uint8]], labels: Sequence[int] | None = None) -> Maps:
    """Return heatmaps of decoded pictures, from 0 to 1: float32 [N, S, S], S the input size of the network.

    A map covers the whole picture, which the network sees stretched to a square.

    Args:
        model: The model.
        pixels: Pictures [H, W, 3], as `Model.forward` takes them.
        labels: The class to explain for each picture; by default the predicted one.
    """
    check_explainable(model)
    network = model.network.featurizer.network
    assert isinstance(network, nn.Module)
    x = model.inputs(pixels).requires_grad_()
    for layers in (list_layers(network) + list_norms(network), [name for name, _ in network.named_modules()]):
        maps = layer_maps(model, network, layers, x, labels)
        if maps:
            return upscale(maps[-1], model.image_size)
    raise AidgnError(f"No heatmap: the network of this {model.algorithm} model has no layer with positions.")


def list_norms(network: nn.Module) -> list[str]:
    """Return the names of the norms of each position over all its channels, as wide as the features."""
    width = int(network.num_features)  # type: ignore[arg-type]
    return [
        name
        for name, module in network.named_modules()
        if "norm" in type(module).__name__.lower()
        and not isinstance(module, _BatchNorm)
        and isinstance(weight := getattr(module, "weight", None), Tensor)
        and weight.numel() >= width
    ]


def layer_maps(
    model: Model, network: nn.Module, layers: Iterable[str], x: Tensor, labels: Sequence[int] | None
) -> list[Tensor]:
    """Return the maps of the layers whose positions reach the logits, in the order of computation."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and len(output) == len(x):
            outputs.append(output)

    hooks = [network.get_submodule(name).register_forward_hook(keep) for name in layers]
    try:
        with torch.enable_grad():
            logits = model.network.predict(x)
            chosen = logits.argmax(1) if labels is None else torch.tensor(list(labels), device=logits.device)
            others = logits.scatter(1, chosen[:, None], -math.inf).logsumexp(1)
            odds = logits.gather(1, chosen[:, None])[:, 0] - others
            gradients = torch.autograd.grad(odds.sum(), outputs, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    maps = [position_map(output.detach(), gradient) for output, gradient in zip(outputs, gradients, strict=True)]
    return [positions for positions in maps if positions is not None]


def check_explainable(model: Model) -> None:
    """Raise an error for an ensemble, which has several networks."""
    if isinstance(model, Ensemble):
        raise AidgnError("A heatmap explains one network, and this is the mean of several models: give one of them.")


def position_map(output: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return sum_c gradient_c output_c at each position, [N, h, w].

    None if there are no positions that reach the logit, or if the terms of every sum cancel.
    """
    if gradient is None or output.ndim not in (3, 4):
        return None
    terms = output.float() * gradient.float()
    axis = channel_axis(output.shape)
    if terms.ndim == 3:  # tokens, perhaps after those of the class and of registers
        side = math.isqrt(terms.shape[1])
        terms = terms[:, terms.shape[1] - side * side :].unflatten(1, (side, side))
        axis = 3
    product = terms.sum(axis)
    reached = product[0].numel() > 1 and bool((product != 0).flatten(1).sum(1).gt(1).any())
    cancelled = bool(product.abs().sum() <= CANCELLED * terms.abs().sum())
    return product if reached and not cancelled else None


def upscale(maps: Tensor, side: int) -> Maps:
    """Drop negative values, divide each map by its maximum, and stretch it to side x side pixels."""
    maps = maps.clamp(min=0)
    maps = maps / maps.amax(dim=(1, 2), keepdim=True).clamp(min=1e-20)
    large = interpolate(maps[:, None], (side, side), mode="bilinear", align_corners=False)[:, 0]
    result: Maps = large.cpu().numpy()
    return result


def paint(picture: NDArray[np.uint8], heat: Maps) -> Image.Image:
    """Return the picture in grey with the map in colour over it, in the size of the picture."""
    size = picture.shape[1], picture.shape[0]
    share = np.asarray(Image.fromarray(heat).resize(size, Image.Resampling.BILINEAR), np.float64)[..., None]
    grey = np.asarray(Image.fromarray(picture).convert("L"), np.float64)[..., None]
    steps = np.linspace(0, 1, len(COLOURS))
    colour = np.stack([np.interp(share[..., 0], steps, channel) for channel in COLOURS.T], axis=-1)
    return Image.fromarray(np.uint8(np.round(grey + STRENGTH * share * (colour - grey))))


class ExplanationFolder:
    """A folder of PNG files, each a picture with its map on the right, numbered in the order of the predictions."""

    def __init__(self, model: Model, folder: Path):
        check_explainable(model)
        self.model = model
        self.folder = folder
        self.written = 0
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, images: Iterable[ImageLike]) -> None:
        """Write the maps of readable pictures."""
        for names, pixels in streamed(images, self.model.slot, BATCH):
            for name, picture, heat in zip(names, pixels, explain(self.model, pixels), strict=True):
                self.written += 1
                stem = Path(str(name)).stem[:LONGEST_STEM]
                both = np.concatenate([picture, np.asarray(paint(picture, heat))], axis=1)
                Image.fromarray(both).save(self.folder / f"{self.written:05d}-{stem}.png")
