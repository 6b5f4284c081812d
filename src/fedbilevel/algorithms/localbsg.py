"""LocalBSGM and LocalBSGVR: momentum on local hypergradients, averaged now and then.

Gao, "On the Convergence of Momentum-Based Algorithms for Federated Bilevel Optimization Problems", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import LocalHypergradients, storm
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Fraction, Positive, at_least
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Steps


class State(NamedTuple):
    """x, y and their momenta u, v; `begun` once the momenta hold a gradient."""

    x: Tree
    y: Tree
    u: Tree
    v: Tree
    begun: bool = False


class Point(NamedTuple):
    x: Tree
    y: Tree
    u: Tree
    v: Tree


class Local(NamedTuple):
    here: Point
    start: Point


class Begin(LocalHypergradients):
    """The first momenta: local hypergradient and lower gradient at the start, on every sample."""

    name = "begin"
    reply: ClassVar = {"u": "x", "v": "y"}

    full: bool = True

    def start(self, m: Message) -> Any:
        return m.x, m.y

    def step(self, at: Any, oracle: Oracle, batch: Any) -> Any:
        x, y = at
        return self.local_directions(oracle, x, y, batch)

    def finish(self, d: Any) -> dict[str, Any]:
        return dict(zip(("u", "v"), d, strict=True))


class Descend(LocalHypergradients):
    """tau_i steps: u <- (1 - w) u + w d_x, v <- (1 - w) v + w d_y, then x <- x - lr_x u, y <- y - lr_y v."""

    name = "descend"
    reply: ClassVar = {"dx": "x", "dy": "y", "du": "x", "dv": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    momentum_weight: Fraction

    def start(self, m: Message) -> Local:
        sent = Point(m.x, m.y, m.u, m.v)
        return Local(sent, sent)

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        x, y, u, v = c.here
        w = self.momentum_weight
        d_x, d_y = self.local_directions(oracle, x, y, batch)
        u = (1 - w) * u + w * d_x
        v = (1 - w) * v + w * d_y
        return c._replace(here=Point(oracle.project_x(x - self.lr_x * u), y - self.lr_y * v, u, v))

    def finish(self, c: Local) -> dict[str, Any]:
        return {
            f"d{name}": here - start
            for name, here, start in zip("xyuv", c.here, c.start, strict=True)
        }


@register("localbsgm")
@dataclass(frozen=True, kw_only=True)
class LocalBSGM(Algorithm):
    """LocalBSGM, one round for tau_i local steps.

    Every client, w = `momentum_weight`, lambda = `neumann_lr`, J = `neumann_steps`:

        u <- (1 - w) u + w (grad_x f_i - d2xy g_i p_i),   v <- (1 - w) v + w grad_y g_i,
        x <- x - lr_x u,   y <- y - lr_y v,

    with p_i = lambda J prod_{k <= J'} (I - lambda d2yy g_i) grad_y f_i, J' uniform on {0 .. J-1}, a fresh batch a
    factor (`truncation="random"`), or its expectation, the sum of J terms (`truncation="sum"`). Then x, y, u, v are
    averaged. Hypergradients are local: on heterogeneous clients it solves another problem (the paper assumes that they
    are alike).

    Departures from print (recalled, not read: the paper was not at hand): the products of step sizes and constants are
    one number each; momenta begin at the mean full-batch gradients, which takes one more round; with partial
    participation the server keeps the averages and adds mean displacements.
    """

    solves = "local"
    local_phase: ClassVar[type[Descend]] = Descend

    lr_x: Step = 0.02
    lr_y: Step = 0.05
    momentum_weight: Fraction = 0.25
    neumann_lr: Positive = 0.1
    neumann_steps: Annotated[int, at_least(2)] = 5
    truncation: Literal["random", "sum"] = "random"

    def init(self, problem: Problem) -> State:
        x, y = problem.start
        return State(x, y, zeros_like(x), zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        S = fed.sample()
        if not s.begun:
            r = fed.ask(self.begin(), S, x=s.x, y=s.y)
            s = s._replace(u=r.mean("u"), v=r.mean("v"), begun=True)
        r = fed.ask(self.descend(), S, x=s.x, y=s.y, u=s.u, v=s.v)
        x, y = fed.problem.project(s.x + r.mean("dx")), s.y + r.mean("dy")
        return State(x, y, s.u + r.mean("du"), s.v + r.mean("dv"), begun=True)

    def begin(self) -> Begin:
        return Begin(
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            truncation=self.truncation,
        )

    def descend(self) -> Descend:
        return self.local_phase(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            momentum_weight=self.momentum_weight,
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            truncation=self.truncation,
        )


class DescendStorm(Descend):
    """tau_i steps: x <- x - lr_x u, y <- y - lr_y v, then u <- d_x(new) + (1 - w) (u - d_x(old)), v alike."""

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        x, y, u, v = c.here
        old = self.local_directions(oracle, x, y, batch)
        x = oracle.project_x(x - self.lr_x * u)
        y = y - self.lr_y * v
        new = self.local_directions(oracle, x, y, batch)
        u, v = storm(new, (u, v), old, self.momentum_weight)
        return c._replace(here=Point(x, y, u, v))


@register("localbsgvr")
@dataclass(frozen=True, kw_only=True)
class LocalBSGVR(LocalBSGM):
    """LocalBSGVR: LocalBSGM with variance-reduced momenta.

        x <- x - lr_x u,   y <- y - lr_y v,   u <- d_x(new; B) + (1 - w) (u - d_x(old; B)),   v alike with d_y,

    both evaluations on the same batches B and with the same random truncation. Departures as in `LocalBSGM`.
    """

    local_phase: ClassVar[type[Descend]] = DescendStorm
