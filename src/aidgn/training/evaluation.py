"""Evaluate the splits that model selection needs, on clean images, with one synchronisation at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from aidgn.algorithms import Algorithm
from aidgn.data import Dataset
from aidgn.data.loader import BatchStore
from aidgn.data.transforms import UNIFORMS, TrainTransform, Transform
from aidgn.errors import AidgnError
from aidgn.metrics import METRICS, Scores, measure
from aidgn.novelty import CALIBRATION_IMAGES, Novelty
from aidgn.objective import class_vectors
from aidgn.runs.accuracy_key import Split, class_accuracies_key, metric_key
from aidgn.runs.options import ACCURACY, CHOICES
from aidgn.runs.spec import RunSpec
from aidgn.training import distributed
from aidgn.training.featurizer import EVAL_BATCH

CPU_BATCH = 64  # images per forward pass on the CPU
CLASS_DIGITS = 5  # decimals of accuracies per class in records, which have many of them


@dataclass(frozen=True)
class Splits:
    """Shuffled image indices of the training and the validation split of every domain."""

    train: list[np.ndarray]
    val: list[np.ndarray]

    @classmethod
    def of(cls, dataset: Dataset, trial: int) -> "Splits":
        """Split every domain by the random numbers of the trial; an error if a domain has too few images."""
        splits = cls([], [])
        for domain in range(len(dataset.domains)):
            train, val = dataset.split(domain, trial)
            if not len(val):
                raise AidgnError(dataset.describe_unsplit(domain))
            splits.train.append(train)
            splits.val.append(val)
        return splits


def eval_batch_size(algorithm: Algorithm, device: torch.device) -> int:
    """Return the images per forward pass: whole groups of images that are predicted together."""
    limit = EVAL_BATCH if device.type == "cuda" else CPU_BATCH
    return max(limit // algorithm.group_size, 1) * algorithm.group_size


def index_batches(groups: Sequence[np.ndarray], algorithm: Algorithm, device: torch.device) -> list[Tensor]:
    """Cut groups of image indices into batches.

    An algorithm that predicts several images together gets batches from one group each. For other algorithms, a batch
    may hold images of several groups.
    """
    parts = groups if algorithm.group_size > 1 else [np.concatenate(groups)]
    size = eval_batch_size(algorithm, device)
    return [batch for part in parts for batch in torch.from_numpy(part).split(size) if len(batch)]


def evaluate(
    algorithm: Algorithm,
    images: BatchStore,
    groups: Sequence[np.ndarray],
    transform: Transform,
    sharded: bool = True,
) -> list[Scores]:
    """Measure the predictions for every group of image indices.

    Args:
        algorithm: Predicts logits; its training mode is restored.
        images: Image store on the device.
        groups: Image indices, one array per group.
        transform: Maps uint8 images to the network's input.
        sharded: Whether each process of the run evaluates its part of the batches. A transform that draws random
            numbers must see all of them.
    """
    was_training = algorithm.training
    algorithm.eval()
    # Predicted class, its probability and the loss of each image stay on the device until all are known.
    values = torch.zeros(3, sum(map(len, groups)), device=images.device)
    with torch.no_grad():
        batches = index_batches(groups, algorithm, images.device)
        places = values.split([len(batch) for batch in batches], dim=1)
        shard = slice(distributed.rank(), None, distributed.world_size()) if sharded else slice(None)
        for (pixels, geometry, labels), place in zip(images.batches(batches[shard]), places[shard], strict=True):
            logits = algorithm.predict(transform(pixels, geometry))
            _check_logits(algorithm, logits, len(labels))
            log_probabilities = log_softmax(logits.float(), 1)
            place[0] = logits.argmax(1)
            place[1] = log_probabilities.amax(1).exp()
            place[2] = -log_probabilities.gather(1, labels[:, None])[:, 0]
        if sharded:
            distributed.all_reduce(values)
        results = values.cpu().numpy()
    algorithm.train(was_training)
    labels_of_images = images.decoded.dataset.labels
    ends = np.cumsum([len(group) for group in groups])[:-1]
    return [
        measure(labels_of_images[group], predicted.astype(int), confidences, losses, algorithm.num_classes)
        for group, (predicted, confidences, losses) in zip(groups, np.split(results, ends, axis=1), strict=True)
    ]


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
    """Return whether the classifier makes the predictions."""
    return type(algorithm).predict is Algorithm.predict


@torch.no_grad()
def measure_novelty(
    algorithm: Algorithm, images: BatchStore, groups: Sequence[np.ndarray], transform: Transform
) -> Novelty:
    """Measure the norms and angles of images that were not trained on, with which new images are compared.

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


