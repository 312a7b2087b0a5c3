"""SelfReg: keep features and logits near those of other samples of the class, from any domain."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aidgn.algorithms.base import Algorithm, Minibatches, join

FEATURE_SHARE = 0.3  # weight of distances between features, relative to logits


class SelfReg(Algorithm):
    """loss = CE + min(CE, 1) ( l D(o, o_p; h, h_p) + (1 - l) D(o, l o_p + (1 - l) o_q; h, l h_p + (1 - l) h_q) )

    D(o, o'; h, h') = mean (o - o')^2 + 0.3 mean (f(x) - h')^2, with logits o and projected features h = P(f(x)).
    p and q pair every sample with one of its class: two random permutations within each class. One l ~ Beta(1/2, 1/2)
    per update; min(CE, 1) is a constant. P is an MLP with batch norm, which keeps its initial weights, as in DomainBed,
    so that results can be compared. The paper also averages weights (`--average sma` does so) and starts with
    a curriculum of domains, which DomainBed leaves out."""

    title = "keep features and logits near those of other samples of the class"
    paper = "Kim et al., ICCV 2021"
    trains_on_features = True
    min_batch = 2

    def build(self) -> None:
        n = self.num_features
        width = n if n == 2048 else 2 * n
        self.projection = nn.Sequential(
            nn.Linear(n, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, n),
            nn.BatchNorm1d(n),
        ).requires_grad_(False)

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        share = float(np.random.beta(0.5, 0.5))
        x, y = join(minibatches)
        z = self.features(x)
        logits = self.classifier(z)
        projected = self.projection(z)
        p, q = self.draw_partners(y), self.draw_partners(y)

        def distance(of_logits: Tensor, of_features: Tensor) -> Tensor:
            return mse_loss(logits, of_logits) + FEATURE_SHARE * mse_loss(z, of_features)

        same = distance(logits[p], projected[p])
        mixed = distance(*(torch.lerp(values[q], values[p], share) for values in (logits, projected)))
        risk = self.cross_entropy(logits, y)
        penalty = share * same + (1 - share) * mixed
        return {"loss": risk + risk.detach().clamp(max=1) * penalty, "risk": risk, "penalty": penalty}

    def draw_partners(self, y: Tensor) -> Tensor:
        """Draw a permutation of the samples that keeps the classes y."""
        noise = torch.rand(len(y), device=y.device)
        partners = torch.empty_like(y)
        partners[y.argsort(stable=True)] = (y + noise.double()).argsort()  # float64 keeps the sum below the next class
        return partners
