"""Check the results of a user's algorithm at its first update."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from aidgn.errors import AidgnError


def check_terms(owner: str, terms: object, method: str) -> None:
    """Raise an error if a result of `objective` or `update` is not a dict of scalars with `loss` among them.

    Args:
        owner: Name of the algorithm.
        terms: The result.
        method: `objective`, whose loss must have a gradient, or `update`, which may return floats.
    """
    if not isinstance(terms, Mapping) or "loss" not in terms:
        result = f"a dict of {list(terms)}" if isinstance(terms, Mapping) else type(terms).__name__
        raise AidgnError(
            f"{owner}: `{method}` must return a dict of scalar tensors with `loss` among them; it returned {result}."
        )
    for name, term in terms.items():
        is_number = method == "update" and isinstance(term, int | float)
        if not is_number and (not isinstance(term, Tensor) or term.dim()):
            result = str(list(term.shape)) if isinstance(term, Tensor) else type(term).__name__
            raise AidgnError(f"{owner}: `{name}` of `{method}` must be a scalar tensor, not {result}.")
    if method == "objective" and not terms["loss"].requires_grad:
        raise AidgnError(
            f"{owner}: the loss of `objective` has no gradient: it was detached, or does not depend on the network."
        )


def check_optimizers(owner: str, optimizers: object, need_settings: bool = False) -> None:
    """Raise an error if a result of `build_optimizers` is not a dict of optimizers by name.

    Args:
        owner: Name of the algorithm.
        optimizers: The result.
        need_settings: Whether the run has options for optimizers, so that `self.adam` must make all of them.
    """
    if not isinstance(optimizers, dict) or not all(
        isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers.values()
    ):
        raise AidgnError(f"{owner}: `build_optimizers` must return a dict of optimizers by name, not {optimizers}.")
    if need_settings and not all(
        "initial_lr" in group for optimizer in optimizers.values() for group in optimizer.param_groups
    ):
        raise AidgnError(
            f"{owner}: `build_optimizers` makes optimizers that ignore the options `optimizer` and `layer_decay` of "
            "the run. Make them with `self.adam`, or leave these options out."
        )


def check_optimizer_names(owner: str, names: Iterable[str], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise an error for the name of an optimizer that does not exist."""
    for name in names:
        if name not in optimizers:
            raise AidgnError(
                f"{owner}: `build_optimizers` returns no optimizer {name}; it has {', '.join(optimizers)}."
            )


def check_trained(owner: str, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise an error if a parameter has a gradient but no optimizer: a network of `build` is easily forgotten."""
    trained = {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and id(parameter) not in trained:
            raise AidgnError(
                f"{owner}: the loss depends on {name}, but no optimizer trains it. Add it to `build_optimizers`, or "
                "freeze it with `requires_grad_(False)`."
            )


def check_batches(owner: str, minibatches: Sequence[tuple[Tensor, Tensor]], num_domains: int, min_batch: int) -> None:
    """Raise an error unless there is a batch of at least `min_batch` samples for each source domain."""
    if len(minibatches) != num_domains:
        raise AidgnError(
            f"{owner} was made for {num_domains} source domains and needs one batch of each; got {len(minibatches)}."
        )
    smallest = min(len(y) for _, y in minibatches)
    if smallest < min_batch:
        raise AidgnError(
            f"{owner} needs at least {min_batch} samples per domain, got {smallest}: raise the batch size."
        )


def check_moments(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the state of an optimizer belongs to other parameters."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and any(
        moments["exp_avg"].shape != parameter.shape for parameter, moments in optimizer.state.items() if moments
    ):
        raise ValueError(f"the optimizer {name} had other parameters, or in another order")
