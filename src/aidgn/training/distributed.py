"""One run on several devices: every process holds the whole model and computes the features of a share of the batch.

The features are gathered, so that each process computes the whole objective of the whole batch: domain means,
covariances, discriminators and running weights are those of one device, and no algorithm knows of this. A process
backpropagates into its own share; before an optimiser steps, the featuriser's gradients are summed over the processes.
"""

import functools
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
from aidgn.training.featurizer import Featurizer

TIMEOUT = timedelta(hours=2)  # for one process to wait for another; one that died is noticed by who started it
APART = 1e-4  # relative difference between the weights of two processes that is more than rounding


def processes() -> int:
    """How many train this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This one's number; 0 writes the run folder."""
    return dist.get_rank() if processes() > 1 else 0


def join(rank: int, processes: int, device: torch.device, meeting_point: str) -> None:
    """Become one of the processes of a run; `meeting_point` is a file that none has used before."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=processes,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )


def barrier() -> None:
    """Wait until every process is here."""
    if processes() > 1:
        dist.barrier()


def all_reduce(values: Tensor) -> Tensor:
    """The sum over the processes, in place."""
    if processes() > 1:
        dist.all_reduce(values)
    return values


# The featuriser -------------------------------------------------------------------------------------------------------


class ShardedFeaturizer(Featurizer):
    """A featuriser that computes a share of the batch here and gets the features of the rest from the others."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:  # evaluation shares out whole batches
            return super().forward(x)
        shares = x.tensor_split(processes())
        if not len(shares[-1]):
            raise AidgnError(
                f"A batch of {len(x)} images cannot be split over {processes()} devices: raise "
                "--batch-size, or lower --devices."
            )
        own = super().forward(shares[rank()])
        return Gather.apply(own, [len(share) for share in shares])


class Gather(torch.autograd.Function):
    """The features of every share. All processes compute the same loss of them, so that of the gradient each needs the
    rows of its own share only."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.sizes = sizes
        sent = own.new_zeros(max(sizes), *own.shape[1:])
        sent[: len(own)] = own
        received = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(received, sent)
        return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].split(ctx.sizes)[rank()], None


def split(featurizer: Featurizer) -> RemovableHandle:
    """Share out the work of the featuriser from now on. The handle is of the hook that sums gradients."""
    draws = next((layer for layer in featurizer.modules() if is_random(layer)), None)
    if draws is not None:
        raise AidgnError(
            f"This backbone draws random numbers inside ({type(draws).__name__}), each device would draw "
            "others than one device does: train it with --devices 1, or choose another --backbone."
        )
    featurizer.__class__ = ShardedFeaturizer
    for layer in featurizer.modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, FrozenBatchNorm):
            layer.__class__ = of_the_whole_batch(type(layer))  # type: ignore[assignment, arg-type]
            featurizer.compiled = None  # its statistics pass between processes in the middle of the network
    own = {id(parameter) for parameter in featurizer.parameters()}

    def combine(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Sum what each process found for its share; what all computed alike is averaged, to stay alike."""
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        for of_shares in (True, False):
            gradients = [each.grad for each in parameters if (id(each) in own) == of_shares]
            if gradients:
                with flattened(gradients) as flat:
                    all_reduce(flat)
                    flat /= 1 if of_shares else processes()

    return register_optimizer_step_pre_hook(combine)


def is_random(layer: nn.Module) -> bool:
    """Dropout and stochastic depth, by the attribute that each kind of them has."""
    chance = next((getattr(layer, name) for name in ("p", "drop_prob", "dropout") if hasattr(layer, name)), 0.0)
    return isinstance(chance, float) and chance > 0


@contextmanager
def flattened(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors as one flat copy, which is written back."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    yield flat
    parts = flat.split([tensor.numel() for tensor in tensors])
    with torch.no_grad():
        torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def sync_weights(module: nn.Module) -> None:
    """Every process gets the parameters and buffers of the first one, from which they differ by rounding at most."""
    if processes() == 1:
        return
    with flattened([each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()]) as flat:
        mine = flat.clone()
        dist.broadcast(flat, 0)
        apart = (mine - flat).norm() / flat.norm()
        dist.all_reduce(apart, dist.ReduceOp.MAX)
        if float(apart) > APART:
            raise AidgnError(
                "The copies of the model on the devices have come apart: this algorithm changes weights in "
                "a way that cannot be split, other than by the step of an optimiser. Train it with "
                "--devices 1."
            )


# Batch norm that is not frozen ----------------------------------------------------------------------------------------


class AllSum(torch.autograd.Function):
    """The sum over the processes; its gradient is the sum of what the processes find for their shares."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return all_reduce(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_reduce(gradients[0].contiguous().clone())


class SyncedBatchNorm(_BatchNorm):
    """Batch norm by the mean and variance of the whole batch while the processes train on shares of it."""

    drop: nn.Module  # timm's BatchNormAct2d has these two after the normalisation
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        wide = x if x.dtype == torch.float64 else x.float()
        others, shape = [d for d in range(x.ndim) if d != 1], [1, -1] + [1] * (x.ndim - 2)
        count = all_reduce(wide.new_tensor([x.numel() / x.shape[1]]))
        mean = AllSum.apply(wide.sum(others)) / count
        centred = wide - mean.view(shape)
        variance = AllSum.apply(centred.square().sum(others)) / count
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), share)
            self.running_var.lerp_((variance.detach() * count / (count - 1)).to(self.running_var.dtype), share)
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        y = y.to(x.dtype)
        return self.act(self.drop(y)) if hasattr(self, "act") else y


@functools.cache
def of_the_whole_batch(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    return type(f"Whole{kind.__name__}", (SyncedBatchNorm, kind), {})
