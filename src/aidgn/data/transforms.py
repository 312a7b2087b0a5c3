"""Augment a uint8 batch on its device: crop, flip, resize, colour jitter, grey and normalisation.

Each image has separate random numbers, with the distributions of torchvision's transforms. Nothing waits for the GPU.
On CUDA, where Triton is installed, `aidgn.data.transform_kernels` computes the same in fewer passes over memory.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aidgn.devices import has_triton

SCALE = (0.7, 1.0)  # area of the crop relative to the image
RATIO = (3 / 4, 4 / 3)  # width / height of the crop
ATTEMPTS = 10  # crops drawn for an image; the first that fits is taken
JITTER = 0.3  # strength of the colour jitter
GREY_PROBABILITY = 0.1
MEAN = (0.485, 0.456, 0.406)  # ImageNet's; some networks expect other values
STD = (0.229, 0.224, 0.225)

# Uniforms of an image for its crop, flip, order of the jitter, factors of the jitter, grey.
SHARES = (2 * ATTEMPTS + 2, 1, 4, 4, 1)
UNIFORMS = sum(SHARES)

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
# All 24 orders of the four operations are subsequences of this sequence. It has hue, which needs most arithmetic, once,
# and contrast, whose mean over the image costs a pass over memory, twice. The others are fused with their neighbours.
PART = (BRIGHTNESS, SATURATION, BRIGHTNESS)
SEQUENCE = (*PART, CONTRAST, *PART, HUE, *PART, CONTRAST, *PART)

CPU_CHUNK = 8  # images transformed together on the CPU: intermediate results stay in the processor's cache

Channels = tuple[float, ...]  # a number for red, green and blue
Planes = tuple[Tensor, Tensor, Tensor]  # red, green, blue [B, H, W] in [0, 1]
TrainTransform = Callable[[Tensor, Tensor, Tensor], Tensor]  # uint8 images, geometry and uniform numbers to the input
Transform = Callable[[Tensor, Tensor], Tensor]  # uint8 images and geometry to the network's input


def build_transforms(
    size: int, augmented: bool, exact_fit: bool, settings: Mapping[str, Any] = {}
) -> tuple[TrainTransform, Transform]:
    """Return the training and the evaluation transform of uint8 images.

    Args:
        size: Side of the network's input in pixels.
        augmented: Whether training images are augmented.
        exact_fit: Whether every image has the size of the network's input already.
        settings: `mean`, `std` and `interpolation` of the network's preprocessing.
    """
    eval_transform: Transform = partial(clean, size=size, exact_fit=exact_fit, **settings)
    if augmented:
        return partial(augment, size=size, **settings), eval_transform
    return lambda pixels, geometry, _: eval_transform(pixels, geometry), eval_transform


def augment(
    images: Tensor,
    geometry: Tensor,
    uniforms: Tensor,
    size: int,
    *,
    mean: Channels = MEAN,
    std: Channels = STD,
    interpolation: str = "bilinear",
) -> Tensor:
    """Augment training images; return [B, 3, size, size], float32, channels_last.

    Args:
        images: Slots, uint8 [B, S, S, 3], with an image in the top left corner of each.
        geometry: Stored height and width, original height and width [B, 4].
        uniforms: Random numbers in [0, 1) [B, UNIFORMS].
        size: Side of the result.
        mean: Subtracted from each channel, whose values go from 0 to 1.
        std: Divides each channel afterwards.
        interpolation: `bilinear` or `bicubic`.
    """
    if images.device.type == "cpu" and len(images) > CPU_CHUNK:
        geometry = geometry.expand(len(images), 4)
        chunks = zip(*(tensor.split(CPU_CHUNK) for tensor in (images, geometry, uniforms)), strict=True)
        settings: dict[str, Any] = {"mean": mean, "std": std, "interpolation": interpolation}
        return torch.cat([augment(pixels, sizes, drawn, size, **settings) for pixels, sizes, drawn in chunks])
    if images.is_cuda and has_triton():
        from aidgn.data import transform_kernels

        return transform_kernels.augment(images, geometry, uniforms, size, mean, std, interpolation)
    crop, flip, order, factors, to_grey = uniforms.split(SHARES, dim=1)
    boxes, flip = crop_boxes_in_slots(crop, geometry), flip[:, 0] < 0.5
    x = resample(images, boxes, flip, size, interpolation=interpolation)
    x = jitter(x, order, jitter_factors(factors))
    x = blend(x, grey(x), (to_grey >= GREY_PROBABILITY)[:, :, None].float())
    return normalise(x, mean, std)


def clean(
    images: Tensor,
    geometry: Tensor,
    size: int,
    *,
    exact_fit: bool = False,
    mean: Channels = MEAN,
    std: Channels = STD,
    interpolation: str = "bilinear",
) -> Tensor:
    """Resize whole images for evaluation; return [B, 3, size, size]. The other arguments are those of `augment`.

    Args:
        geometry: Of images of one size, one row is enough.
        exact_fit: Whether every image fills its slot and slots have this size, so that nothing is resized.
    """
    if exact_fit:
        if images.shape[1:3] != (size, size):
            raise ValueError(f"exact_fit needs slots of {size} x {size} pixels, got {tuple(images.shape[1:3])}")
        red, green, blue = (images / 255).unbind(dim=3)
        return normalise((red, green, blue), mean, std)
    if images.device.type == "cpu" and not torch.compiler.is_compiling():  # one by one is faster than products on a CPU
        return torch.cat(
            [
                normalise(resize_one(image[:height, :width], size, interpolation), mean, std)
                for image, (height, width) in zip(images, geometry[:, :2].expand(len(images), 2).tolist(), strict=True)
            ]
        )
    stored = geometry[:, :2].float()
    boxes = torch.cat([torch.zeros_like(stored), stored], dim=1)
    flip = torch.zeros_like(geometry[:, 0], dtype=torch.bool)
    if images.is_cuda and has_triton():
        from aidgn.data import transform_kernels

        return transform_kernels.resize(images, boxes, flip, size, interpolation, mean, std)
    return normalise(resample(images, boxes, flip, size, interpolation=interpolation), mean, std)


def resize_one(image: Tensor, size: int, interpolation: str) -> Planes:
    """Resize one image [H, W, 3]; all of it stays in the processor's cache."""
    image = image.permute(2, 0, 1)[None].float()
    resized = functional.interpolate(image, (size, size), mode=interpolation, antialias=True)
    red, green, blue = limit(resized / 255, interpolation).unbind(dim=1)
    return red, green, blue


