"""MAML, distributed: a start from which a few gradient steps fit every episode.

Finn, Abbeel and Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks",
ICML 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm, Point
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_episodes import Episodes
from fedbilevel.core.client_data import Batch
from fedbilevel.core.derivatives import grad
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation


class Adapt(Episodes):
    """The gradients of the upper loss after the inner steps of an episode.

    Args:
        inner_lr: Step size of the inner steps.
        inner_steps: Number of inner steps.
        first_order: Take the gradients at the end of the inner steps instead of at their start.
    """

    reply: ClassVar = {"dx": "x", "dy": "y"}

    inner_lr: Positive
    inner_steps: Count
    first_order: bool = False

    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]:
        """Evaluate the gradients of one episode."""

        def adapted(x: Tree, y: Tree) -> tuple[Tree, Tree]:
            for _ in range(self.inner_steps):
                g_x, g_y = oracle.lower_gradients(x, y, batch)
                x = oracle.project_x(x - self.inner_lr * g_x)
                y = y - self.inner_lr * g_y
            return x, y

        def outer(x: Tree, y: Tree) -> Tensor:
            with oracle.kernels():
                x, y = adapted(x, y)
            return oracle.upper(x, y, batch)

        if self.first_order:
            d_x, d_y = oracle.upper_gradients(*adapted(x, y), batch)
        else:
            # The backward pass costs grad f and a Hessian product per inner step.
            oracle.gradients += 1 + 2 * self.inner_steps
            d_x, d_y = grad(outer, argnums=(0, 1))(x, y)
        return {"dx": d_x, "dy": d_y}


@register("maml")
@dataclass(frozen=True, kw_only=True)
class MAML(Algorithm):
    """MAML: learn a start from which a few gradient steps fit every episode.

    A few-shot baseline, for problems with a private lower level only. It is a single-level method:
    the whole network w = (x, y) adapts to every episode, where `RABO` and `FedMBO` adapt y alone
    and learn x through the solution of the lower level. Choose `ProtoNet` for a method without
    inner steps.

    With K = `inner_steps`, on each episode

        w_0 = w,   w_{k+1} = w_k - inner_lr grad g(w_k)   for k < K,   h = d f(w_K) / d w_0.

    Client i replies with the mean of h over its tau_i episodes, and

        x <- x - lr_x mean h_x,   y <- y - lr_y mean h_y.

    `first_order=True` takes h = grad f(w_K) instead (FOMAML, in the same paper).

    Cost per iteration: one round. Gradients per client and episode: 3K + 1, with `first_order` K +
    1. Down: x, y. Up: h, which is shaped like x and y.

    Departures from the paper: it was not at hand, so the method is written from memory. Episodes
    belong to clients, and their gradients are averaged. The server takes plain gradient steps.

    References:
        Finn, Abbeel and Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep
        Networks", ICML 2017.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        inner_lr: Step size of the inner steps.
        inner_steps: The number K of inner steps per episode.
        first_order: Whether to leave out the derivative through the inner steps.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("few-shot", clients=1, ways=2, hidden=4, episodes=2)
        >>> method = fb.algorithms.MAML(inner_steps=1)
        >>> episodes = fb.Environment(batch_size=2)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=1, environment=episodes)
        >>> result.status, result.history[-1]["gradients"]
        ('completed', 4)
    """

    solves = "single"
    lower_levels = ("private",)

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    inner_lr: Positive = 0.1
    inner_steps: Count = 5
    first_order: bool = False

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round; step along the mean gradients of the episodes."""
        adapt = Adapt(
            inner_lr=self.inner_lr, inner_steps=self.inner_steps, first_order=self.first_order
        )
        r = fed.ask(adapt, fed.sample(), x=s.x, y=s.y)
        x = fed.problem.project(s.x - self.lr_x * r.mean("dx"))
        return Point(x, s.y - self.lr_y * r.mean("dy"))
