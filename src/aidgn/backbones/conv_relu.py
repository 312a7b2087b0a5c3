"""A convolution, the addition of a shortcut and ReLU in one kernel, with the gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SHAPES_WITHOUT_KERNEL: set[tuple[object, ...]] = set()  # cuDNN has no fused kernel for these


class ConvReLU(torch.autograd.Function):
    """relu(conv(x) + bias + shortcut), returned twice: the gradients of the two are added in the backward kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
        output = conv_relu(x, weight, bias.to(x.dtype), shortcut, stride, padding, dilation)
        ctx.save_for_backward(x, weight, output)
        ctx.geometry = stride, padding, dilation
        ctx.set_materialize_grads(False)
        return output, output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, ...]:
        from aidgn.backbones.resnet_kernels import relu_gradient

        x, weight, output = ctx.saved_tensors
        if gradient is None:
            gradient, second = second, None
        assert gradient is not None
        masked, grad_bias = relu_gradient(output, gradient, second)
        needs_x, needs_weight, needs_bias, needs_shortcut = ctx.needs_input_grad[:4]
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            masked, x, weight, None, *ctx.geometry, False, [0, 0], 1, [needs_x, needs_weight, False]
        )
        grad_shortcut = masked if needs_shortcut else None
        return grad_x, grad_weight, grad_bias if needs_bias else None, grad_shortcut, None, None, None


def conv_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Compute relu(conv(x) + bias + shortcut), on CUDA in one kernel if cuDNN has one.

    The kernel needs a shortcut or an output of the input's shape. PyTorch's cudnn_convolution_relu would add its
    uninitialised output times zero, which may be NaN; here the input takes that place.
    """
    is_product = weight.shape[2:] == (1, 1) and tuple(stride) == (1, 1) and tuple(padding) == (0, 0)
    if x.is_cuda and shortcut is None and is_product:
        return pointwise_conv_relu(x, weight, bias)
    shapes = x.shape, weight.shape, x.dtype, *stride, *padding, *dilation
    fits = shortcut is not None or output_shape(x, weight, stride, padding, dilation) == x.shape
    if x.is_cuda and fits and shapes not in SHAPES_WITHOUT_KERNEL:
        added, factor = (x, 0.0) if shortcut is None else (shortcut, 1.0)
        try:
            return torch.cudnn_convolution_add_relu(x, weight, added, factor, bias, stride, padding, dilation, 1)
        except RuntimeError as error:
            if "engine" not in str(error):
                raise
            SHAPES_WITHOUT_KERNEL.add(shapes)
    y = F.conv2d(x, weight, bias, stride, padding, dilation)
    return F.relu_(y if shortcut is None else y + shortcut)


def output_shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of a convolution's output."""
    sizes = [
        (size + 2 * p - d * (kernel - 1) - 1) // s + 1
        for size, kernel, s, p, d in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    return (len(x), len(weight), *sizes)


def pointwise_conv_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute relu(conv(x) + bias) of a 1x1 convolution as a matrix product of pixels (channels last) and weights."""
    pixels = x.permute(0, 2, 3, 1)
    y = torch.ops.aten._addmm_activation(bias, pixels.reshape(-1, x.shape[1]), weight.flatten(1).t())
    return y.view(*pixels.shape[:3], len(weight)).permute(0, 3, 1, 2)
