"""Meta-learning for domain generalisation: a step on one domain should also help another."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, paired, random_cycle
from aidgn.algorithms.hyper_parameters import SearchSpace, log_uniform, one_of

ADAM_EPS = 1e-8


class MLDG(Algorithm):
    """gradient = 1/N sum over pairs (i, j) of  grad CE_i + mldg_beta grad CE_j at the weights after one step on CE_i

    That inner step is a fresh Adam's, and nothing is differentiated through it (first order). Pairs are neighbours in
    a random circle of the N domains, cut to the shorter batch. With n_meta_test, that many domains (at most N - 1)
    are drawn for meta-testing instead, and the others are paired with them in turn."""

    title = "a step on one domain should also lower the risk of another"
    paper = "Li et al., AAAI 2018"
    min_domains = 2
    search_space: ClassVar[SearchSpace] = {
        **COMMON,
        "mldg_beta": (1.0, log_uniform(-1, 1)),
        "n_meta_test": (None, one_of(1, 2, kind=int, least=1, optional=True)),
    }

    def pairs(self) -> list[tuple[int, int]]:
        """(meta-train, meta-test) domains."""
        if self.hyper_parameters["n_meta_test"] is None:
            return random_cycle(self.num_domains)
        order = torch.randperm(self.num_domains).tolist()
        train = self.num_domains - min(self.integer("n_meta_test"), self.num_domains - 1)
        test = order[train:]
        return [(domain, test[k % len(test)]) for k, domain in enumerate(order[:train])]

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        self.check(minibatches)
        self.updates += 1
        beta, total_loss = self.number("mldg_beta"), torch.zeros((), device=minibatches[0][1].device)
        optimizer = self.optimizers["main"]
        optimizer.zero_grad()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradient = [torch.zeros_like(parameter) for parameter in parameters]
        before = [parameter.detach().clone() for parameter in parameters]

        def accumulate(loss: Tensor, weight: float) -> None:
            """Leave the loss's gradient on the parameters and add it, weighted, to the sum."""
            nonlocal total_loss
            loss.backward()
            used = [(total, parameter.grad) for total, parameter in zip(gradient, parameters, strict=True)
                    if parameter.grad is not None]
            torch._foreach_add_([total for total, _ in used], [grad for _, grad in used], alpha=weight)
            total_loss = total_loss + weight * loss.detach()

        for i, j in self.pairs():
            x_i, y_i, x_j, y_j = paired(minibatches, i, j)
            accumulate(cross_entropy(self.predict(x_i), y_i), 1 / self.num_domains)
            # The copy is the network itself for a while: weights and running statistics are put back afterwards.
            statistics = [(buffer, buffer.clone()) for layer in self.live_batch_norms()
                          for buffer in layer.buffers(recurse=False)]
            FreshAdam(parameters, self.number("lr") * self.lr_factor, self.number("weight_decay")).step()
            optimizer.zero_grad()
            accumulate(cross_entropy(self.predict(x_j), y_j), beta / self.num_domains)
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(parameters, before)
                for buffer, saved in statistics:
                    buffer.copy_(saved)

        for parameter, total in zip(parameters, gradient, strict=True):
            parameter.grad = total
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total_loss}


class FreshAdam(torch.optim.Optimizer):
    """An Adam that makes one step: w - lr g / (|g| + eps), g the gradient with weight decay, whose two means are g and
    g^2 then. An optimiser by its class, as before those step the gradients of several devices are summed."""

    def __init__(self, parameters: list[Tensor], lr: float, weight_decay: float):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            g = [parameter.grad for parameter in moved]
            if group["weight_decay"]:
                g = list(torch._foreach_add(g, moved, alpha=group["weight_decay"]))
            size = torch._foreach_abs(g)
            torch._foreach_add_(size, ADAM_EPS)
            torch._foreach_addcdiv_(moved, g, size, value=-group["lr"])