def limit(x: Tensor, interpolation: str) -> Tensor:
    """Clamp values to [0, 1], which only bicubic weights leave: some of them are negative."""
    return x.clamp(0, 1) if interpolation == "bicubic" else x


def crop_boxes(uniforms: Tensor, sizes: Tensor) -> Tensor:
    """Draw random crops: top, left, height, width [B, 4] in whole pixels, as torchvision's RandomResizedCrop.

    Ten times, area ~ U(SCALE) and log(width / height) ~ U(log RATIO) are drawn. The first pair that fits is placed
    anywhere in the image. If none fits, the crop is the largest central one with an allowed ratio.

    Args:
        uniforms: Random numbers [B, 2 * ATTEMPTS + 2].
        sizes: Height and width of the images [B, 2].
    """
    area, ratio, position = uniforms.split((ATTEMPTS, ATTEMPTS, 2), dim=1)
    height, width = sizes.float().split(1, dim=1)
    area = (SCALE[0] + (SCALE[1] - SCALE[0]) * area) * height * width
    ratio = RATIO[0] * (RATIO[1] / RATIO[0]) ** ratio
    heights, widths = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    first = fits.int().argmax(dim=1, keepdim=True)

    whole = torch.cat([height, width], dim=1)
    drawn = torch.cat([heights.gather(1, first), widths.gather(1, first)], dim=1)
    anywhere = (position * (whole - drawn + 1)).floor()  # below 1 in float32, times n rounds to below n
    largest = torch.minimum(whole, torch.cat([width / RATIO[0], height * RATIO[1]], dim=1).round())
    central = ((whole - largest) / 2).floor()
    return torch.where(
        fits.any(dim=1, keepdim=True), torch.cat([anywhere, drawn], dim=1), torch.cat([central, largest], dim=1)
    )


