"""Batch norm with frozen statistics, its exact folding into the convolutions before it, and a ResNet's blocks with
shortcut and ReLU inside these convolutions."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F


class FrozenBatchNorm(nn.BatchNorm2d):
    """Batch norm whose running statistics stay as they are; scale and shift train."""

    folded = False
    drop: nn.Module  # timm's BatchNormAct2d has these two after the normalisation
    act: nn.Module

    def train(self, mode: bool = True) -> "FrozenBatchNorm":
        super().train(mode)
        self.training = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        if not self.folded:
            return super().forward(x)
        return self.act(self.drop(x)) if hasattr(self, "act") else x

    def __reduce__(self) -> tuple[Any, ...]:
        return blank, (frozen, type(self).__bases__[-1]), self.__dict__


@functools.cache
def frozen(kind: type[nn.BatchNorm2d]) -> type[FrozenBatchNorm]:
    return FrozenBatchNorm if kind is nn.BatchNorm2d else type(f"Frozen{kind.__name__}", (FrozenBatchNorm, kind), {})


def blank(derived: Callable[[type[nn.Module]], type[nn.Module]], kind: type[nn.Module]) -> nn.Module:
    """A layer without anything in it yet, for copies: no other process finds a class that was made by its name."""
    return object.__new__(derived(kind))


def freeze(net: nn.Module) -> None:
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.__class__ = frozen(type(layer))  # type: ignore[arg-type]
            layer.train(layer.training)


class FoldedConv2d(nn.Conv2d):
    """A convolution and the frozen batch norm after it as one: bn(conv(x, w)) = conv(x, w s) + b.

    s = scale / sqrt(variance + eps), b = shift + (bias - mean) s. Both are computed here, from the parameters, so that
    w, scale and shift have the gradients they had. Under autocast the product is float32 and conv casts it.
    """

    bn: FrozenBatchNorm
    settled: tuple[Tensor, Tensor] | None = None
    adds_shift = True  # or who reads what this gives does so: fewer numbers, or in a pass that there is anyway

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """bn(conv(x)), with `more` added to b."""
        weight, shift = self.weight_and_bias(more)
        bias = shift if self.adds_shift else None
        if x.is_cuda and self.is_stem and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            return stem_convolution(x, weight, bias)
        return self._conv_forward(x, weight, bias)

    def with_relu(self, x: Tensor, shortcut: Tensor | None = None, more: Tensor | None = None) -> Tensor:
        """relu(bn(conv(x)) + shortcut), with `more` added to b, in one kernel where there is one: without, what the
        convolution writes is read and written once more."""
        if (
            x.is_cuda
            and torch.is_autocast_enabled("cuda")
            and self.groups == 1
            and self.padding_mode == "zeros"
            and not isinstance(self.padding, str)
            and (shortcut is not None or self.keeps_size)
        ):
            kind = torch.get_autocast_dtype("cuda")
            weight, shift = (each.to(kind) for each in self.weight_and_bias(more))
            compute = convolution_relu if torch.is_grad_enabled() or torch.compiler.is_compiling() else then_relu
            return compute(
                x.to(kind),
                weight,
                shift,
                None if shortcut is None else shortcut.to(kind),
                self.stride,
                self.padding,
                self.dilation,
            )
        y = self(x, more)
        if shortcut is not None:
            y += shortcut
        return F.relu_(y)

    def weight_and_bias(self, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.settled is not None:
            weight, shift = self.settled
        else:
            mean, variance = self.bn.running_mean, self.bn.running_var
            assert mean is not None and variance is not None
            scale = self.bn.weight * torch.rsqrt(variance + self.bn.eps)
            shift = self.bn.bias + (-mean if self.bias is None else self.bias - mean) * scale
            weight = self.weight * scale[:, None, None, None]
        return weight, shift if more is None else shift + more

    @property
    def keeps_size(self) -> bool:
        """Pixel for pixel and, unless each is computed from one, channel for channel."""
        return (
            self.stride == (1, 1)
            and self.padding
            == tuple(step * (side - 1) / 2 for step, side in zip(self.dilation, self.kernel_size, strict=True))
            and (self.kernel_size == (1, 1) or self.in_channels == self.out_channels)
        )

    @property
    def is_stem(self) -> bool:
        return (self.kernel_size, self.stride, self.padding, self.dilation, self.groups, self.padding_mode) == (
            (7, 7),
            (2, 2),
            (3, 3),
            (1, 1),
            1,
            "zeros",
        ) and self.in_channels <= 4


def stem_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The 7x7 convolution of stride 2 that a ResNet starts with, as a 4x4 one of stride 1 on 2x2 blocks of pixels.

    Three channels leave tensor cores mostly idle; the same sum over twelve, padded to sixteen, does not.
    """
    blocks = F.pad(F.pixel_unshuffle(x, 2), (2, 1, 2, 1))
    kernel = F.pixel_unshuffle(F.pad(weight, (1, 0, 1, 0)), 2)
    fill = (0, 0, 0, 0, 0, -kernel.shape[1] % 8)
    return F.conv2d(F.pad(blocks, fill), F.pad(kernel, fill), bias)


