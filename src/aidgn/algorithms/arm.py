"""Adaptive risk minimisation: add the mean context of a domain's images as an input channel."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aidgn.algorithms.base import COMMON, COMMON_SMALL, Algorithm, Minibatches, join
from aidgn.algorithms.search_space import fixed
from aidgn.errors import AidgnError


class ARM(Algorithm):
    """loss = CE(g(f([x, c_d])), y) over all samples,   c_d = mean of context(x) over the batch of domain d

    context is a convolutional network from the image to one channel, an additional input of f. It keeps its initial
    weights, as in DomainBed, so that results can be compared: Adam trains f and g. Unseen images share a context in
    consecutive groups of batch_size."""

    title = "an input channel with a context, averaged over images of the domain"
    passes = 1.75  # the context network passes over the images too
    paper = "Zhang et al., NeurIPS 2021"
    extra_channels = 1
    search_space = {**COMMON, "batch_size": (8, fixed(8, least=1))}
    small_images = {"batch_size": COMMON_SMALL["batch_size"]}

    def build(self) -> None:
        network = nn.Sequential(
            nn.Conv2d(image_channels(self.featurizer), 64, 5, padding=2),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 5, padding=2),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 1, 5, padding=2),
        )
        # A featurizer with a precision and compiled code wraps the network in the same.
        wrap = getattr(self.featurizer, "auxiliary", None)
        self.context_runner = wrap(network) if wrap else None
        self.context_net = self.context_runner.network if self.context_runner else network

    @property
    def group_size(self) -> int:
        return self.hparams.batch_size

    def context(self, x: Tensor) -> Tensor:
        """Compute the context of every image [B, 1, H, W]."""
        return self.context_runner(x) if self.context_runner else self.context_net(x)

    def features(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Compute features; consecutive groups share a context.

        Args:
            x: Images.
            sizes: Sizes of the groups; None for `batch_size` each.
        """
        check_channels(self.featurizer, x.shape[1])
        with torch.no_grad():
            contexts = self.context(x).split(list(sizes) if sizes else self.group_size)
            context = torch.cat([group.mean(0, keepdim=True).expand_as(group) for group in contexts])
        return super().features(torch.cat([x, context], dim=1))

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        z = self.features(x, [len(y) for _, y in minibatches])
        return {"loss": self.cross_entropy(self.classifier(z), y)}


def first_channels(featurizer: nn.Module) -> int | None:
    """Return the input channels of the featurizer's first convolution, if it has one."""
    return next((module.in_channels for module in featurizer.modules() if isinstance(module, nn.Conv2d)), None)


def image_channels(featurizer: nn.Module) -> int:
    """Return the channels of an image: one less than the featurizer takes, or 3 if it has no convolution."""
    channels = first_channels(featurizer) or 3 + ARM.extra_channels
    if channels == 1:  # made for grey images alone
        check_channels(featurizer, channels)
    return channels - ARM.extra_channels


def check_channels(featurizer: nn.Module, channels: int) -> None:
    taken, needed = first_channels(featurizer), channels + ARM.extra_channels
    if taken not in (None, needed):
        raise AidgnError(
            f"ARM gives the featurizer its context as one more channel: with images of {channels} channels "
            f"its first convolution must take {needed}, not {taken}. backbones.create(..., "
            f"in_channels={needed}) makes such a network."
        )
