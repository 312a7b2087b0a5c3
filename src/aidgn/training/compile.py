"""Compiled code, and image transforms that check it against eager mode."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from aidgn.backbones import IMAGENET, Preprocessing
from aidgn.data import transforms

MAX_SHAPES = 1000  # batch shapes that a process compiles a function for
CPU_CHUNK = 8  # images transformed together on the CPU: intermediate results stay in the processor's cache
TrainTransform = Callable[[Tensor, Tensor, Tensor], Tensor]  # uint8 images, geometry and uniform numbers to the input
Transform = Callable[[Tensor, Tensor], Tensor]  # uint8 images and geometry to the network's input

log = logging.getLogger("aidgn")


def compiled_by_shape(function: Callable[..., Tensor], mode: str | None = None) -> Callable[..., Tensor]:
    """Compile a function for every shape it meets.

    Hyper-parameter draws have batches of many sizes. By default PyTorch compiles the first eight and runs the others in
    another way, more slowly and with other rounding.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MAX_SHAPES
    return torch.compile(function, dynamic=False, mode=mode)


class VerifiedCompile:
    """A compiled transform, compared with eager mode on the first batches of each shape.

    A fault of the compiler would show only as worse results at the end of a run. Where the two differ, the transform
    falls back to eager mode.

    Args:
        function: Maps tensors, whose first dimension is that of the images, to images.
    """

    CALLS = 3  # calls of each shape that are compared
    IMAGES = 8  # images of a call that are compared
    TOLERANCE = 0.05  # rounding changes a value by less
    SHARE = 0.02  # an image differs if more than this share of its values does
    # One image may differ: where the side of a crop lies half way between two integers, rounding moves it by a pixel.

    def __init__(self, function: Callable[..., Tensor]):
        self.eager = function
        self.compiled: Callable[..., Tensor] | None = compiled_by_shape(function)
        self.calls: Counter[Hashable] = Counter()

    def __call__(self, *tensors: Tensor, **settings: Any) -> Tensor:
        if self.compiled is None:
            return self.eager(*tensors, **settings)
        images = self.compiled(*tensors, **settings)
        shape = tensors[0].shape, *settings.items()
        if self.calls[shape] < self.CALLS:
            self.calls[shape] += 1
            if self._differs(images, tensors, settings):
                self.compiled = None
                return self.eager(*tensors, **settings)
        return images

    def _differs(self, images: Tensor, tensors: tuple[Tensor, ...], settings: dict[str, Any]) -> bool:
        sample = slice(None, None, max(len(images) // self.IMAGES, 1))  # from all domains
        expected = self.eager(*(tensor[sample] for tensor in tensors), **settings)
        error = (images[sample] - expected).abs().flatten(1)
        wrong = ~(error < self.TOLERANCE)  # NaN is wrong too
        differing = int((wrong.float().mean(1) > self.SHARE).sum())
        if differing <= 1 and error.isfinite().all():
            return False
        log.warning(
            "Compiled code prepared %d of %d images wrongly, probably by a fault of PyTorch %s. "
            "The run continues without compiled transforms, more slowly.",
            differing,
            len(error),
            torch.__version__,
        )
        return True


@lru_cache(1)
def compiled_transforms() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the augmenting and the clean transform; compiled code serves all runs of a process."""
    return VerifiedCompile(transforms.augment), VerifiedCompile(transforms.clean)


def build_transforms(
    size: int,
    augmented: bool,
    exact_fit: bool,
    compiled: bool,
    preprocessing: Preprocessing = IMAGENET,
) -> tuple[TrainTransform, Transform]:
    """Return the training and the evaluation transform of uint8 images.

    Args:
        size: Side of the network's input in pixels.
        augmented: Whether training images are augmented.
        exact_fit: Whether every image has the size of the network's input already.
        compiled: Whether to compile both, which pays on a GPU.
        preprocessing: What the network expects.
    """
    if compiled:
        augment, clean = compiled_transforms()
    else:
        augment, clean = _in_chunks(transforms.augment), transforms.clean
    settings = preprocessing.transform_settings()
    eval_transform = partial(clean, size=size, exact_fit=exact_fit, **settings)
    if augmented:
        return partial(augment, size=size, **settings), eval_transform
    return lambda pixels, geometry, _: eval_transform(pixels, geometry), eval_transform


def _in_chunks(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(*tensors: Tensor, **settings: Any) -> Tensor:
        chunks = zip(*(tensor.split(CPU_CHUNK) for tensor in tensors), strict=True)
        return torch.cat([function(*chunk, **settings) for chunk in chunks])

    return apply
