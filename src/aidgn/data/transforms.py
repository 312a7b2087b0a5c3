"""Augmentation of a uint8 batch where it lies: crop, flip, resize, colour jitter, grey and normalisation.

One draw per image, distributed as torchvision's; no synchronisation with a GPU, and torch.compile takes it whole.
"""

import torch
from torch import Tensor
from torch.nn import functional

SCALE = (0.7, 1.0)  # area of the crop relative to the image
RATIO = (3 / 4, 4 / 3)  # width / height of the crop
ATTEMPTS = 10
JITTER = 0.3
GREY_PROBABILITY = 0.1
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

# What the uniforms of an image are for: its crop, flip, order of the jitter, factors of the jitter, grey.
SHARES = (2 * ATTEMPTS + 2, 1, 4, 4, 1)
UNIFORMS = sum(SHARES)

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
# All 24 orders of the four operations are subsequences of this one. Hue, which costs most arithmetic, is in it once;
# contrast, whose mean over the image costs a pass over memory, twice; the others fuse into what is around them.
PART = (BRIGHTNESS, SATURATION, BRIGHTNESS)
SEQUENCE = (*PART, CONTRAST, *PART, HUE, *PART, CONTRAST, *PART)

Planes = tuple[Tensor, Tensor, Tensor]  # red, green, blue [B, H, W] in [0, 1]


def augment(images: Tensor, geometry: Tensor, uniforms: Tensor, size: int) -> Tensor:
    """Training images [B, 3, size, size], float32, channels_last, of slots `images` uint8 [B, S, S, 3].

    geometry [B, 4]: stored height and width (the image lies in the slot's top left corner), original height and width;
    uniforms [B, UNIFORMS] in [0, 1).
    """
    crop, flip, order, factors, to_grey = uniforms.split(SHARES, dim=1)
    stored, original = geometry.split(2, dim=1)
    boxes = crop_boxes(crop, original) * (stored / original).repeat(1, 2)
    x = resample(images, boxes, flip[:, 0] < 0.5, size)
    x = jitter(x, order, jitter_factors(factors))
    x = blend(x, grey(x), (to_grey >= GREY_PROBABILITY)[:, :, None].float())
    return normalise(x)


def clean(images: Tensor, geometry: Tensor, size: int, *, exact_fit: bool = False) -> Tensor:
    """Evaluation images [B, 3, size, size]: the whole image resized, both sides; arguments as those of `augment`.

    Images of one size need no more than one row of geometry. exact_fit says that every image fills its slot and slots
    have the size asked for: nothing is resized.
    """
    if exact_fit:
        if images.shape[1:3] != (size, size):
            raise ValueError(f"exact_fit needs slots of {size} x {size} pixels, got {tuple(images.shape[1:3])}")
        red, green, blue = (images / 255).unbind(dim=3)
        return normalise((red, green, blue))
    if images.device.type == "cpu" and not torch.compiler.is_compiling():  # one by one: faster than the products there
        return torch.cat(
            [
                clean_one(image[:height, :width], size)
                for image, (height, width) in zip(images, geometry[:, :2].expand(len(images), 2).tolist(), strict=True)
            ]
        )
    stored = geometry[:, :2].float()
    boxes = torch.cat([torch.zeros_like(stored), stored], dim=1)
    return normalise(resample(images, boxes, torch.zeros_like(geometry[:, 0], dtype=torch.bool), size))


def clean_one(image: Tensor, size: int) -> Tensor:
    """The same of one image [H, W, 3] without a slot, all of which stays in a processor's cache: [1, 3, size, size]."""
    image = image.permute(2, 0, 1)[None].float()
    resized = functional.interpolate(image, (size, size), mode="bilinear", antialias=True)
    red, green, blue = (resized / 255).unbind(dim=1)
    return normalise((red, green, blue))


