"""Accuracies: of the splits that model selection needs, on clean images, with one synchronisation at the end."""

from collections.abc import Callable, Sequence
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
from aidgn.errors import AidgnError
from aidgn.novelty import MOST, Novelty, outputs
from aidgn.training import distributed as parallel
from aidgn.training.featurizer import EVAL_BATCH

CPU_BATCH = 64  # images per forward pass on the CPU
Transform = Callable[[Tensor, Tensor], Tensor]  # uint8 images and their geometry to the network's input


@dataclass(frozen=True)
class Splits:
    """Image indices of every domain's `in` and `out` split, as shuffled."""

    inside: list[np.ndarray]
    outside: list[np.ndarray]

    @classmethod
    def of(cls, dataset: Dataset, trial: int) -> "Splits":
        pairs = [
            (dataset.indices(domain), *train_val_indices(len(dataset.indices(domain)), trial, domain))
            for domain in range(len(dataset.domains))
        ]
        return cls([all_[in_] for all_, in_, _ in pairs], [all_[out] for all_, _, out in pairs])


def batch_size(algorithm: Algorithm, device: torch.device) -> int:
    """Images that go through the network at a time: whole groups of those that are predicted together."""
    most, together = EVAL_BATCH if device.type == "cuda" else CPU_BATCH, algorithm.group_size
    return max(most // together, 1) * together


def rows_of(groups: Sequence[np.ndarray], algorithm: Algorithm, device: torch.device) -> list[Tensor]:
    """Image indices, a batch each: images that are predicted together are neighbours in one group; where each is
    predicted on its own, a batch takes from several."""
    parts = groups if algorithm.group_size > 1 else [np.concatenate(groups)]
    return [row for part in parts for row in torch.from_numpy(part).split(batch_size(algorithm, device)) if len(row)]


def measure(
    algorithm: Algorithm,
    images: DeviceImageStore,
    groups: Sequence[np.ndarray],
    transform: Transform,
    shared: bool = True,
) -> tuple[list[float], list[float]]:
    """The share of right predictions and the mean cross entropy in every group of image indices.

    The batches are shared out over the processes of the run, unless the transform must see them all."""
    owner = torch.from_numpy(np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
    was_training = algorithm.training
    algorithm.eval()
    values = torch.zeros(2, len(owner), device=images.device)
    with torch.no_grad():
        rows = rows_of(groups, algorithm, images.device)
        places = values.split([len(row) for row in rows], dim=1)
        own = slice(parallel.rank(), None, parallel.processes()) if shared else slice(None)
        for (pixels, geometry, labels), place in zip(images.batches(rows[own]), places[own], strict=True):
            logits = algorithm.predict(transform(pixels, geometry))
            given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            if given != (expected := [len(labels), algorithm.num_classes]):
                raise AidgnError(
                    f"{algorithm.name()}: `predict` must give logits {expected}, images by classes; it gave {given}."
                )
            place[0] = logits.argmax(1) == labels
            place[1] = cross_entropy(logits.float(), labels, reduction="none")
        values = (parallel.all_reduce(values) if shared else values).double().cpu()
    algorithm.train(was_training)
    totals = torch.zeros(2, len(groups), dtype=torch.float64).index_add_(1, owner, values)
    means = totals / torch.tensor([len(group) for group in groups])
    return means[0].tolist(), means[1].tolist()


@torch.no_grad()
def calibrate(
    algorithm: Algorithm, images: DeviceImageStore, groups: Sequence[np.ndarray], transform: Transform
) -> Novelty:
    """Norms and angles of images that were not trained on: groups are the sources' `out` splits. At most `MOST` images,
    of each group the same share."""
    share = min(1.0, MOST / sum(map(len, groups)))
    parts = [group[: max(int(len(group) * share), 1)] for group in groups]  # they are shuffled
    was_training = algorithm.training
    algorithm.eval()
    found = [
        outputs(algorithm, transform(pixels, geometry))
        for pixels, geometry, _ in images.batches(rows_of(parts, algorithm, images.device))
    ]
    algorithm.train(was_training)
    features, logits = (torch.cat([each[which].float() for each in found]) for which in (0, 1))
    return Novelty.of(features, logits, class_vectors(algorithm.classifier))
