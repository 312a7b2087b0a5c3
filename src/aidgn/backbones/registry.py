"""Backbones by name: networks of timm and torchvision and a small one, with the preprocessing each of them expects."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aidgn.backbones.frozen_bn import freeze
from aidgn.backbones.input_size import set_input_size
from aidgn.backbones.preprocessing import Preprocessing
from aidgn.backbones.small import SMALL, SmallConvNet
from aidgn.backbones.weights import hub_error, hub_or_cache, load_weights, resolve_weights, summarize
from aidgn.errors import ParameterError, UnknownNameError

DEFAULT = "resnet50.tv_in1k"
TORCHVISION = "torchvision/"
# Networks without a single linear layer at the end, or with auxiliary outputs in training.
NOT_BACKBONES = ("squeezenet", "googlenet", "inception")


@dataclass(frozen=True)
class Network:
    """A network without its classifier."""

    module: nn.Module  # the network [B, in_channels, H, W] -> [B, num_features]
    classifier: Sequence[str]  # names of the removed classifier layers, which a file of weights may have
    inputs: Sequence[str]  # names of the convolutions that receive the image


def create(
    name: str,
    *,
    weights: str | Path | None = None,
    in_channels: int = 3,
    freeze_bn: bool = True,
    image_size: int | None = None,
) -> nn.Module:
    """Create a network [B, in_channels, H, W] -> [B, num_features] without a classifier.

    Args:
        name: A timm name with the tag of its weights (`resnet50.tv_in1k`), `torchvision/resnet50`, or `small`.
        weights: `hub` (the published weights, the default), `none` (random, the default of `small`), or a file.
        in_channels: Channels of an image. Those beyond three start with the weights of the first channel.
        freeze_bn: Freeze the statistics of batch norms.
        image_size: Side of the images in pixels; None for the size of the published weights.
    """
    if name != SMALL and in_channels < 3:
        raise ParameterError("in_channels", in_channels, f"3 or more for {name}; backbone {SMALL} takes any number")
    weights = resolve_weights(name, weights)
    from_hub = weights == "hub"
    check_name(name, from_hub)
    if name == SMALL:
        network = Network(SmallConvNet(min(in_channels, 3)), [], ["layers.0"])
    elif name.startswith(TORCHVISION):
        network = create_torchvision(name, from_hub)
    else:
        network = create_timm(name, from_hub)
    if isinstance(weights, Path):
        architecture = name.removeprefix(TORCHVISION).split(".")[0]
        load_weights(network.module, architecture, weights, [*network.classifier])
    if image_size is not None:
        set_input_size(network.module, name, image_size)
    if freeze_bn:
        freeze(network.module)
    if in_channels > 3:
        add_channels(network, name, in_channels)
    return network.module


def freezes_batch_norm(weights: str | Path | None, batch_norm: str | None = None) -> bool:
    """Return whether a run freezes the statistics of batch norm: a network from scratch has none worth freezing.

    Args:
        weights: Initial weights.
        batch_norm: `frozen` or `live`; None leaves the choice to the weights.
    """
    return weights != "none" if batch_norm is None else batch_norm == "frozen"


def list_backbones() -> list[str]:
    """List the names with published weights that `create` knows, and `small`."""
    import timm
    from torchvision import models

    torchvision = [name for name in models.list_models(module=models) if not name.startswith(NOT_BACKBONES)]
    return [SMALL, *timm.list_models(pretrained=True), *(TORCHVISION + name for name in torchvision)]


def check_name(name: str, from_hub: bool = False) -> None:
    """Raise an error if no network has this name or, with `from_hub`, if it has no published weights."""
    if name in (SMALL, DEFAULT):  # known without importing timm
        return
    known = set(list_backbones())
    if name in known:
        return
    import timm

    if name.startswith(TORCHVISION) or "." in name or not timm.is_model(name):
        raise UnknownNameError(
            "backbone",
            name,
            list_backbones(),
            f"Give {SMALL}, a timm name with the tag of its weights such as {DEFAULT}, or a torchvision name such as "
            f"{TORCHVISION}resnet50.",
        )
    if from_hub:
        tagged = [other for other in list_backbones() if other.startswith(f"{name}.")]
        if tagged:
            raise ParameterError("backbone", name, f"a name that says which weights: {', '.join(tagged)}")
        raise ParameterError("weights", "hub", f"none or a file, because {name} has no published weights")


def preprocessing(name: str, weights: str | Path | None = None) -> Preprocessing:
    """Return the preprocessing that a backbone expects.

    Its library describes it for the published weights; the metadata of a weights file may say otherwise.

    Args:
        name: Name of the backbone.
        weights: `hub`, `none` or a file.
    """
    described = describe_preprocessing(name)
    return described if weights in (None, "hub", "none") else described.updated(Path(str(weights)))


def describe_preprocessing(name: str) -> Preprocessing:
    """Return the preprocessing that the library of a backbone describes for its published weights."""
    if name == DEFAULT:  # known without importing timm
        return Preprocessing()
    check_name(name)
    if name == SMALL:
        return Preprocessing(input_size=(28, 28))
    if name.startswith(TORCHVISION):
        transforms = _torchvision_weights(name).transforms()
        [side] = transforms.crop_size
        return Preprocessing(
            tuple(transforms.mean), tuple(transforms.std), transforms.interpolation.value, (side, side)
        )
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None:  # an architecture without published weights
        return Preprocessing()
    _, height, width = config.input_size
    return Preprocessing(tuple(config.mean), tuple(config.std), config.interpolation, (height, width))


def create_timm(name: str, from_hub: bool) -> Network:
    """Create a network of timm without its classifier."""
    import timm

    with hub_or_cache() if from_hub else nullcontext() as failure:
        try:
            module = timm.create_model(name, pretrained=from_hub, num_classes=0)
        except Exception as error:  # without a connection the hub's libraries raise some ten unrelated classes
            if from_hub:
                raise hub_error(name, failure or summarize(error)) from error
            raise
    # Some networks have a hidden layer in the head: its width is the width of the output.
    module.num_features = getattr(module, "head_hidden_size", module.num_features)
    config: dict[str, Any] = module.pretrained_cfg  # type: ignore[assignment]
    return Network(module, _as_list(config.get("classifier")), _as_list(config.get("first_conv")))


def create_torchvision(name: str, from_hub: bool) -> Network:
    """Create a network of torchvision without its classifier."""
    from torchvision import models

    try:
        weights = _torchvision_weights(name) if from_hub else None
        module = models.get_model(name.removeprefix(TORCHVISION), weights=weights)
    except Exception as error:  # as in `create_timm`
        if from_hub:
            raise hub_error(name, summarize(error)) from error
        raise
    head, linear = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, nn.Linear)][-1]
    module.set_submodule(head, nn.Identity())
    module.num_features = linear.in_features
    first = next(path for path, layer in module.named_modules() if isinstance(layer, nn.Conv2d))
    return Network(module, [head], [first])


def _torchvision_weights(name: str) -> Any:
    """Return the first of a network's published weights, which stays the same in later versions of torchvision."""
    from torchvision import models

    return next(iter(models.get_model_weights(name.removeprefix(TORCHVISION))))


