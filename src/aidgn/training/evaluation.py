"""Evaluate the splits that model selection needs, on clean images, with one synchronisation at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aidgn.algorithms import Algorithm
from aidgn.algorithms.base import class_vectors
from aidgn.data import Dataset
from aidgn.data.loader import DeviceImageStore
from aidgn.data.splits import train_val_indices
from aidgn.data.transforms import UNIFORMS
from aidgn.errors import AidgnError
from aidgn.novelty import CALIBRATION_IMAGES, Novelty
from aidgn.runs.accuracy_key import accuracy_key
from aidgn.runs.spec import RunSpec
from aidgn.training import distributed
from aidgn.training.compile import TrainTransform, Transform
from aidgn.training.featurizer import EVAL_BATCH

CPU_BATCH = 64  # images per forward pass on the CPU


@dataclass(frozen=True)
class Splits:
    """Shuffled image indices of the training and the validation split of every domain."""

    train: list[np.ndarray]
    val: list[np.ndarray]

    @classmethod
    def of(cls, dataset: Dataset, trial: int) -> "Splits":
        """Split every domain as the trial says; an error if a domain has too few images."""
        splits = cls([], [])
        for domain, name in enumerate(dataset.domains):
            indices = dataset.indices(domain)
            train, val = train_val_indices(len(indices), trial, domain)
            if not len(val):
                raise AidgnError(
                    f"Domain {name} has {len(indices)} images; at least 5 are needed to set a fifth of them aside for "
                    "validation."
                )
            splits.train.append(indices[train])
            splits.val.append(indices[val])
        return splits


def eval_batch_size(algorithm: Algorithm, device: torch.device) -> int:
    """Return the images per forward pass: whole groups of images that are predicted together."""
    limit = EVAL_BATCH if device.type == "cuda" else CPU_BATCH
    return max(limit // algorithm.group_size, 1) * algorithm.group_size


def index_batches(groups: Sequence[np.ndarray], algorithm: Algorithm, device: torch.device) -> list[Tensor]:
    """Cut groups of image indices into batches.

    Images that are predicted together stay neighbours in one group. Where each is predicted alone, a batch takes from
    several groups.
    """
    parts = groups if algorithm.group_size > 1 else [np.concatenate(groups)]
    size = eval_batch_size(algorithm, device)
    return [batch for part in parts for batch in torch.from_numpy(part).split(size) if len(batch)]


def evaluate(
    algorithm: Algorithm,
    images: DeviceImageStore,
    groups: Sequence[np.ndarray],
    transform: Transform,
    sharded: bool = True,
) -> tuple[list[float], list[float]]:
    """Return the accuracy and the mean cross entropy of every group of image indices.

    Args:
        algorithm: Predicts logits; its training mode is restored.
        images: Image store on the device.
        groups: Image indices, one array per group.
        transform: Maps uint8 images to the network's input.
        sharded: Whether the processes of the run share the batches out; a transform that draws must see them all.
    """
    group_of = torch.from_numpy(np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
    was_training = algorithm.training
    algorithm.eval()
    values = torch.zeros(2, len(group_of), device=images.device)  # correct, cross entropy
    with torch.no_grad():
        batches = index_batches(groups, algorithm, images.device)
        places = values.split([len(batch) for batch in batches], dim=1)
        shard = slice(distributed.rank(), None, distributed.world_size()) if sharded else slice(None)
        for (pixels, geometry, labels), place in zip(images.batches(batches[shard]), places[shard], strict=True):
            logits = algorithm.predict(transform(pixels, geometry))
            _check_logits(algorithm, logits, len(labels))
            place[0] = logits.argmax(1) == labels
            place[1] = cross_entropy(logits.float(), labels, reduction="none")
        if sharded:
            distributed.all_reduce(values)
        values = values.double().cpu()
    algorithm.train(was_training)
    totals = torch.zeros(2, len(groups), dtype=torch.float64).index_add_(1, group_of, values)
    means = totals / torch.tensor([len(group) for group in groups])
    return means[0].tolist(), means[1].tolist()


def _check_logits(algorithm: Algorithm, logits: object, images: int) -> None:
    shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    expected = [images, algorithm.num_classes]
    if shape != expected:
        raise AidgnError(
            f"{algorithm.name()}: `predict` must return logits {expected}, images by classes; it returned {shape}."
        )


def compute_outputs(algorithm: Algorithm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features and the logits, in one pass unless a custom algorithm overrides `predict`."""
    features = algorithm.features(x)
    return features, algorithm.classifier(features) if predicts_by_classifier(algorithm) else algorithm.predict(x)


