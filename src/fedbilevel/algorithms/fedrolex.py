"""FedRolex: submodels are windows that roll over the units of each layer.

Alam, Liu, Yan and Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedbilevel.algorithms.base import Point
from fedbilevel.algorithms.heterofl import HeteroFL
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_submodels import assign_submodels
from fedbilevel.core.submodels import Submodel
from fedbilevel.federation import Federation


@register("fedrolex")
@dataclass(frozen=True, kw_only=True)
class FedRolex(HeteroFL):
    """FedRolex: HeteroFL with windows of units that move by one unit per iteration.

    Choose it over `HeteroFL` where no client can hold the whole model: every unit is trained as
    often as every other. Weights between two axes of equal width K are not, though: their windows
    move in step, so units further apart than a window never meet in one (at r_i <= 1/2).

    In iteration t client i of capacity r_i holds

        units t, t + 1, ..., t + ceil(r_i K) - 1   (mod K)   of every axis of K units,

    and trains and is averaged as in `HeteroFL`.

    Cost per iteration: that of `HeteroFL`: one round, 1 gradient per client and local step. Down:
    the submodel's x and y. Up: their displacements.

    Departures from the paper: the published code was read. Its windows move the other way, with the
    same coverage. Its means of biases, norm layers and classifier are weighted by how often an
    entry was updated so far, here by the clients' weights. Momentum, weight decay and gradient
    clipping are left out.

    References:
        Alam, Liu, Yan and Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling
        Sub-Model Extraction", NeurIPS 2022.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        server_lr: Factor of the mean displacement; 1 averages the clients' weights.
        train: What is trained: "both", or "y" to leave x at its start.
        episode_steps: Gradient steps per episode; used with a private lower level only.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("loss-tuning", clients=4, hidden=8)
        >>> small = fb.Environment(capacity=0.25, batch_size=16)
        >>> method = fb.algorithms.FedRolex(lr_y=0.5, train="y")
        >>> result = fb.solve(task.problem, task.clients, method, rounds=3, environment=small)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
    """

    def assign(self, s: Point, fed: Federation, S: Sequence[int]) -> list[Submodel | None]:
        """Return the windows of the clients S in this iteration."""
        return assign_submodels(fed, S, s.x, s.y, "rolling")