def _as_list(names: str | Sequence[str] | None) -> Sequence[str]:
    return [names] if isinstance(names, str) else names or []


def add_channels(network: Network, name: str, in_channels: int) -> None:
    """Widen the first convolutions to `in_channels`, with copies of the first channel's weights."""
    layers = [network.module.get_submodule(path) for path in network.inputs]
    if not layers or not all(isinstance(layer, nn.Conv2d) and layer.in_channels == 3 for layer in layers):
        raise ParameterError("backbone", name, f"a network that begins with a convolution, such as {DEFAULT}")
    for layer in layers:
        assert isinstance(layer, nn.Conv2d)
        weight = layer.weight.detach()
        layer.weight = nn.Parameter(torch.cat([weight, weight[:, :1].expand(-1, in_channels - 3, -1, -1)], 1))
        layer.in_channels = in_channels


def train_last_stage(network: nn.Module) -> None:
    """Freeze everything before the last stage of a network, so that the backward pass ends there.

    For networks of timm, the last stage is the last that timm lists; for others, their last part with parameters.
    """
    stage: nn.Module | None = None
    if info := getattr(network, "feature_info", None):
        stage = dict(network.named_modules()).get([*info][-1]["module"])
    if stage is None or not _has_parameters(stage):
        stage = network
        while len(parts := [part for part in stage.children() if _has_parameters(part)]) == 1:
            stage = parts[0]
        stage = parts[-1] if parts else stage
    first = next(stage.parameters(), None)
    for parameter in network.parameters():
        if parameter is first:
            break
        parameter.requires_grad_(False)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
