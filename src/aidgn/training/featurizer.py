"""A backbone with the arithmetic of a run: precision, memory format, folded batch norm, compiled code.

Algorithms see a module that maps images to float32 features, and nothing of this.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from aidgn import backbones
from aidgn.errors import AidgnError

PRECISIONS = ("auto", "bfloat16", "tf32", "float32")
EVAL_BATCH = 512  # images per forward pass of evaluation
SHAPES = 1000  # of batches, that a process compiles a function for
log = logging.getLogger("aidgn")


class Compiled(NamedTuple):
    """Code for training, by CUDA graphs, and for evaluation, whose large batches need none: graphs of both would share
    memory, and mixing them has been seen to crash (pytorch/pytorch#128218)."""

    training: Callable[[Tensor], Tensor]
    evaluation: Callable[[Tensor], Tensor]


class Featurizer(nn.Module):
    """Images [B, channels, H, W] to features [B, num_features] in float32."""

    def __init__(self, network: nn.Module, precision: str, compiled: bool):
        super().__init__()
        self.network = network
        self.num_features = int(getattr(network, "num_features", 0))
        self.precision = precision
        self.compiled: Compiled | None = None
        if compiled:
            self.compiled = Compiled(
                compiled_by_shape(self.compute, mode="reduce-overhead"), compiled_by_shape(self.evaluate)
            )
        self.__dict__["beside"] = None  # not a part of this module: see `like`

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "compiled": None}  # a copy must not run the original's weights

    def like(self, network: nn.Module) -> "Featurizer":
        """A network that an algorithm has beside this one, with the same arithmetic. Compiled code is kept for the
        next run in this process: the same module comes back with these weights copied in."""
        beside: Featurizer | None = self.__dict__["beside"]
        if beside is None or self.compiled is None:
            beside = Featurizer(
                network.to(memory_format=torch.channels_last), self.precision, compiled=self.compiled is not None
            )
            self.__dict__["beside"] = beside
        else:
            beside.network.load_state_dict(network.state_dict())
        return beside

    def compute(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            features = self.network(x)
        return features.float() if features.dtype == torch.bfloat16 else features

    def evaluate(self, x: Tensor) -> Tensor:
        """The same, compiled on its own."""
        return self.compute(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if self.compiled is None:
            return self.compute(x)
        try:
            if torch.is_grad_enabled() or self.network.training:
                return self.compiled.training(x).clone()  # the graph's own output is overwritten by its next replay
            return torch.cat([self.compiled.evaluation(padded(part))[: len(part)] for part in x.split(EVAL_BATCH)])
        except torch._dynamo.exc.TorchDynamoException as error:
            log.info("Compilation failed (%s); continuing without it.", str(error).splitlines()[0])
            self.compiled = None
            return self.compute(x)


def compiled_by_shape(function: Callable[..., Tensor], mode: str | None = None) -> Callable[..., Tensor]:
    """Code of its own for every shape. Draws of hyper-parameters have batches of many sizes; PyTorch would compile the
    first eight that a process meets and run the others otherwise, slowly and with other rounding."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = SHAPES
    return torch.compile(function, dynamic=False, mode=mode)


def padded(x: Tensor) -> Tensor:
    """x with zeros behind it, up to the batch that evaluation is compiled for."""
    return x if len(x) == EVAL_BATCH else torch.cat([x, x.new_zeros(EVAL_BATCH - len(x), *x.shape[1:])])


def choose_device(name: str = "auto") -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise AidgnError(f"--device {name} cannot be used: expected auto, cpu, cuda or cuda:N.")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise AidgnError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def choose_precision(name: str, device: torch.device) -> str:
    """The precision by name, set for this process; auto is bfloat16 on CUDA, float32 elsewhere."""
    if name not in PRECISIONS:
        raise AidgnError(f"--precision {name} is not one of {', '.join(PRECISIONS)}.")
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    torch.set_float32_matmul_precision("highest" if name == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = name != "float32"
    torch.backends.cudnn.benchmark = True
    return name


_compiled: dict[tuple[object, ...], Featurizer] = {}


def featurizer(
    backbone: str,
    weights: str | Path | None,
    in_channels: int,
    precision: str,
    device: torch.device,
    train_only: str | None = None,
) -> Featurizer:
    """A featuriser with fresh initial weights; with `train_only`, its last stage alone has gradients.

    On CUDA its compiled code is kept for the next run in this process: the same module comes back with the initial
    weights copied in."""
    # From scratch there are no statistics worth freezing.
    network = backbones.create(backbone, weights=weights, in_channels=in_channels, freeze_bn=weights != "none")
    # The weights file decides where the strides are.
    key = (backbone, str(weights), in_channels, precision, device, train_only)
    if key in _compiled:
        module = _compiled[key]
        module.network.load_state_dict(network.state_dict())
        module.zero_grad(set_to_none=True)
        return module
    backbones.fold(network)
    if train_only:
        backbones.train_last_stage(network)
    network = network.to(device).to(memory_format=torch.channels_last)
    module = Featurizer(network, precision, compiled=device.type == "cuda")
    if device.type == "cuda":
        _compiled.clear()  # one network's graphs and buffers at a time
        _compiled[key] = module
    return module