def crop_boxes(uniforms: Tensor, sizes: Tensor) -> Tensor:
    """Random crops of images of `sizes` (height, width) [B, 2]: top, left, height, width [B, 4], whole pixels.

    torchvision's RandomResizedCrop: of ten draws of area ~ U(SCALE) and log(width / height) ~ U(log RATIO) the first
    that fits, anywhere in the image; if none does, the largest central crop whose ratio is allowed.
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


def resample(images: Tensor, boxes: Tensor, flip: Tensor, size: int, dtype: torch.dtype | None = None) -> Planes:
    """The boxes (top, left, height, width [B, 4], in pixels of the slot, fractions allowed) of uint8 images
    [B, S, S, 3], resized to size x size and mirrored where `flip` [B]: rows @ image @ columns^T.

    The products run in float16 on CUDA (error up to about 0.12 grey levels), elsewhere in float32.
    """
    dtype = dtype or (torch.float16 if images.is_cuda else torch.float32)
    margin = -images.shape[1] % 8  # tensor cores want rows of whole 16 bytes
    images = functional.pad(images, (0, 0, 0, margin, 0, margin))
    batch, slot = images.shape[:2]
    rows = weights(boxes[:, 0], boxes[:, 2], torch.zeros_like(flip), size, slot).to(dtype)
    columns = weights(boxes[:, 1], boxes[:, 3], flip, size, slot).to(dtype)
    # With the channel between row and column both products take the memory as it lies. Bytes are exact in float16;
    # centred, what the products round is half as large.
    x = images.transpose(2, 3).to(dtype, memory_format=torch.contiguous_format).sub_(128)
    x = rows @ x.reshape(batch, slot, 3 * slot)
    x = x.reshape(batch, size * 3, slot) @ columns.transpose(1, 2)
    # Divided by the sums here, not before: a kernel that divides weights by their sum reads back what it wrote, which
    # PyTorch before the mending of pytorch/pytorch#190517 compiles without a barrier: it may read other numbers.
    high, wide = (each.sum(dim=2, dtype=torch.float32) for each in (rows, columns))
    x = x.reshape(batch, size, 3, size).float() / (high[:, :, None, None] * wide[:, None, None])
    red, green, blue = ((x + 128) / 255).unbind(dim=2)
    return red, green, blue


def weights(start: Tensor, length: Tensor, flip: Tensor, size: int, slot: int) -> Tensor:
    """Weights [B, size, slot] of the antialiased bilinear resizing of [start, start + length) to `size` pixels.

    Pixel i is centred at start + (i + 1/2) length / size and weighs its neighbours by a triangle of half-width
    max(1, length / size), and by how much of each lies in the interval. Their sum is about one, and less at the ends of
    the interval: it is still to be divided by.
    """
    start, length, flip = start[:, None, None], length[:, None, None], flip[:, None, None]
    pixel = torch.arange(slot, device=start.device)
    i = torch.arange(size, device=start.device)[:, None]
    scale = length / size
    centre = start + (torch.where(flip, size - 1 - i, i) + 0.5) * scale
    inside = (torch.minimum(pixel + 1, start + length) - torch.maximum(pixel, start)).clamp(0, 1)
    half = scale.clamp(min=1)
    return (1 - (pixel + 0.5 - centre).abs() / half).clamp(min=0) * inside / half


def jitter_factors(uniforms: Tensor) -> Tensor:
    """Factors of brightness, contrast and saturation ~ U(0.7, 1.3), turn of the hue ~ U(-0.3, 0.3) [B, 4]."""
    centre = (torch.arange(4, device=uniforms.device) != HUE).float()
    return centre + JITTER * (2 * uniforms - 1)


def jitter(x: Planes, order: Tensor, factors: Tensor) -> Planes:
    """torchvision's ColorJitter with brightness, contrast, saturation and hue `factors` [B, 4]; each image has its own
    order of the four: that of its numbers in `order` [B, 4].

    All operations of SEQUENCE run; an image takes part in one of each kind, in the others its factor is 1.
    """
    steps = jitter_steps(order)
    for step, operation in enumerate(SEQUENCE):
        factor = torch.where(steps[operation] == step, factors[:, operation], 1.0)[:, None, None]
        if operation == BRIGHTNESS:
            x = blend(x, 0.0, factor)
        elif operation == CONTRAST:
            x = blend(x, grey(x).mean(dim=(1, 2), keepdim=True), factor)
        elif operation == SATURATION:
            x = blend(x, grey(x), factor)
        else:
            x = shift_hue(x, factor)
    return x


def jitter_steps(order: Tensor) -> list[Tensor]:
    """The step of SEQUENCE at which each operation acts [B], so that they act in the order of the numbers [B, 4]."""
    brightness, contrast, saturation, hue = order.unbind(dim=1)

    def part(operation: Tensor) -> Tensor:  # the contrast ends part 0 or 2, hue part 1
        return (contrast < operation) + 2 * (hue < operation)

    return [
        4 * part(brightness) + 2 * (saturation < brightness),
        3 + 8 * (hue < contrast),
        4 * part(saturation) + 1,
        torch.full_like(hue, SEQUENCE.index(HUE)),
    ]


def blend(x: Planes, other: Tensor | float, factor: Tensor) -> Planes:
    """factor x + (1 - factor) other, clamped to [0, 1]."""
    rest = (1 - factor) * other
    red, green, blue = ((plane * factor).add_(rest).clamp_(0, 1) for plane in x)
    return red, green, blue


def grey(x: Planes) -> Tensor:
    return 0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2]


def shift_hue(x: Planes, turn: Tensor) -> Planes:
    """Turn the hue by `turn` [B, 1, 1] of a full circle, in HSV.

    With h in [0, 6): red = low + (high - low) clamp(|h - 3| - 1), green and blue alike with 2 - |h - 2|, 2 - |h - 4|.
    """
    red, green, blue = x
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    spread = high - low
    hue = torch.where(
        red == high, green - blue, torch.where(green == high, blue - red + 2 * spread, red - green + 4 * spread)
    )
    hue = hue / spread.clamp(min=1e-12) + 6 * turn  # where spread is 0 any hue gives the same grey
    hue = hue - 6 * (hue / 6).floor()
    return (
        low + spread * ((hue - 3).abs() - 1).clamp(0, 1),
        low + spread * (2 - (hue - 2).abs()).clamp(0, 1),
        low + spread * (2 - (hue - 4).abs()).clamp(0, 1),
    )


def normalise(x: Planes) -> Tensor:
    """(x - mean) / std per channel: [B, 3, H, W] in channels_last memory."""
    planes = [(plane - mean) / std for plane, mean, std in zip(x, MEAN, STD, strict=True)]
    return torch.stack(planes, dim=3).permute(0, 3, 1, 2)
