"""MAML, distributed: a start from which a few gradient steps fit every episode.

Finn, Abbeel and Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor
from torch.func import grad

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import Episodes
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation


class State(NamedTuple):
    x: Tree
    y: Tree


class Adapt(Episodes):
    """The gradients at the start, or at the end, of the inner steps on an episode."""

    reply: ClassVar = {"dx": "x", "dy": "y"}

    inner_lr: Positive
    inner_steps: Count
    first_order: bool = False

    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]:
        def adapted(x: Tree, y: Tree) -> tuple[Tree, Tree]:
            for _ in range(self.inner_steps):
                g_x, g_y = oracle.lower_gradients(x, y, batch)
                x, y = oracle.project_x(x - self.inner_lr * g_x), y - self.inner_lr * g_y
            return x, y

        def outer(x: Tree, y: Tree) -> Tensor:
            return oracle.upper(*adapted(x, y), batch)

        if self.first_order:
            d_x, d_y = oracle.upper_gradients(*adapted(x, y), batch)
        else:
            oracle.gradients += (
                1 + 2 * self.inner_steps
            )  # the way back: grad f, and a Hessian product an inner step
            d_x, d_y = grad(outer, argnums=(0, 1))(x, y)
        return {"dx": d_x, "dy": d_y}


@register("maml")
@dataclass(frozen=True, kw_only=True)
class MAML(Algorithm):
    """MAML, one round an iteration; only for private lower levels.

    With w = (x, y), on each episode

        w_0 = w,   w_k+1 = w_k - inner_lr grad g(w_k)   (`inner_steps` times),   h = d f(w_K) / d w_0.

    Client i replies with the mean of h over its tau_i episodes; x <- x - lr_x mean h_x, y <- y - lr_y mean h_y.
    first_order=True takes h = grad f(w_K) (FOMAML, in the same paper).

    It is a single-level method: it fits the whole network to every episode, and x is no variable of its own.

    Departures from print (recalled, not read: the paper was not at hand): episodes are the clients', their gradients
    averaged; plain gradient steps.
    """

    solves = "single"
    lower_levels = ("private",)

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    inner_lr: Positive = 0.1
    inner_steps: Count = 5
    first_order: bool = False

    def init(self, problem: Problem) -> State:
        return State(*problem.start)

    def iterate(self, s: State, fed: Federation) -> State:
        adapt = Adapt(
            inner_lr=self.inner_lr, inner_steps=self.inner_steps, first_order=self.first_order
        )
        r = fed.ask(adapt, fed.sample(), x=s.x, y=s.y)
        return State(
            fed.problem.project(s.x - self.lr_x * r.mean("dx")), s.y - self.lr_y * r.mean("dy")
        )