def name_metrics(by_split: dict[tuple[int, Split], Scores]) -> dict[str, Any]:
    """Return the metrics of splits under their names in records, all accuracies first."""
    named: dict[str, Any] = {
        metric_key(domain, split, metric): getattr(scores, metric)
        for metric in METRICS
        for (domain, split), scores in by_split.items()
    }
    for (domain, split), scores in by_split.items():
        by_class = [value and round(value, CLASS_DIGITS) for value in scores.class_accuracies]
        named[class_accuracies_key(domain, split)] = by_class
    return named


class SplitEvaluator:
    """Evaluate an algorithm on the splits of a run."""

    def __init__(
        self,
        spec: RunSpec,
        images: BatchStore,
        seed: int,
        train_transform: TrainTransform,
        eval_transform: Transform,
    ):
        dataset = images.decoded.dataset
        self.images = images
        self.seed = seed  # of augmented validation, together with the step
        self.train_transform = train_transform
        self.eval_transform = eval_transform
        self.augment_validation = spec.augment_validation
        self.select_by = CHOICES[spec.select_by or ACCURACY]
        self.splits = Splits.of(dataset, spec.trial)
        self.sources = [domain for domain, name in enumerate(dataset.domains) if name not in spec.target]
        self.train_pools = [self.splits.train[domain] for domain in self.sources]
        if spec.train_on_all:
            self.train_pools = [
                np.concatenate([self.splits.train[domain], self.splits.val[domain]]) for domain in self.sources
            ]
        self.source_validation = [self.splits.val[domain] for domain in self.sources]
        self.groups: dict[tuple[int, Split], np.ndarray] = {}  # by domain and split
        for domain, name in enumerate(dataset.domains):
            if name in spec.target or spec.evaluate_source_in:
                self.groups[domain, "in"] = self.splits.train[domain]
            if name in spec.target or not spec.augment_validation:
                self.groups[domain, "out"] = self.splits.val[domain]

    def metrics(self, algorithm: Algorithm, step: int) -> tuple[dict[str, Any], bool]:
        """Return the metrics under their names in records, and whether no loss is NaN."""
        groups = list(self.groups.values())
        scores = evaluate(algorithm, self.images, groups, self.eval_transform)
        by_split = dict(zip(self.groups, scores, strict=True))
        finite = not np.isnan([split.nll for split in scores]).any()
        if self.augment_validation:
            by_split |= self._augmented_validation(algorithm, step)
        return name_metrics(by_split), finite

    def _augmented_validation(self, algorithm: Algorithm, step: int) -> dict[tuple[int, Split], Scores]:
        generator = torch.Generator().manual_seed(self.seed + step)

        def transform(pixels: Tensor, geometry: Tensor) -> Tensor:
            uniforms = torch.rand((len(pixels), UNIFORMS), generator=generator).to(pixels.device)
            return self.train_transform(pixels, geometry, uniforms)

        scores = evaluate(algorithm, self.images, self.source_validation, transform, sharded=False)
        return {(domain, "out"): of_domain for domain, of_domain in zip(self.sources, scores, strict=True)}

    def mean_validation(self, metrics: dict[str, Any]) -> float:
        """Return the mean over the validation splits of the sources of the metric that selects the step."""
        return float(np.mean([metrics[metric_key(domain, "out", self.select_by)] for domain in self.sources]))

    def validation_loss(self, algorithm: Algorithm) -> float:
        """Return the mean cross entropy on the validation splits of the sources."""
        scores = evaluate(algorithm, self.images, self.source_validation, self.eval_transform)
        return float(np.mean([split.nll for split in scores]))

    def measure_novelty(self, algorithm: Algorithm) -> Novelty:
        """Measure norms and angles on the validation splits of the sources."""
        return measure_novelty(algorithm, self.images, self.source_validation, self.eval_transform)
