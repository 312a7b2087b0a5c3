"""Model soups: average the weights of runs that started from the same weights (Wortsman et al., ICML 2022)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm

from aidgn import backbones
from aidgn.algorithms import Algorithm
from aidgn.analysis.extraction import Progress, open_images
from aidgn.backbones.frozen_bn import FrozenBatchNorm
from aidgn.data.loader import DeviceImageStore
from aidgn.devices import choose_device
from aidgn.errors import AidgnError
from aidgn.inference.loading import build_network, find_preprocessing, load_model
from aidgn.inference.model import Model
from aidgn.objective import AngularClassifier
from aidgn.runs.checkpoints import read_model, write_values, write_weights
from aidgn.runs.folder import RunFolder, RunWriter
from aidgn.runs.inputs import choose_custom_algorithm, open_run
from aidgn.runs.metadata import RunMetadata
from aidgn.training.evaluation import Splits, evaluate, index_batches, measure_novelty

BATCH_NORM_IMAGES = 4096  # training images whose statistics batch norm takes, at most

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Soup:
    """A model whose weights are the average of the weights of several runs.

    Args:
        folder: Folder of the model, which commands read like the folder of a run.
        runs: All runs that the caller chose.
        used: The runs in the average.
        run_accuracies: Mean accuracy of each of `runs` on the validation images of the source domains; empty if these
            were not available.
        accuracy: Mean accuracy of the soup on the same images; None if they were not available.
    """

    folder: Path
    runs: Sequence[Path]
    used: Sequence[Path]
    run_accuracies: Sequence[float] = ()
    accuracy: float | None = None

    def model(self, device: str = "auto", algorithm: str | None = None) -> Model:
        """Load the model.

        Args:
            device: cuda, cuda:1, mps or cpu.
            algorithm: path/to/file.py:Class if the algorithm is a custom one.
        """
        return load_model(self.folder, device, algorithm)


def soup(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    greedy: bool = False,
    data: str | Path | None = None,
    data_dir: str | Path | None = None,
    device: str = "auto",
    algorithm: str | None = None,
    on_progress: Progress | None = None,
) -> Soup:
    """Average the weights of runs that share their initial weights, and write the model to a folder.

    The vectors of an angular classifier are scaled to unit length first, because only their directions matter.
    Batch norm with frozen statistics is averaged like any layer; statistics that training changed are computed again
    for the averaged weights from training images.

    Args:
        runs: Folders of finished runs of one algorithm on the same images, with the same unseen domain and trial, from
            the same weights. Draws of hyper-parameters, steps and averaging over steps may differ.
        out: Folder to write.
        greedy: Start with the run of the highest accuracy on validation images of the source domains, and add others
            in this order if they do not lower the accuracy of the average. By default all runs are averaged.
        data: Folder of the images, if they have moved. Without images, the uniform average has no accuracy, and its
            predictions no warnings.
        data_dir: Folder in which data sets are looked for.
        device: "auto", "cpu", "cuda" or "cuda:N".
        algorithm: path/to/file.py:Class of a custom algorithm.
        on_progress: Called with the part of the work, the number done and the total.
    """
    report = on_progress or (lambda *_: None)
    folders = [open_run(run) for run in runs]
    check_shared_start(folders)
    check_out(Path(out), folders)
    first = folders[0].metadata
    same_trial = len({folder.identity["trial"] for folder in folders}) == 1
    set_aside = same_trial and not any(folder.identity.get("train_on_all") for folder in folders)
    if greedy and not set_aside:
        reason = "trained on the validation images" if same_trial else "are of different trials and validation images"
        raise AidgnError(f"Some of these runs {reason}, so that no image is left for the greedy selection.")
    chosen = choose_device(device)
    network = build_network(first, chosen, choose_custom_algorithm(first, algorithm)).to(chosen).eval()
    weights = [read_ingredient(folder, network) for folder in folders]
    mixer = Mixer(network, None)
    if set_aside:
        try:
            images = open_images(first, data=data, data_dir=data_dir, device=device, on_progress=report)
            mixer = Mixer(network, Validation(images, first))
        except AidgnError:
            if greedy or data is not None or mixer.needs_images:
                raise
    if mixer.needs_images and mixer.validation is None:
        raise AidgnError("These networks have batch norm that was trained, whose statistics need runs of one trial.")

    accuracies: list[float] = []
    if mixer.validation:
        for number, ingredient in enumerate(weights):
            accuracies.append(mixer.accuracy([ingredient]))
            report("measuring runs", number + 1, len(weights))
    used = list(range(len(weights)))
    if greedy:
        used = choose_greedily(weights, accuracies, mixer, report)
    accuracy = mixer.accuracy([weights[i] for i in used]) if mixer.validation else None
    mixed = mixer.mix([weights[i] for i in used])
    metadata = describe_soup(first, [folders[i].path for i in used], greedy)
    _write(RunWriter(out), metadata, mixed, mixer)
    return Soup(Path(out), [f.path for f in folders], [folders[i].path for i in used], accuracies, accuracy)


def choose_greedily(
    weights: Sequence[Weights], accuracies: Sequence[float], mixer: "Mixer", report: Progress
) -> list[int]:
    """Add runs by falling accuracy as long as the accuracy of the average does not fall."""
    order = sorted(range(len(weights)), key=lambda i: -accuracies[i])
    used, best = order[:1], accuracies[order[0]]
    for number, candidate in enumerate(order[1:], 1):
        accuracy = mixer.accuracy([weights[i] for i in [*used, candidate]])
        if accuracy >= best:
            used, best = [*used, candidate], accuracy
        report("adding runs", number, len(order) - 1)
    return used


# Weights --------------------------------------------------------------------------------------------------------------


def read_ingredient(run: RunFolder, network: Algorithm) -> Weights:
    """Read the weights of a run's selected step."""
    tensors, _ = read_model(run.model)
    if mismatch := backbones.find_mismatch(tensors, network.state_dict()):
        raise AidgnError(f"{run.model} does not fit the first run: {mismatch}. Only runs of one network can be mixed.")
    return tensors


