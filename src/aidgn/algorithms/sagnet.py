"""Style-agnostic networks: decide by content where style is random, and forget the style that tells the class."""

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, join
from aidgn.algorithms.search_space import log_uniform

EPSILON = 1e-5  # under the square root of the variance


class SagNet(Algorithm):
    """1. f and content head:  minimise CE(content(z with random style), y)
    2. style head:          minimise CE(style(z with random content), y)
    3. f:                   minimise sag_w_adv mean of -log softmax(style(z with random content)), over classes too

    Style is the mean and the (unbiased) variance of a feature vector over its entries; content is the vector normalised
    by them. Random style: a mixture, with a uniform share in [0, 1], of the sample's style and another sample's. Random
    content: another sample's content, as a constant. Each step has its own forward pass; f and the two heads have an
    Adam each."""

    title = "decide by content under random style; make style useless for the class"
    passes = 7 / 3  # two passes with gradients and one without
    paper = "Nam et al., CVPR 2021"
    search_space = {**COMMON, "sag_w_adv": (0.1, log_uniform(-2, 1))}

    def build(self) -> None:
        self.style_classifier = nn.Linear(self.num_features, self.num_classes)

    def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            "main": self.adam([self.featurizer]),
            "content": self.adam([self.classifier]),
            "style": self.adam([self.style_classifier]),
        }

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        self.begin_update(minibatches)
        x, y = join(minibatches)

        content = self.cross_entropy(self.classifier(random_style(self.features(x))), y)
        self.step(content, "main", "content")

        with torch.no_grad():
            z = self.features(x)
        style = self.cross_entropy(self.style_classifier(random_content(z)), y)
        self.step(style, "style")

        log_probabilities = log_softmax(self.style_classifier(random_content(self.features(x))), dim=1)
        adversary = -self.hparams.sag_w_adv * log_probabilities.mean()
        self.step(adversary, "main")
        return {"loss": content.detach(), "style": style.detach(), "adversary": adversary.detach()}


def random_style(z: Tensor) -> Tensor:
    """Mix the style of every sample with the style of another."""
    mean, variance, content = mean_variance_content(z)
    share, other = sample_partners(z)
    mean = share * mean + (1 - share) * mean[other]
    variance = share * variance + (1 - share) * variance[other]
    return content * (variance + EPSILON).sqrt() + mean


def random_content(z: Tensor) -> Tensor:
    """Give every sample the content of another."""
    mean, variance, content = mean_variance_content(z)
    _, other = sample_partners(z)
    return content[other].detach() * (variance + EPSILON).sqrt() + mean


def mean_variance_content(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split features into style, their mean and variance, and content."""
    mean = z.mean(1, keepdim=True)
    variance = z.var(1, keepdim=True)
    return mean, variance, (z - mean) / (variance + EPSILON).sqrt()


def sample_partners(z: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a share in [0, 1] and another sample for every sample.

    Both are drawn in this order on the CPU, so that a seed gives the same numbers as in DomainBed.
    """
    share, other = torch.rand(len(z), 1), torch.randperm(len(z))
    return share.to(z.device, non_blocking=True), other.to(z.device, non_blocking=True)