def crop_boxes_in_slots(uniforms: Tensor, geometry: Tensor) -> Tensor:
    """Draw crops in pixels of the original images; return them in pixels of the slots, with fractions."""
    stored, original = geometry.split(2, dim=1)
    return crop_boxes(uniforms, original) * (stored / original).repeat(1, 2)


def resample(
    images: Tensor,
    boxes: Tensor,
    flip: Tensor,
    size: int,
    dtype: torch.dtype | None = None,
    interpolation: str = "bilinear",
) -> Planes:
    """Cut boxes out of images and resize them to size x size, as products rows @ image @ columns^T.

    Args:
        images: Slots, uint8 [B, S, S, 3].
        boxes: Top, left, height, width [B, 4] in pixels of the slot, with fractions.
        flip: Whether to mirror an image [B].
        size: Side of the result.
        dtype: Type of the products. By default float16 on CUDA (error up to about 0.12 grey levels), else float32.
        interpolation: `bilinear` or `bicubic`.
    """
    dtype = dtype or (torch.float16 if images.is_cuda else torch.float32)
    images = pad_slots(images)
    slot = images.shape[1]
    rows = weights(boxes[:, 0], boxes[:, 2], torch.zeros_like(flip), size, slot, interpolation).to(dtype)
    columns = weights(boxes[:, 1], boxes[:, 3], flip, size, slot, interpolation).to(dtype)
    x = weighted_sums(images, rows, columns)
    high, wide = (matrix.sum(dim=2, dtype=torch.float32) for matrix in (rows, columns))
    x = x.float() / (high[:, :, None, None] * wide[:, None, None])
    red, green, blue = limit((x + 128) / 255, interpolation).unbind(dim=2)
    return red, green, blue


def pad_slots(images: Tensor) -> Tensor:
    """Pad images to a side that tensor cores can multiply: rows of a multiple of 16 bytes."""
    margin = -images.shape[1] % 8
    return functional.pad(images, (0, 0, 0, margin, 0, margin)) if margin else images


