"""Ditto: a personal model per client, pulled towards the common one.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization",
ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbilevel.algorithms.base import Algorithm, Point
from fedbilevel.algorithms.fedavg import gradients_of
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_personal import Local, PersonalModel
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import NonNegative
from fedbilevel.federation import Federation


class TrainBoth(PersonalModel):
    """tau_i steps on the common and on the personal model; replies with the former's displacement.

    Args:
        pull: lambda, the factor of ||v - w||^2 / 2.
    """

    pull: NonNegative

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """Take one step on each model, on one batch."""
        g_x, g_y = gradients_of(oracle, c.x, c.y, batch, self.train)
        h_x, h_y = gradients_of(oracle, c.own_x, c.own_y, batch, self.train)
        pull_x = self.pull * (c.own_x - c.x0) if self.train == "both" else h_x
        own_x = c.own_x - self.lr_x * (h_x + pull_x)
        return c._replace(
            x=oracle.project_x(c.x - self.lr_x * g_x),
            y=c.y - self.lr_y * g_y,
            own_x=oracle.project_x(own_x),
            own_y=c.own_y - self.lr_y * (h_y + self.pull * (c.own_y - c.y0)),
        )


@register("ditto")
@dataclass(frozen=True, kw_only=True)
class Ditto(Algorithm):
    """Ditto: FedAvg, and beside it a model of each client's own that may not go far from it.

    It is a single-level baseline: it trains on the lower loss. All of x and y belong to the server;
    besides, client i has a whole model v_i = (x_i, y_i), which `Result.personal` returns. With
    w = (x, y) the server's model, client i takes tau_i steps on both,

        w_i <- w_i - lr grad g_i(w_i),   v_i <- v_i - lr (grad g_i(v_i) + lambda (v_i - w)),

    lr being lr_x for x and lr_y for y, and the server adds the mean displacement w_i - w.

    Cost per iteration: one round; 2 gradients per client and local step. x and y go down, their
    displacements come up.

    Departures from the paper: written from memory. One batch serves both models, and they take the
    same number of steps; v_i starts at the common model of the first visit.

    References:
        Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through
        Personalization", ICML 2021: Algorithm 1.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        pull: The factor lambda of the pull towards the common model.
        train: What is trained: "both", or "y" to leave x at its start.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("hyper-representation", clients=4, hidden=8, held_out=0.2)
        >>> result = fb.solve(task.problem, task.clients, "ditto", rounds=5)
        >>> _, own_y = result.personal(1)
        >>> bool((own_y["head.bias"] != result.y["head.bias"]).any())
        True
    """

    solves = "single"
    second_derivatives = False

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    pull: NonNegative = 0.1
    train: Literal["both", "y"] = "both"

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round of local training."""
        phase = TrainBoth(lr_x=self.lr_x, lr_y=self.lr_y, pull=self.pull, train=self.train)
        r = fed.ask(phase, fed.sample(), x=s.x, y=s.y)
        return Point(fed.problem.project(s.x + r.mean("dx")), s.y + r.mean("dy"))