# What a ResNet starts with: convolution, batch norm, ReLU, pooling ---------------------------------------------------


class PoolingFirst(nn.MaxPool2d):
    """Pooling, then shift and ReLU: the same numbers as in the order of the network, for neither changes which of two
    is greater, from a quarter of the work."""

    convolution: FoldedConv2d

    def forward(self, x: Tensor) -> Tensor:
        shift = self.convolution.weight_and_bias()[1].to(x.dtype)[:, None, None]
        halves = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode) == (3, 2, 1, 1, False)
        if halves and torch.compiler.is_compiling() and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            return F.relu(MaxPoolFunction.apply(x) + shift)
        return F.relu_(super().forward(x).add_(shift))


class FusedReLU(nn.ReLU):
    """A ReLU that another layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class MaxPoolFunction(torch.autograd.Function):
    """The largest of 3x3 pixels around every second one, in operations that a compiler makes one kernel of, forward and
    backward. Its own gradient of pooling takes longer on a GPU than that of any convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        framed = F.pad(x, (1, 0, 1, 0), value=-torch.inf)
        pixels = [
            framed[:, :, row : row + height : 2, column : column + width : 2]
            for row, column in product(range(3), range(3))
        ]
        largest = functools.reduce(torch.maximum, pixels)
        where = torch.full((), 8, dtype=torch.int8, device=x.device)
        for place in reversed(range(8)):  # of the first, if several are the largest
            where = torch.where(pixels[place] == largest, place, where)
        ctx.save_for_backward(where)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (where,) = ctx.saved_tensors
        # Pixels 2p and 2p + 1 are in window p, in its rows 1 and 2; 2p + 1 also in window p + 1, in its row 0.
        number = torch.arange(2, dtype=torch.int8, device=where.device)
        places = number + 1, 9 * number - 9
        found = torch.zeros((), dtype=gradient.dtype, device=where.device)
        for down, right in product(range(2), range(2)):
            place = 3 * places[down][:, None, None, None] + places[right][:, None]  # [2, 1, 2, 1]
            window, given = (
                F.pad(each, (0, right, 0, down))[:, :, down:, right:].permute(0, 2, 3, 1) for each in (where, gradient)
            )
            found = found + torch.where(window[:, :, None, :, None] == place, given[:, :, None, :, None], 0)
        return found.flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)


# A ResNet's blocks ----------------------------------------------------------------------------------------------------

WITHOUT_ENGINE: set[tuple[object, ...]] = set()  # shapes that cuDNN has searched for one in vain


def then_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """relu(conv(x) + bias + shortcut), on CUDA in one kernel, if there is a shortcut or the convolution keeps the size.

    PyTorch's cudnn_convolution_relu is not used: it adds its output, as it lay in memory, times zero, which may be
    NaN. Here that is the input, which has the same shape."""
    if x.is_cuda:
        x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
        if shortcut is None and weight.shape[2:] == (1, 1):
            return product_relu(x, weight, bias)
        added, times = (x, 0.0) if shortcut is None else (shortcut, 1.0)
        shape = x.shape, weight.shape, x.dtype, *stride, *padding, *dilation
        if shape not in WITHOUT_ENGINE:
            try:
                return torch.cudnn_convolution_add_relu(x, weight, added, times, bias, stride, padding, dilation, 1)
            except RuntimeError as error:
                if "engine" not in str(error):
                    raise
                WITHOUT_ENGINE.add(shape)
    y = F.conv2d(x, weight, bias, stride, padding, dilation)
    return F.relu(y if shortcut is None else y + shortcut)


