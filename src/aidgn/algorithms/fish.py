"""Fish: align the gradients of the domains, by a step towards the end of a walk that descends each domain in turn."""

from functools import cached_property

import torch
from torch import Tensor

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches
from aidgn.algorithms.search_space import one_of
from aidgn.devices import begin_pass


class Fish(Algorithm):
    """w' = w,   then for each domain d in turn  w' <- Adam's step from w' down CE_d,   then w <- w + meta_lr (w' - w)

    To first order the walk w' - w raises the inner products of the domains' gradients. Adam's moments continue from
    one update to the next. Running statistics of batch norm move as the weights do."""

    title = "step towards the end of a walk that descends the domains in turn"
    paper = "Shi et al., ICLR 2022"
    trains_on_features = True
    search_space = {**COMMON, "meta_lr": (0.5, one_of(0.05, 0.1, 0.5, most=1.0))}

    @cached_property
    def start(self) -> list[Tensor]:
        """Memory for the weights before the walk, kept because allocating it takes longer than filling it."""
        return [torch.empty_like(weight) for weight in self.walking()]

    def walking(self) -> list[Tensor]:
        """List the weights and running statistics that the walk changes."""
        weights = [weight for group in self.optimizers["main"].param_groups for weight in group["params"]]
        statistics = [
            buffer
            for layer in self.live_batch_norms()
            for buffer in layer.buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        return [*weights, *statistics]

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        self.begin_update(minibatches)
        with torch.no_grad():
            walking = self.walking()
            torch._foreach_copy_(self.start, walking)
        losses = []
        for x, y in minibatches:
            begin_pass()
            loss = self.cross_entropy(self.predict(x), y)
            self.step(loss, "main")
            losses.append(loss.detach())
        with torch.no_grad():
            torch._foreach_lerp_(walking, self.start, 1 - self.hparams.meta_lr)
        return {"loss": torch.stack(losses).mean()}
