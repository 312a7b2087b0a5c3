"""Try a network on an image before work begins: does it return features, and for which image sizes?"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aidgn.backbones.input_size import ImageSizeError, patch_size
from aidgn.backbones.registry import DEFAULT, create, describe_preprocessing
from aidgn.backbones.small import SMALL
from aidgn.backbones.weights import summarize
from aidgn.errors import AidgnError

STEP = 32  # pixels between the sizes that are tried; most networks halve the resolution five times
TRIED_SIZES = 8  # number of sizes that are tried for advice


@lru_cache(16)
def try_forward(name: str, image_size: int, weights: str | Path | None = "none") -> None:
    """Pass one image through a network on the meta device, and raise an error if that fails.

    Args:
        name: Name of the backbone.
        image_size: Side of the image in pixels.
        weights: A file, whose tensors must fit; `hub` and `none` are not checked.

    Raises:
        ImageSizeError: The network takes other sizes; the message names them.
        WeightsError: The file holds the weights of another network.
        AidgnError: The network gives no feature vector.
    """
    if name == SMALL:
        return
    with on_meta_device():
        network = create(name, weights="none" if weights in (None, "hub") else weights, image_size=image_size)
        try:
            output = network.eval()(torch.zeros(1, 3, image_size, image_size))
        except Exception as error:  # the network's own code
            if sizes := find_working_sizes(network, name, image_size):
                raise ImageSizeError(name, image_size, " or ".join(map(str, sizes)), sizes) from error
            raise AidgnError(f"{name} cannot be a backbone: it fails on an image ({summarize(error)}).") from error
    width = int(network.num_features)  # type: ignore[arg-type]
    if not isinstance(output, Tensor) or output.shape != (1, width):
        shape = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise AidgnError(
            f"{name} cannot be a backbone: its output for one image is {shape}, not one pooled vector of {width} "
            "features."
        )


@lru_cache(16)
def choose_image_size(name: str, image_size: int) -> int:
    """Return the image size if a network takes it, else the nearest size that it takes."""
    if name in (SMALL, DEFAULT):  # known without importing timm
        return image_size
    try:
        try_forward(name, image_size)
    except ImageSizeError as error:
        return min(error.sizes, key=lambda size: abs(size - image_size), default=image_size)
    return image_size


def find_working_sizes(network: nn.Module, name: str, image_size: int) -> list[int]:
    """Return up to two sizes near `image_size` that a network takes, in ascending order."""
    candidates = {*describe_preprocessing(name).input_size} - {image_size}
    config: Any = getattr(network, "pretrained_cfg", {"fixed_input_size": True})  # torchvision's say nothing
    if hasattr(network, "set_input_size") or not config.get("fixed_input_size"):
        patch = patch_size(network)
        step = patch if patch > 4 else STEP
        nearest = round(image_size / step)
        near = {step * (nearest + offset) for offset in range(-TRIED_SIZES // 2, TRIED_SIZES // 2 + 1)}
        candidates |= {size for size in near if size > 0 and size != image_size}
    working: list[int] = []
    for size in sorted(candidates, key=lambda size: abs(size - image_size)):
        try:
            with on_meta_device():
                create(name, weights="none", image_size=size).eval()(torch.zeros(1, 3, size, size))
        except Exception:  # as in `try_forward`
            continue
        working.append(size)
        if len(working) == 2:
            break
    return sorted(working)


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Create networks inside the context with shapes and no numbers, which takes no time and no memory."""
    with torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on copies of weights that have no effect
        yield