def average_weights(weights: Sequence[Weights], angular: str | None = None) -> dict[str, Tensor]:
    """Return the mean of every tensor, computed in float64; tensors of whole numbers are copied from the first.

    Args:
        weights: Tensors by name.
        angular: Name of the weight [n, C] of an angular classifier, whose columns are scaled to unit length first.
    """
    mixed = {}
    for name, first in weights[0].items():
        if not first.is_floating_point():
            mixed[name] = first.clone()
            continue
        members = [ingredient[name].double() for ingredient in weights]
        if name == angular:
            members = [normalize(member, dim=0) for member in members]
        mixed[name] = (sum(members[1:], start=members[0]) / len(members)).to(first.dtype)
    return mixed


class Validation:
    """The images of the source domains, for the accuracy of averaged weights."""

    def __init__(self, images: DeviceImageStore, run: RunMetadata):
        self.images = images
        _, self.transform = images.transforms(find_preprocessing(run).transform_settings())
        splits = Splits.of(images.decoded.dataset, run.identity["trial"])
        sources = [number for number, name in enumerate(run.domains) if name in run.sources]
        self.groups = [splits.val[domain] for domain in sources]
        self.train = np.concatenate([splits.train[domain] for domain in sources])

    def accuracy(self, network: Algorithm) -> float:
        """Return the mean accuracy over the source domains."""
        scores = evaluate(network, self.images, self.groups, self.transform)
        return float(np.mean([split.accuracy for split in scores]))

    def training_inputs(self, network: Algorithm) -> Iterator[Tensor]:
        """Yield training images of all source domains in random order, prepared for the network."""
        sample = np.random.default_rng(0).permutation(self.train)[:BATCH_NORM_IMAGES]
        groups = [sample]
        if network.group_size > 1:  # images that are predicted together are of one domain
            domains = self.images.decoded.dataset.domain_of[sample]
            groups = [sample[domains == domain] for domain in np.unique(domains)]
        for pixels, geometry, _ in self.images.batches(index_batches(groups, network, self.images.device)):
            yield self.transform(pixels, geometry)


