"""A backbone that computes in the precision of a run, with folded batch norm and, on CUDA, graphs or compiled code."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from aidgn import backbones
from aidgn.backbones.stages import StageComparison
from aidgn.devices import PRECISIONS
from aidgn.training.acceleration import EvaluationGraphs, TrainingGraphs, compiled_by_shape

EVAL_BATCH = 512  # images per forward pass of evaluation on CUDA
log = logging.getLogger("aidgn")


class Graphs(NamedTuple):
    """Recorded passes for training, and for evaluation, which has no gradients."""

    training: TrainingGraphs
    evaluation: EvaluationGraphs


class Compiled(NamedTuple):
    """Compiled entry points: training by CUDA graphs, evaluation without, as its large batches gain nothing.

    Graphs of both would share memory, and mixing them has been seen to crash (pytorch/pytorch#128218).
    """

    training: Callable[[Tensor], Tensor]
    evaluation: Callable[[Tensor], Tensor]


class NetworkRunner:
    """Run a network in a precision, fast on CUDA if asked for.

    A network with fused blocks has kernels for all its parts. Recorded as CUDA graphs it starts at once. Other networks
    are compiled.

    A runner refers to the network but is no module: weights belong to the module that the network is registered in.

    Args:
        network: Maps images to features.
        precision: Name in `aidgn.devices.PRECISIONS`.
        compiled: Whether to record or compile the network.
    """

    def __init__(self, network: nn.Module, precision: str, compiled: bool):
        self.network = network
        self.precision = precision
        self.compiled: Compiled | None = None
        self.graphs: Graphs | None = None
        if compiled and backbones.has_kernels(network, PRECISIONS[precision].autocast):
            self.graphs = Graphs(TrainingGraphs(network, self.compute), EvaluationGraphs(self.compute))
        elif compiled:
            self.compiled = Compiled(
                compiled_by_shape(self.compute, mode="reduce-overhead"), compiled_by_shape(self.compute_for_evaluation)
            )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "compiled": None, "graphs": None}  # a copy must not run the original's weights

    @property
    def is_reused(self) -> bool:
        """Whether the next run of this process reuses recordings or compiled code."""
        return self.compiled is not None or self.graphs is not None

    def compute(self, x: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        """Compute features in eager mode.

        Args:
            x: Images.
            parameters: Tensors in place of the parameters of the network with these names.
        """
        autocast = PRECISIONS[self.precision].autocast
        # Recorded passes must not read weights that autocast converted before.
        with torch.autocast(
            x.device.type, torch.bfloat16, enabled=autocast == "bfloat16", cache_enabled=self.graphs is None
        ):
            features = self.network(x) if parameters is None else functional_call(self.network, parameters, (x,))
        return features.float() if features.dtype == torch.bfloat16 else features

    def compute_for_evaluation(self, x: Tensor) -> Tensor:
        """Separate entry point, so that evaluation is compiled apart from training."""
        return self.compute(x)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if self.graphs is not None:
            if torch.is_grad_enabled():
                return self.graphs.training(x)
            if self.network.training:  # small batches, as in a warm start
                return self.compute(x)
            return torch.cat([self.graphs.evaluation(_pad(part))[: len(part)] for part in x.split(EVAL_BATCH)])
        if self.compiled is None:
            return self.compute(x)
        try:
            if torch.is_grad_enabled() or self.network.training:
                return self.compiled.training(x).clone()  # the next replay of the graph overwrites its own output
            return torch.cat([self.compiled.evaluation(_pad(part))[: len(part)] for part in x.split(EVAL_BATCH)])
        except torch._dynamo.exc.TorchDynamoException as error:
            log.info("Compilation failed (%s); continuing without it.", str(error).splitlines()[0])
            self.compiled = None
            return self.compute(x)


class Featurizer(nn.Module):
    """Images [B, channels, H, W] to features [B, num_features] in float32.

    While `frozen` is true, the network gets no gradients, so that optimizers leave it and its state alone.

    Args:
        network: Backbone with `num_features`.
        precision: Name in `aidgn.devices.PRECISIONS`.
        compiled: Whether to compile the backbone.
    """

    def __init__(self, network: nn.Module, precision: str, compiled: bool = False):
        super().__init__()
        self.network = network
        self.num_features = int(getattr(network, "num_features", 0))
        self.runner = NetworkRunner(network, precision, compiled)
        self._auxiliary: NetworkRunner | None = None
        self._comparison: NetworkRunner | None = None
        self.frozen = False

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.runner, x)

    def run(self, runner: NetworkRunner, x: Tensor) -> Tensor:
        """Compute a runner's output for images, without gradients of the network while `frozen`."""
        if not self.frozen:
            return runner(x)
        with torch.no_grad():
            features = runner(x)
        return features.requires_grad_(torch.is_grad_enabled())  # some objectives differentiate by features

    def forget_shapes(self) -> None:
        """Free the memory of recordings: the next run may have batches of other sizes."""
        for runner in (self.runner, self._auxiliary, self._comparison):
            if runner is not None and runner.graphs is not None:
                runner.graphs.training.recorded.clear()
                runner.graphs.evaluation.recorded.clear()
        gc.collect()  # recordings refer to themselves

    def auxiliary(self, network: nn.Module) -> NetworkRunner:
        """Wrap an auxiliary network with the same precision and compilation.

        The next run of this process reuses compiled code: it gets the same runner, whose network receives the weights
        of the new one. Register `runner.network`, not `network`.
        """
        if self._auxiliary is None or not self.runner.is_reused:
            network = network.to(memory_format=torch.channels_last)
            self._auxiliary = NetworkRunner(network, self.runner.precision, compiled=self.runner.is_reused)
        else:
            self._auxiliary.network.load_state_dict(network.state_dict())
        return self._auxiliary

    def compare_stages(self) -> NetworkRunner:
        """Compare the network with a frozen copy of its present weights, with the same precision and compilation.

        Pass the result to `run`. The next run of this process reuses compiled code.
        """
        if self._comparison is None or not self.runner.is_reused:
            self._comparison = NetworkRunner(
                StageComparison(self.network), self.runner.precision, compiled=self.runner.is_reused
            )
        else:
            self._comparison.network.get_submodule("oracle").load_state_dict(self.network.state_dict())
        return self._comparison


def _pad(x: Tensor) -> Tensor:
    """Append zeros up to the batch size that evaluation is compiled for."""
    return x if len(x) == EVAL_BATCH else torch.cat([x, x.new_zeros(EVAL_BATCH - len(x), *x.shape[1:])])


_compiled_featurizers: dict[tuple[object, ...], Featurizer] = {}


def create_featurizer(
    backbone: str,
    weights: str | Path | None,
    in_channels: int,
    precision: str,
    device: torch.device,
    train_only: str | None = None,
    image_size: int | None = None,
    batch_norm: str | None = None,
) -> Featurizer:
    """Create a featurizer with initial weights.

    On CUDA the next run of this process gets the same module, with initial weights, and reuses its compiled code.

    Args:
        backbone: Name of the architecture.
        weights: `hub`, `none` or a file.
        in_channels: Channels of the input.
        precision: Name in `aidgn.devices.PRECISIONS`.
        device: Where to compute.
        train_only: `last-stage` gives the last stage gradients and no other; None trains everything.
        image_size: Side of the images in pixels; None for the size of the published weights.
        batch_norm: `frozen` or `live` statistics; None leaves the choice to the weights.
    """
    freeze_bn = backbones.freezes_batch_norm(weights, batch_norm)
    network = backbones.create(
        backbone, weights=weights, in_channels=in_channels, freeze_bn=freeze_bn, image_size=image_size
    )
    # The weights are part of the key because they decide where the strides are.
    key = (backbone, str(weights), in_channels, precision, device, train_only, image_size, batch_norm)
    if key in _compiled_featurizers:
        featurizer = _compiled_featurizers[key]
        featurizer.network.load_state_dict(network.state_dict())
        featurizer.forget_shapes()
        featurizer.zero_grad(set_to_none=True)
        return featurizer
    backbones.fold(network)
    if train_only:
        backbones.train_last_stage(network)
    network = network.to(device).to(memory_format=torch.channels_last)
    featurizer = Featurizer(network, precision, compiled=device.type == "cuda")
    if device.type == "cuda":
        _compiled_featurizers.clear()  # graphs and buffers of one network at a time
        _compiled_featurizers[key] = featurizer
    return featurizer