def product_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(conv(x) + bias) of a 1x1 convolution, which is a matrix product of pixels, channels last, and weights."""
    pixels = x.permute(0, 2, 3, 1)
    found = torch.ops.aten._addmm_activation(bias, pixels.reshape(-1, x.shape[1]), weight.flatten(1).t())
    return found.view(*pixels.shape[:3], len(weight)).permute(0, 3, 1, 2)


convolution_relu = torch.library.custom_op("aidgn::convolution_relu", then_relu, mutates_args=())


@convolution_relu.register_fake
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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, _, *ctx.geometry = inputs
    ctx.save_for_backward(x, weight, output)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, output = ctx.saved_tensors
    of_x, of_weight, of_bias, of_shortcut = ctx.needs_input_grad[:4]
    gradient = torch.where(output > 0, gradient, 0)
    stride, padding, dilation = ctx.geometry
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, dilation, False, [0, 0], 1, [of_x, of_weight, False]
    )
    return (
        grad_x,
        grad_weight,
        gradient.sum((0, 2, 3)) if of_bias else None,
        gradient if of_shortcut else None,
        None,
        None,
        None,
    )


convolution_relu.register_autograd(_gradients, setup_context=_keep)


class FusedBlock(nn.Module):
    """A residual block of timm's or torchvision's ResNets, each convolution with the ReLU behind it."""

    downsample: nn.Module | None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        *first, last = (layer for layer in self.children() if isinstance(layer, FoldedConv2d))
        for convolution in first:
            x = convolution.with_relu(x)
        of_shortcut = self.of_shortcut()
        return last.with_relu(x, shortcut, None if of_shortcut is None else of_shortcut.weight_and_bias()[1])

    def of_shortcut(self) -> FoldedConv2d | None:
        """The convolution that the shortcut ends with."""
        match [*self.downsample.children()] if type(self.downsample) is nn.Sequential else []:
            case [*_, FoldedConv2d() as convolution, bn] if type(bn) is FrozenBatchNorm:
                return convolution
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return blank, (fused, type(self).__bases__[-1]), self.__dict__


@functools.cache
def fused(kind: type[nn.Module]) -> type[FusedBlock]:
    return type(f"Fused{kind.__name__}", (FusedBlock, kind), {})


def is_plain_block(layer: nn.Module) -> bool:
    """Nothing but convolutions with their batch norms folded, ReLUs, and a shortcut."""
    kind = type(layer)
    return (
        kind.__module__ in ("timm.models.resnet", "torchvision.models.resnet")
        and kind.__name__ in ("BasicBlock", "Bottleneck")
        and all(
            type(part) in (FoldedConv2d, FrozenBatchNorm, nn.ReLU, nn.Identity)
            for name, part in layer.named_children()
            if name != "downsample"
        )
    )


def unfuse(model: nn.Module) -> None:
    """All in its order again; convolutions stay folded."""
    for layer in model.modules():
        if isinstance(layer, FusedBlock):
            layer.__class__ = type(layer).__bases__[1]
        elif isinstance(layer, FoldedConv2d):
            layer.__dict__.pop("adds_shift", None)
        elif isinstance(layer, FusedReLU):
            layer.__class__ = nn.ReLU  # type: ignore[assignment]
        elif isinstance(layer, PoolingFirst):
            layer.__dict__.pop("convolution")
            layer.__class__ = nn.MaxPool2d  # type: ignore[assignment]


# Folding --------------------------------------------------------------------------------------------------------------


class Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d | nn.BatchNorm2d) or super().is_leaf_module(m, module_qualified_name)


def fold(model: nn.Module) -> int:
    """Fold every frozen batch norm into the convolution before it; how many were.

    Parameters, buffers and their names stay. A pair is folded when each of the two runs once and nothing else sees
    what the convolution gives; a network that cannot be traced stays as it is. The whole gives what it gave; a layer
    inside may leave its shift or ReLU to one behind it.
    """
    if not any(isinstance(layer, FrozenBatchNorm) for layer in model.modules()):
        return 0
    try:
        nodes = list(Tracer().trace(model).nodes)
    except Exception:  # tracing runs the network's own code on symbols, which may fail in any way
        return 0
    runs = Counter(node.target for node in nodes if node.op == "call_module")
    before: dict[nn.Module, nn.Module] = {}  # of two layers that run once, where nothing else sees what the first gives
    for node in nodes:
        first = node.args[0] if node.op == "call_module" and node.args else None
        if (
            isinstance(first, torch.fx.Node)
            and first.op == "call_module"
            and len(first.users) == 1
            and runs[first.target] == runs[node.target] == 1
        ):
            before[model.get_submodule(str(node.target))] = model.get_submodule(str(first.target))
    folded = 0
    for bn, conv in before.items():
        if type(conv) is nn.Conv2d and isinstance(bn, FrozenBatchNorm) and bn.affine and bn.track_running_stats:
            conv.__class__ = FoldedConv2d
            conv.__dict__["bn"] = bn  # not as a submodule, which would list its parameters twice
            bn.folded = True
            folded += 1
    for pool, relu in before.items():
        if type(pool) is nn.MaxPool2d and not pool.return_indices and type(relu) is nn.ReLU and relu in before:
            norm = before[relu]
            first_layer = before.get(norm)
            if type(norm) is FrozenBatchNorm and isinstance(first_layer, FoldedConv2d):
                first_layer.adds_shift = False
                relu.__class__, pool.__class__ = FusedReLU, PoolingFirst  # type: ignore[assignment]
                pool.__dict__["convolution"] = first_layer
    for layer in model.modules():
        if is_plain_block(layer):
            layer.__class__ = fused(type(layer))  # type: ignore[arg-type]
        if isinstance(layer, FusedBlock) and (convolution := layer.of_shortcut()) is not None:
            convolution.adds_shift = False
    return folded


def unfold(model: nn.Module) -> None:
    """Undo `fold`: every batch norm computes on its own again."""
    unfuse(model)
    for layer in model.modules():
        if isinstance(layer, FoldedConv2d):
            layer.__dict__.pop("bn").folded = False
            layer.__dict__.pop("settled", None)
            layer.__class__ = nn.Conv2d  # type: ignore[assignment]


@torch.no_grad()
def freeze_folded(model: nn.Module, dtype: torch.dtype) -> None:
    """For a network that only predicts: compute what folding gives once, in the arithmetic of its convolutions. Weights
    that change afterwards do not count."""
    for layer in model.modules():
        if isinstance(layer, FoldedConv2d):
            weight, shift = layer.weight_and_bias()
            layer.__dict__["settled"] = weight.to(dtype), shift.to(dtype)
