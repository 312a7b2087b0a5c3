"""Featurisers: timm and torchvision networks or a small one of our own, with weights from the hub or a file."""

import hashlib
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn

from aidgn.backbones.fused_resnet import (  # noqa: F401 (a featuriser's batch norm is asked for here)
    FoldedConv2d,
    FrozenBatchNorm,
    fold,
    freeze,
    freeze_folded,
    stem_convolution,
    unfold,
)
from aidgn.errors import AidgnError, did_you_mean
from aidgn.runs.checkpoints import check_finite

DEFAULT = "resnet50.tv_in1k"
SMALL = "small"
TORCHVISION = "torchvision/"
HUB_SECONDS = 10.0  # in which the hub must answer at all
# These have no single linear layer at the end, or return auxiliary outputs while training.
NO_FEATURISER = ("squeezenet", "googlenet", "inception")


def create(name: str, *, weights: str | Path | None = None, in_channels: int = 3, freeze_bn: bool = True) -> nn.Module:
    """A network [B, in_channels, H, W] -> [B, num_features], without a classifier.

    name: a timm name with its weights tag (`resnet50.tv_in1k`), `torchvision/resnet50`, or `small`.
    weights: `hub` (those the name says; the default), `none` (random; the default of `small`), or a file.
    Beyond three input channels, the additional ones start with a copy of the first channel's weights.
    """
    if name != SMALL and in_channels < 3:
        raise AidgnError(f"Backbone {name} takes images of 3 channels, not {in_channels}. Use --backbone {SMALL}.")
    weights = source(name, weights)
    hub = weights == "hub"
    check(name, hub)
    net, heads, inputs = (
        (SmallConvNet(min(in_channels, 3)), [], ["layers.0"])
        if name == SMALL
        else torchvision_network(name, hub)
        if name.startswith(TORCHVISION)
        else timm_network(name, hub)
    )
    if isinstance(weights, Path):
        load(net, name, weights, heads)
    if freeze_bn:
        freeze(net)
    if in_channels > 3:
        widen(net, name, inputs, in_channels)
    return net


def weights_identity(name: str, weights: str | Path | None) -> str:
    """What the initial weights are, wherever they lie: `none`, `hub`, or <stem of the file>-<8 hex of its sha256>."""
    weights = source(name, weights)
    if not isinstance(weights, Path):
        return weights
    try:
        with weights.open("rb") as file:
            return f"{weights.stem}-{hashlib.file_digest(file, 'sha256').hexdigest()[:8]}"
    except OSError as error:
        raise AidgnError(f"Weights file {weights} cannot be read ({error.strerror}).") from error


def says_stride_first(name: str, weights: str | Path | None) -> bool:
    """Whether the initial weights are a file of a network that halves the resolution as `stride_first` makes it."""
    from safetensors import safe_open

    weights = source(name, weights)
    if not isinstance(weights, Path) or weights.suffix != ".safetensors":
        return False
    with safe_open(weights, framework="pt") as file:
        return is_stride_first(file.metadata() or {})


def source(name: str, weights: str | Path | None) -> str | Path:
    """`hub`, `none`, or the file that is there."""
    weights = weights or ("none" if name == SMALL else "hub")
    if weights == "hub" and name == SMALL:
        raise AidgnError(
            f"Backbone {SMALL} has no weights on the hub; it is trained from scratch. Leave --weights out."
        )
    if weights in ("hub", "none"):
        return str(weights)
    if not Path(weights).is_file():
        raise AidgnError(f"Weights file {weights} does not exist. Give --weights a file, hub or none.")
    return Path(weights)


def check(name: str, hub: bool) -> None:
    """Refuse a name that is no network's, or, with `hub`, does not say which weights."""
    if name in (SMALL, DEFAULT):
        return
    if name.startswith(TORCHVISION):
        from torchvision import models

        bare = name.removeprefix(TORCHVISION)
        if bare not in models.list_models(module=models) or bare.startswith(NO_FEATURISER):
            raise unknown(name)
        return
    import timm

    tagged = timm.list_models(pretrained=True)
    if not timm.is_model(name) or ("." in name and name not in tagged):
        raise unknown(name)
    if hub and name not in tagged:
        tags = [each for each in tagged if each.startswith(f"{name}.")]
        raise AidgnError(
            f"Backbone {name} does not say which weights: give one of {', '.join(tags)}."
            if tags
            else f"The hub has no weights of backbone {name}: give --weights FILE or --weights none."
        )


# Networks: each with the names of its classifier layers, which a file may hold too, and of its first convolutions -----

