"""The algorithms by name. To add one: write its file, add its line here."""

from typing import Any

from torch import nn

from aidgn.algorithms.aidgn import AIDGN, AIDGNnoD, AIDGNnoR, AIDGNnoRD, AIDGNRelease
from aidgn.algorithms.base import Algorithm
from aidgn.algorithms.erm import ERM
from aidgn.errors import UserError, did_you_mean

__all__ = ["ALGORITHMS", "Algorithm", "create", "find"]

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name(): algorithm
    for algorithm in (
        ERM,
        AIDGN,
        AIDGNnoR,
        AIDGNnoD,
        AIDGNnoRD,
        AIDGNRelease,
    )
}


def find(name: str) -> type[Algorithm]:
    """The algorithm of this name, or an error that suggests the nearest."""
    if name not in ALGORITHMS:
        raise UserError(f"There is no algorithm {name}.{did_you_mean(name, ALGORITHMS)} "
                        f"`aidgn algorithms` lists them.")
    return ALGORITHMS[name]


def create(name: str, featurizer: nn.Module, num_classes: int, num_domains: int, **hyper_parameters: Any) -> Algorithm:
    """The named algorithm around `featurizer`, a module with `num_features`; hyper-parameters not given take the
    defaults for 224-pixel images."""
    return find(name)(featurizer, num_classes, num_domains, **hyper_parameters)