def weighted_sums(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return rows @ (image - 128) @ columns^T [B, size, 3, size], in the dtype of the weights.

    With the channel between row and column, both products read the memory without copies. Bytes are exact in float16,
    and centring them halves the rounding errors of the products.
    """
    batch, (_, size, slot) = len(images), rows.shape
    x = images.transpose(2, 3).to(rows.dtype, memory_format=torch.contiguous_format).sub_(128)
    x = rows @ x.reshape(batch, slot, 3 * slot)
    return (x.reshape(batch, size * 3, slot) @ columns.transpose(1, 2)).reshape(batch, size, 3, size)


def weights(
    start: Tensor, length: Tensor, flip: Tensor, size: int, slot: int, interpolation: str = "bilinear"
) -> Tensor:
    """Compute weights [B, size, slot] that resize [start, start + length) to `size` pixels, antialiased.

    Pixel i is centred at start + (i + 1/2) length / size. The weight of a neighbour is a function of its distance in
    units of max(1, length / size), times the part of the neighbour in the interval: a triangle for `bilinear`, the
    cubic of Keys with a = -1/2 for `bicubic`. The sum of the weights differs from one at the ends of the interval; the
    caller divides by the sum.
    """
    start, length, flip = start[:, None, None], length[:, None, None], flip[:, None, None]
    pixel = torch.arange(slot, device=start.device)
    i = torch.arange(size, device=start.device)[:, None]
    scale = length / size
    centre = start + (torch.where(flip, size - 1 - i, i) + 0.5) * scale
    inside = (torch.minimum(pixel + 1, start + length) - torch.maximum(pixel, start)).clamp(0, 1)
    half = scale.clamp(min=1)
    distance = (pixel + 0.5 - centre).abs() / half
    if interpolation == "bicubic":
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
        return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0)) * inside / half
    return (1 - distance).clamp(min=0) * inside / half


def jitter_factors(uniforms: Tensor) -> Tensor:
    """Return factors of brightness, contrast and saturation ~ U(0.7, 1.3) and of hue ~ U(-0.3, 0.3) [B, 4]."""
    centre = (torch.arange(4, device=uniforms.device) != HUE).float()
    return centre + JITTER * (2 * uniforms - 1)


def jitter(x: Planes, order: Tensor, factors: Tensor) -> Planes:
    """Change brightness, contrast, saturation and hue, as torchvision's ColorJitter.

    All operations of SEQUENCE run. Each of the four changes an image once; in the others its factor is 1.

    Args:
        x: The images.
        order: The four operations run in the order of these numbers [B, 4].
        factors: See `jitter_factors` [B, 4].
    """
    for operation, by_step in zip(SEQUENCE, step_factors(jitter_steps(order), factors), strict=True):
        factor = by_step[:, None, None]
        if operation == BRIGHTNESS:
            x = blend(x, 0.0, factor)
        elif operation == CONTRAST:
            x = blend(x, grey(x).mean(dim=(1, 2), keepdim=True), factor)
        elif operation == SATURATION:
            x = blend(x, grey(x), factor)
        else:
            x = shift_hue(x, factor)
    return x


def step_factors(steps: list[Tensor], factors: Tensor) -> list[Tensor]:
    """Return the factor of every step of SEQUENCE [B]: 1 where an operation changes the image in another step."""
    return [
        torch.where(steps[operation] == step, factors[:, operation], 1.0) for step, operation in enumerate(SEQUENCE)
    ]


def jitter_steps(order: Tensor) -> list[Tensor]:
    """Return the step of SEQUENCE at which each operation changes an image [B]; see `jitter` for `order`."""
    brightness, contrast, saturation, hue = order.unbind(dim=1)

    def part(operation: Tensor) -> Tensor:  # contrast ends part 0 or 2, hue ends part 1
        return (contrast < operation) + 2 * (hue < operation)

    return [
        4 * part(brightness) + 2 * (saturation < brightness),
        3 + 8 * (hue < contrast),
        4 * part(saturation) + 1,
        torch.full_like(hue, SEQUENCE.index(HUE)),
    ]


def blend(x: Planes, other: Tensor | float, factor: Tensor) -> Planes:
    """Return factor * x + (1 - factor) * other, clamped to [0, 1]."""
    rest = (1 - factor) * other
    red, green, blue = ((plane * factor).add_(rest).clamp_(0, 1) for plane in x)
    return red, green, blue


def grey(x: Planes) -> Tensor:
    return 0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2]


def shift_hue(x: Planes, turn: Tensor) -> Planes:
    """Turn the hue by `turn` [B, 1, 1] of a full circle, in HSV.

    With h in [0, 6): red = low + (high - low) clamp(|h - 3| - 1); green and blue have 2 - |h - 2| and 2 - |h - 4|.
    """
    red, green, blue = x
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    spread = high - low
    hue = torch.where(
        red == high, green - blue, torch.where(green == high, blue - red + 2 * spread, red - green + 4 * spread)
    )
    hue = hue / spread.clamp(min=1e-12) + 6 * turn  # if spread is 0, any hue gives the same grey
    hue = hue - 6 * (hue / 6).floor()
    return (
        low + spread * ((hue - 3).abs() - 1).clamp(0, 1),
        low + spread * (2 - (hue - 2).abs()).clamp(0, 1),
        low + spread * (2 - (hue - 4).abs()).clamp(0, 1),
    )


def normalise(x: Planes, mean: Channels, std: Channels) -> Tensor:
    """Return (x - mean) / std per channel, [B, 3, H, W] in channels_last memory."""
    planes = [(plane - m) / s for plane, m, s in zip(x, mean, std, strict=True)]
    return torch.stack(planes, dim=3).permute(0, 3, 1, 2)
