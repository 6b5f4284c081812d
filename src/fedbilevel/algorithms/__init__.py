"""The algorithms, one paper per file.

`get(name)` finds an algorithm by its registered name. `base` says what an algorithm is, `registry`
holds the names, and the modules `shared` and `shared_...` hold what several methods are made of.
"""

from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.adbo import ADBO, SDBO
from fedbilevel.algorithms.afbo import AFBO
from fedbilevel.algorithms.afl import AFL
from fedbilevel.algorithms.aggitd import AggITD
from fedbilevel.algorithms.asfbo import ASFBO, LAASFBO
from fedbilevel.algorithms.base import Algorithm, Point, State
from fedbilevel.algorithms.ditto import Ditto
from fedbilevel.algorithms.dsbo import DSBO
from fedbilevel.algorithms.f2sa import F2SA
from fedbilevel.algorithms.fedadam import FedAdam
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbabu import FedBABU
from fedbilevel.algorithms.fedbio import FedBiO, FedBiOAcc
from fedbilevel.algorithms.fedmbo import FedMBO
from fedbilevel.algorithms.fednest import FedNest, LFedNest
from fedbilevel.algorithms.fedper import FedPer
from fedbilevel.algorithms.fedrep import FedRep
from fedbilevel.algorithms.fedrolex import FedRolex
from fedbilevel.algorithms.fiarse import FIARSE, FIARSEStructured
from fedbilevel.algorithms.heterofl import HeteroFL
from fedbilevel.algorithms.localbsg import LocalBSGM, LocalBSGVR
from fedbilevel.algorithms.maml import MAML
from fedbilevel.algorithms.mefbo import MeFBO
from fedbilevel.algorithms.memfbo import MemFBO
from fedbilevel.algorithms.oap import OAP, OAPStructured
from fedbilevel.algorithms.perfedavg import PerFedAvg
from fedbilevel.algorithms.pfedme import PFedMe
from fedbilevel.algorithms.prometheus import Prometheus
from fedbilevel.algorithms.protonet import ProtoNet
from fedbilevel.algorithms.rabo import RABO, RAFBO
from fedbilevel.algorithms.registry import get, names, register
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO
from fedbilevel.algorithms.unifbo import UniFBO
from fedbilevel.core.schedules import Step
from fedbilevel.federation.phase import Message, Number, Phase

__all__ = [
    "ADBO",
    "AFBO",
    "AFL",
    "ASFBO",
    "DSBO",
    "F2SA",
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
    "Ditto",
    "FIARSEStructured",
    "FedAdam",
    "FedAvg",
    "FedBABU",
    "FedBiO",
    "FedBiOAcc",
    "FedMBO",
    "FedNest",
    "FedPer",
    "FedRep",
    "FedRolex",
    "HeteroFL",
    "LFedNest",
    "LocalBSGM",
    "LocalBSGVR",
    "MeFBO",
    "MemFBO",
    "Message",
    "Number",
    "OAPStructured",
    "PFedMe",
    "PerFedAvg",
    "Phase",
    "Point",
    "Prometheus",
    "ProtoNet",
    "ShroFBO",
    "SimFBO",
    "State",
    "Step",
    "UniFBO",
    "get",
    "names",
    "register",
]
