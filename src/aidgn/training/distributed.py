"""One run on several devices: every process holds the whole model and computes the features of a shard of the batch.

The features are gathered, so that each process computes the objective of the whole batch: domain means, covariances,
discriminators and running weights are the same as on one device, and algorithms need no change. A process
backpropagates into its own shard. Before an optimizer steps, the featurizer's gradients are summed over the processes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from aidgn.backbones import FrozenBatchNorm
from aidgn.errors import AidgnError
from aidgn.training.featurizer import Featurizer, NetworkRunner

TIMEOUT = timedelta(hours=2)  # for a process to wait for another; their parent process notices a dead one
DIVERGED = 1e-4  # larger relative differences between the weights of two processes are more than rounding


def world_size() -> int:
    """Return the number of processes that train this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process; 0 writes the run folder."""
    return dist.get_rank() if world_size() > 1 else 0


def init_process_group(rank: int, world_size: int, device: torch.device, rendezvous: str) -> None:
    """Join the processes of a run.

    Args:
        rank: Number of this process.
        world_size: Number of processes.
        device: Device of this process.
        rendezvous: Path of a file that no other group has used.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )


def barrier() -> None:
    """Wait until every process has called this function."""
    if world_size() > 1:
        dist.barrier()


def all_reduce(values: Tensor) -> Tensor:
    """Sum over the processes, in place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


# The featurizer -------------------------------------------------------------------------------------------------------


class ShardedFeaturizer(Featurizer):
    """A featurizer that computes a shard of the batch and gathers the features of the other shards.

    It replaces a featurizer and shares its network. Each process creates one with `shard_featurizer`.
    """

    def __init__(self, featurizer: Featurizer):
        super().__init__(featurizer.network, featurizer.runner.precision)
        self.num_features = featurizer.num_features
        self.runner = featurizer.runner

    def run(self, runner: NetworkRunner, x: Tensor) -> Tensor:
        if not self.training:  # evaluation gives whole batches to the processes
            return super().run(runner, x)
        shards = x.tensor_split(world_size())
        if not len(shards[-1]):
            raise AidgnError(
                f"A batch of {len(x)} images cannot be split over {world_size()} devices: raise --batch-size, or lower "
                "--devices."
            )
        features = super().run(runner, shards[rank()])
        return _Gather.apply(features, [len(shard) for shard in shards])


class _Gather(torch.autograd.Function):
    """Gather the features of every shard.

    All processes compute the same loss, so each needs only its shard of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.sizes = sizes
        padded = features.new_zeros(max(sizes), *features.shape[1:])
        padded[: len(features)] = features
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].split(ctx.sizes)[rank()], None


def shard_featurizer(featurizer: Featurizer) -> tuple[ShardedFeaturizer, RemovableHandle]:
    """Split the work of a featurizer over the processes.

    Returns:
        The featurizer to use, and the handle of the hook that sums gradients.
    """
    check_deterministic(featurizer)
    for name, layer in list(featurizer.network.named_modules()):
        if isinstance(layer, _BatchNorm) and not isinstance(layer, FrozenBatchNorm):
            parent, _, attribute = name.rpartition(".")
            setattr(featurizer.network.get_submodule(parent), attribute, SyncedBatchNorm(layer))
            featurizer.runner.compiled = None  # its statistics pass between processes in the middle of the network
    sharded = ShardedFeaturizer(featurizer)
    sharded_ids = {id(parameter) for parameter in sharded.parameters()}

    def combine_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Sum the gradients of shards. Average the others, which differ by rounding only, so that they stay equal."""
        gradients_of_shards: list[Tensor] = []
        other_gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if id(parameter) in sharded_ids:
                    gradients_of_shards.append(parameter.grad)
                else:
                    other_gradients.append(parameter.grad)
        for gradients, divisor in ((gradients_of_shards, 1), (other_gradients, world_size())):
            if gradients:
                with flattened(gradients) as flat:
                    all_reduce(flat)
                    flat /= divisor

    return sharded, register_optimizer_step_pre_hook(combine_gradients)


def check_deterministic(network: nn.Module) -> None:
    """Raise an error if a backbone has dropout or stochastic depth."""
    for layer in network.modules():
        rates = (getattr(layer, name) for name in ("p", "drop_prob", "dropout") if hasattr(layer, name))
        rate = next(rates, 0.0)
        if isinstance(rate, float) and rate > 0:
            raise AidgnError(
                f"This backbone draws random numbers inside ({type(layer).__name__}), and each device would draw other "
                "numbers than one device does. Train it with --devices 1, or choose another --backbone."
            )


@contextmanager
def flattened(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield a flat copy of the tensors, and write it back at the end."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    yield flat
    parts = flat.split([tensor.numel() for tensor in tensors])
    with torch.no_grad():
        torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def sync_weights(module: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to all processes; an error if theirs differ by more than rounding."""
    if world_size() == 1:
        return
    weights = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
    with flattened(weights) as flat:
        mine = flat.clone()
        dist.broadcast(flat, 0)
        difference = (mine - flat).norm() / flat.norm()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        if float(difference) > DIVERGED:
            raise AidgnError(
                "Model replicas diverged: this algorithm changes weights outside optimizer.step(). Use --devices 1."
            )


# Batch norm that is not frozen ----------------------------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """Sum over the processes; the gradient is the sum of the gradients of the shards."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return all_reduce(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_reduce(gradients[0].contiguous().clone())


class SyncedBatchNorm(_BatchNorm):
    """Batch norm by the mean and variance of the whole batch while processes train on shards.

    It replaces a layer and shares its parameters and buffers, and the `drop` and `act` that some layers of timm have.
    """

    def __init__(self, layer: _BatchNorm):
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.train(layer.training)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept every number of dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalize_by_batch(x) if self.training else super().forward(x)
        for name in ("drop", "act"):
            if name in self._modules:
                y = self.get_submodule(name)(y)
        return y

    def normalize_by_batch(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        dims = [dim for dim in range(x.ndim) if dim != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        count = all_reduce(wide.new_tensor([x.numel() / x.shape[1]]))
        mean = _Sum.apply(wide.sum(dims)) / count
        centred = wide - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(dims)) / count
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), share)
            self.running_var.lerp_((variance.detach() * count / (count - 1)).to(self.running_var.dtype), share)
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)
