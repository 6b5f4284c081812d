"""FedRolex: the submodels are windows that roll over the units of each layer.

Alam, Liu, Yan and Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS
2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedbilevel.algorithms.fedavg import State
from fedbilevel.algorithms.heterofl import HeteroFL
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_submodels import cut
from fedbilevel.core.submodels import Submodel
from fedbilevel.federation import Federation


@register("fedrolex")
@dataclass(frozen=True, kw_only=True)
class FedRolex(HeteroFL):
    """FedRolex: HeteroFL with windows that move by one unit an iteration, in every axis by itself.

    In iteration t client i holds

        units t, t + 1, ..., t + ceil(r_i K) - 1   (mod K)   of an axis of K units.

    So every unit is trained as often as every other. Weights between two axes of one width K are not: their windows
    move in step, and units further apart than a window never meet in it (at r_i <= 1/2).

    Departures from print (read in the published code): there windows move the other way, which covers the same; means
    of biases, norm layers and classifier are weighted by how often an entry was updated so far, here by the clients'
    weights; momentum, weight decay and gradient clipping are left out.
    """

    def hold(self, s: State, fed: Federation, S: Sequence[int]) -> list[Submodel | None]:
        return cut(fed, S, s.x, s.y, "rolling")