Network = tuple[nn.Module, Sequence[str], Sequence[str]]


class SmallConvNet(nn.Module):
    """Three convolutions and a linear layer for images of 28 to 64 pixels, early strides to be quick on a CPU.

    Group norm looks at one image at a time, so no domain leaks into another; the last layer has no normalisation, so
    that features may take any norm. It sees a 4 x 4 grid: where a stroke is matters in digits and the like.
    """

    num_features = 128

    def __init__(self, in_channels: int):
        super().__init__()

        def convolution(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
            layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            return layer

        self.layers = nn.Sequential(
            convolution(in_channels, 16, 2),
            nn.GroupNorm(8, 16),
            nn.ReLU(),
            convolution(16, 32, 2),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            convolution(32, 64, 1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(64 * 16, self.num_features),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def timm_network(name: str, hub: bool) -> Network:
    import timm

    with hub_or_its_cache() if hub else nullcontext() as silence:
        try:
            net = timm.create_model(name, pretrained=hub, num_classes=0)
        except Exception as error:  # the hub's libraries raise some ten unrelated kinds when there is no connection
            if hub:
                raise unreachable(name, silence or reason(error)) from error
            raise
    net.num_features = getattr(net, "head_hidden_size", net.num_features)  # what comes out, not what enters the head
    facts: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
    return net, names(facts.get("classifier")), names(facts.get("first_conv"))


def torchvision_network(name: str, hub: bool) -> Network:
    """The last linear layer removed. Of several weights the first, which do not change with torchvision's version."""
    from torchvision import models

    bare = name.removeprefix(TORCHVISION)
    try:
        net = models.get_model(bare, weights=next(iter(models.get_model_weights(bare))) if hub else None)
    except Exception as error:  # as above
        if hub:
            raise unreachable(name, reason(error)) from error
        raise
    head, linear = [(path, layer) for path, layer in net.named_modules() if isinstance(layer, nn.Linear)][-1]
    net.set_submodule(head, nn.Identity())
    net.num_features = linear.in_features
    return net, [head], [next(path for path, layer in net.named_modules() if isinstance(layer, nn.Conv2d))]


def names(layers: str | Sequence[str] | None) -> Sequence[str]:
    return [layers] if isinstance(layers, str) else layers or []


def unknown(name: str) -> AidgnError:
    import timm
    from torchvision import models

    known = [
        SMALL,
        *timm.list_models(pretrained=True),
        *(TORCHVISION + each for each in models.list_models(module=models) if not each.startswith(NO_FEATURISER)),
    ]
    return AidgnError(
        f"Unknown backbone {name}: expected {SMALL}, a timm name with its weights tag such as {DEFAULT}, "
        f"or a torchvision name such as {TORCHVISION}resnet50.{did_you_mean(name, known)}"
    )


@contextmanager
def hub_or_its_cache() -> Iterator[str | None]:
    """Where the hub does not answer at all, only what its library has kept on disk is looked at, and what was wrong is
    given: by itself the library tries again and again for a minute, and says so line by line."""
    from huggingface_hub import constants

    silence, before = None, constants.HF_HUB_OFFLINE
    if not before:
        try:
            urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_SECONDS).close()
        except HTTPError:
            pass  # it answers
        except (OSError, HTTPException) as error:
            silence = f"{constants.ENDPOINT} does not answer: {getattr(error, 'reason', error)}"
            constants.HF_HUB_OFFLINE = True
    try:
        yield silence
    finally:
        constants.HF_HUB_OFFLINE = before


def unreachable(name: str, why: str) -> AidgnError:
    return AidgnError(
        f"The weights of {name} could not be fetched from the hub ({why}). "
        "Check the connection, or give --weights FILE with weights that are here."
    )


def reason(error: Exception) -> str:
    """The kind of an error and its first sentence."""
    sentence = re.split(r"[.] |[.]?$", str(error).strip(), maxsplit=1, flags=re.MULTILINE)[0]
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__


def widen(net: nn.Module, name: str, inputs: Sequence[str], in_channels: int) -> None:
    layers = [net.get_submodule(path) for path in inputs]
    if not layers or not all(isinstance(layer, nn.Conv2d) and layer.in_channels == 3 for layer in layers):
        raise AidgnError(
            f"Backbone {name} does not begin with a convolution of 3 channels, so that it cannot take "
            f"{in_channels}. Use another --backbone, such as {DEFAULT}."
        )
    for layer in layers:
        assert isinstance(layer, nn.Conv2d)
        weight = layer.weight.detach()
        layer.weight = nn.Parameter(torch.cat([weight, weight[:, :1].expand(-1, in_channels - 3, -1, -1)], 1))
        layer.in_channels = in_channels


def train_last_stage(net: nn.Module) -> None:
    """Take the gradients from all that comes before the last stage of the network. Nothing of it is then kept for a
    backward pass, which ends at that stage; its place is what timm says, or the last part of the network."""
    info = getattr(net, "feature_info", None)
    stage: nn.Module | None = None
    if info:
        path = [*info][-1]["module"]
        stage = dict(net.named_modules()).get(path)
    if stage is None or not any(True for _ in stage.parameters()):
        stage = net
        while len(parts := [part for part in stage.children() if any(True for _ in part.parameters())]) == 1:
            stage = parts[0]
        stage = parts[-1] if parts else stage
    first = next(stage.parameters(), None)
    for parameter in net.parameters():
        if parameter is first:
            break
        parameter.requires_grad_(False)


# Weights from a file --------------------------------------------------------------------------------------------------


def load(net: nn.Module, name: str, path: Path, heads: Sequence[str]) -> None:
    """The tensors of the file into the network, all of them; those of the classifier are left out."""
    tensors, metadata = read(path)
    architecture = name.removeprefix(TORCHVISION).split(".")[0]
    if metadata.get("architecture", architecture) != architecture:
        raise AidgnError(
            f"{path} holds weights of {metadata['architecture']}, not of {architecture}. "
            "Name the network it is of with --backbone, or give another file."
        )
    expected = net.state_dict()
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(tuple(f"{h}." for h in heads))}
    faults = differences(tensors, expected)
    if faults:
        raise AidgnError(
            f"{path} does not hold the weights of {name}, which has {len(expected)} tensors: {faults}. "
            "Name the network it is of with --backbone, or give another file."
        )
    net.load_state_dict(tensors, strict=False)  # copies into float32
    if is_stride_first(metadata):
        stride_first(net)


def differences(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """How tensors differ in names and shapes from those expected, in words; '' if they do not."""
    # Weights saved before PyTorch counted batches have no counter.
    missing = [key for key in expected if key not in tensors and not key.endswith("num_batches_tracked")]
    misshapen = [
        f"{key} is {list(tensors[key].shape)} instead of {list(expected[key].shape)}"
        for key in expected
        if key in tensors and tensors[key].shape != expected[key].shape
    ]
    foreign = [key for key in tensors if key not in expected]
    return ", ".join(
        f"{len(keys)} {what} ({', '.join(keys[:3] + ['...'] * (len(keys) > 3))})"
        for keys, what in [(missing, "missing"), (misshapen, "of another shape"), (foreign, "that it does not have")]
        if keys
    )


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its metadata; nothing in the file is executed."""
    from safetensors import safe_open

    if path.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise AidgnError(f"Weights file {path} must end in .safetensors, .pth, .pt or .bin.")
    metadata: dict[str, str] = {}
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                content = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no dict)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise AidgnError(f"Weights file {path} cannot be read ({error.strerror}).") from error
    except pickle.UnpicklingError as error:  # PyTorch's reader of tensors met something else
        called = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise AidgnError(
            f"{path} was refused: it is not a file of tensors alone"
            f"{f' but calls {called[1]}' if called else ''}, and reading more than tensors could run any "
            "code. Save only the state_dict, best as .safetensors."
        ) from error
    except Exception as error:  # a damaged file leads to errors of any kind
        raise AidgnError(
            f"{path} is not a complete file of weights ({reason(error)}). "
            "It may be cut short or of another kind: fetch it again."
        ) from error
    for key in ("state_dict", "model"):  # as training scripts save them
        content = content[key] if isinstance(content, dict) and isinstance(content.get(key), dict) else content
    if not isinstance(content, dict) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise AidgnError(f"{path} does not hold weights: expected tensors by name, as a state_dict has them.")
    check_finite(path, content)
    return content, metadata


def is_stride_first(metadata: Mapping[str, str]) -> bool:
    return metadata.get("downsample", "").startswith("stride on the 1x1 conv")


def stride_first(net: nn.Module) -> None:
    """Halve the resolution of stages 2 to 4 in the 1x1 convolution of their first block, as He et al. (2015) do.

    timm and torchvision have that stride on the 3x3 convolution after it.
    """
    for stage in ("layer2", "layer3", "layer4"):
        block: Any = net.get_submodule(f"{stage}.0")
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
