"""Set the size of the images that a network takes."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from aidgn.backbones.weights import summarize
from aidgn.errors import ParameterError


class ImageSizeError(ParameterError):
    """A network does not take images of a size.

    Args:
        name: Name of the network.
        image_size: The size.
        expected: What it takes.
        sizes: Sizes near that one that it takes, as far as they are known.
    """

    def __init__(self, name: str, image_size: int, expected: str, sizes: Sequence[int] = ()):
        super().__init__("image_size", image_size, f"{expected} for {name}")
        self.sizes = list(sizes)


def set_input_size(network: nn.Module, name: str, image_size: int) -> None:
    """Let a network of timm take images of another size than its weights were trained on.

    Position embeddings and tables of relative positions are resampled, and windows get the size that timm derives from
    the image. Networks without such parameters stay as they are.
    """
    resize: Any = getattr(network, "set_input_size", None)
    takes_any = getattr(network, "dynamic_img_size", False)  # it resamples position embeddings in every pass
    config: Any = getattr(network, "pretrained_cfg", None)  # of the images that the weights were trained on
    if resize is None or takes_any or (config and tuple(config["input_size"][1:]) == (image_size, image_size)):
        return
    patch = patch_size(network)
    if image_size % patch:  # timm would leave out the pixels beyond the last whole patch
        near = max(round(image_size / patch), 1) * patch
        raise ImageSizeError(name, image_size, f"a multiple of {patch}, such as {near},", [near])
    try:
        resize(img_size=(image_size, image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ImageSizeError(name, image_size, f"another size ({summarize(error)})") from error


def patch_size(network: nn.Module) -> int:
    """Return the side of the patches that a network cuts images into, 1 if it cuts none."""
    patch: Any = getattr(getattr(network, "patch_embed", None), "patch_size", 1)
    return max(patch) if isinstance(patch, tuple) else int(patch)
