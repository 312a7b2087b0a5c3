"""The algorithms by name, and the interface for new ones.

A new algorithm is a subclass of `Algorithm`: in a user's file, which trains as path/to/file.py:Class, or in this
package with a line in `ALGORITHMS`. `examples/own_algorithm.py` is an example.
"""

from typing import Any

from torch import nn

from aidgn.algorithms.aidgn import AIDGN, AIDGNnoD, AIDGNnoR, AIDGNnoRD, AIDGNRelease
from aidgn.algorithms.arm import ARM
from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, domain_ids, join, split
from aidgn.algorithms.causirl import CausIRLCORAL, CausIRLMMD
from aidgn.algorithms.cdann import CDANN
from aidgn.algorithms.coral import CORAL
from aidgn.algorithms.custom import CustomAlgorithmError, is_custom, load_custom
from aidgn.algorithms.dann import DANN
from aidgn.algorithms.eqrm import EQRM
from aidgn.algorithms.erm import ERM
from aidgn.algorithms.fish import Fish
from aidgn.algorithms.fishr import Fishr
from aidgn.algorithms.group_dro import GroupDRO
from aidgn.algorithms.irm import IRM
from aidgn.algorithms.miro import MIRO
from aidgn.algorithms.mixup import Mixup
from aidgn.algorithms.mldg import MLDG
from aidgn.algorithms.mmd import MMD
from aidgn.algorithms.mtl import MTL
from aidgn.algorithms.rsc import RSC
from aidgn.algorithms.sagm import AIDGNSAGM, SAGM, SAM
from aidgn.algorithms.sagnet import SagNet
from aidgn.algorithms.sd import SD
from aidgn.algorithms.search_space import (
    Distribution,
    SearchSpace,
    fixed,
    floor_power,
    floor_uniform,
    log_uniform,
    one_of,
    uniform,
)
from aidgn.algorithms.selfreg import SelfReg
from aidgn.algorithms.urm import URM
from aidgn.algorithms.vne import AIDGNVNE, VNE
from aidgn.algorithms.vrex import VREx
from aidgn.errors import UnknownNameError

__all__ = [
    "ALGORITHMS",
    "COMMON",
    "Algorithm",
    "Distribution",
    "Minibatches",
    "SearchSpace",
    "canonical",
    "create",
    "domain_ids",
    "find",
    "fixed",
    "floor_power",
    "floor_uniform",
    "join",
    "log_uniform",
    "one_of",
    "split",
    "uniform",
]

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
        SAM,
        SAGM,
        AIDGNSAGM,
        MIRO,
        SelfReg,
        Fish,
        URM,
        CausIRLCORAL,
        CausIRLMMD,
        VNE,
        AIDGNVNE,
    )
}


def find(name: str) -> type[Algorithm]:
    """Return the class of an algorithm.

    Args:
        name: Name in any case, or path/to/file.py:Class for a user's algorithm.
    """
    by_name = {known.casefold(): algorithm for known, algorithm in ALGORITHMS.items()}
    if is_custom(name):
        custom = load_custom(name)
        namesake = by_name.get(custom.name().casefold())
        if namesake is not None:
            raise CustomAlgorithmError(
                f"{name} has the name of the package's algorithm {namesake.name()}, and records could not tell them "
                "apart. Give the class another name."
            )
        return custom
    if name.casefold() not in by_name:
        raise UnknownNameError("algorithm", name, ALGORITHMS, "`aidgn algorithms` lists them.")
    return by_name[name.casefold()]


def canonical(name: str) -> str:
    """Return the name in records; the name of a custom algorithm stays the same."""
    return name if is_custom(name) else find(name).name()


def create(name: str, featurizer: nn.Module, num_classes: int, num_domains: int, **hyper_parameters: Any) -> Algorithm:
    """Create an algorithm.

    Args:
        name: Name in any case, or path/to/file.py:Class for a user's algorithm.
        featurizer: Maps images to features [B, `num_features`].
        num_classes: Number of classes.
        num_domains: Number of source domains.
        **hyper_parameters: Values; the others take their defaults for images of 224 pixels.
    """
    return find(name)(featurizer, num_classes, num_domains, **hyper_parameters)
