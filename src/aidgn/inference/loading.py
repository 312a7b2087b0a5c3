"""Find the model of a trained run, check its files, and load it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aidgn import backbones, hub
from aidgn.algorithms import ALGORITHMS, Algorithm, find
from aidgn.algorithms.custom import source_of
from aidgn.algorithms.search_space import resolve
from aidgn.devices import choose_device, choose_precision
from aidgn.errors import AidgnError
from aidgn.inference.ensemble import Ensemble
from aidgn.inference.model import Model
from aidgn.new_site.expectations import Expectations
from aidgn.novelty import FALSE_ALARM_RATE, Novelty
from aidgn.objective import class_vectors
from aidgn.runs import names
from aidgn.runs.checkpoints import read_model, read_values, read_weights
from aidgn.runs.folder import RunFolder
from aidgn.runs.inputs import choose_custom_algorithm, find_run
from aidgn.runs.metadata import MODEL_NEEDS, DamagedMetadata, RunMetadata
from aidgn.terminal import log
from aidgn.training.featurizer import Featurizer


def load_model(
    path: str | Path | Sequence[str | Path],
    device: str = "auto",
    algorithm: str | None = None,
    false_alarms: float = FALSE_ALARM_RATE,
    *,
    featurizer: nn.Module | None = None,
) -> Model:
    """Load the model of a finished run, or several models as one.

    Args:
        path: The folder of the run (for the selected step), model.safetensors or last.safetensors in it, the
            .safetensors file that `aidgn export` made, the folder of `aidgn fit` or `aidgn soup`, or hf://user/name on
            the Hugging Face Hub. A list of several gives an `Ensemble`, which averages their probabilities.
        device: auto, cpu, cuda, cuda:N or mps.
        algorithm: path/to/file.py:Class of a custom algorithm. The run does not remember it, because loading a model
            must not run code that the author of the folder chose.
        false_alarms: Share of images like those of the training domains that get a warning.
        featurizer: Replaces the frozen network of a single model, whose weights are then not read.
    """
    if not isinstance(path, str | Path):
        members = [load_model(member, device, find_custom(member, algorithm), false_alarms) for member in path]
        return Ensemble(members) if len(members) > 1 else members[0]
    path = find_model(path)
    weights = RunFolder(path).model if path.is_dir() else path
    read = read_model if featurizer is None else read_weights
    tensors, metadata = read(weights) if weights.suffix == ".safetensors" and weights.is_file() else ({}, {})
    if "run" in metadata:  # an exported file
        run = RunMetadata.from_dict(metadata["run"], weights)
    else:
        run = find_run(path, weights).metadata
    run.check_complete(*MODEL_NEEDS)
    target_device = choose_device(device)
    network = build_network(run, target_device, algorithm, featurizer)

    label = str(run.label)
    if metadata.get("algorithm", label) != label:
        raise AidgnError(
            f"{weights} holds weights of {metadata['algorithm']}, but {run.path} describes a run of {label}: "
            "they are not of the same run."
        )
    expected = network.state_dict()
    if featurizer is not None:
        expected = {name: tensor for name, tensor in expected.items() if not name.startswith("featurizer.")}
    mismatch = backbones.find_mismatch(tensors, expected)
    if mismatch:
        raise AidgnError(
            f"{weights} does not fit {run.path}, which describes {label} with {run.identity['backbone']} and "
            f"{len(run.classes)} classes: {mismatch}. They are not of the same run, or one was changed."
        )
    network.load_state_dict(tensors, strict=False)
    novelty = read_values_of(weights, names.NOVELTY, metadata)
    expectations = read_values_of(weights, names.EXPECTATIONS, metadata)
    return Model(
        network,
        label,
        run.classes,
        run.domains,
        run.image_size,
        target_device,
        None if novelty is None else Novelty.from_dict(novelty, class_vectors(network.classifier)),
        false_alarms,
        find_preprocessing(run),
        None if expectations is None else Expectations.from_dict(expectations),
        [Path(run.root, name) for name in run.sources] if run.root else [],
    )


def find_custom(path: str | Path, algorithm: str | None) -> str | None:
    """Return the custom algorithm if this member of an ensemble needs it; other members may not."""
    run = RunFolder(find_model(path))
    return choose_custom_algorithm(run.metadata, algorithm) if run.exists else algorithm


def build_network(
    run: RunMetadata, device: torch.device, algorithm: str | None, featurizer: nn.Module | None = None
) -> Algorithm:
    """Build the network of a run with random weights, folded and with the precision for this device.

    A `featurizer` replaces the one of the run.
    """
    identity = run.identity
    name = run.label.name
    algorithm_type = find_algorithm(run.path, name, identity.get("source"), algorithm)
    if featurizer is None:
        featurizer = build_featurizer(run, device, 3 + algorithm_type.extra_channels)
    hyper_parameters = resolve(name, algorithm_type.search_space, {**identity["hyper_parameters"]})
    return algorithm_type(featurizer, len(run.classes), len(run.sources), **hyper_parameters)


def build_featurizer(run: RunMetadata, device: torch.device, in_channels: int) -> Featurizer:
    """Build the featurizer of a run with random weights."""
    identity = run.identity
    from_file = identity["weights"] not in ("none", "hub")
    if from_file and run.stride_first is None:
        raise DamagedMetadata(run.path, "it has no stride_first")
    precision = precision_on(device, run)
    net = backbones.create(
        str(identity["backbone"]),
        weights="none",
        in_channels=in_channels,
        freeze_bn=backbones.freezes_batch_norm(identity["weights"], identity.get("batch_norm")),
        image_size=run.image_size,
    )
    if from_file and run.stride_first:
        backbones.set_stride_first(net)
    backbones.fold(net)
    return Featurizer(net.to(memory_format=torch.channels_last), precision, compiled=False)


def precision_on(device: torch.device, run: RunMetadata) -> str:
    """Set up the run's precision on the kind of device that trained it, else float32; return its name."""
    same_kind = device.type == "cuda" or (device.type == "cpu" and run.device.endswith("CPU"))
    return choose_precision((run.precision if same_kind else "") or "float32", device)


