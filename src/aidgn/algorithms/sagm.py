"""Sharpness-aware steps, SAM's and SAGM's, for the losses of ERM and AIDGN."""

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from aidgn.algorithms.aidgn import AIDGN
from aidgn.algorithms.base import Algorithm, Minibatches
from aidgn.algorithms.erm import ERM
from aidgn.algorithms.search_space import SearchSpace, one_of
from aidgn.devices import begin_pass

RHO: SearchSpace = {"rho": (0.05, one_of(0.01, 0.02, 0.05, 0.1))}
RHO_ALPHA: SearchSpace = {**RHO, "alpha": (1e-3, one_of(5e-4, 1e-3))}  # alpha: the authors' values for five data sets


class SharpnessAware(Algorithm):
    """An update rule for the objective of another base class: Adam's step down the gradient of a loss L nearby.

    The gradient is (1 - own_share) L'(w + e) + own_share L'(w), with e = (rho / |L'(w)| - alpha) L'(w). Running
    statistics of batch norm follow the pass at w alone.
    """

    passes = 2.0
    own_share: ClassVar[float] = 0.5

    @cached_property
    def ascent(self) -> "Ascent":
        return Ascent(
            [
                parameter
                for optimizer in self.optimizers.values()
                for group in optimizer.param_groups
                for parameter in group["params"]
            ],
            self.hparams.rho,
            getattr(self.hparams, "alpha", 0.0),
        )

    def backward(self, minibatches: Minibatches) -> dict[str, Tensor]:
        """Compute the gradients of the objective, and return its terms."""
        self.zero_grad()
        begin_pass()
        terms = self.objective(minibatches)
        terms["loss"].backward()
        return {name: term.detach() for name, term in terms.items()}

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        self.begin_update(minibatches)
        terms = self.backward(minibatches)
        trained = [parameter for parameter in self.ascent.parameters if parameter.grad is not None]
        total = torch._foreach_mul(gradients_of(trained), self.own_share)
        self.ascent.step()
        with self.keep_statistics():
            nearby = self.backward(minibatches)
        self.ascent.undo()
        torch._foreach_add_(total, gradients_of(trained), alpha=1 - self.own_share)
        for parameter, gradient in zip(trained, total, strict=True):
            parameter.grad = gradient
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.zero_grad()
        return {**terms, "loss_nearby": nearby["loss"]}


class Ascent(torch.optim.Optimizer):
    """Move parameters w with gradient g to w + (rho / |g| - alpha) g, and back.

    It is an optimizer, so that several devices sum their gradients before the step.

    Args:
        parameters: Parameters to move; |g| is the norm over all of them.
        rho: Length of the move before alpha shortens it.
        alpha: Length of a step of gradient descent within the move.
    """

    def __init__(self, parameters: list[Tensor], rho: float, alpha: float):
        super().__init__(parameters, {})
        self.parameters = parameters
        self.before = [torch.empty_like(parameter) for parameter in parameters]
        self.rho = rho
        self.alpha = alpha

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__  # Optimizer.__getstate__ would drop the copies

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        torch._foreach_copy_(self.before, self.parameters)
        moved = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = gradients_of(moved)
        norm = torch.stack([*torch._foreach_norm(gradients)]).norm()
        factor = self.rho / (norm + 1e-12) - self.alpha
        torch._foreach_add_(moved, [*torch._foreach_mul(gradients, factor)])

    @torch.no_grad()
    def undo(self) -> None:
        torch._foreach_copy_(self.parameters, self.before)


def gradients_of(parameters: list[Tensor]) -> list[Tensor]:
    """List the gradients of parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class SAM(SharpnessAware, ERM):
    """gradient = L'(w + rho L'(w) / |L'(w)|),   L = CE over all samples, w all weights"""

    title = "minimise the cross entropy at the worst weights nearby"
    paper = "Foret et al., ICLR 2021"
    own_share = 0.0
    search_space = {**ERM.search_space, **RHO}


class SAGM(SharpnessAware, ERM):
    """gradient = 1/2 L'(w) + 1/2 L'(w + (rho / |L'(w)| - alpha) L'(w)),   L = CE over all samples, w all weights

    alpha makes the gradients of the loss and of the loss nearby point the same way."""

    title = "minimise the cross entropy here and nearby, and match their gradients"
    paper = "Wang et al., CVPR 2023"
    search_space = {**ERM.search_space, **RHO_ALPHA}


class AIDGNSAGM(SharpnessAware, AIDGN):
    """gradient = 1/2 L'(w) + 1/2 L'(w + (rho / |L'(w)| - alpha) L'(w)),   L the loss of AIDGN, w all weights"""

    display_name = "AIDGN-SAGM"
    title = "AIDGN's loss, by the steps of SAGM"
    paper = "a combination of Jin et al., IJCAI 2022, with Wang et al., CVPR 2023"
    search_space = {**AIDGN.search_space, **RHO_ALPHA}
