"""Triton kernels for a ResNet with folded batch norm: what lies between its convolutions, in one pass over memory each.

They start in seconds, where compiling the whole network takes half a minute. Tensors are channels_last, so that
an image batch is a matrix of pixels by channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, COLUMNS = 32, 64  # pixels and channels of a program's block
PROGRAMS = 1024  # programs that a large GPU runs at once
BLOCK = 512  # weights of a channel that a program folds at once
PARTS, SUMMED_COLUMNS = 256, 8  # partial sums and channels of a program's block

# Gradient of ReLU and of the shift before it --------------------------------------------------------------------------


@triton.jit(do_not_specialize=["steps"])
def relu_gradient_kernel(
    output,
    gradient,
    second,
    masked,
    sums,
    rows,
    channels,
    steps,
    HAS_SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < channels)[None, :]
        place = row.to(tl.int64)[:, None] * channels + column[None, :]
        value = tl.load(gradient + place, inside, 0.0).to(tl.float32)
        if HAS_SECOND:
            value += tl.load(second + place, inside, 0.0).to(tl.float32)
        value = tl.where(tl.load(output + place, inside, 0.0) > 0, value, 0.0)
        tl.store(masked + place, value.to(masked.dtype.element_ty), inside)
        total += value
    tl.store(sums + tl.program_id(0) * channels + column, tl.sum(total, 0), column < channels)


@triton.jit(do_not_specialize=["rows"])
def column_sums_kernel(parts, sums, rows, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < channels)[None, :]
        total += tl.load(parts + row[:, None] * channels + column[None, :], inside, 0.0)
    tl.store(sums + column, tl.sum(total, 0), column < channels)


def column_sums(parts: Tensor) -> Tensor:
    """Return `parts.sum(0)` in float32; PyTorch's kernel reads these few rows one after the other."""
    rows, channels = parts.shape
    sums = torch.empty(channels, device=parts.device)
    grid = (triton.cdiv(channels, SUMMED_COLUMNS),)
    column_sums_kernel[grid](parts, sums, rows, channels, ROWS=PARTS, COLUMNS=SUMMED_COLUMNS)
    return sums


