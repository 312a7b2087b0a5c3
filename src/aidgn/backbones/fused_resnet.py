"""Layers that compute several layers of a ResNet at once: convolution, batch norm, ReLU, shortcut and pooling.

Each layer replaces one layer of the network and shares its parameters. `aidgn.backbones.folding` puts them in place.
"""

import functools
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from aidgn.backbones.frozen_bn import FrozenBatchNorm


class FoldedConv2d(nn.Conv2d):
    """A convolution and the frozen batch norm after it in one: bn(conv(x, w)) = conv(x, w s) + b.

    s = scale / sqrt(variance + eps), b = shift + (bias - mean) s. The forward pass computes both from the parameters,
    so that w, scale and shift receive their gradients. Under autocast the product is float32 and conv casts it.

    Args:
        conv: The convolution to replace. The new layer shares its parameters.
        norm: The batch norm after it. It stays in its place in the network and becomes the identity.
    """

    norm: FrozenBatchNorm

    def __init__(self, conv: nn.Conv2d, norm: FrozenBatchNorm):
        super().__init__(**conv_options(conv))
        self.weight = conv.weight
        self.bias = conv.bias
        self.training = conv.training
        # Bypass nn.Module, which would list the parameters of `norm` a second time.
        object.__setattr__(self, "norm", norm)
        norm.folded = True
        self.adds_shift = True  # False: a later layer adds the shift, to fewer numbers or in a pass that exists anyway
        self.constants: tuple[Tensor, Tensor] | None = None  # weight and shift of a network that only predicts

    def forward(self, x: Tensor, extra_shift: Tensor | None = None) -> Tensor:
        """Compute bn(conv(x)), with `extra_shift` added to b."""
        weight, shift = self.weight_and_shift(extra_shift)
        bias = shift if self.adds_shift else None
        if x.is_cuda and self.is_stem and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            return stem_convolution(x, weight, bias)
        return self._conv_forward(x, weight, bias)

    def forward_relu(self, x: Tensor, shortcut: Tensor | None = None, extra_shift: Tensor | None = None) -> Tensor:
        """Compute relu(bn(conv(x)) + shortcut), with `extra_shift` added to b.

        A fused kernel, where one exists, saves reading and writing the output of the convolution once more.
        """
        if self.has_fused_kernel(x, shortcut) and not isinstance(self.padding, str):
            dtype = torch.get_autocast_dtype("cuda")
            weight, shift = (tensor.to(dtype) for tensor in self.weight_and_shift(extra_shift))
            differentiable = torch.is_grad_enabled() or torch.compiler.is_compiling()
            compute = conv_relu if differentiable else conv_relu_kernel
            shortcut = None if shortcut is None else shortcut.to(dtype)
            return compute(x.to(dtype), weight, shift, shortcut, self.stride, self.padding, self.dilation)
        y = self(x, extra_shift)
        if shortcut is not None:
            y += shortcut
        return F.relu_(y)

    def has_fused_kernel(self, x: Tensor, shortcut: Tensor | None) -> bool:
        return (
            x.is_cuda
            and torch.is_autocast_enabled("cuda")
            and self.groups == 1
            and self.padding_mode == "zeros"
            and (shortcut is not None or self.keeps_size)
        )

    def weight_and_shift(self, extra_shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.constants is not None:
            weight, shift = self.constants
        else:
            norm = self.norm
            assert norm.running_mean is not None and norm.running_var is not None
            scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
            mean = -norm.running_mean if self.bias is None else self.bias - norm.running_mean
            shift = norm.bias + mean * scale
            weight = self.weight * scale[:, None, None, None]
        return weight, shift if extra_shift is None else shift + extra_shift

    @property
    def keeps_size(self) -> bool:
        """Whether the output has the height and width of the input and, beyond 1x1 kernels, its channels."""
        same = tuple(d * (k - 1) / 2 for d, k in zip(self.dilation, self.kernel_size, strict=True))
        channels_fit = self.kernel_size == (1, 1) or self.in_channels == self.out_channels
        return self.stride == (1, 1) and self.padding == same and channels_fit

    @property
    def is_stem(self) -> bool:
        """Whether this is the 7x7 convolution of stride 2 that a ResNet starts with."""
        geometry = (self.kernel_size, self.stride, self.padding, self.dilation, self.groups, self.padding_mode)
        return geometry == ((7, 7), (2, 2), (3, 3), (1, 1), 1, "zeros") and self.in_channels <= 4


def conv_options(conv: nn.Conv2d) -> dict[str, Any]:
    """Collect the arguments of a convolution with the shape of `conv` and no memory or random numbers."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {name: getattr(conv, name) for name in names} | {"bias": conv.bias is not None, "device": "meta"}


def stem_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a 7x7 convolution of stride 2 as a 4x4 convolution of stride 1 on 2x2 blocks of pixels.

    Three channels leave tensor cores mostly idle; the same sum over twelve, padded to sixteen, does not.
    """
    blocks = F.pad(F.pixel_unshuffle(x, 2), (2, 1, 2, 1))
    kernel = F.pixel_unshuffle(F.pad(weight, (1, 0, 1, 0)), 2)
    fill = (0, 0, 0, 0, 0, -kernel.shape[1] % 8)
    return F.conv2d(F.pad(blocks, fill), F.pad(kernel, fill), bias)


# The stem: convolution, batch norm, ReLU, pooling ---------------------------------------------------------------------


class PoolingFirst(nn.MaxPool2d):
    """Max pooling, then shift and ReLU.

    Shift and ReLU do not change which of two numbers is greater, so the result is the same as in the usual order, from
    a quarter of the work.

    Args:
        pool: The pooling to replace.
        conv: The convolution that leaves its shift to this layer.
    """

    conv: FoldedConv2d

    def __init__(self, pool: nn.MaxPool2d, conv: FoldedConv2d):
        super().__init__(**pool_options(pool))
        self.training = pool.training
        object.__setattr__(self, "conv", conv)  # a reference, not a submodule
        conv.adds_shift = False

    def forward(self, x: Tensor) -> Tensor:
        shift = self.conv.weight_and_shift()[1].to(x.dtype)[:, None, None]
        halves = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode) == (3, 2, 1, 1, False)
        if halves and torch.compiler.is_compiling() and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            return F.relu(MaxPoolFunction.apply(x) + shift)
        return F.relu_(super().forward(x).add_(shift))