def find_preprocessing(run: RunMetadata) -> backbones.Preprocessing:
    """Return the preprocessing of a run's images."""
    try:
        return backbones.Preprocessing.recorded(run.identity)
    except ValueError as error:
        raise DamagedMetadata(run.path, f"identity.preprocessing cannot be used ({error})") from None


def find_model(path: str | Path) -> Path:
    """Return the path of a model: `aidgn fit` puts it into the folder `model`; one on the Hub is downloaded."""
    if hub.is_address(path):
        return hub.download(str(path), names.MODEL)
    path = Path(path)
    inner = RunFolder(path / "model").exists and not RunFolder(path).exists
    return path / "model" if inner else path


def read_values_of(weights: Path, name: str, metadata: dict[str, Any]) -> Any:
    """Read the values that belong to the weights of a selected step; None if there are none.

    Args:
        weights: File of the weights.
        name: File of the values next to it, novelty.json or expectations.json.
        metadata: Metadata of the weights; those of an exported file hold the values.
    """
    if "run" in metadata:
        return metadata.get(Path(name).stem)
    path = weights.with_name(name)
    return read_values(path) if weights.name == names.MODEL and path.exists() else None


def find_algorithm(run_file: Path, name: str, source: str | None, custom: str | None) -> type[Algorithm]:
    """Find the class of a run's algorithm.

    Args:
        run_file: File that describes the run, for messages.
        name: Name of the algorithm.
        source: Digest of the file of a custom algorithm; None for an algorithm of the package.
        custom: path/to/file.py:Class of a custom algorithm, which the caller must name.
    """
    if source is not None and custom is None:
        raise AidgnError(
            f"{run_file} describes a run of {name}, a custom algorithm: name its file with "
            f"--algorithm path/to/file.py:{name} (load_model(..., algorithm=...))."
        )
    if custom is None and name not in ALGORITHMS:  # `find` would run the code of a path
        raise AidgnError(f"{run_file} describes a run of {name}, which this version of aidgn does not have.")
    algorithm_type = find(custom or name)
    if algorithm_type.name() != name:
        raise AidgnError(f"{run_file} describes a run of {name}, not of {custom}.")
    if source is not None and source != source_of(algorithm_type):
        log.warning("%s has changed since the run was trained; predictions may differ.", custom)
    return algorithm_type
