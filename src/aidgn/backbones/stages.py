"""The stages of a network, and the distances of their outputs from the outputs of a frozen copy."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

MAX_STAGES = 5
PROBE_SIDE = 224  # side of the image that `stage_widths` passes through networks without a size of their own
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


def list_stages(network: nn.Module) -> list[str]:
    """Return the names of at most five of `list_layers` at equal distances, the last among them."""
    names = list_layers(network)
    count = min(len(names), MAX_STAGES)
    return [names[(number + 1) * len(names) // count - 1] for number in range(count)]


def list_layers(network: nn.Module) -> list[str]:
    """Return the names of the layers whose outputs end the stages of a network, in their order.

    For a ResNet: max pooling, and the four layers of blocks. For other networks of timm: the layers that timm names.
    For other networks: the last layer before each part with parameters, and the last of all.
    """
    layers = [f"layer{number}" for number in range(1, 5)]
    if all(hasattr(network, name) for name in layers):
        return ["maxpool", *layers] if isinstance(getattr(network, "maxpool", None), nn.Module) else layers
    modules = dict(network.named_modules())
    names = [str(info["module"]) for info in getattr(network, "feature_info", [])]
    return list(dict.fromkeys(name for name in names if name in modules)) or _ends_of_parts(network)


def _ends_of_parts(network: nn.Module) -> list[str]:
    """Return the names of the last layers before each part of a network with parameters, norms aside."""
    prefix = ""
    while len(parts := [part for part in network.named_children() if _starts_stage(part[1])]) == 1:
        if not any(True for _ in parts[0][1].children()):
            break
        prefix, network = f"{prefix}{parts[0][0]}.", parts[0][1]
    children = list(network.named_children())
    starts = [number for number, (_, child) in enumerate(children) if _starts_stage(child)]
    return [f"{prefix}{children[end - 1][0]}" for end in [*starts[1:], len(children)]] if children else []


def _starts_stage(module: nn.Module) -> bool:
    return not isinstance(module, NORMS) and any(True for _ in module.parameters())


class StageComparison(nn.Module):
    """Features of a network, and the distances of its stage outputs from those of a frozen copy, in one pass of both.

    Maps x to [B, n + C_1 + .. + C_S]: the features, and for each stage and channel the mean over positions of the
    squared difference. `stage_widths` returns C_1 .. C_S. Each image has its own means, so that a batch can be computed
    in parts.

    Args:
        network: The network; the copy keeps the weights that it has now.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.oracle = copy.deepcopy(network).eval().requires_grad_(False)
        self.stages = StageOutputs(network)
        self.oracle_stages = StageOutputs(self.oracle)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            _, targets = self.oracle_stages.compute(self.oracle, x)
        features, outputs = self.stages.compute(self.network, x)
        distances = [
            channel_means((output - target).square())
            for output, target in zip(map(in_float32, outputs), map(in_float32, targets), strict=True)
        ]
        return torch.cat([in_float32(features), *distances], dim=1)


class StageOutputs:
    """Collect the outputs of a network's stages by hooks, in the passes of `compute` only."""

    def __init__(self, network: nn.Module):
        self.outputs: list[Tensor] = []
        self.collecting = False
        for name in list_stages(network):
            network.get_submodule(name).register_forward_hook(self.collect)

    def collect(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        if self.collecting:
            self.outputs.append(output)

    def compute(self, network: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the features and the outputs of the stages."""
        self.outputs = []
        self.collecting = True
        features = network(x)
        self.collecting = False
        outputs, self.outputs = self.outputs, []
        return features, outputs


def in_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def channel_axis(shape: Sequence[int]) -> int:
    """Return the axis of the channels: the last of [B, n], [B, tokens, n] and [B, H, W, C], the second of [B, C, H, W].

    Images are square, so the two axes of equal size are the positions.
    """
    last = len(shape) < 4 or shape[1] == shape[2] != shape[3]
    return len(shape) - 1 if last else 1


def channel_means(x: Tensor) -> Tensor:
    """Return the means over positions, [B, C]."""
    axis = channel_axis(x.shape)
    positions = [dim for dim in range(1, x.ndim) if dim != axis]
    return x.mean(positions) if positions else x


@torch.no_grad()
def stage_widths(network: nn.Module) -> list[int]:
    """Return the number of channels of every stage, by a pass of one image through a copy."""
    probe = copy.deepcopy(network).eval()
    first = next((layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)), None)
    if isinstance(first, nn.Linear):
        shape = [1, first.in_features]
    else:
        side = getattr(network, "pretrained_cfg", {}).get("input_size", (3, PROBE_SIDE, PROBE_SIDE))[-1]
        shape = [1, first.in_channels if first else 3, side, side]
    _, outputs = StageOutputs(probe).compute(probe, next(network.parameters()).new_zeros(shape))
    return [output.shape[channel_axis(output.shape)] for output in outputs]