def predicts_by_classifier(algorithm: Algorithm) -> bool:
    """Return whether predictions are those of the classifier."""
    return type(algorithm).predict is Algorithm.predict


@torch.no_grad()
def calibrate(
    algorithm: Algorithm, images: DeviceImageStore, groups: Sequence[np.ndarray], transform: Transform
) -> Novelty:
    """Measure norms and angles on images that were not trained on.

    At most `CALIBRATION_IMAGES` are measured, the same share of each group.

    Args:
        algorithm: Computes features and logits; its training mode is restored.
        images: Image store on the device.
        groups: Shuffled image indices, the validation splits of the sources.
        transform: Maps uint8 images to the network's input.
    """
    share = min(1.0, CALIBRATION_IMAGES / sum(map(len, groups)))
    sample = [group[: max(int(len(group) * share), 1)] for group in groups]
    was_training = algorithm.training
    algorithm.eval()
    pairs = [
        compute_outputs(algorithm, transform(pixels, geometry))
        for pixels, geometry, _ in images.batches(index_batches(sample, algorithm, images.device))
    ]
    algorithm.train(was_training)
    features, logits = (torch.cat([pair[part].float() for pair in pairs]) for part in (0, 1))
    return Novelty.from_features(features, logits, class_vectors(algorithm.classifier))


class SplitEvaluator:
    """Evaluate an algorithm on the splits of a run.

    Args:
        spec: The resolved run.
        images: The images of the data set, on the device.
        seed: Seed of augmented validation, together with the step.
        train_transform: Augments images.
        eval_transform: Prepares images without augmentation.
    """

    def __init__(
        self,
        spec: RunSpec,
        images: DeviceImageStore,
        seed: int,
        train_transform: TrainTransform,
        eval_transform: Transform,
    ):
        dataset = images.decoded.dataset
        self.images = images
        self.seed = seed
        self.train_transform = train_transform
        self.eval_transform = eval_transform
        self.augment_validation = spec.augment_validation
        self.splits = Splits.of(dataset, spec.trial)
        self.sources = [domain for domain, name in enumerate(dataset.domains) if name not in spec.target]
        self.train_pools = [self.splits.train[domain] for domain in self.sources]
        self.source_validation = [self.splits.val[domain] for domain in self.sources]
        self.groups: dict[str, np.ndarray] = {}  # by the name of the accuracy in records
        for domain, name in enumerate(dataset.domains):
            if name in spec.target or spec.evaluate_source_in:
                self.groups[accuracy_key(domain, "in")] = self.splits.train[domain]
            if name in spec.target or not spec.augment_validation:
                self.groups[accuracy_key(domain, "out")] = self.splits.val[domain]

    def accuracies(self, algorithm: Algorithm, step: int) -> tuple[dict[str, float], bool]:
        """Return the accuracies by their names in records, and whether all losses are numbers."""
        groups = list(self.groups.values())
        values, losses = evaluate(algorithm, self.images, groups, self.eval_transform)
        by_name = dict(zip(self.groups, values, strict=True))
        if self.augment_validation:
            by_name |= self._augmented_validation(algorithm, step)
        return by_name, not np.isnan(losses).any()

    def _augmented_validation(self, algorithm: Algorithm, step: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed(self.seed + step)

        def transform(pixels: Tensor, geometry: Tensor) -> Tensor:
            uniforms = torch.rand((len(pixels), UNIFORMS), generator=generator).to(pixels.device)
            return self.train_transform(pixels, geometry, uniforms)

        values, _ = evaluate(algorithm, self.images, self.source_validation, transform, sharded=False)
        return {accuracy_key(domain, "out"): value for domain, value in zip(self.sources, values, strict=True)}

    def mean_validation(self, accuracies: dict[str, float]) -> float:
        """Return the mean accuracy on the validation splits of the sources."""
        return float(np.mean([accuracies[accuracy_key(domain, "out")] for domain in self.sources]))

    def validation_loss(self, algorithm: Algorithm) -> float:
        """Return the mean cross entropy on the validation splits of the sources."""
        _, losses = evaluate(algorithm, self.images, self.source_validation, self.eval_transform)
        return float(np.mean(losses))

    def calibrate(self, algorithm: Algorithm) -> Novelty:
        """Measure norms and angles on the validation splits of the sources."""
        return calibrate(algorithm, self.images, self.source_validation, self.eval_transform)