def pool_options(pool: nn.MaxPool2d) -> dict[str, Any]:
    names = ("kernel_size", "stride", "padding", "dilation", "return_indices", "ceil_mode")
    return {name: getattr(pool, name) for name in names}


class FusedReLU(nn.ReLU):
    """Placeholder for a ReLU that another layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class MaxPoolFunction(torch.autograd.Function):
    """3x3 max pooling of stride 2, in operations that a compiler makes one kernel of, forward and backward.

    The gradient of PyTorch's max pooling takes longer on a GPU than the gradient of any convolution.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        padded = F.pad(x, (1, 0, 1, 0), value=-torch.inf)
        pixels = [
            padded[:, :, row : row + height : 2, column : column + width : 2]
            for row, column in product(range(3), range(3))
        ]
        largest = functools.reduce(torch.maximum, pixels)
        index = torch.full((), 8, dtype=torch.int8, device=x.device)
        for candidate in reversed(range(8)):  # the first of several equal pixels wins
            index = torch.where(pixels[candidate] == largest, candidate, index)
        ctx.save_for_backward(index)
        return largest

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (index,) = ctx.saved_tensors
        # Pixels 2p and 2p + 1 are rows 1 and 2 of window p; 2p + 1 is also row 0 of window p + 1.
        parity = torch.arange(2, dtype=torch.int8, device=index.device)
        rows = (parity + 1, 9 * parity - 9)  # in window p, in window p + 1; -9: not in that window
        gradient = torch.zeros((), dtype=grad_output.dtype, device=index.device)
        for down, right in product(range(2), range(2)):
            pixel = 3 * rows[down][:, None, None, None] + rows[right][:, None]  # [2, 1, 2, 1]
            window, grad_window = (
                F.pad(tensor, (0, right, 0, down))[:, :, down:, right:].permute(0, 2, 3, 1)
                for tensor in (index, grad_output)
            )
            is_largest = window[:, :, None, :, None] == pixel
            gradient = gradient + torch.where(is_largest, grad_window[:, :, None, :, None], 0)
        return gradient.flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)


# Residual blocks ------------------------------------------------------------------------------------------------------

SHAPES_WITHOUT_KERNEL: set[tuple[object, ...]] = set()  # cuDNN has no fused kernel for these


