"""Fast passes through a network on a GPU: recorded CUDA graphs, or compiled code.

A training step of ResNet-50 launches hundreds of kernels, and Python needs longer to launch them than the GPU to run
them. The same holds for a pass over 512 images without gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from aidgn import devices

MAX_SHAPES = 1000  # batch shapes that a process compiles a function for


def compiled_by_shape(function: Callable[..., Tensor], mode: str | None = None) -> Callable[..., Tensor]:
    """Compile a function separately for every shape of its input.

    Hyper-parameter draws have batches of many sizes. By default PyTorch compiles the first eight shapes and runs the
    others in eager mode, which is slower and rounds differently.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MAX_SHAPES
    return torch.compile(function, dynamic=False, mode=mode)


class TrainingGraphs:
    """Record the forward and the backward pass of a network once per shape, and replay them.

    An update with several passes has a recording for each, because the backward pass needs the results of the forward
    pass in the memory of the graph. `aidgn.devices.begin_pass` starts the count again.

    Args:
        network: The network, whose parameters receive the gradients.
        compute: Computes features of images with the network and these tensors in place of its parameters.
    """

    def __init__(self, network: nn.Module, compute: Callable[[Tensor, dict[str, Tensor]], Tensor]):
        self.network = network
        self.compute = compute
        self.recorded: dict[tuple[object, ...], Recording] = {}
        self.last_pass = -1  # value of `devices.passes` in the last call
        self.position = 0  # number of the call since `begin_pass`

    def __call__(self, x: Tensor) -> Tensor:
        if self.last_pass != devices.passes:
            self.last_pass = devices.passes
            self.position = 0
        parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in self.network.named_parameters() if parameter.requires_grad
        }
        key = x.shape, x.dtype, x.requires_grad, len(parameters), self.position
        self.position += 1
        if key not in self.recorded:
            self.recorded[key] = Recording(self.compute, x, parameters)
        features: Tensor = Replay.apply(self.recorded[key], x, *parameters.values())
        return features


class Recording:
    """A forward and a backward pass as CUDA graphs, with the memory that they read and write.

    Args:
        compute: Computes the output of the forward pass from images and parameters.
        x: An input of the shape that all inputs will have.
        parameters: Tensors that receive gradients, by name. The input receives one too if it requires a gradient.
    """

    def __init__(
        self,
        compute: Callable[[Tensor, dict[str, Tensor]], Tensor],
        x: Tensor,
        parameters: dict[str, Tensor],
    ):
        self.x = x.detach().clone().requires_grad_(x.requires_grad)
        # New tensors that share the parameters' memory: an earlier pass of this update may have given the parameters
        # nodes of autograd that belong to another stream, which a recording cannot wait for.
        aliases = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
        inputs = [self.x, *aliases.values()] if x.requires_grad else [*aliases.values()]

        def pass_through() -> None:
            output = compute(self.x, aliases)
            torch.autograd.grad(output, inputs, torch.zeros_like(output), allow_unused=True)

        warm_up(pass_through)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward):
            output = compute(self.x, aliases)
        self.gradient = torch.zeros_like(output)
        with torch.cuda.graph(self.backward, pool=self.forward.pool()):
            gradients = torch.autograd.grad(output, inputs, self.gradient, allow_unused=True)
        # Drop autograd's nodes, which belong to the stream of the recording. The graphs keep the memory.
        self.output = output.detach()
        self.gradients = gradients if x.requires_grad else (None, *gradients)


class EvaluationGraphs:
    """Record the forward pass of a network without gradients once per shape, and replay it.

    Args:
        compute: Computes features with the network.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor]):
        self.compute = compute
        self.recorded: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        key = x.shape, x.dtype
        if key not in self.recorded:
            self.recorded[key] = self.record(x.detach().clone())
        graph, images, features = self.recorded[key]
        images.copy_(x)
        graph.replay()
        return features.clone()  # the next replay overwrites it

    def record(self, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Return the recording, and the memory that it reads and writes."""
        warm_up(lambda: self.compute(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            features = self.compute(x)
        return graph, x, features


def warm_up(work: Callable[[], object]) -> None:
    """Let cuDNN choose its algorithms, which cannot be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)


class Replay(torch.autograd.Function):
    """Replay a recording on an input and the parameters it was made with."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.recording = recording
        recording.x.detach().copy_(x)
        recording.forward.replay()
        return recording.output.clone()  # the next replay overwrites it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        recording: Recording = ctx.recording
        recording.gradient.copy_(gradient)
        recording.backward.replay()
        gradients = [None if recorded is None else recorded.detach() for recorded in recording.gradients]
        return None, *gradients
