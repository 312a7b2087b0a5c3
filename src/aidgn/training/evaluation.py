"""Accuracies: of the splits that model selection needs, on clean images, with one synchronisation at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aidgn.algorithms import Algorithm
from aidgn.data import Dataset
from aidgn.data.batches import Images
from aidgn.data.splits import split
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
        pairs = [(dataset.indices(domain), *split(len(dataset.indices(domain)), trial, domain))
                 for domain in range(len(dataset.domains))]
        return cls([all_[in_] for all_, in_, _ in pairs], [all_[out] for all_, _, out in pairs])


def measure(algorithm: Algorithm, images: Images, groups: Sequence[np.ndarray],
            transform: Transform) -> tuple[list[float], list[float]]:
    """The share of right predictions and the mean cross entropy in every group of image indices.

    Groups are predicted together, unless a prediction depends on the images beside it."""
    owner = torch.from_numpy(np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
    together = algorithm.group_size
    parts = groups if together > 1 else [np.concatenate(groups)]
    batch = max((EVAL_BATCH if images.device.type == "cuda" else CPU_BATCH) // together, 1) * together
    was_training = algorithm.training
    algorithm.eval()
    found = []
    with torch.no_grad():
        rows = [row for part in parts for row in torch.from_numpy(part).split(batch)]
        for pixels, geometry, labels in images.batches(rows):
            logits = algorithm.predict(transform(pixels, geometry))
            found.append(torch.stack([(logits.argmax(1) == labels).float(),
                                      cross_entropy(logits.float(), labels, reduction="none")]))
        values = torch.cat(found, dim=1).double().cpu()
    algorithm.train(was_training)
    totals = torch.zeros(2, len(groups), dtype=torch.float64).index_add_(1, owner, values)
    means = totals / torch.tensor([len(group) for group in groups])
    return means[0].tolist(), means[1].tolist()
