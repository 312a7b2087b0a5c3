"""Meta-learning for domain generalisation: a step on one domain should also help another."""

from functools import cached_property

import torch
from torch import Tensor

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, paired, random_cycle
from aidgn.algorithms.search_space import log_uniform, one_of
from aidgn.devices import begin_pass


class MLDG(Algorithm):
    """gradient = 1/N sum over pairs (i, j) of  grad CE_i + mldg_beta grad CE_j at the weights after one step on CE_i

    The inner step is a fresh Adam's, and no gradient passes through it (first order). Pairs are neighbours in
    a random circle of the N domains, cut to the shorter batch. With n_meta_test, that many domains (at most N - 1)
    are drawn for meta-testing instead, and the others are paired with them in turn."""

    title = "a step on one domain should also lower the risk of another"
    passes = 3.5  # six passes over one domain each, as measured with three
    paper = "Li et al., AAAI 2018"
    min_domains = 2
    only_adam = True
    search_space = {
        **COMMON,
        "mldg_beta": (1.0, log_uniform(-1, 1)),
        "n_meta_test": (None, one_of(1, 2, least=1, optional=True)),
    }

    def pairs(self) -> list[tuple[int, int]]:
        """Draw pairs of a domain for meta-training and one for meta-testing."""
        if self.hyper_parameters["n_meta_test"] is None:
            return random_cycle(self.num_domains)
        order = torch.randperm(self.num_domains).tolist()
        train = self.num_domains - min(self.hparams.n_meta_test, self.num_domains - 1)
        test = order[train:]
        return [(domain, test[k % len(test)]) for k, domain in enumerate(order[:train])]

    @cached_property
    def inner(self) -> "InnerAdam":
        return InnerAdam(
            [parameter for group in self.optimizers["main"].param_groups for parameter in group["params"]],
            self.hparams.weight_decay,
        )

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        self.begin_update(minibatches)
        inner = self.inner
        optimizer = self.optimizers["main"]
        total_loss = torch.zeros((), device=minibatches[0][1].device)
        reached: set[int] = set()  # parameters with a gradient: in a warm start, those of the head
        optimizer.zero_grad()
        torch._foreach_zero_(inner.total)

        def accumulate(x: Tensor, y: Tensor, weight: float) -> None:
            """Compute the gradient of the risk and add it, weighted, to the sum."""
            nonlocal total_loss
            begin_pass()
            loss = self.cross_entropy(self.predict(x), y)
            loss.backward()
            used = [
                (total, parameter.grad)
                for total, parameter in zip(inner.total, inner.parameters, strict=True)
                if parameter.grad is not None
            ]
            torch._foreach_add_([total for total, _ in used], [grad for _, grad in used], alpha=weight)
            reached.update(id(parameter) for parameter in inner.parameters if parameter.grad is not None)
            total_loss = total_loss + weight * loss.detach()

        for i, j in self.pairs():
            x_i, y_i, x_j, y_j = paired(minibatches, i, j)
            accumulate(x_i, y_i, 1 / self.num_domains)
            # The network itself takes the inner step; its weights and running statistics are restored afterwards.
            inner.try_step(self.hparams.lr * self.lr_factor)
            optimizer.zero_grad()
            with self.keep_statistics():
                accumulate(x_j, y_j, self.hparams.mldg_beta / self.num_domains)
            optimizer.zero_grad()
            inner.undo()

        for parameter, total in zip(inner.parameters, inner.total, strict=True):
            parameter.grad = total if id(parameter) in reached else None
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total_loss}


class InnerAdam(torch.optim.Adam):
    """Make the first step of a fresh Adam, and undo it.

    With betas of zero every step is a first step, w - lr g / (|g| + eps), g the gradient with weight decay. The buffers
    are kept for all updates, because allocating a tensor for every parameter takes longer than filling it.
    """

    def __init__(self, parameters: list[Tensor], weight_decay: float):
        super().__init__(parameters, betas=(0.0, 0.0), weight_decay=weight_decay, fused=True)
        self.parameters = parameters
        self.before = [torch.empty_like(parameter) for parameter in parameters]
        self.total = [torch.empty_like(parameter) for parameter in parameters]  # sum of gradients over pairs

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__  # Optimizer.__getstate__ would drop the buffers

    @torch.no_grad()
    def try_step(self, lr: float) -> None:
        torch._foreach_copy_(self.before, self.parameters)
        self.param_groups[0]["lr"] = lr
        self.step()

    @torch.no_grad()
    def undo(self) -> None:
        torch._foreach_copy_(self.parameters, self.before)
