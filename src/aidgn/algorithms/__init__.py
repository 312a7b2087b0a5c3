"""The algorithms by name. To add one: write its file, add its line here."""

from typing import Any

from torch import nn

from aidgn.algorithms.aidgn import AIDGN, AIDGNnoD, AIDGNnoR, AIDGNnoRD, AIDGNRelease
from aidgn.algorithms.arm import ARM
from aidgn.algorithms.base import Algorithm
from aidgn.algorithms.cdann import CDANN
from aidgn.algorithms.coral import CORAL
from aidgn.algorithms.custom import is_custom, load_custom
from aidgn.algorithms.dann import DANN
from aidgn.algorithms.eqrm import EQRM
from aidgn.algorithms.erm import ERM
from aidgn.algorithms.fishr import Fishr
from aidgn.algorithms.group_dro import GroupDRO
from aidgn.algorithms.irm import IRM
from aidgn.algorithms.mixup import Mixup
from aidgn.algorithms.mldg import MLDG
from aidgn.algorithms.mmd import MMD
from aidgn.algorithms.mtl import MTL
from aidgn.algorithms.rsc import RSC
from aidgn.algorithms.sagnet import SagNet
from aidgn.algorithms.sd import SD
from aidgn.algorithms.vrex import VREx
from aidgn.errors import AidgnError, did_you_mean

__all__ = ["ALGORITHMS", "Algorithm", "canonical", "create", "find"]

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name(): algorithm
    for algorithm in (
        ERM,
        IRM,
        GroupDRO,
        Mixup,
        MLDG,
        CORAL,
        MMD,
        DANN,
        CDANN,
        MTL,
        SagNet,
        ARM,
        VREx,
        RSC,
        AIDGN,
        AIDGNnoR,
        AIDGNnoD,
        AIDGNnoRD,
        AIDGNRelease,
        SD,
        Fishr,
        EQRM,
    )
}


def find(name: str) -> type[Algorithm]:
    """The algorithm of this name, in any case, or the user's own if it is path/to/file.py:Class."""
    known = {each.casefold(): algorithm for each, algorithm in ALGORITHMS.items()}
    if is_custom(name):
        own = load_custom(name)
        if own.name().casefold() in known:
            raise AidgnError(
                f"{name} calls itself {own.name()}, as an algorithm of the package does, and records could "
                "not tell them apart. Give the class another name."
            )
        return own
    if name.casefold() not in known:
        raise AidgnError(
            f"There is no algorithm {name}.{did_you_mean(name, ALGORITHMS)} `aidgn algorithms` lists them."
        )
    return known[name.casefold()]


def canonical(name: str) -> str:
    """The name as records have it; where the user's own is stays as it is."""
    return name if is_custom(name) else find(name).name()


def create(name: str, featurizer: nn.Module, num_classes: int, num_domains: int, **hyper_parameters: Any) -> Algorithm:
    """The named algorithm around `featurizer`, a module with `num_features`; hyper-parameters not given take the
    defaults for 224-pixel images."""
    return find(name)(featurizer, num_classes, num_domains, **hyper_parameters)
