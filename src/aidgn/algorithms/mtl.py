"""Marginal transfer learning: classify an image together with the mean of its domain's features."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, split
from aidgn.algorithms.search_space import one_of

TEST_BATCH = 64  # images whose mean describes an unseen domain


class MTL(Algorithm):
    """loss = sum_d CE(g([f(x), e_d]), y),   e_d <- mtl_ema mean f(x) + (1 - mtl_ema) e_d before the loss

    e_d starts at 0; the gradient passes through the batch's mean. An unseen domain is described by the mean over
    consecutive groups of 64 images."""

    title = "classify an image together with the mean of its domain's features"
    paper = "Blanchard et al., JMLR 2021"
    trains_on_features = True
    search_space = {**COMMON, "mtl_ema": (0.99, one_of(0.5, 0.9, 0.99, 1.0, most=1.0))}
    embeddings: Tensor

    def build_classifier(self) -> nn.Module:
        return nn.Linear(2 * self.num_features, self.num_classes)

    def build(self) -> None:
        self.register_buffer("embeddings", torch.zeros(self.num_domains, self.num_features))

    @property
    def group_size(self) -> int:
        return TEST_BATCH

    def features(self, x: Tensor) -> Tensor:
        groups = super().features(x).split(TEST_BATCH)
        return with_embeddings(groups, [group.mean(0) for group in groups])

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        domains = split(self.forward_per_domain(super().features, [x for x, _ in minibatches]), minibatches)
        ema = self.hparams.mtl_ema
        embeddings = ema * torch.stack([z.mean(0) for z in domains]) + (1 - ema) * self.embeddings
        self.embeddings.copy_(embeddings.detach())
        logits = split(self.classifier(with_embeddings(domains, list(embeddings))), minibatches)
        losses = [self.cross_entropy(domain, y) for domain, (_, y) in zip(logits, minibatches, strict=True)]
        return {"loss": torch.stack(losses).sum()}


def with_embeddings(groups: Sequence[Tensor], embeddings: Sequence[Tensor]) -> Tensor:
    """Append the embedding of its group to every feature vector."""
    return torch.cat(
        [
            torch.cat([group, embedding.expand_as(group)], dim=1)
            for group, embedding in zip(groups, embeddings, strict=True)
        ]
    )
