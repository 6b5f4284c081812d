"""HeteroFL: every client trains the first units of each layer, as many as it can hold.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedbilevel.algorithms.base import Point
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_submodels import assign_submodels
from fedbilevel.core.submodels import Submodel
from fedbilevel.federation import Federation


@register("static")
@dataclass(frozen=True, kw_only=True)
class HeteroFL(FedAvg):
    """HeteroFL: FedAvg on submodels, the first units of every axis; registered as "static".

    The simplest single-level baseline for clients that cannot hold the whole model. Everyone holds
    the first units and few clients hold the last ones, which are trained accordingly little; units
    beyond the largest submodel are never trained. `FedRolex` trains all units equally often,
    `FIARSEStructured` those with the largest weights, `OAPStructured` covers all units in every
    iteration; `RABO` trains submodels on both levels.

    Client i of capacity r_i holds the first ceil(r_i K) of the K units of every axis. It takes the
    local steps of `FedAvg` on its part w_i of w = (x, y), on batches or on episodes, and

        w[k] <- w[k] + server_lr mean of dw_i[k] over the clients i that hold coordinate k;

    where nobody holds k, w[k] stays.

    Cost per iteration: one round. Gradients per client: those of `FedAvg` (1 per local step), on a
    smaller network. Down: the submodel's x and y. Up: their displacements.

    Departures from the paper: the published code was read. It divides activations by r_i in
    training and has static batch norms; our networks have group norms, which remove the scale and
    keep no statistics. Its cross-entropy and its means of the classifier leave out the labels that
    a client lacks; here the losses are those of the problem. The server's mean of displacements
    with `server_lr = 1` is the printed mean of weights.

    References:
        Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated
        Learning for Heterogeneous Clients", ICLR 2021.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        server_lr: Factor of the mean displacement; 1 averages the clients' weights.
        train: What is trained: "both", or "y" to leave x at its start.
        episode_steps: Gradient steps per episode; used with a private lower level only.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("loss-tuning", clients=4, hidden=8)
        >>> small = fb.Environment(capacity=[1.0, 0.25], batch_size=16)
        >>> method = fb.algorithms.HeteroFL(lr_y=0.5, train="y")
        >>> result = fb.solve(task.problem, task.clients, method, rounds=3, environment=small)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
    """

    submodels = True

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round; average each coordinate over the clients that hold it."""
        S = fed.sample()
        r = fed.ask(self.phase(fed), S, submodels=self.assign(s, fed, S), x=s.x, y=s.y)
        return self.move(s, r.coverage_mean("dx"), r.coverage_mean("dy"), fed)

    def assign(self, s: Point, fed: Federation, S: Sequence[int]) -> list[Submodel | None]:
        """Return the submodels of the clients S in this iteration; None is the whole model."""
        return assign_submodels(fed, S, s.x, s.y, "static")