def relu_gradient(output: Tensor, gradient: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (gradient + second) where the output of a ReLU is positive, and its sum over pixels in float32.

    Args:
        output: Output of the ReLU [B, C, H, W], channels_last.
        gradient: Gradient of the output.
        second: Gradient of a second use of the output.
    """
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    second = None if second is None else second.contiguous(memory_format=torch.channels_last)
    channels = output.shape[1]
    rows = output.numel() // channels
    columns = triton.cdiv(channels, COLUMNS)
    steps = triton.cdiv(rows, ROWS * max(PROGRAMS // columns, 1))
    grid = (triton.cdiv(rows, ROWS * steps), columns)
    masked = torch.empty_like(output, memory_format=torch.channels_last)
    sums = torch.empty(grid[0], channels, device=output.device)
    relu_gradient_kernel[grid](
        output, gradient, gradient if second is None else second, masked, sums, rows, channels, steps,
        HAS_SECOND=second is not None, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return masked, column_sums(sums)


# Folded weights -------------------------------------------------------------------------------------------------------


@triton.jit
def fold_kernel(weight, scale, shift, mean, variance, folded, moved, size, eps, BLOCK: tl.constexpr):
    channel = tl.program_id(0)
    factor = tl.load(scale + channel) * tl.rsqrt(tl.load(variance + channel) + eps)
    tl.store(moved + channel, tl.load(shift + channel) - tl.load(mean + channel) * factor)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        values = tl.load(weight + channel * size + place, place < size) * factor
        tl.store(folded + channel * size + place, values.to(folded.dtype.element_ty), place < size)


@triton.jit
def fold_gradient_kernel(
    weight, scale, mean, variance, of_folded, of_moved, of_weight, of_scale, size, eps, BLOCK: tl.constexpr
):
    channel = tl.program_id(0)
    inverse = tl.rsqrt(tl.load(variance + channel) + eps)
    factor = tl.load(scale + channel) * inverse
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        gradient = tl.load(of_folded + channel * size + place, place < size, 0.0).to(tl.float32)
        total += gradient * tl.load(weight + channel * size + place, place < size, 0.0)
        tl.store(of_weight + channel * size + place, gradient * factor, place < size)
    product = tl.sum(total, 0) - tl.load(of_moved + channel) * tl.load(mean + channel)
    tl.store(of_scale + channel, product * inverse)


class Fold(torch.autograd.Function):
    """Fold a frozen batch norm into a convolution without bias: w s in bfloat16 and the shift b in float32.

    s = scale / sqrt(variance + eps), b = shift - mean s.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        folded = torch.empty_like(weight, dtype=torch.bfloat16)
        moved = torch.empty_like(shift)
        size = weight[0].numel()
        fold_kernel[(len(weight),)](weight, scale, shift, mean, variance, folded, moved, size, eps, BLOCK=BLOCK)
        ctx.save_for_backward(weight, scale, mean, variance)
        ctx.eps = eps
        return folded, moved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_folded: Tensor, of_moved: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, mean, variance = ctx.saved_tensors
        if of_folded.stride() != weight.stride():
            of_folded = torch.empty_like(weight, dtype=of_folded.dtype).copy_(of_folded)
        of_weight, of_scale = torch.empty_like(weight), torch.empty_like(scale)
        size = weight[0].numel()
        fold_gradient_kernel[(len(weight),)](
            weight, scale, mean, variance, of_folded, of_moved, of_weight, of_scale, size, ctx.eps,
            BLOCK=BLOCK,
        )  # fmt: skip
        return of_weight, of_scale, of_moved, None, None, None


# Max pooling of the stem, shift and ReLU -----------------------------------------------------------------------------


@triton.jit
def pool_kernel(
    images, shift, output, index, height, width, down, right, pixels, CHANNELS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    image, y, x = row // (down * right), row // right % down, row % right
    largest = tl.full([ROWS, CHANNELS], float("-inf"), tl.float32)
    winner = tl.zeros([ROWS, CHANNELS], tl.int32)
    for window in tl.static_range(9):
        at_y, at_x = 2 * y - 1 + window // 3, 2 * x - 1 + window % 3
        inside = (row < pixels) & (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
        place = ((image * height + at_y) * width + at_x).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        value = tl.load(images + place, inside[:, None], float("-inf")).to(tl.float32)
        winner = tl.where(value > largest, window, winner)  # the first of several equal pixels wins
        largest = tl.maximum(value, largest)
    value = tl.maximum(largest + tl.load(shift + channel)[None, :], 0.0)
    place = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(output + place, value.to(output.dtype.element_ty), (row < pixels)[:, None])
    tl.store(index + place, winner.to(tl.int8), (row < pixels)[:, None])


@triton.jit
def pool_gradient_kernel(
    gradient, index, of_images, height, width, down, right, pixels, CHANNELS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    image, y, x = row // (height * width), row // width % height, row % width
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for window in tl.static_range(9):
        from_y, from_x = y + 1 - window // 3, x + 1 - window % 3
        at_y, at_x = from_y // 2, from_x // 2
        inside = (row < pixels) & (from_y >= 0) & (from_x >= 0) & (from_y % 2 == 0) & (from_x % 2 == 0)
        inside = inside & (at_y < down) & (at_x < right)
        place = ((image * down + at_y) * right + at_x).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        chosen = tl.load(index + place, inside[:, None], -1) == window
        total += tl.load(gradient + place, chosen, 0.0).to(tl.float32)
    place = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(of_images + place, total.to(of_images.dtype.element_ty), (row < pixels)[:, None])


class PoolShiftReLU(torch.autograd.Function):
    """relu(max_pool(x) + shift): 3x3 max pooling of stride 2 and padding 1 over a power of two of channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = x.shape
        down, right = (height + 1) // 2, (width + 1) // 2
        output = x.new_empty(batch, down, right, channels).permute(0, 3, 1, 2)
        index = torch.empty_like(output, dtype=torch.int8)
        pixels, rows = batch * down * right, 2048 // channels
        grid = (triton.cdiv(pixels, rows),)
        pool_kernel[grid](x, shift, output, index, height, width, down, right, pixels, CHANNELS=channels, ROWS=rows)
        ctx.save_for_backward(output, index)
        ctx.shape = x.shape
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        output, index = ctx.saved_tensors
        masked, of_shift = relu_gradient(output, gradient)
        batch, channels, height, width = ctx.shape
        of_x = output.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)
        pixels, rows = batch * height * width, 2048 // channels
        grid = (triton.cdiv(pixels, rows),)
        pool_gradient_kernel[grid](
            masked, index, of_x, height, width, *output.shape[2:], pixels, CHANNELS=channels, ROWS=rows
        )
        return of_x, of_shift
