"""Conditional domain-adversarial training: within a class, a discriminator cannot tell the domain."""

from torch import Tensor, nn
from torch.nn.functional import one_hot

from aidgn.algorithms.dann import DANN


class CDANN(DANN):
    """discriminator: minimise D = sum_i w_i CE(h(f(x_i) + e(y_i)), domain_i) + grad_penalty mean |d sum CE / d input|^2
    network:       minimise CE(g(f(x)), y) - dann_lambda D

    As DANN, but the discriminator also sees the class, by an embedding e learned with it, and every class counts the
    same: w_i = 1 / (samples of class y_i in the batch * number of classes)."""

    title = "features from which a discriminator that knows the class cannot tell the domain"
    paper = "Li et al., ECCV 2018"

    def build(self) -> None:
        super().build()
        self.class_embeddings = nn.Embedding(self.num_classes, self.num_features)

    def discriminator_parts(self) -> list[nn.Module]:
        return [self.discriminator, self.class_embeddings]

    def discriminator_input(self, z: Tensor, y: Tensor) -> Tensor:
        return z + self.class_embeddings(y)

    def reduce(self, losses: Tensor, y: Tensor) -> Tensor:
        counts = one_hot(y, self.num_classes).sum(0)
        return (losses / (counts[y] * self.num_classes)).sum()
