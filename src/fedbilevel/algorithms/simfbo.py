"""SimFBO and ShroFBO: one loop, one communication round an iteration.

Yang, Xiao and Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel Learning", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import NonNegative, Positive
from fedbilevel.core.tree import Tree, norm, project, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class State(NamedTuple):
    x: Tree
    y: Tree
    z: Tree


class Local(NamedTuple):
    """A client's copies, the sums of its directions, and the number of its steps."""

    x: Tree
    y: Tree
    z: Tree
    q: Directions
    steps: Tensor


class Descend(Phase):
    """tau_i steps on x, y and z at once (eq. 3); replies with the sums of the directions (eq. 4)."""

    name = "descend"
    batch = "both"
    reply: ClassVar = {"qx": "x", "qy": "y", "qz": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    lr_z: Number
    damping: NonNegative = 0.0
    independent_batches: bool = False

    @property
    def draws(self) -> int:
        return 3 if self.independent_batches else 1

    def start(self, m: Message) -> Local:
        return Local(
            m.x, m.y, m.z, Directions(zeros_like(m.x), zeros_like(m.y), zeros_like(m.z)), m.steps
        )

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        d = self.directions(c, oracle, batch)
        return Local(
            x=oracle.project_x(c.x - self.lr_x * d.x),
            y=c.y - self.lr_y * d.y,
            z=c.z - self.lr_z * d.z,
            q=Directions(c.q.x + d.x, c.q.y + d.y, c.q.z + d.z),
            steps=c.steps,
        )

    def directions(self, c: Local, oracle: Oracle, batch: Any) -> Directions:
        if not self.independent_batches:
            return oracle.directions(c.x, c.y, c.z, batch, self.damping)
        for_y, for_z, for_x = batch
        d_x = oracle.upper_gradient_x(c.x, c.y, for_x) - oracle.cross_product(c.x, c.y, c.z, for_x)
        d_y = oracle.lower_gradient_y(c.x, c.y, for_y)
        hessian_z = oracle.hessian_product(c.x, c.y, c.z, for_z) + self.damping * c.z
        return Directions(d_x, d_y, hessian_z - oracle.upper_gradient_y(c.x, c.y, for_z))

    def finish(self, c: Local) -> dict[str, Any]:
        return {"qx": c.q.x, "qy": c.q.y, "qz": c.q.z}


@register("simfbo")
@dataclass(frozen=True, kw_only=True)
class SimFBO(Algorithm):
    """SimFBO (Algorithm 1, eq. 3 to 5).

    Client i in C takes tau_i steps   var <- var - lr_var d_var   on its copies of x, y and z, with

        d_y = grad_y g_i,   d_z = d2yy g_i z - grad_y f_i,   d_x = grad_x f_i - d2xy g_i z,

    and sends the sums q_i of its directions. Server, with p~_i = (n / |C|) p_i and q = sum_C p~_i q_i:

        x <- x - server_lr_x q_x,   y <- y - server_lr_y q_y,   z <- P_r(z - server_lr_z q_z).

    With unequal tau_i its fixed point is that of the problem re-weighted by tau_i (`ShroFBO` mends this).

    Departures from print: the coefficients a_i of the local steps are 1; one training and one validation batch serve
    all three directions, which is one fused evaluation instead of five (`independent_batches=True` draws three pairs,
    as printed, at 7 gradients a step instead of 3); r = L_f / mu is unknown in practice and a setting (the metric
    `projection_active` tells how often it acts); `damping` adds a multiple of the identity to the Hessian of z's
    system. Defaults are the paper's for MNIST.
    """

    local_phase: ClassVar[type[Descend]] = Descend

    lr_x: Step = 0.05
    lr_y: Step = 0.2
    lr_z: Step = 0.1
    server_lr_x: Step = 0.05
    server_lr_y: Step = 0.2
    server_lr_z: Step = 0.1
    radius: Positive = 1000.0
    damping: NonNegative = 0.0
    independent_batches: bool = False

    def init(self, problem: Problem) -> State:
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def descend(self) -> Descend:
        return self.local_phase(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            lr_z=self.lr_z,
            damping=self.damping,
            independent_batches=self.independent_batches,
        )

    def iterate(self, s: State, fed: Federation) -> State:
        r = fed.ask(self.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        z = s.z - self.server_lr_z * r.mean("qz")
        fed.record(projection_active=norm(z) > self.radius)
        return State(
            x=fed.problem.project(s.x - self.server_lr_x * r.mean("qx")),
            y=s.y - self.server_lr_y * r.mean("qy"),
            z=project(z, self.radius),
        )


class DescendMean(Descend):
    """As `Descend`; replies with the means h_i = q_i / tau_i (eq. 6)."""

    reply: ClassVar = {"hx": "x", "hy": "y", "hz": "y"}

    def finish(self, c: Local) -> dict[str, Any]:
        return {"hx": c.q.x / c.steps, "hy": c.q.y / c.steps, "hz": c.q.z / c.steps}


@register("shrofbo")
@dataclass(frozen=True, kw_only=True)
class ShroFBO(SimFBO):
    """ShroFBO (Algorithm 1, eq. 6 to 8): SimFBO that keeps the weights of the problem under unequal tau_i.

    Clients send h_i = q_i / tau_i. Server, with h = sum_C p~_i h_i and rho = sum_C p~_i tau_i:

        x <- x - rho server_lr_x h_x,   y <- y - rho server_lr_y h_y,   z <- P_r(z - rho server_lr_z h_z).

    Departures from print: those of `SimFBO`; rho is defined over all n clients, but the server hears only from C, so it
    is estimated from C.
    """

    local_phase: ClassVar[type[Descend]] = DescendMean

    def iterate(self, s: State, fed: Federation) -> State:
        r = fed.ask(self.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        rho = r.mean("steps")
        z = s.z - rho * self.server_lr_z * r.mean("hz")
        fed.record(projection_active=norm(z) > self.radius)
        return State(
            x=fed.problem.project(s.x - rho * self.server_lr_x * r.mean("hx")),
            y=s.y - rho * self.server_lr_y * r.mean("hy"),
            z=project(z, self.radius),
        )
