"""AdaFBiO: variance-reduced local hypergradients with scales that adapt once per round.

F. Huang, "Fast Adaptive Federated Bilevel Optimization", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.localbsg import Begin, Point, displacements
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import storm
from fedbilevel.algorithms.shared_hypergradients import TruncatedHypergradient
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Decay, Fraction, Positive, at_least
from fedbilevel.core.tree import Tree, norm, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Steps


class State(NamedTuple):
    """The server's variables.

    x and y, their momenta u and v, the running mean a of u * u and b of ||v||; `begun` once the
    momenta hold gradients.
    """

    x: Tree
    y: Tree
    u: Tree
    v: Tree
    a: Tree
    b: Tensor
    begun: bool = False


class Local(NamedTuple):
    """Where a client is, where it started, and the server's scales a and b."""

    now: Point
    start: Point
    a: Tree
    b: Tensor


class Descend(TruncatedHypergradient):
    """tau_i steps along A^-1 u and B^-1 v, each of which then renews u and v on one batch."""

    name = "descend"
    reply: ClassVar = {"dx": "x", "dy": "y", "du": "x", "dv": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    momentum_weight: Fraction
    norm_floor: Positive

    def start(self, m: Message) -> Local:
        """Start at the server's point."""
        start = Point(m.x, m.y, m.u, m.v)
        return Local(start, start, m.a, m.b)

    def step(self, c: Local, oracle: Oracle, batches: Sequence[Batch]) -> Local:
        """Move along the scaled momenta, then renew the momenta."""
        x, y, u, v = c.now
        old = self.local_directions(oracle, x, y, batches)
        scaled = u.map(lambda ui, ai: ui / (ai.sqrt() + self.norm_floor), c.a)
        x = oracle.project_x(x - self.lr_x * scaled)
        del scaled  # it would count towards the client's peak memory below
        y = y - self.lr_y * (v / (c.b + self.norm_floor))
        new = self.local_directions(oracle, x, y, batches)
        u, v = storm(new, (u, v), old, self.momentum_weight)
        return c._replace(now=Point(x, y, u, v))

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the displacements."""
        return displacements(c.now, c.start)


@register("adafbio")
@dataclass(frozen=True, kw_only=True)
class AdaFBiO(Algorithm):
    """AdaFBiO: `LocalBSGVR` with adaptive steps at both levels, one round per iteration.

    Steps are divided by running scales of the momenta, one per coordinate of x and one for all of
    y: choose it over `LocalBSGVR` where the gradients of different coordinates differ in size, or
    change in size during a run. The scales belong to the server and stay fixed between rounds:
    with its own scales each client would move in another metric, and the average would have no
    meaning. Like `LocalBSGM` it averages local hypergradients and is biased on heterogeneous
    clients; `ASFBO` has adaptive steps without that bias.

    With varrho = `norm_decay` and floor = `norm_floor` the server first computes

        a <- varrho a + (1 - varrho) u * u,        A = diag(sqrt(a) + floor),
        b <- varrho b + (1 - varrho) ||v||,        B = b + floor.

    With w = `momentum_weight`, every client then repeats tau_i times

        x <- x - lr_x A^-1 u,      u <- d_x(new; b) + (1 - w) (u - d_x(old; b)),
        y <- y - lr_y B^-1 v,      v <- d_y(new; b) + (1 - w) (v - d_y(old; b)),

    d_x = grad_x f_i - d2xy g_i p_i with the Neumann estimate p_i of `LocalBSGM`, d_y = grad_y g_i,
    both evaluations on the same batches b. The server averages x, y, u and v.

    Cost per iteration: one round, one more in the first iteration for the first momenta. Gradients
    per client: 4J + 6 per local step, J = `neumann_steps`, and 2J + 3 once for the first momenta.
    Down: x, y, u, v, a and the number b. Up: the displacements of x, y, u and v.

    Departures from the paper: it was not at hand, so the method is written from memory. Its
    decreasing eta_t is a schedule of lr_x and lr_y. The scale b is of norms, not of coordinates.
    Momenta start at the mean full-batch gradients, which takes a round.

    References:
        F. Huang, "Fast Adaptive Federated Bilevel Optimization", 2022.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        momentum_weight: The weight w with which a momentum forgets, in (0, 1]; 1 is no momentum.
        norm_decay: The decay varrho of the scales a and b, in [0, 1).
        norm_floor: The number added to both scales, so that a vanishing momentum does not blow up
            the step.
        neumann_lr: The step lambda of the Neumann estimate.
        neumann_steps: The number J of Neumann terms, at least 2.
        truncation: "random" for a product of random length, "sum" for its expectation.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4, heterogeneity=0.0)
        >>> method = fb.algorithms.AdaFBiO(lr_x=0.1, lr_y=0.2, neumann_lr=1.0, norm_floor=1.0)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=40)
        >>> result.status
        'completed'
        >>> bool(task.phi(result.x) < task.phi(task.problem.x))
        True
    """

    solves = "local"

    lr_x: Step = 0.01
    lr_y: Step = 0.02
    momentum_weight: Fraction = 0.25
    norm_decay: Decay = 0.9
    norm_floor: Positive = 0.01
    neumann_lr: Positive = 0.1
    neumann_steps: Annotated[int, at_least(2)] = 5
    truncation: Literal["random", "sum"] = "random"

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y; momenta and scales are 0."""
        x, y = problem.start
        return State(x, y, zeros_like(x), zeros_like(y), zeros_like(x), norm(zeros_like(y)))

    def iterate(self, s: State, fed: Federation) -> State:
        """Update the scales, then run one round of local steps."""
        S = fed.sample()
        varrho = self.norm_decay
        if not s.begun:
            r = fed.ask(self.begin(), S, x=s.x, y=s.y)
            s = s._replace(u=r.mean("u"), v=r.mean("v"), begun=True)
        a = varrho * s.a + (1 - varrho) * s.u.map(torch.square)
        b = varrho * s.b + (1 - varrho) * norm(s.v)
        r = fed.ask(self.descend(), S, x=s.x, y=s.y, u=s.u, v=s.v, a=a, b=b)
        x = fed.problem.project(s.x + r.mean("dx"))
        y = s.y + r.mean("dy")
        return State(x, y, s.u + r.mean("du"), s.v + r.mean("dv"), a, b, begun=True)

    def begin(self) -> Begin:
        """Return the phase that computes the first momenta."""
        return Begin(
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            truncation=self.truncation,
        )

    def descend(self) -> Descend:
        """Return the phase with the local steps."""
        return Descend(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            momentum_weight=self.momentum_weight,
            norm_floor=self.norm_floor,
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            truncation=self.truncation,
        )
