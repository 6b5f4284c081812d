"""pFedMe: personal models as proximal points of the common one.

Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.
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
from fedbilevel.core.settings import Count, Positive
from fedbilevel.federation import Federation


class ProximalSteps(PersonalModel):
    """tau_i steps of w_i towards the client's proximal point; replies with its displacement.

    Args:
        pull: lambda.
        personal_lr: Step size of the personal model.
        personal_steps: The number K of its steps, on one batch.
    """

    pull: Positive
    personal_lr: Positive
    personal_steps: Count

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """Take K steps on the personal model, then one on w_i."""
        own_x = c.own_x
        own_y = c.own_y
        for _ in range(self.personal_steps):
            g_x, g_y = gradients_of(oracle, own_x, own_y, batch, self.train)
            if self.train == "both":
                own_x = own_x - self.personal_lr * (g_x + self.pull * (own_x - c.x))
                own_x = oracle.project_x(own_x)
            own_y = own_y - self.personal_lr * (g_y + self.pull * (own_y - c.y))
        x = c.x
        if self.train == "both":
            x = oracle.project_x(x - self.lr_x * self.pull * (x - own_x))
        y = c.y - self.lr_y * self.pull * (c.y - own_y)
        return c._replace(x=x, y=y, own_x=own_x, own_y=own_y)


@register("pfedme")
@dataclass(frozen=True, kw_only=True)
class PFedMe(Algorithm):
    """pFedMe: the common model minimises the mean of the clients' Moreau envelopes.

    It is a single-level baseline: it trains on the lower loss. With w = (x, y), the personal model
    of client i is the proximal point

        theta_i(w) = argmin_v g_i(v) + lambda/2 ||v - w||^2,

    approached by K = `personal_steps` gradient steps on each batch; `Result.personal` returns it.
    Client i takes tau_i steps, and the server moves by the mean displacement,

        w_i <- w_i - lr lambda (w_i - theta_i(w_i)),   w <- w + server_lr mean (w_i - w),

    lr being lr_x for x and lr_y for y.

    Cost per iteration: one round; K gradients per client and local step. x and y go down, their
    displacements come up.

    Departures from the paper: written from memory. theta_i starts where it was left, at first at
    the common model; the paper leaves the start open. beta is `server_lr`.

    References:
        Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS
        2020: Algorithm 1.

    Args:
        lr_x: Step size of x in w_i, a number or a schedule.
        lr_y: Step size of y in w_i, a number or a schedule.
        pull: The factor lambda.
        personal_lr: Step size of the personal model.
        personal_steps: Its steps on each batch, K.
        server_lr: Factor of the mean displacement, beta.
        train: What is trained: "both", or "y" to leave x at its start.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("hyper-representation", clients=4, hidden=8, held_out=0.2)
        >>> result = fb.solve(task.problem, task.clients, "pfedme", rounds=5)
        >>> _, own_y = result.personal(1)
        >>> bool((own_y["head.bias"] != result.y["head.bias"]).any())
        True
    """

    solves = "single"
    second_derivatives = False

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    pull: Positive = 15.0
    personal_lr: Positive = 0.05
    personal_steps: Count = 5
    server_lr: Positive = 1.0
    train: Literal["both", "y"] = "both"

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round of local steps."""
        phase = ProximalSteps(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            pull=self.pull,
            personal_lr=self.personal_lr,
            personal_steps=self.personal_steps,
            train=self.train,
        )
        r = fed.ask(phase, fed.sample(), x=s.x, y=s.y)
        x = fed.problem.project(s.x + self.server_lr * r.mean("dx"))
        return Point(x, s.y + self.server_lr * r.mean("dy"))
