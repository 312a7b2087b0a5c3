"""Triton kernels of `aidgn.data.transforms`: weights that resize images, and all operations on a pixel in one pass.

They compute the same as the functions there. They are ready seconds after the start of a process; compiling those
functions takes half a minute.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aidgn.data import transforms

PIXELS = 1024  # pixels of an image per program


@triton.jit
def weights_kernel(
    starts, lengths, flips, matrix, sums, size, slot, CUBIC: tl.constexpr, SLOT: tl.constexpr, ROWS: tl.constexpr
):
    image = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pixel = tl.arange(0, SLOT)[None, :].to(tl.float32)
    start, length = tl.load(starts + image), tl.load(lengths + image)
    position = tl.where(tl.load(flips + image) != 0, size - 1 - row, row).to(tl.float32)
    scale = length / size
    centre = (start + (position + 0.5) * scale)[:, None]
    inside = tl.minimum(pixel + 1, start + length) - tl.maximum(pixel, start)
    inside = tl.minimum(tl.maximum(inside, 0.0), 1.0)
    half = tl.maximum(scale, 1.0)
    distance = tl.abs(pixel + 0.5 - centre) / half
    if CUBIC:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
        value = tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0)) * inside / half
    else:
        value = tl.maximum(1 - distance, 0.0) * inside / half
    value = value.to(matrix.dtype.element_ty)
    allowed = (row < size)[:, None] & (tl.arange(0, SLOT) < slot)[None, :]
    tl.store(matrix + (image * size + row)[:, None] * slot + tl.arange(0, SLOT)[None, :], value, allowed)
    tl.store(sums + image * size + row, tl.sum(tl.where(allowed, value.to(tl.float32), 0.0), 1), row < size)


def resize_weights(
    start: Tensor, length: Tensor, flip: Tensor, size: int, slot: int, interpolation: str
) -> tuple[Tensor, Tensor]:
    """Return `transforms.weights` in float16 [B, size, slot], and the sums of its rows in float32 [B, size]."""
    batch = len(start)
    matrix = torch.empty(batch, size, slot, dtype=torch.float16, device=start.device)
    sums = torch.empty(batch, size, device=start.device)
    width = triton.next_power_of_2(slot)
    rows = max(1, 4096 // width)
    weights_kernel[(triton.cdiv(size, rows), batch)](
        start.float().contiguous(), length.float().contiguous(), flip.to(torch.uint8), matrix, sums, size, slot,
        CUBIC=interpolation == "bicubic", SLOT=width, ROWS=rows,
    )  # fmt: skip
    return matrix, sums


@triton.jit
def load_pixels(products, high, wide, size, CUBIC: tl.constexpr, PIXELS: tl.constexpr):
    image = tl.program_id(1)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    inside = place < size * size
    row, column = place // size, place % size
    divisor = tl.load(high + image * size + row, inside, 1.0) * tl.load(wide + image * size + column, inside, 1.0)
    first = products + (image * size + row) * (3 * size) + column
    red = (tl.load(first, inside, 0.0).to(tl.float32) / divisor + 128) / 255
    green = (tl.load(first + size, inside, 0.0).to(tl.float32) / divisor + 128) / 255
    blue = (tl.load(first + 2 * size, inside, 0.0).to(tl.float32) / divisor + 128) / 255
    if CUBIC:
        red, green, blue = limit(red), limit(green), limit(blue)
    return red, green, blue


@triton.jit
def limit(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def grey(red, green, blue):
    return 0.2989 * red + 0.587 * green + 0.114 * blue


@triton.jit
def blend(red, green, blue, other, factor):
    rest = (1 - factor) * other
    return limit(red * factor + rest), limit(green * factor + rest), limit(blue * factor + rest)


@triton.jit
def change_part(red, green, blue, factors):
    red, green, blue = blend(red, green, blue, 0.0, tl.load(factors))
    red, green, blue = blend(red, green, blue, grey(red, green, blue), tl.load(factors + 1))
    return blend(red, green, blue, 0.0, tl.load(factors + 2))


@triton.jit
def shift_hue(red, green, blue, turn):
    high = tl.maximum(tl.maximum(red, green), blue)
    low = tl.minimum(tl.minimum(red, green), blue)
    spread = high - low
    of_blue = red - green + 4 * spread
    hue = tl.where(red == high, green - blue, tl.where(green == high, blue - red + 2 * spread, of_blue))
    hue = hue / tl.maximum(spread, 1e-12) + 6 * turn
    hue = hue - 6 * tl.floor(hue / 6)
    red = low + spread * limit(tl.abs(hue - 3) - 1)
    green = low + spread * limit(2 - tl.abs(hue - 2))
    blue = low + spread * limit(2 - tl.abs(hue - 4))
    return red, green, blue


@triton.jit
def grey_sums_kernel(
    products, high, wide, factors, contrast_first, sums, size, CUBIC: tl.constexpr, PIXELS: tl.constexpr
):
    image = tl.program_id(1)
    factors += image * 15
    red, green, blue = load_pixels(products, high, wide, size, CUBIC, PIXELS)
    red, green, blue = change_part(red, green, blue, factors)
    if tl.load(contrast_first + image) == 0:
        red, green, blue = change_part(red, green, blue, factors + 4)
        red, green, blue = shift_hue(red, green, blue, tl.load(factors + 7))
        red, green, blue = change_part(red, green, blue, factors + 8)
    inside = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS) < size * size
    total = tl.sum(tl.where(inside, grey(red, green, blue), 0.0), 0)
    tl.store(sums + image * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def pixels_kernel(
    products,
    high,
    wide,
    factors,
    means,
    to_grey,
    output,
    size,
    mean_red,
    mean_green,
    mean_blue,
    std_red,
    std_green,
    std_blue,
    COLOURS: tl.constexpr,
    CUBIC: tl.constexpr,
    PIXELS: tl.constexpr,
):
    image = tl.program_id(1)
    red, green, blue = load_pixels(products, high, wide, size, CUBIC, PIXELS)
    if COLOURS:
        factors += image * 15
        mean = tl.load(means + image)
        red, green, blue = change_part(red, green, blue, factors)
        red, green, blue = blend(red, green, blue, mean, tl.load(factors + 3))
        red, green, blue = change_part(red, green, blue, factors + 4)
        red, green, blue = shift_hue(red, green, blue, tl.load(factors + 7))
        red, green, blue = change_part(red, green, blue, factors + 8)
        red, green, blue = blend(red, green, blue, mean, tl.load(factors + 11))
        red, green, blue = change_part(red, green, blue, factors + 12)
        red, green, blue = blend(red, green, blue, grey(red, green, blue), 1 - tl.load(to_grey + image))
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    inside = place < size * size
    first = output + (image.to(tl.int64) * size * size + place) * 3
    tl.store(first, (red - mean_red) / std_red, inside)
    tl.store(first + 1, (green - mean_green) / std_green, inside)
    tl.store(first + 2, (blue - mean_blue) / std_blue, inside)


def augment(
    images: Tensor,
    geometry: Tensor,
    uniforms: Tensor,
    size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    interpolation: str,
) -> Tensor:
    """Compute `transforms.augment`."""
    crop, flip, order, factors, to_grey = uniforms.split(transforms.SHARES, dim=1)
    steps = transforms.jitter_steps(order)
    by_step = torch.stack(transforms.step_factors(steps, transforms.jitter_factors(factors)), dim=1)
    contrast_first = steps[transforms.CONTRAST] == transforms.SEQUENCE.index(transforms.CONTRAST)
    colours = by_step, contrast_first.to(torch.uint8), (to_grey < transforms.GREY_PROBABILITY).float()
    boxes = transforms.crop_boxes_in_slots(crop, geometry)
    return resize(images, boxes, flip[:, 0] < 0.5, size, interpolation, mean, std, colours)


def resize(
    images: Tensor,
    boxes: Tensor,
    flip: Tensor,
    size: int,
    interpolation: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    colours: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Cut boxes out of images, resize them, change their colours, normalise; return [B, 3, size, size], channels_last.

    Args:
        images: Slots, uint8 [B, S, S, 3].
        boxes: Top, left, height, width [B, 4].
        flip: Whether to mirror an image [B].
        size: Side of the result.
        interpolation: `bilinear` or `bicubic`.
        mean: Subtracted from each channel.
        std: Divides each channel afterwards.
        colours: Factors of the steps of `transforms.SEQUENCE` [B, 15], whether contrast changes in the first of its
            two steps [B], and 1 for images that become grey, else 0 [B, 1]; None changes no colour.
    """
    images = transforms.pad_slots(images)
    batch, slot = images.shape[:2]
    boxes, flip = boxes.expand(batch, 4), flip.expand(batch)
    upright = torch.zeros_like(flip)
    rows, high = resize_weights(boxes[:, 0], boxes[:, 2], upright, size, slot, interpolation)
    columns, wide = resize_weights(boxes[:, 1], boxes[:, 3], flip, size, slot, interpolation)
    products = transforms.weighted_sums(images, rows, columns)
    blocks = triton.cdiv(size * size, PIXELS)
    output = torch.empty(batch, size, size, 3, device=images.device)
    cubic = interpolation == "bicubic"
    factors, means, to_grey = high, high, high  # not read if no colour changes
    if colours is not None:
        factors, contrast_first, to_grey = colours
        sums = torch.empty(batch, blocks, device=images.device)
        grey_sums_kernel[(blocks, batch)](
            products, high, wide, factors, contrast_first, sums, size, CUBIC=cubic, PIXELS=PIXELS
        )
        means = sums.sum(1) / (size * size)
    pixels_kernel[(blocks, batch)](
        products, high, wide, factors, means, to_grey, output, size, *mean, *std,
        COLOURS=colours is not None, CUBIC=cubic, PIXELS=PIXELS,
    )  # fmt: skip
    return output.permute(0, 3, 1, 2)
