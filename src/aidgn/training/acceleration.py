"""Fast passes through a network on a GPU: CUDA graphs of the kernels it has, or compiled code.

A training step of ResNet-50 launches hundreds of kernels, which takes Python longer than it takes a GPU to compute.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from aidgn import devices

MAX_SHAPES = 1000  # batch shapes that a process compiles a function for


def compiled_by_shape(function: Callable[..., Tensor], mode: str | None = None) -> Callable[..., Tensor]:
    """Compile a function for every shape it meets.

    Hyper-parameter draws have batches of many sizes. By default PyTorch compiles the first eight and runs the others in
    another way, more slowly and with other rounding.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MAX_SHAPES
    return torch.compile(function, dynamic=False, mode=mode)


class TrainingGraphs:
    """Record the forward and the backward pass of a network once per shape, and replay them.

    An update with several passes has a recording for each, because the backward pass needs what the forward pass left
    in the memory of the graph. `aidgn.devices.begin_pass` starts the count again.

    Args:
        network: The network, whose parameters receive the gradients.
        compute: Computes features with the network.
    """

    def __init__(self, network: nn.Module, compute: Callable[[Tensor], Tensor]):
        self.network = network
        self.compute = compute
        self.recorded: dict[tuple[object, ...], Callable[[Tensor], Tensor]] = {}
        # These nodes belong to the stream they are created on: that of the backward passes, not that of recordings.
        self.accumulators = [get_gradient_edge(p).node for p in network.parameters() if p.requires_grad]
        self.begun = -1
        self.position = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self.begun != devices.passes:
            self.begun, self.position = devices.passes, 0
        key = x.shape, x.dtype, x.requires_grad, self.position
        self.position += 1
        if key not in self.recorded:
            example = x.detach().clone().requires_grad_(x.requires_grad)
            recorded = torch.cuda.make_graphed_callables(Pass(self.network, self.compute), (example,))
            self.recorded[key] = cast(Callable[[Tensor], Tensor], recorded)
        return self.recorded[key](x).clone()  # the next replay overwrites its own output


class Pass(nn.Module):
    """A module to record, which leaves the network itself as it is."""

    def __init__(self, network: nn.Module, compute: Callable[[Tensor], Tensor]):
        super().__init__()
        self.network = network
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)