class Mixer:
    """Average weights and measure the result."""

    def __init__(self, network: Algorithm, validation: Validation | None):
        self.network = network
        self.validation = validation
        self.angular = "classifier.weight" if isinstance(network.classifier, AngularClassifier) else None

    @property
    def needs_images(self) -> bool:
        """Whether training changed statistics of batch norm: averaged weights need new statistics, from images."""
        return bool(self.trained_batch_norms())

    def trained_batch_norms(self) -> list[_BatchNorm]:
        """Return the layers whose statistics training changed, in the featurizer and in ARM's context network."""
        layers = (layer for layer in self.network.modules() if isinstance(layer, _BatchNorm))
        return [
            layer
            for layer in layers
            if not isinstance(layer, FrozenBatchNorm)
            and layer.track_running_stats
            and all(parameter.requires_grad for parameter in layer.parameters())
        ]

    def mix(self, weights: Sequence[Weights]) -> dict[str, Tensor]:
        """Load the averaged weights into the network, and return them."""
        mixed = average_weights(weights, self.angular)
        self.network.load_state_dict(mixed, strict=False)
        if self.needs_images and len(weights) > 1:
            self.update_statistics()
            trained = self.network.state_dict()
            mixed = {name: trained[name].cpu() for name in mixed}
        return mixed

    @torch.no_grad()
    def update_statistics(self) -> None:
        """Give batch norms the mean of the statistics of batches of training images."""
        assert self.validation is not None
        layers = self.trained_batch_norms()
        momenta = [layer.momentum for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over batches
            layer.train()
        for x in self.validation.training_inputs(self.network):
            self.network.predict(x)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            layer.eval()

    def accuracy(self, weights: Sequence[Weights]) -> float:
        """Return the accuracy of the average on validation images."""
        assert self.validation is not None
        self.mix(weights)
        return self.validation.accuracy(self.network)


# Runs that fit together -----------------------------------------------------------------------------------------------


def check_shared_start(runs: Sequence[RunFolder]) -> None:
    """Raise an error unless all runs started from the same weights and have the same classes and domains."""
    if len(runs) < 2:
        raise AidgnError("A soup needs at least two runs.")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise AidgnError("One run was given twice: a soup needs different ones.")
    first = runs[0]
    for other in runs[1:]:
        for (name, value), mine in zip(_start(first.metadata), _start(other.metadata), strict=True):
            if value != mine[1]:
                raise AidgnError(
                    f"{first} and {other} do not share their initial weights or their task: {name} is "
                    f"{_text(value)} and {_text(mine[1])}."
                )
    trials = {run.identity["trial"] for run in runs}
    if len(trials) > 1:
        warm = all(run.identity.get("warm_start") for run in runs)
        if first.identity["weights"] == "none" or not warm:
            subject = "network" if first.identity["weights"] == "none" else "classifier"
            raise AidgnError(
                f"These runs do not share their initial weights: they are of the trials {sorted(trials)}, and the "
                f"initial weights of the {subject} depend on the trial. Give runs of one trial, such as several draws"
                + (", or runs with --warm-start." if subject == "classifier" else ".")
            )


def _start(run: RunMetadata) -> Iterator[tuple[str, Any]]:
    """List everything that the initial weights and the task depend on, except the trial."""
    yield "the algorithm", run.label.name
    titles = {
        "target": "the unseen domain",
        "data": "the fingerprint of the images",
        "batch_norm": "the kind of batch norm",  # the average keeps the statistics that are frozen
    }
    for name in ("source", "backbone", "weights", "preprocessing", "dataset", "data", "target", "batch_norm"):
        yield titles.get(name, name), run.identity.get(name)
    yield "the list of classes", run.classes
    yield "the list of domains", run.domains
    yield "the image size", run.image_size
    yield "kappa", run.identity["hyper_parameters"].get("kappa")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def check_out(out: Path, runs: Sequence[RunFolder]) -> None:
    """Raise an error if a folder holds a run or a model that is no soup."""
    folder = RunFolder(out)
    if out.is_file():
        raise AidgnError(f"{out} is a file: give a folder.")
    if any(out.resolve() == run.path.resolve() for run in runs) or (folder.exists and "soup" not in folder.identity):
        raise AidgnError(f"{out} holds a run or another model, which would be overwritten. Choose another folder.")


def describe_soup(first: RunMetadata, used: Sequence[Path], greedy: bool) -> RunMetadata:
    """Return the metadata of a soup: the metadata of its first run, with the names of all runs."""
    label = first.label
    average = "+".join(filter(None, [label.average, "soup"]))
    members = {"runs": [path.resolve().name for path in used], "selection": "greedy" if greedy else "uniform"}
    identity = {**first.identity, "algorithm": str(replace(label, average=average)), "soup": members}
    return replace(first, identity=identity)


def _write(folder: RunWriter, metadata: RunMetadata, weights: Weights, mixer: Mixer) -> None:
    """Write the model; run.json comes last, so that a folder with it is complete."""
    folder.path.mkdir(parents=True, exist_ok=True)
    for path in (folder.metadata_file, folder.novelty, folder.backbone):
        path.unlink(missing_ok=True)  # of an earlier soup
    write_weights(folder.model, weights, {"algorithm": str(metadata.label), "step": metadata.steps})
    if mixer.validation:
        images, groups = mixer.validation.images, mixer.validation.groups
        novelty = measure_novelty(mixer.network, images, groups, mixer.validation.transform)
        write_values(folder.novelty, novelty.to_dict())
    folder.write_metadata(metadata)
