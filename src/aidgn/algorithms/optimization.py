"""Create the optimizers of algorithms (Adam or AdamW, learning rates by layer), and compute gradients in parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aidgn.algorithms.batches import Minibatches
from aidgn.devices import begin_pass

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Optimization:
    """Settings of optimizers, the same for every algorithm."""

    # `adam`, whose weight decay is added to the gradient of every parameter, or `adamw`, whose weight decay shrinks
    # weights directly and leaves out biases, scales of norms and what the network names
    optimizer: str = "adam"
    layer_decay: float = 1.0  # learning rate of a layer of the network relative to that of the layer after it
    parts: int = 1  # number of parts of a batch that pass through the network one after the other

    @property
    def changes_optimizers(self) -> bool:
        return self.optimizer != "adam" or self.layer_decay != 1.0

    def create(
        self, featurizer: nn.Module, parameters: Sequence[Tensor], lr: float, weight_decay: float, betas: Any
    ) -> torch.optim.Optimizer:
        """Create an optimizer over parameters; the featurizer's have the learning rates of their layers."""
        groups: list[dict[str, Any]] = [{"params": list(parameters)}]
        if self.changes_optimizers:
            groups = self.group(featurizer, parameters, lr, weight_decay)
        optimizer = OPTIMIZERS[self.optimizer](groups, lr=lr, weight_decay=weight_decay, betas=betas, fused=True)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def group(
        self, featurizer: nn.Module, parameters: Sequence[Tensor], lr: float, weight_decay: float
    ) -> list[dict[str, Any]]:
        """Group parameters by learning rate and weight decay."""
        # The network of timm inside the featurizer, if there is one. It may name parameters, such as position
        # embeddings, as free of weight decay.
        network: Any = next((module for module in featurizer.modules() if hasattr(module, "group_matcher")), None)
        factors = layer_factors(network, self.layer_decay) if network is not None and self.layer_decay != 1.0 else {}
        free = network.no_weight_decay() if hasattr(network, "no_weight_decay") else ()
        exempt = {id(parameter) for name, parameter in network.named_parameters() if name in free} if free else set()
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for parameter in parameters:
            shrinks = self.optimizer == "adam" or (parameter.ndim > 1 and id(parameter) not in exempt)
            settings = lr * factors.get(id(parameter), 1.0), weight_decay if shrinks else 0.0
            groups.setdefault(settings, []).append(parameter)
        return [{"params": members, "lr": rate, "weight_decay": decay} for (rate, decay), members in groups.items()]


def layer_factors(network: Any, layer_decay: float) -> dict[int, float]:
    """Return the learning rate of each parameter, by its id, relative to the classifier's.

    timm divides the network into layers: the stem, each block, and what follows the last block, which learns as fast
    as the classifier.
    """
    from timm.models import group_parameters

    layers: dict[str, int] = group_parameters(network, network.group_matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {id(parameter): layer_decay ** (last - layers[name]) for name, parameter in network.named_parameters()}


# Batches in parts -----------------------------------------------------------------------------------------------------


def backward_in_parts(
    objective: Callable[[Minibatches], Mapping[str, Tensor]], trained: nn.Module, minibatches: Minibatches, parts: int
) -> dict[str, Tensor]:
    """Compute the gradients of an objective that is a mean over samples, from parts of a batch.

    Args:
        objective: Returns scalars by name, `loss` among them.
        trained: Its parameters receive the gradients.
        minibatches: One (x, y) per source domain.
        parts: Number of parts.

    Returns:
        The scalars of the whole batch.
    """
    parameters = list(trained.parameters())
    totals: dict[int, Tensor] = {}
    means: dict[str, Tensor] = {}
    samples = sum(len(y) for _, y in minibatches)
    for part in split_batch(minibatches, parts):
        share = sum(len(y) for _, y in part) / samples
        begin_pass()
        terms = objective(part)
        (share * terms["loss"]).backward()
        for name, term in terms.items():
            means[name] = means.get(name, 0.0) + share * term.detach()
        for number, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            # Gradients may lie in the memory of CUDA graphs, which the next pass overwrites: keep copies.
            totals[number] = totals[number] + parameter.grad if number in totals else parameter.grad.clone()
            parameter.grad = None
    for number, total in totals.items():
        parameters[number].grad = total
    return means


def split_batch(minibatches: Minibatches, parts: int) -> Iterator[Minibatches]:
    """Cut the batch of every domain into parts whose sizes differ by one sample at most."""
    pieces = [(x.tensor_split(parts), y.tensor_split(parts)) for x, y in minibatches]
    for number in range(parts):
        yield [(x[number], y[number]) for x, y in pieces]
