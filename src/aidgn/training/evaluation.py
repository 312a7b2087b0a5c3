"""Accuracies: of the splits that model selection needs, on clean images, with one synchronisation at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aidgn.algorithms import Algorithm
from aidgn.data import Dataset
from aidgn.data.batches import Images
from aidgn.data.splits import split
from aidgn.training.featurizer import EVAL_BATCH

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


def accuracies(algorithm: Algorithm, images: Images, groups: Sequence[np.ndarray],
               transform: Transform) -> list[float]:
    """The share of right predictions in every group of image indices.

    Groups are predicted together, unless a prediction depends on the images beside it."""
    owner = torch.from_numpy(np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
    together = algorithm.group_size
    parts = groups if together > 1 else [np.concatenate(groups)]
    batch = max(EVAL_BATCH // together, 1) * together
    was_training = algorithm.training
    algorithm.eval()
    right = []
    with torch.no_grad():
        rows = [row for part in parts for row in torch.from_numpy(part).split(batch)]
        for pixels, geometry, labels in images.batches(rows):
            right.append(algorithm.predict(transform(pixels, geometry)).argmax(1) == labels)
        hits = torch.cat(right).to(torch.float64).cpu()
    algorithm.train(was_training)
    totals = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, owner, hits)
    return [float(total) / len(group) for total, group in zip(totals, groups, strict=True)]
