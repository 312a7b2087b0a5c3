"""Layers that compute several layers of a ResNet at once: convolution, batch norm, ReLU, shortcut and pooling.

Each layer replaces one layer of the network and shares its parameters. `aidgn.backbones.folding` puts them in place.
"""

from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from aidgn.backbones.conv_relu import ConvReLU
from aidgn.backbones.frozen_bn import FrozenBatchNorm
from aidgn.devices import has_triton

MAX_POOL_CHANNELS = 1024  # channels that the pooling kernel holds at a time


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

    def forward(self, x: Tensor) -> Tensor:
        """Compute bn(conv(x)), or without the shift if a later layer adds it."""
        weight, shift = self.weight_and_shift()
        return self.convolve(x, weight, shift if self.adds_shift else None)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.is_cuda and self.is_stem and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            return stem_convolution(x, weight, bias)
        return self._conv_forward(x, weight, bias)

    def forward_relu(
        self, x: Tensor, shortcut: Tensor | None = None, extra_shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute relu(bn(conv(x)) + shortcut), with `extra_shift` added to the shift.

        Returns:
            The same tensor twice. Where two layers read it, each should read one of the two: kernels then add their
            gradients in the pass that they need anyway.
        """
        weight, shift = self.weight_and_shift()
        if extra_shift is not None:
            shift = shift + extra_shift
        if use_kernels(x) and self.groups == 1 and self.padding_mode == "zeros" and not isinstance(self.padding, str):
            dtype = torch.get_autocast_dtype("cuda")
            shortcut = None if shortcut is None else shortcut.to(dtype)
            main, side = ConvReLU.apply(
                x.to(dtype), weight.to(dtype), shift, shortcut, self.stride, self.padding, self.dilation
            )
            return main, side
        y = self.convolve(x, weight, shift)
        if shortcut is not None:
            y += shortcut
        y = F.relu_(y)
        return y, y

    def weight_and_shift(self) -> tuple[Tensor, Tensor]:
        if self.constants is not None:
            return self.constants
        if use_kernels(self.weight) and self.bias is None:
            from aidgn.backbones.resnet_kernels import Fold

            norm = self.norm
            weight, shift = Fold.apply(
                self.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps
            )
            return weight, shift
        return self.weight * self.scale[:, None, None, None], self.shift

    @property
    def scale(self) -> Tensor:
        assert self.norm.running_var is not None
        return self.norm.weight * torch.rsqrt(self.norm.running_var + self.norm.eps)

    @property
    def shift(self) -> Tensor:
        if self.constants is not None:
            return self.constants[1]
        assert self.norm.running_mean is not None
        mean = -self.norm.running_mean if self.bias is None else self.bias - self.norm.running_mean
        return self.norm.bias + mean * self.scale

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
    kernel = F.pixel_unshuffle(F.pad(weight, (1, 0, 1, 0)), 2)
    kernel = F.pad(kernel, (0, 0, 0, 0, 0, -kernel.shape[1] % 8)).contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = x.shape
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    # One pass over memory cuts the image into blocks, pads them and converts the numbers.
    blocks = x.new_zeros(batch, height // 2 + 3, width // 2 + 3, kernel.shape[1], dtype=dtype)
    pixels = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 1, 3, 5)
    blocks[:, 2:-1, 2:-1, : 4 * channels].unflatten(3, (channels, 2, 2)).copy_(pixels)
    return F.conv2d(blocks.permute(0, 3, 1, 2), kernel, bias)


def use_kernels(x: Tensor) -> bool:
    """Return whether to use the Triton kernels: on CUDA, in bfloat16, while `torch.compile` does not trace."""
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") == torch.bfloat16
        and has_triton()
    )


def has_kernels(network: nn.Module, autocast: str | None) -> bool:
    """Return whether a network has fused stages and autocast uses bfloat16, so that Triton kernels compute it."""
    return autocast == "bfloat16" and has_triton() and any(isinstance(layer, FusedStage) for layer in network.modules())


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
        shift = self.conv.shift
        if use_kernels(x) and self.is_halving and fits_pooling_kernel(x.shape[1]):
            from aidgn.backbones.resnet_kernels import PoolShiftReLU

            return PoolShiftReLU.apply(x, shift.float())
        return F.relu_(super().forward(x).add_(shift.to(x.dtype)[:, None, None]))

    @property
    def is_halving(self) -> bool:
        """Whether this is the 3x3 pooling of stride 2 that a ResNet has."""
        return (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode) == (3, 2, 1, 1, False)


def fits_pooling_kernel(channels: int) -> bool:
    """Return whether the kernel holds all channels of a pixel: a power of two, and not too many."""
    return channels.bit_count() == 1 and channels <= MAX_POOL_CHANNELS


def pool_options(pool: nn.MaxPool2d) -> dict[str, Any]:
    """Collect the arguments of a pooling layer like `pool`."""
    names = ("kernel_size", "stride", "padding", "dilation", "return_indices", "ceil_mode")
    return {name: getattr(pool, name) for name in names}


class FusedReLU(nn.ReLU):
    """Placeholder for a ReLU that another layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x


# Residual blocks ------------------------------------------------------------------------------------------------------


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
        object.__setattr__(self, "block", block)  # a reference for `unfuse`, not a submodule
        if conv := self.shortcut_conv():
            conv.adds_shift = False

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_pair(x, x)[0]

    def forward_pair(self, main: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the block from two references to one tensor: `main` for the convolutions, `side` for the shortcut."""
        *first, last = (layer for layer in self.children() if isinstance(layer, FoldedConv2d))
        for conv in first:
            main, _ = conv.forward_relu(main)
        shortcut_conv = self.shortcut_conv()
        if self.downsample is None or shortcut_conv is None:
            return last.forward_relu(main, side if self.downsample is None else self.downsample(side))
        for layer in list(self.downsample.children())[:-2]:
            side = layer(side)
        weight, shift = shortcut_conv.weight_and_shift()
        return last.forward_relu(main, shortcut_conv.convolve(side, weight, None), shift)

    def shortcut_conv(self) -> FoldedConv2d | None:
        """Return the convolution at the end of a plain shortcut, which leaves its shift to the last convolution."""
        if type(self.downsample) is not nn.Sequential or len(self.downsample) < 2:
            return None
        conv, norm = list(self.downsample.children())[-2:]
        return conv if isinstance(conv, FoldedConv2d) and type(norm) is FrozenBatchNorm else None


class FusedStage(nn.Sequential):
    """Fused blocks one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        main = side = x
        for block in self:
            assert isinstance(block, FusedBlock)
            main, side = block.forward_pair(main, side)
        return main


def is_plain_block(block: nn.Module) -> bool:
    """Tell whether a block has only folded convolutions, ReLUs and a shortcut."""
    block_type = type(block)
    if block_type.__module__ not in ("timm.models.resnet", "torchvision.models.resnet"):
        return False
    layers = [layer for name, layer in block.named_children() if name != "downsample"]
    return block_type.__name__ in ("BasicBlock", "Bottleneck") and all(
        type(layer) in (FoldedConv2d, FrozenBatchNorm, nn.ReLU, nn.Identity) for layer in layers
    )
