"""Mixup between domains: train on averages of images of two domains, with both labels."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, paired, random_cycle
from aidgn.algorithms.hyper_parameters import SearchSpace, log_uniform


class Mixup(Algorithm):
    """loss = 1/N sum over pairs (i, j) of  l CE(l x_i + (1 - l) x_j, y_i) + (1 - l) CE(l x_i + (1 - l) x_j, y_j)

    The N domains are put in a circle at random; the pairs are neighbours, cut to the shorter batch. One
    l ~ Beta(mixup_alpha, mixup_alpha) per pair."""

    title = "train on mixtures of images of two domains"
    paper = "Zhang et al., ICLR 2018; between domains as in Xu et al., AAAI 2020 and Yan et al., arXiv:2001.00677"
    min_domains = 2
    search_space: ClassVar[SearchSpace] = {**COMMON, "mixup_alpha": (0.2, log_uniform(-1, 1, above=True))}

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        alpha = self.number("mixup_alpha")
        mixtures, pairs = [], []
        for i, j in random_cycle(len(minibatches)):
            x_i, y_i, x_j, y_j = paired(minibatches, i, j)
            share = float(np.random.beta(alpha, alpha))
            mixtures.append(share * x_i + (1 - share) * x_j)
            pairs.append((share, y_i, y_j))
        logits = self.apart(self.predict, mixtures).split([len(x) for x in mixtures])
        each = [share * cross_entropy(mixed, y_i) + (1 - share) * cross_entropy(mixed, y_j)
                for mixed, (share, y_i, y_j) in zip(logits, pairs, strict=True)]
        return {"loss": torch.stack(each).mean()}
