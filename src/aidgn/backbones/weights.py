"""Initial weights: from the hub of a library or from a file, checked against the network that receives them."""

import hashlib
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn

from aidgn.backbones.small import SMALL
from aidgn.errors import AidgnError, ParameterError, some
from aidgn.files import check_finite

HUB_SECONDS = 10.0  # time for the hub's first answer
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


class WeightsError(AidgnError):
    """The weights of a network cannot be read from a file or fetched from the hub."""


def resolve_weights(name: str, weights: str | Path | None) -> str | Path:
    """Return `hub`, `none` or the path of an existing file."""
    weights = weights or ("none" if name == SMALL else "hub")
    if weights == "hub" and name == SMALL:
        raise ParameterError("weights", "hub", f"none or a file, because {SMALL} has no published weights")
    if weights in ("hub", "none"):
        return str(weights)
    if not Path(weights).is_file():
        raise ParameterError("weights", weights, "hub, none or a file that exists")
    return Path(weights)


def weights_identity(name: str, weights: str | Path | None) -> str:
    """Name the initial weights whatever their folder: `none`, `hub`, or <file stem>-<8 hex digits of the sha256>."""
    weights = resolve_weights(name, weights)
    if not isinstance(weights, Path):
        return weights
    try:
        with weights.open("rb") as file:
            return f"{weights.stem}-{hashlib.file_digest(file, 'sha256').hexdigest()[:8]}"
    except OSError as error:
        raise WeightsError(f"Weights file {weights} cannot be read ({error.strerror}).") from error


# Files ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """Differences between given tensors and the tensors of a network."""

    missing: list[str]
    misshapen: list[str]
    unexpected: list[str]

    def __bool__(self) -> bool:
        return bool(self.missing or self.misshapen or self.unexpected)

    def __str__(self) -> str:
        return ", ".join(
            f"{len(keys)} {fault} ({some(keys)})"
            for keys, fault in (
                (self.missing, "missing"),
                (self.misshapen, "of another shape"),
                (self.unexpected, "that the network does not have"),
            )
            if keys
        )


def find_mismatch(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Mismatch:
    """Compare names and shapes of tensors with the expected ones."""
    return Mismatch(
        # Weights saved before PyTorch counted batches have no counter.
        [key for key in expected if key not in tensors and not key.endswith("num_batches_tracked")],
        [
            f"{key} is {list(tensors[key].shape)} instead of {list(expected[key].shape)}"
            for key in expected
            if key in tensors and tensors[key].shape != expected[key].shape
        ],
        [key for key in tensors if key not in expected],
    )


def load_weights(network: nn.Module, architecture: str, path: Path, classifier: list[str]) -> None:
    """Copy the tensors of a file into a network.

    Args:
        network: Receives the tensors as float32.
        architecture: Name of the network without the tag of its weights.
        path: A .safetensors file, or a state_dict that PyTorch saved.
        classifier: Names of the classifier's layers, whose tensors are left out.
    """
    tensors, metadata = read_weights_file(path)
    advice = "Name the network of the file as backbone, or give another file."
    if metadata.get("architecture", architecture) != architecture:
        raise WeightsError(f"{path} holds weights of {metadata['architecture']}, not of {architecture}. {advice}")
    prefixes = tuple(f"{layer}." for layer in classifier)
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(prefixes)}
    expected = network.state_dict()
    if mismatch := find_mismatch(tensors, expected):
        network_size = f"which has {len(expected)} tensors"
        raise WeightsError(f"{path} does not hold the weights of {architecture}, {network_size}: {mismatch}. {advice}")
    network.load_state_dict(tensors, strict=False)
    if _is_stride_first(metadata):
        set_stride_first(network)


def read_weights_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a file and its metadata without executing anything in it."""
    from safetensors import safe_open

    if path.suffix not in SUFFIXES:
        raise ParameterError("weights", path, f"a file that ends in {', '.join(SUFFIXES)}")
    metadata: dict[str, str] = {}
    try:
        if path.suffix == ".safetensors":
            # Old versions of safetensors make empty tensors where the default device is "meta", as in a trial.
            with torch.device("cpu"), safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                content = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise WeightsError(f"Weights file {path} cannot be read ({error.strerror}).") from error
    except pickle.UnpicklingError as error:
        function = re.search(r"GLOBAL ([\w.]+)", str(error))
        extra = f"a call of {function[1]}" if function else "something else"
        raise WeightsError(
            f"{path} was refused: it holds {extra} in addition to tensors, and reading that could run any code. "
            "Save only the state_dict, best as .safetensors."
        ) from error
    except Exception as error:  # a damaged file leads to errors of any kind
        raise WeightsError(
            f"{path} is not a complete file of weights ({summarize(error)}). It may be cut short: fetch it again."
        ) from error
    for key in ("state_dict", "model"):  # training scripts save the weights under these
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise WeightsError(f"{path} does not hold weights: expected tensors by name, as in a state_dict.")
    check_finite(path, content)
    return content, metadata


def read_file_metadata(weights: Path) -> dict[str, str]:
    """Read the metadata of a .safetensors file; other files have none."""
    from safetensors import SafetensorError, safe_open

    if weights.suffix != ".safetensors":
        return {}
    try:
        with safe_open(weights, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}  # reading the tensors reports the fault


# The stride of He et al. ----------------------------------------------------------------------------------------------


def is_stride_first(name: str, weights: str | Path | None) -> bool:
    """Return whether the initial weights are a file for a ResNet with the strides of `set_stride_first`."""
    weights = resolve_weights(name, weights)
    return isinstance(weights, Path) and _is_stride_first(read_file_metadata(weights))


def _is_stride_first(metadata: Mapping[str, str]) -> bool:
    return metadata.get("downsample", "").startswith("stride on the 1x1 conv")


def set_stride_first(network: nn.Module) -> None:
    """Halve the resolution of stages 2 to 4 in the 1x1 convolution of their first block, as He et al. (2015) do.

    timm and torchvision have that stride on the 3x3 convolution after it.
    """
    for stage in ("layer2", "layer3", "layer4"):
        block: Any = network.get_submodule(f"{stage}.0")
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride


# The hub --------------------------------------------------------------------------------------------------------------


@contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """Make the hub's library use only its cache if the hub does not answer, and yield the reason.

    Otherwise the library would try again for a minute and print a line each time.
    """
    from huggingface_hub import constants

    failure = None
    was_offline = constants.HF_HUB_OFFLINE
    if not was_offline:
        try:
            urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_SECONDS).close()
        except HTTPError:
            pass  # an error is an answer
        except (OSError, HTTPException) as error:
            failure = f"{constants.ENDPOINT} does not answer: {getattr(error, 'reason', error)}"
            constants.HF_HUB_OFFLINE = True
    try:
        yield failure
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def hub_error(name: str, reason: str) -> WeightsError:
    return WeightsError(
        f"The weights of {name} could not be fetched from the hub ({reason}). "
        "Check the connection, or give a file as weights."
    )


def summarize(error: Exception) -> str:
    """Return the class of an error and its first sentence."""
    sentence = re.split(r"[.] |[.]?$", str(error).strip(), maxsplit=1, flags=re.MULTILINE)[0]
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__
