"""HeteroFL: every client trains the first units of each layer, as many as it can hold.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedbilevel.algorithms.fedavg import FedAvg, State
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_submodels import cut
from fedbilevel.core.submodels import Submodel
from fedbilevel.federation import Federation


@register("static")
@dataclass(frozen=True, kw_only=True)
class HeteroFL(FedAvg):
    """HeteroFL: FedAvg on submodels, the first units of every axis ("static").

    Client i holds the first ceil(r_i K) of the K units of every axis. It takes FedAvg's local steps on its part w_i of
    w = (x, y), on episodes too, and replies with its displacement:

        w[k] <- w[k] + server_lr mean of dw_i[k] over the clients i that hold k;    where nobody does, w[k] stays.

    What only larger submodels hold is trained by few clients; beyond the largest one nothing is ever trained.

    Departures from print (read in the published code): there activations are divided by r_i in training, and batch
    norms are static; our networks have group norms, which take the scale out and have no statistics. There the
    cross-entropy and the means of the classifier leave out the labels that a client lacks; here they are the problem's
    losses. The server's mean of displacements with server_lr = 1 is print's mean of weights.
    """

    submodels = True

    def iterate(self, s: State, fed: Federation) -> State:
        S = fed.sample()
        r = fed.ask(self.phase(fed), S, submodels=self.hold(s, fed, S), x=s.x, y=s.y)
        return self.move(s, r.coverage_mean("dx"), r.coverage_mean("dy"), fed)

    def hold(self, s: State, fed: Federation, S: Sequence[int]) -> list[Submodel | None]:
        """The submodels of these clients in this iteration."""
        return cut(fed, S, s.x, s.y, "static")
