"""AdaFBiO: variance-reduced local hypergradients with adaptive matrices that stay frozen between averages.

F. Huang, "Fast Adaptive Federated Bilevel Optimization", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.localbsg import Begin
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import LocalHypergradients, storm
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Decay, Fraction, Positive, at_least
from fedbilevel.core.tree import Tree, norm, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Steps


class State(NamedTuple):
    """x, y, their momenta u, v, and the running squares a of u and norm b of v; `begun` once u, v hold a gradient."""

    x: Tree
    y: Tree
    u: Tree
    v: Tree
    a: Tree
    b: Tensor
    begun: bool = False


class Point(NamedTuple):
    x: Tree
    y: Tree
    u: Tree
    v: Tree


class Local(NamedTuple):
    here: Point
    start: Point
    a: Tree
    b: Tensor


class Descend(LocalHypergradients):
    """tau_i steps along A^-1 u and B^-1 v, each followed by STORM's renewal of u and v on one batch."""

    name = "descend"
    reply: ClassVar = {"dx": "x", "dy": "y", "du": "x", "dv": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    momentum_weight: Fraction
    norm_floor: Positive

    def start(self, m: Message) -> Local:
        sent = Point(m.x, m.y, m.u, m.v)
        return Local(sent, sent, m.a, m.b)

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        x, y, u, v = c.here
        old = self.local_directions(oracle, x, y, batch)
        x = oracle.project_x(
            x - self.lr_x * u.map(lambda ui, ai: ui / (ai.sqrt() + self.norm_floor), c.a)
        )
        y = y - self.lr_y * (v / (c.b + self.norm_floor))
        new = self.local_directions(oracle, x, y, batch)
        u, v = storm(new, (u, v), old, self.momentum_weight)
        return c._replace(here=Point(x, y, u, v))

    def finish(self, c: Local) -> dict[str, Any]:
        return {
            f"d{name}": here - start
            for name, here, start in zip("xyuv", c.here, c.start, strict=True)
        }


@register("adafbio")
@dataclass(frozen=True, kw_only=True)
class AdaFBiO(Algorithm):
    """AdaFBiO, one round for tau_i local steps.

    Server, before each round:   a <- varrho a + (1 - varrho) u * u,   b <- varrho b + (1 - varrho) ||v||,
    A = diag(sqrt(a) + floor),   B = b + floor;   varrho = `norm_decay`, floor = `norm_floor`. Every client, tau_i
    times:

        x <- x - lr_x A^-1 u,   y <- y - lr_y B^-1 v,   u <- d_x(new) + (1 - w) (u - d_x(old)),   v alike with d_y,

    d_x = grad_x f_i - d2xy g_i p_i with the client's own Neumann estimate p_i (see `LocalBSGM`), d_y = grad_y g_i, both
    evaluations on the same batches. Then x, y, u, v are averaged. A and B are the same for all clients until the next
    average, or the average would mean nothing. Hypergradients are local: biased on heterogeneous clients.

    Departures from print (recalled, not read: the paper was not at hand): the paper's decreasing eta_t is a schedule of
    lr_x and lr_y; b is of norms, not of coordinates; momenta begin at the mean full-batch gradients, in one more round.
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
        x, y = problem.start
        return State(x, y, zeros_like(x), zeros_like(y), zeros_like(x), norm(zeros_like(y)))

    def iterate(self, s: State, fed: Federation) -> State:
        S, varrho = fed.sample(), self.norm_decay
        if not s.begun:
            r = fed.ask(self.begin(), S, x=s.x, y=s.y)
            s = s._replace(u=r.mean("u"), v=r.mean("v"), begun=True)
        a = varrho * s.a + (1 - varrho) * s.u.map(torch.square)
        b = varrho * s.b + (1 - varrho) * norm(s.v)
        r = fed.ask(self.descend(), S, x=s.x, y=s.y, u=s.u, v=s.v, a=a, b=b)
        x, y = fed.problem.project(s.x + r.mean("dx")), s.y + r.mean("dy")
        return State(x, y, s.u + r.mean("du"), s.v + r.mean("dv"), a, b, begun=True)

    def begin(self) -> Begin:
        return Begin(
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            truncation=self.truncation,
        )

    def descend(self) -> Descend:
        return Descend(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            momentum_weight=self.momentum_weight,
            norm_floor=self.norm_floor,
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            truncation=self.truncation,
        )
