"""Batch norm with frozen statistics."""

from collections.abc import Mapping
from typing import Self

from torch import Tensor, nn


class FrozenBatchNorm(nn.BatchNorm2d):
    """Batch norm with frozen running statistics; scale and shift still train.

    Args:
        norm: The layer to replace. The new layer shares its parameters and buffers.
    """

    def __init__(self, norm: nn.BatchNorm2d):
        super().__init__(
            norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta"
        )
        self.weight = norm.weight
        self.bias = norm.bias
        self.running_mean = norm.running_mean
        self.running_var = norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.folded = False  # True: the convolution before this layer includes the normalisation
        self.train(norm.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.training = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x if self.folded else super().forward(x)


class FrozenBatchNormAct(FrozenBatchNorm):
    """Frozen version of timm's `BatchNormAct2d`, which applies dropout and an activation after the normalisation."""

    def __init__(self, norm: nn.BatchNorm2d, drop: nn.Module, act: nn.Module):
        super().__init__(norm)
        self.drop = drop
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


def freeze(network: nn.Module) -> None:
    """Replace every batch norm inside `network` by a frozen one."""
    frozen: dict[nn.Module, nn.Module] = {}
    for layer in network.modules():
        if not isinstance(layer, nn.BatchNorm2d) or isinstance(layer, FrozenBatchNorm):
            continue
        if isinstance(act := getattr(layer, "act", None), nn.Module):
            frozen[layer] = FrozenBatchNormAct(layer, layer.drop, act)  # type: ignore[arg-type]
        else:
            frozen[layer] = FrozenBatchNorm(layer)
    replace_modules(network, frozen)


def replace_modules(network: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put new modules in the places of old ones inside `network`, in every place of a shared module."""
    for path, module in list(network.named_modules(remove_duplicate=False)):
        if path and module in replacements:
            network.set_submodule(path, replacements[module])
