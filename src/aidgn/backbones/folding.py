"""Fold frozen batch norms into the convolutions before them, and fuse the blocks of a ResNet; undo both."""

from collections import Counter, OrderedDict

import torch
import torch.fx
from torch import nn

from aidgn.backbones.frozen_bn import FrozenBatchNorm, replace_modules
from aidgn.backbones.fused_resnet import (
    FoldedConv2d,
    FusedBlock,
    FusedReLU,
    FusedStage,
    PoolingFirst,
    conv_options,
    is_plain_block,
    pool_options,
)


class LayerTracer(torch.fx.Tracer):
    """Trace a network down to its convolutions and batch norms."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d | nn.BatchNorm2d) or super().is_leaf_module(m, module_qualified_name)


def fold(network: nn.Module) -> int:
    """Fold every frozen batch norm inside `network` into the convolution before it, and fuse ResNet blocks.

    Names of parameters and buffers stay. The network computes the same outputs and gradients up to rounding; single
    layers inside may leave their shift or ReLU to a later one. A batch norm is folded if both layers run once and
    nothing else reads the output of the convolution. A network that cannot be traced stays as it is.

    Returns:
        The number of folded batch norms.
    """
    if not any(isinstance(layer, FrozenBatchNorm) for layer in network.modules()):
        return 0
    try:
        predecessors = find_predecessors(network)
    except Exception:  # tracing runs the network's code on symbols, which may fail in any way
        return 0
    folded: dict[nn.Module, nn.Module] = {}
    for norm, conv in predecessors.items():
        if isinstance(norm, FrozenBatchNorm) and norm.affine and norm.track_running_stats and type(conv) is nn.Conv2d:
            folded[conv] = FoldedConv2d(conv, norm)
    replace_modules(network, folded)
    fuse_stem(network, predecessors, folded)
    blocks = [layer for layer in network.modules() if layer is not network and is_plain_block(layer)]
    replace_modules(network, {block: FusedBlock(block) for block in blocks})
    stages = [layer for layer in network.modules() if type(layer) is nn.Sequential and is_stage(layer)]
    replace_modules(network, {stage: rebuild(stage, FusedStage) for stage in stages})
    return len(folded)


def is_stage(layers: nn.Sequential) -> bool:
    """Return whether fused blocks follow each other, and nothing else."""
    return len(layers) > 1 and all(isinstance(layer, FusedBlock) for layer in layers)


def rebuild(layers: nn.Sequential, sequence_type: type[nn.Sequential]) -> nn.Sequential:
    """Return a sequence of another type with the same layers under the same names."""
    rebuilt = sequence_type(OrderedDict(layers.named_children()))
    rebuilt.training = layers.training
    return rebuilt


def find_predecessors(network: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map layers to the layer before them, where both run once and nothing else reads the output of the first."""
    nodes = list(LayerTracer().trace(network).nodes)
    runs = Counter(node.target for node in nodes if node.op == "call_module")
    predecessors: dict[nn.Module, nn.Module] = {}
    for node in nodes:
        before = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(before, torch.fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        if runs[before.target] == runs[node.target] == 1:
            predecessors[network.get_submodule(str(node.target))] = network.get_submodule(str(before.target))
    return predecessors


def fuse_stem(network: nn.Module, predecessors: dict[nn.Module, nn.Module], folded: dict[nn.Module, nn.Module]) -> None:
    """Move pooling before shift and ReLU wherever convolution, batch norm, ReLU and pooling follow each other."""
    for pool, relu in predecessors.items():
        if type(pool) is not nn.MaxPool2d or pool.return_indices or type(relu) is not nn.ReLU:
            continue
        norm = predecessors.get(relu)
        conv = folded.get(predecessors[norm]) if norm in predecessors else None
        if type(norm) is FrozenBatchNorm and isinstance(conv, FoldedConv2d):
            replace_modules(network, {relu: FusedReLU(relu.inplace), pool: PoolingFirst(pool, conv)})


def unfuse(network: nn.Module) -> None:
    """Restore the original blocks and stem of a ResNet; batch norms stay folded."""
    originals: dict[nn.Module, nn.Module] = {}
    for layer in network.modules():
        if isinstance(layer, FusedBlock):
            originals[layer] = layer.block
            layer.block.training = layer.training
        elif isinstance(layer, FusedStage):
            originals[layer] = rebuild(layer, nn.Sequential)
        elif isinstance(layer, FusedReLU):
            originals[layer] = nn.ReLU(layer.inplace)
        elif isinstance(layer, PoolingFirst):
            originals[layer] = nn.MaxPool2d(**pool_options(layer))
        elif isinstance(layer, FoldedConv2d):
            layer.adds_shift = True
    replace_modules(network, originals)


def unfold(network: nn.Module) -> None:
    """Undo `fold`: every batch norm computes its own output again."""
    unfuse(network)
    convs: dict[nn.Module, nn.Module] = {}
    for layer in network.modules():
        if isinstance(layer, FoldedConv2d):
            conv = convs[layer] = nn.Conv2d(**conv_options(layer))
            conv.weight = layer.weight
            conv.bias = layer.bias
            layer.norm.folded = False
    replace_modules(network, convs)


@torch.no_grad()
def freeze_folded(network: nn.Module, dtype: torch.dtype) -> None:
    """Compute the folded weights of a network that only predicts once, in the dtype of its convolutions.

    Later changes of the weights have no effect.
    """
    for layer in network.modules():
        if isinstance(layer, FoldedConv2d):
            weight, shift = layer.weight_and_shift()
            layer.constants = (weight.to(dtype), shift.to(dtype))