def conv_relu_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Compute relu(conv(x) + bias + shortcut), on CUDA in one kernel.

    The kernel needs a shortcut or a convolution that keeps the size. PyTorch's cudnn_convolution_relu would add its
    uninitialised output times zero, which may be NaN; here the input, which has the same shape, takes that place.
    """
    if x.is_cuda:
        x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
        if shortcut is None and weight.shape[2:] == (1, 1):
            return pointwise_conv_relu(x, weight, bias)
        added, factor = (x, 0.0) if shortcut is None else (shortcut, 1.0)
        shapes = x.shape, weight.shape, x.dtype, *stride, *padding, *dilation
        if shapes not in SHAPES_WITHOUT_KERNEL:
            try:
                return torch.cudnn_convolution_add_relu(x, weight, added, factor, bias, stride, padding, dilation, 1)
            except RuntimeError as error:
                if "engine" not in str(error):
                    raise
                SHAPES_WITHOUT_KERNEL.add(shapes)
    y = F.conv2d(x, weight, bias, stride, padding, dilation)
    return F.relu(y if shortcut is None else y + shortcut)


def pointwise_conv_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute relu(conv(x) + bias) of a 1x1 convolution as a matrix product of pixels (channels last) and weights."""
    pixels = x.permute(0, 2, 3, 1)
    y = torch.ops.aten._addmm_activation(bias, pixels.reshape(-1, x.shape[1]), weight.flatten(1).t())
    return y.view(*pixels.shape[:3], len(weight)).permute(0, 3, 1, 2)


conv_relu = torch.library.custom_op(
    "aidgn::convolution_relu",
    conv_relu_kernel,
    mutates_args=(),
    # As inferred from the annotations, which PyTorch 2.6 cannot do.
    schema="(Tensor x, Tensor weight, Tensor bias, Tensor? shortcut, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation) -> Tensor",
)


@conv_relu.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    y = F.conv2d(x, weight, None, stride, padding, dilation)
    return y.contiguous(memory_format=torch.channels_last) if x.is_cuda else y


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, _, *ctx.geometry = inputs
    ctx.save_for_backward(x, weight, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, output = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_shortcut = ctx.needs_input_grad[:4]
    gradient = torch.where(output > 0, gradient, 0)
    stride, padding, dilation = ctx.geometry
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, dilation, False, [0, 0], 1, [needs_x, needs_weight, False]
    )
    grad_bias = gradient.sum((0, 2, 3)) if needs_bias else None
    grad_shortcut = gradient if needs_shortcut else None
    return grad_x, grad_weight, grad_bias, grad_shortcut, None, None, None


conv_relu.register_autograd(_backward, setup_context=_save_for_backward)


class FusedBlock(nn.Module):
    """A residual block of timm's or torchvision's ResNets that computes each convolution together with its ReLU.

    Args:
        block: The block to replace. The new block shares its layers, under the same names.
    """

    block: nn.Module

    def __init__(self, block: nn.Module):
        super().__init__()
        for name, layer in block.named_children():
            self.add_module(name, layer)
        self.downsample: nn.Module | None = block.downsample  # type: ignore[assignment]
        self.training = block.training
        object.__setattr__(self, "block", block)  # a reference, for `unfuse`, not a submodule
        if conv := self.shortcut_conv():
            conv.adds_shift = False

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        *first, last = (layer for layer in self.children() if isinstance(layer, FoldedConv2d))
        for conv in first:
            x = conv.forward_relu(x)
        shortcut_conv = self.shortcut_conv()
        return last.forward_relu(x, shortcut, None if shortcut_conv is None else shortcut_conv.weight_and_shift()[1])

    def shortcut_conv(self) -> FoldedConv2d | None:
        """Return the convolution at the end of a plain shortcut, which leaves its shift to the last convolution."""
        match [*self.downsample.children()] if type(self.downsample) is nn.Sequential else []:
            case [*_, FoldedConv2d() as conv, norm] if type(norm) is FrozenBatchNorm:
                return conv
        return None


def is_plain_block(block: nn.Module) -> bool:
    """Tell whether a block has only folded convolutions, ReLUs and a shortcut."""
    block_type = type(block)
    if block_type.__module__ not in ("timm.models.resnet", "torchvision.models.resnet"):
        return False
    layers = [layer for name, layer in block.named_children() if name != "downsample"]
    return block_type.__name__ in ("BasicBlock", "Bottleneck") and all(
        type(layer) in (FoldedConv2d, FrozenBatchNorm, nn.ReLU, nn.Identity) for layer in layers
    )
