"""F2SA: a penalty in place of second derivatives; double loop, all steps on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import Evaluation
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Number


class State(NamedTuple):
    """The server's x, its y, which minimises G, and its u, which minimises G + F / penalty."""

    x: Tree
    y: Tree
    u: Tree


class LowerGradients(Evaluation):
    """grad_y g_i(x, y), and grad_y (g_i + f_i / penalty)(x, u)."""

    name = "lower"
    fixed_x = True
    batch = "both"
    reply: ClassVar = {"dy": "y", "du": "y"}

    penalty: Number

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate both."""
        x = m["x"]
        u = m["u"]
        f_u = oracle.upper_gradient_y(x, u, batch)
        d_u = oracle.lower_gradient_y(x, u, batch) + f_u / self.penalty
        return {"dy": oracle.lower_gradient_y(x, m["y"], batch), "du": d_u}


class UpperGradient(Evaluation):
    """grad_x (f_i + penalty g_i)(x, u) - penalty grad_x g_i(x, y)."""

    name = "upper"
    batch = "both"
    reply: ClassVar = {"dx": "x"}

    penalty: Number

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate it."""
        return {"dx": oracle.penalty_directions(m["x"], m["y"], m["u"], batch, self.penalty).x}


@register("f2sa")
@dataclass(frozen=True, kw_only=True)
class F2SA(Algorithm):
    """F2SA, federated: a fully first-order method with a penalty and a double loop.

    It solves the bilevel problem with the global hypergradient of the penalised problem

        min_x min_u F(x, u) + penalty (G(x, u) - min_y G(x, y)),

    which needs no second derivative: it runs on networks that have none, such as those with fused
    attention, and holds one graph at a time. Its solution is within O(1 / penalty) of that of the
    bilevel problem; a penalty that grows (`fb.schedules.Linear`) closes the gap. Choose `MemFBO`
    for fewer rounds: it moves everything at once and takes local steps.

    T = `inner_rounds` times, all at the server's point, with means over the cohort,

        y <- y - lr_y grad_y G(x, y),
        u <- u - lr_u (grad_y G(x, u) + grad_y F(x, u) / penalty),

    and then

        x <- x - lr_x (grad_x F(x, u) + penalty (grad_x G(x, u) - grad_x G(x, y))).

    With lr_u = lr_y, penalty (u - y) follows the solution of [d2yy G] v = - grad_y F as it does in
    methods with second derivatives, and so d_x stays of its size however large the penalty is.

    Cost per iteration: T + 1 rounds and 3 (T + 1) gradients per client. Down: x, y and u in every
    round. Up: two directions like y in each of the T rounds, and one like x.

    Departures from the paper: the paper's text was at hand only in excerpts (the penalised problem
    and its gradient); the loop was recalled, and compared with the code of a public benchmark,
    which takes grad_y F at y instead of u. The paper calls our y z and our u y, and writes its step
    on u as alpha (grad_y F + penalty grad_y G): alpha is lr_u / penalty here, so that a growing
    penalty does not make the step unstable. Both gradients of G in d_x are on one batch: their
    difference is of the order of 1 / penalty, and on two batches its noise would grow with the
    penalty. The paper adds delta_k to the penalty in each iteration: a schedule here. Without its
    momentum variant.

    References:
        Kwon, Kwon, Wright and Nowak, "A Fully First-Order Method for Stochastic Bilevel
        Optimization", ICML 2023: Algorithm 1.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y.
        lr_u: Step size of u.
        penalty: The weight of the lower loss, a number above 0 or a schedule.
        inner_rounds: The number T of steps on y and u.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> growing = fb.schedules.Linear(2.0, increase=1.0)
        >>> method = fb.algorithms.F2SA(lr_x=0.1, lr_y=0.5, lr_u=0.5, penalty=growing)
        >>> result = fb.solve(
        ...     task.problem, task.clients, method, rounds=100, evaluate=task.evaluate, every=100
        ... )
        >>> start, end = (row["hypergradient_norm"] for row in result.history)
        >>> result.status, end < 0.1 * start
        ('completed', True)
    """

    second_derivatives = False

    lr_x: Step = 0.05
    lr_y: Step = 0.2
    lr_u: Step = 0.2
    penalty: Step = 10.0
    inner_rounds: Count = 1

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, and u = y."""
        x, y = problem.start
        return State(x, y, y)

    def iterate(self, s: State, fed: Federation) -> State:
        """Take T steps on y and u, and one on x."""
        x, y, u = s
        lower = LowerGradients(penalty=self.penalty)
        for _ in range(self.inner_rounds):
            r = fed.ask(lower, fed.sample(), x=x, y=y, u=u)
            y = y - self.lr_y * r.mean("dy")
            u = u - self.lr_u * r.mean("du")
        r = fed.ask(UpperGradient(penalty=self.penalty), fed.sample(), x=x, y=y, u=u)
        return State(fed.problem.project(x - self.lr_x * r.mean("dx")), y, u)
