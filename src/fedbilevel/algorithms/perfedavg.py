"""Per-FedAvg: a common model from which one gradient step fits each client.

Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020.
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
from fedbilevel.core.settings import Positive
from fedbilevel.core.tree import Tree, dot
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, StepBatch

TINY = 1e-30  # the least squared norm that is divided by


class MetaSteps(PersonalModel):
    """tau_i steps along the gradient after one adaptation; replies with the displacement.

    Args:
        inner_lr: alpha, the step size of the adaptation.
        second_order: "none" (FO), or "differences" (HF).
        width: The distance over which differences are taken.
    """

    inner_lr: Positive
    second_order: Literal["none", "differences"]
    width: Positive

    @property
    def draws(self) -> int:
        """A batch for the adaptation, one for the gradient after it, and one for differences."""
        return 3 if self.second_order == "differences" else 2

    def start(self, m: Message) -> Local:
        """Start at the common model."""
        return Local(m.x, m.y, m.x, m.y, m.x, m.y)

    def first(self, c: Local, oracle: Oracle, batches: StepBatch) -> Local:
        """Take one step, and keep the adapted model: it starts at the common one."""
        own_x, own_y = self.adapted(c, oracle, batches[0])
        return self.step(c._replace(own_x=own_x, own_y=own_y), oracle, batches)

    def adapted(self, c: Local, oracle: Oracle, batch: Batch) -> tuple[Tree, Tree]:
        """Return the model after one step of `inner_lr`."""
        g_x, g_y = gradients_of(oracle, c.x, c.y, batch, self.train)
        return oracle.project_x(c.x - self.inner_lr * g_x), c.y - self.inner_lr * g_y

    def step(self, c: Local, oracle: Oracle, batches: StepBatch) -> Local:
        """Take one step along the meta-gradient."""
        x, y = self.adapted(c, oracle, batches[0])
        d_x, d_y = gradients_of(oracle, x, y, batches[1], self.train)
        if self.second_order == "differences":
            h_x, h_y = self.hessian_product(c, oracle, d_x, d_y, batches[2])
            d_x = d_x - self.inner_lr * h_x
            d_y = d_y - self.inner_lr * h_y
        return c._replace(x=oracle.project_x(c.x - self.lr_x * d_x), y=c.y - self.lr_y * d_y)

    def hessian_product(
        self, c: Local, oracle: Oracle, v_x: Tree, v_y: Tree, batch: Batch
    ) -> tuple[Tree, Tree]:
        """Return (grad g(w + h v) - grad g(w - h v)) / 2h with h = width / ||v||."""
        h = self.width / (dot(v_x, v_x) + dot(v_y, v_y)).clamp(min=TINY).sqrt()
        above = gradients_of(oracle, c.x + h * v_x, c.y + h * v_y, batch, self.train)
        below = gradients_of(oracle, c.x - h * v_x, c.y - h * v_y, batch, self.train)
        return (above[0] - below[0]) / (2 * h), (above[1] - below[1]) / (2 * h)


@register("per-fedavg")
@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Algorithm):
    """Per-FedAvg: FedAvg on the loss after one step of adaptation, as in MAML.

    It is a single-level baseline: it trains on the lower loss,

        min_w sum_i p_i g_i(w - alpha grad g_i(w)),   w = (x, y), alpha = `inner_lr`.

    Client i takes tau_i steps, each with batches of its own for all gradients,

        v <- grad g_i(w - alpha grad g_i(w)),   w <- w - lr (v - alpha d2 g_i(w) v),

    lr being lr_x for x and lr_y for y; the first-order variant (`second_order="none"`) leaves out
    the last term, the other takes it from a difference of gradients. The server adds the mean
    displacement. `Result.personal` returns the common model of the client's last visit after one
    step of adaptation.

    Cost per iteration: one round; 2 gradients per client and local step, 4 with "differences", and
    1 in the first step for the model that is kept. x and y go down, their displacements come up.

    Departures from the paper: written from memory. The width of a difference is relative to ||v||.
    `MAML` is for problems whose episodes have lower levels of their own.

    References:
        Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical
        Guarantees: A Model-Agnostic Meta-Learning Approach", NeurIPS 2020.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        inner_lr: Step size of the adaptation, alpha.
        second_order: "none" (FO) or "differences" (HF).
        width: The distance over which differences are taken.
        train: What is trained: "both", or "y" to leave x at its start.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("hyper-representation", clients=4, hidden=8, held_out=0.2)
        >>> result = fb.solve(task.problem, task.clients, "per-fedavg", rounds=5)
        >>> _, own_y = result.personal(1)
        >>> bool((own_y["head.bias"] != result.y["head.bias"]).any())
        True
    """

    solves = "single"
    second_derivatives = False

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    inner_lr: Positive = 0.05
    second_order: Literal["none", "differences"] = "none"
    width: Positive = 3e-3
    train: Literal["both", "y"] = "both"

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round of local steps."""
        phase = MetaSteps(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            inner_lr=self.inner_lr,
            second_order=self.second_order,
            width=self.width,
            train=self.train,
        )
        r = fed.ask(phase, fed.sample(), x=s.x, y=s.y)
        return Point(fed.problem.project(s.x + r.mean("dx")), s.y + r.mean("dy"))
