"""ASFBO and LA-ASFBO: one loop, with local momentum and adaptive server steps.

"Communication-Efficient Adaptive Federated Bi-level Optimization with Data and System Heterogeneity", under review.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import storm
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Bounds, Decay, Fraction, NonNegative, Positive
from fedbilevel.core.tree import Tree, norm, project, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class State(NamedTuple):
    """x, y, z and the running norms s of their directions."""

    x: Tree
    y: Tree
    z: Tree
    sx: float = 0.0
    sy: float = 0.0
    sz: float = 0.0


class Point(NamedTuple):
    x: Tree
    y: Tree
    z: Tree


class Local(NamedTuple):
    """Where a client is, where it was a step ago, its momenta, their sums, and the number of its steps."""

    now: Point
    before: Point
    m: Directions
    q: Directions
    steps: Tensor


class Descend(Phase):
    """tau_i momentum steps from the broadcast point (eq. 15 to 22); replies with the momenta's means h_i (eq. 26)."""

    name = "descend"
    batch = "both"
    reply: ClassVar = {"hx": "x", "hy": "y", "hz": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    lr_z: Number
    momentum_weight: Fraction
    damping: NonNegative = 0.0

    def start(self, msg: Message) -> Local:
        here = Point(msg.x, msg.y, msg.z)
        zeros = Directions(*map(zeros_like, here))
        return Local(here, here, zeros, zeros, msg.steps)

    def first(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """m_0 = d at the broadcast point (eq. 16)."""
        return self.move(c, oracle.directions(*c.now, batch, self.damping), oracle)

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """m_k = beta d(new point) + (1 - beta) m_{k-1} (eq. 20)."""
        beta = self.momentum_weight
        d = oracle.directions(*c.now, batch, self.damping)
        return self.move(
            c,
            Directions(*(beta * new + (1 - beta) * m for new, m in zip(d, c.m, strict=True))),
            oracle,
        )

    def move(self, c: Local, m: Directions, oracle: Oracle) -> Local:
        """var <- var - lr_var m (eq. 19), q <- q + m (eq. 22)."""
        x, y, z = c.now
        now = Point(
            x=oracle.project_x(x - self.lr_x * m.x),
            y=y - self.lr_y * m.y,
            z=z - self.lr_z * m.z,
        )
        return Local(
            now=now,
            before=c.now,
            m=m,
            q=Directions(*(q + m for q, m in zip(c.q, m, strict=True))),
            steps=c.steps,
        )

    def finish(self, c: Local) -> dict[str, Any]:
        return {"hx": c.q.x / c.steps, "hy": c.q.y / c.steps, "hz": c.q.z / c.steps}


@register("asfbo")
@dataclass(frozen=True, kw_only=True)
class ASFBO(Algorithm):
    """ASFBO (Algorithm 1, eq. 15 to 30).

    Client i starts its momenta at the directions d of the broadcast point and, for k = 0 .. tau_i - 1, moves
    var <- var - lr_var m_k and renews   m_{k+1} = beta d(new point, new batch) + (1 - beta) m_k,   beta =
    `momentum_weight`. It sends h_i = (1/tau_i) sum_k m_k. Server, for each of x, y, z, with h = sum_C p~_i h_i and
    rho = sum_C p~_i tau_i:

        s <- varrho s + (1 - varrho) ||h||,   gamma = clip(server_lr / (s + floor), bounds),   var <- var - rho gamma h,

    and z is projected on the ball of `radius`; varrho = `norm_decay`, floor = `norm_floor`.

    Departures from print: ||a_i||_1 is tau_i (Lemma 1 gives coefficients that sum to it for every beta); the momentum
    after the last step is never used and not computed, so a client evaluates d tau_i times; the bounds of eq. 88, an
    assumption there, are enforced by clipping; "AdaGrad-Norm" is what the text says, an average of norms is what it
    prints and what this is; rho is estimated from the cohort, as in `ShroFBO`. Defaults are the paper's.
    """

    local_phase: ClassVar[type[Descend]] = Descend

    lr_x: Step = 0.01
    lr_y: Step = 0.03
    lr_z: Step = 0.02
    server_lr_x: Step = 0.03
    server_lr_y: Step = 0.03
    server_lr_z: Step = 0.05
    server_lr_x_bounds: Bounds = (0.01, 0.1)
    server_lr_y_bounds: Bounds = (0.03, 0.3)
    server_lr_z_bounds: Bounds = (0.02, 0.2)
    momentum_weight: Fraction = 0.25
    norm_decay: Decay = 0.75
    norm_floor: Positive = 0.001
    radius: Positive = 1000.0
    damping: NonNegative = 0.0

    def init(self, problem: Problem) -> State:
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def descend(self) -> Descend:
        return self.local_phase(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            lr_z=self.lr_z,
            momentum_weight=self.momentum_weight,
            damping=self.damping,
        )

    def iterate(self, s: State, fed: Federation) -> State:
        r = fed.ask(self.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        rho, hx, hy, hz = r.mean("steps"), r.mean("hx"), r.mean("hy"), r.mean("hz")
        sx, sy, sz = (
            self.running_norm(s.sx, hx),
            self.running_norm(s.sy, hy),
            self.running_norm(s.sz, hz),
        )
        z = s.z - rho * self.adapted(self.server_lr_z, sz, self.server_lr_z_bounds) * hz
        fed.record(projection_active=norm(z) > self.radius)
        return State(
            x=fed.problem.project(
                s.x - rho * self.adapted(self.server_lr_x, sx, self.server_lr_x_bounds) * hx
            ),
            y=s.y - rho * self.adapted(self.server_lr_y, sy, self.server_lr_y_bounds) * hy,
            z=project(z, self.radius),
            sx=sx,
            sy=sy,
            sz=sz,
        )

    def running_norm(self, s: float, h: Tree) -> float:
        """eq. 27."""
        return self.norm_decay * s + (1 - self.norm_decay) * float(norm(h))

    def adapted(self, lr: Step, s: float, bounds: tuple[float, float]) -> float:
        """eq. 28, clipped to its bounds (eq. 88)."""
        low, high = bounds
        return float(min(max(lr / (s + self.norm_floor), low), high))


class DescendStorm(Descend):
    """As `Descend`, with momentum-based variance reduction."""

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """m_k = d(new point) + (1 - beta) (m_{k-1} - d(old point)), both on one batch (eq. 21)."""
        new, old = (oracle.directions(*point, batch, self.damping) for point in (c.now, c.before))
        return self.move(c, Directions(*storm(new, c.m, old, self.momentum_weight)), oracle)


@register("la-asfbo")
@dataclass(frozen=True, kw_only=True)
class LAASFBO(ASFBO):
    """LA-ASFBO: ASFBO with the STORM momentum (eq. 21)

        m_{k+1} = d(new point) + (1 - beta) (m_k - d(old point)),   both on the new batch.

    A client evaluates d 2 tau_i - 1 times. Departures from print: those of `ASFBO`; the l1 norm of STORM's coefficients
    is not tau_i, but their signed sum is, and h_i is normalised by that.
    """

    local_phase: ClassVar[type[Descend]] = DescendStorm
