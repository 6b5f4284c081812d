"""AFL: anarchic federated learning, with local hypergradients as its bilevel form.

Yang, Zhang, Khanduri and Liu, "Anarchic Federated Learning", ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.afbo import Latest
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import own_hypergradient
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Phase, Steps

NOTHING: Any = ({}, 0.0, {})


class State(NamedTuple):
    """`latest`: what clients last said (see `afbo`), as a plain tuple; `idle`: who waits for a task."""

    x: Tree
    y: Tree
    latest: Any = NOTHING
    idle: Any = ()
    begun: bool = False


class Local(NamedTuple):
    x: Tree
    y: Tree
    qx: Tree
    qy: Tree
    steps: Tensor


class Work(Phase):
    """K_i steps on x and y; replies with the means of the directions."""

    name = "work"
    reply: ClassVar = {"hx": "x", "hy": "y"}
    summed = False

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    neumann_lr: Positive
    neumann_steps: Count

    def start(self, m: Message) -> Local:
        return Local(m.x, m.y, zeros_like(m.x), zeros_like(m.y), m.steps)

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        terms = self.neumann_steps + 1
        d_x = own_hypergradient(oracle, c.x, c.y, batch, terms, self.neumann_lr)
        d_y = oracle.lower_gradient_y(c.x, c.y, batch)
        return Local(
            x=oracle.project_x(c.x - self.lr_x * d_x),
            y=c.y - self.lr_y * d_y,
            qx=c.qx + d_x,
            qy=c.qy + d_y,
            steps=c.steps,
        )

    def finish(self, c: Local) -> dict[str, Any]:
        return {"hx": c.qx / c.steps, "hy": c.qy / c.steps}


@register("afl")
@dataclass(frozen=True, kw_only=True)
class AFL(Algorithm):
    """AFL, one round a number of arrivals (the environment's participation).

    Client i takes K_i local steps along   d_x = grad_x f_i - d2xy g_i p_i,   d_y = grad_y g_i,   with p_i its own
    Neumann sum of `neumann_steps` + 1 terms, and sends the means h_i of the directions. The server moves
    x <- x - server_lr_x h_x,   y <- y - server_lr_y h_y   with h the mean of

        what all clients last said (`variant="cs"`, AFA-CS),   or what has just arrived (`variant="cd"`, AFA-CD).

    AFL is a single-level method; this is how AFBO's paper makes it a bilevel one: hypergradients are local, so that it
    solves another problem when clients differ, and with "cd" the fast ones count for more.

    Departures from print (recalled, not read: the paper was not at hand): h_i is the mean direction, so that server
    steps do not depend on local ones; means go over the clients heard so far.
    """

    solves = "local"

    lr_x: Step = 0.01
    lr_y: Step = 0.05
    server_lr_x: Step = 0.05
    server_lr_y: Step = 0.1
    neumann_lr: Positive = 0.1
    neumann_steps: Count = 5
    variant: Literal["cs", "cd"] = "cs"

    def init(self, problem: Problem) -> State:
        return State(*problem.start)

    def iterate(self, s: State, fed: Federation) -> State:
        work = Work(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
        )
        fed.post(work, s.idle if s.begun else range(len(fed)), x=s.x, y=s.y)
        r = fed.collect()
        latest = Latest(*s.latest).renew(r, fed.iteration)
        s = s._replace(
            latest=tuple(latest) if self.variant == "cs" else NOTHING, idle=r.idle, begun=True
        )
        if not latest.heard:
            return s
        x, y = (
            s.x - self.server_lr_x * latest.mean("hx", s.x),
            s.y - self.server_lr_y * latest.mean("hy", s.y),
        )
        return s._replace(x=fed.problem.project(x), y=y)
