"""Every method by name. One paper, one file; `register` works from outside the package too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fedbilevel import checks
from fedbilevel.algorithms.base import Algorithm, State
from fedbilevel.federation.phase import Message, Number, Phase

A = TypeVar("A", bound=type[Algorithm])
_registry: dict[str, type[Algorithm]] = {}


def register(name: str) -> Callable[[A], A]:
    """Class decorator: make an algorithm known by `name`."""

    def enrol(cls: A) -> A:
        if name in _registry:
            raise ValueError(f"an algorithm named {name!r} is registered already")
        cls.name = name
        _registry[name] = cls
        return cls

    return enrol


def names() -> list[str]:
    return list(_registry)


def get(name: str) -> type[Algorithm]:
    return _registry[checks.one_of("algorithm", name, _registry)]


from fedbilevel.algorithms.adafbio import AdaFBiO  # noqa: E402
from fedbilevel.algorithms.adbo import ADBO, SDBO  # noqa: E402
from fedbilevel.algorithms.afbo import AFBO  # noqa: E402
from fedbilevel.algorithms.afl import AFL  # noqa: E402
from fedbilevel.algorithms.aggitd import AggITD  # noqa: E402
from fedbilevel.algorithms.asfbo import ASFBO, LAASFBO  # noqa: E402  (they register themselves)
from fedbilevel.algorithms.fedavg import FedAvg  # noqa: E402
from fedbilevel.algorithms.fedbio import FedBiO, FedBiOAcc  # noqa: E402
from fedbilevel.algorithms.fedmbo import FedMBO  # noqa: E402
from fedbilevel.algorithms.fednest import FedNest, LFedNest  # noqa: E402
from fedbilevel.algorithms.fedrolex import FedRolex  # noqa: E402
from fedbilevel.algorithms.fiarse import FIARSE, FIARSEStructured  # noqa: E402
from fedbilevel.algorithms.heterofl import HeteroFL  # noqa: E402
from fedbilevel.algorithms.localbsg import LocalBSGM, LocalBSGVR  # noqa: E402
from fedbilevel.algorithms.maml import MAML  # noqa: E402
from fedbilevel.algorithms.oap import OAP, OAPStructured  # noqa: E402
from fedbilevel.algorithms.protonet import ProtoNet  # noqa: E402
from fedbilevel.algorithms.rabo import RABO, RAFBO  # noqa: E402
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO  # noqa: E402
from fedbilevel.algorithms.unifbo import UniFBO  # noqa: E402

__all__ = [
    "ADBO",
    "AFBO",
    "AFL",
    "ASFBO",
    "FIARSE",
    "LAASFBO",
    "MAML",
    "OAP",
    "RABO",
    "RAFBO",
    "SDBO",
    "AdaFBiO",
    "AggITD",
    "Algorithm",
    "FIARSEStructured",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedMBO",
    "FedNest",
    "FedRolex",
    "HeteroFL",
    "LFedNest",
    "LocalBSGM",
    "LocalBSGVR",
    "Message",
    "Number",
    "OAPStructured",
    "Phase",
    "ProtoNet",
    "ShroFBO",
    "SimFBO",
    "State",
    "UniFBO",
    "get",
    "names",
    "register",
]
