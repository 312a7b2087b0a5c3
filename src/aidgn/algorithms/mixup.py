"""Mixup between domains: train on averages of images of two domains, with both labels."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, paired, random_cycle
from aidgn.algorithms.search_space import log_uniform


class Mixup(Algorithm):
    """loss = 1/N sum over pairs (i, j) of  l CE(l x_i + (1 - l) x_j, y_i) + (1 - l) CE(l x_i + (1 - l) x_j, y_j)

    The N domains are put in a circle at random; the pairs are neighbours, cut to the shorter batch. One
    l ~ Beta(mixup_alpha, mixup_alpha) per pair."""

    title = "train on mixtures of images of two domains"
    paper = "Zhang et al., ICLR 2018; between domains as in Xu et al., AAAI 2020 and Yan et al., arXiv:2001.00677"
    trains_on_features = True
    min_domains = 2
    search_space = {**COMMON, "mixup_alpha": (0.2, log_uniform(-1, 1, above=True))}

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        alpha = self.hparams.mixup_alpha
        mixtures, targets = [], []
        for i, j in random_cycle(len(minibatches)):
            x_i, y_i, x_j, y_j = paired(minibatches, i, j)
            share = float(np.random.beta(alpha, alpha))
            t_i, t_j = (one_hot(y, self.num_classes).to(x_i.dtype) for y in (y_i, y_j))
            mixtures.append(torch.lerp(x_j, x_i, share))
            targets.append(torch.lerp(t_j, t_i, share))  # the cross entropy is linear in them
        logits = self.forward_per_domain(self.predict, mixtures)
        losses = self.cross_entropy(logits, torch.cat(targets), reduction="none")
        pairs = losses.split([len(x) for x in mixtures])
        return {"loss": torch.stack([pair.mean() for pair in pairs]).mean()}
