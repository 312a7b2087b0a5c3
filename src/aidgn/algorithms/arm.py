"""Adaptive risk minimisation: give the network a context, averaged over images of one domain, as another channel."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aidgn.algorithms.base import COMMON, COMMON_SMALL, Algorithm, Minibatches, join
from aidgn.algorithms.search_space import SearchSpace, fixed
from aidgn.errors import AidgnError


class ARM(Algorithm):
    """loss = CE(g(f([x, c_d])), y) over all samples,   c_d = mean of context(x) over the batch of domain d

    context is a convolutional network from the image to one channel, which f gets beside the image's. As in DomainBed,
    whose numbers one compares with, it keeps its initial weights: Adam holds f and g. Unseen images share a context in
    consecutive groups of batch_size."""

    title = "the network sees a context, averaged over images of the domain, beside the image"
    paper = "Zhang et al., NeurIPS 2021"
    extra_channels = 1
    search_space: ClassVar[SearchSpace] = {**COMMON, "batch_size": (8, fixed(8, least=1))}
    small_images: ClassVar[SearchSpace] = {"batch_size": COMMON_SMALL["batch_size"]}
    context: nn.Module
    context_net: nn.Module

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
        # Computed as the featuriser is, where that has an arithmetic of its own; a part of this under one name only.
        like = getattr(self.featurizer, "like", None)
        self.__dict__["context"] = like(network) if like else network
        self.context_net = self.context.get_submodule("network") if like else network

    @property
    def group_size(self) -> int:
        return self.integer("batch_size")

    def features(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Features of x, where consecutive groups of these sizes (default: batch_size each) share a context."""
        check_channels(self.featurizer, x.shape[1])
        with torch.no_grad():
            contexts = self.context(x).split(list(sizes) if sizes else self.group_size)
            context = torch.cat([each.mean(0, keepdim=True).expand_as(each) for each in contexts])
        return super().features(torch.cat([x, context], dim=1))

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        z = self.features(x, [len(each) for _, each in minibatches])
        return {"loss": cross_entropy(self.classifier(z), y)}


def first_channels(featurizer: nn.Module) -> int | None:
    """What the featuriser's first convolution takes, if it has one."""
    return next((module.in_channels for module in featurizer.modules() if isinstance(module, nn.Conv2d)), None)


def image_channels(featurizer: nn.Module) -> int:
    """The channels of an image: one less than the featuriser takes; 3 if it has no convolution."""
    channels = first_channels(featurizer) or 3 + ARM.extra_channels
    if channels == 1:  # it was made for grey images alone; if 3 are for 2 and a context, the images tell
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
