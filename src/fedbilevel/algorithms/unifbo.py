"""UniFBO: one loop, few rounds. A method of our own, made of what the others share; docs/unifbo.md has its ablation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.afbo import Latest
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_submodels import cut
from fedbilevel.algorithms.simfbo import Local
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Fraction, NonNegative, Positive
from fedbilevel.core.tree import Tree, norm, project, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Message, Phase, Steps

FLOOR = 1e-6  # of the mean eigenvalue, added to all: what is far below it is rounding
Policy = Literal["static", "rolling", "importance"]
TINY = torch.finfo(torch.float64).tiny  # where all directions were 0 the step is 0


class State(NamedTuple):
    """x, y, z, the momenta m of their directions, the sums s of the directions' squares; without a barrier also what
    clients last said, and who waits for a task."""

    x: Tree
    y: Tree
    z: Tree
    m: tuple[Tree, ...]
    s: tuple[Tree, ...]
    latest: Any = ({}, 0.0, {})
    idle: Any = ()


class Look(Phase):
    """d on tau_i batches at the point that was sent; replies with the means h_i."""

    name = "look"
    reply: ClassVar = {"hx": "x", "hy": "y", "hz": "y"}

    steps: Steps = "local"
    damping: NonNegative = 0.0

    def start(self, m: Message) -> Local:
        zeros = Directions(zeros_like(m.x), zeros_like(m.y), zeros_like(m.z))
        return Local(m.x, m.y, m.z, zeros, m.steps)

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        d = oracle.directions(c.x, c.y, c.z, batch, self.damping)
        return c._replace(q=Directions(c.q.x + d.x, c.q.y + d.y, c.q.z + d.z))

    def finish(self, c: Local) -> dict[str, Any]:
        return {"hx": c.q.x / c.steps, "hy": c.q.y / c.steps, "hz": c.q.z / c.steps}


class LookAlone(Look):
    """As `Look`, for a server that remembers who said what."""

    summed = False


@register("unifbo")
@dataclass(frozen=True, kw_only=True)
class UniFBO(Algorithm):
    """UniFBO: SimFBO's loop, ShroFBO's means, ASFBO's momentum, and server steps that are whitened.

    Client i in C sends h_i, the mean over tau_i batches (its local steps) of SimFBO's directions at x, y, z,

        d_y = grad_y g_i,   d_z = d2yy g_i z - grad_y f_i,   d_x = grad_x f_i - d2xy g_i z.

    Server, with h = sum_C p~_i h_i and w = `momentum_weight`, for every tensor of x, y and z, as a matrix with no more
    rows than columns (a vector is one row):

        m <- (1 - w) m + w h,   S <- S + h h^T,   var <- var - lr_var sqrt(columns) S^-1/2 m,   z <- P_r(z).

    S^-1/2 lets all directions of a tensor move alike, where a step size for each coordinate (Adam) follows the few that
    dominate: that is what saves rounds. For a vector it is AdaGrad-Norm, which ASFBO's text names. The first step moves
    the entries of a tensor by w lr_var in root mean square, whatever the scale of the losses, and steps shorten as the
    squares add up: no server step has to fit a curvature.

    Clients do not move: they would drift apart, and with these server steps moving gains nothing where they differ. So
    h is unbiased, whatever the tau_i, and the solution is the fixed point. Where x is projected all of x has one step
    size, sqrt(numel / trace S), because the projection of any other step can leave the solution. The server decomposes
    one matrix a tensor and round, of the size of its smaller side. `damping` and `radius` are those of `SimFBO`.

    Clients that cannot hold the model get the submodels of `policy`, and h is in every coordinate the mean over those
    who hold it (RABO). With `barrier=False` everyone works on the last point it was sent, and h is the mean over all
    clients of what they last said (AFBO), however old: every client counts once, whatever its speed. Steps are then
    divided by sqrt(1 + the mean age of what they said, in iterations), and models are whole.
    """

    submodels = True

    lr_x: Step = 0.02
    lr_y: Step = 0.02
    lr_z: Step = 0.02
    momentum_weight: Fraction = 0.5
    radius: Positive = 1000.0
    damping: NonNegative = 0.0
    policy: Policy = "importance"
    barrier: bool = True

    def check(self, problem: Problem, environment: Environment) -> None:
        if environment.submodels and not self.barrier:
            raise ValueError(
                f"barrier is False and capacity is {environment.capacity}; without a barrier models are whole: "
                "barrier must be True, or capacity 1"
            )
        super().check(problem, environment)

    def init(self, problem: Problem) -> State:
        x, y = problem.start
        m = zeros_like(x), zeros_like(y), zeros_like(y)
        return State(x, y, zeros_like(y), m, tuple(zero.map(square) for zero in m))

    def iterate(self, s: State, fed: Federation) -> State:
        s, h, pace = self.ask(s, fed) if self.barrier else self.collect(s, fed)
        w = self.momentum_weight
        mx, my, mz = m = tuple((1 - w) * old + w * new for old, new in zip(s.m, h, strict=True))
        sx, sy, sz = S = tuple(old + new.map(square) for old, new in zip(s.s, h, strict=True))
        dx = mx.map(whitened, sx) if fed.problem.project_x is None else scaled(mx, sx)
        z = s.z - pace * self.lr_z * mz.map(whitened, sz)
        fed.record(projection_active=norm(z) > self.radius)
        return s._replace(
            x=fed.problem.project(s.x - pace * self.lr_x * dx),
            y=s.y - pace * self.lr_y * my.map(whitened, sy),
            z=project(z, self.radius),
            m=m,
            s=S,
        )

    def ask(self, s: State, fed: Federation) -> tuple[State, tuple[Tree, ...], float]:
        C = fed.sample()
        parts = cut(fed, C, s.x, s.y, self.policy)
        r = fed.ask(Look(damping=self.damping), C, submodels=parts, x=s.x, y=s.y, z=s.z)
        mean = r.coverage_mean if any(parts) else r.mean
        return s, (mean("hx"), mean("hy"), mean("hz")), 1.0

    def collect(self, s: State, fed: Federation) -> tuple[State, tuple[Tree, ...], float]:
        fed.post(LookAlone(damping=self.damping), s.idle or range(len(fed)), x=s.x, y=s.y, z=s.z)
        r, now = fed.collect(), fed.iteration
        latest = Latest(*s.latest).renew(r, now)
        s = s._replace(latest=tuple(latest), idle=r.idle)
        if not latest.heard:
            return s, (zeros_like(s.x), zeros_like(s.y), zeros_like(s.z)), 0.0
        h = latest.mean("hx", s.x), latest.mean("hy", s.y), latest.mean("hz", s.z)
        return s, h, (1 + latest.age(now)) ** -0.5


def wide(tensor: Tensor) -> Tensor:
    """A tensor as a matrix with no more rows than columns."""
    matrix = tensor.reshape(len(tensor) if tensor.ndim > 1 else 1, -1)
    return matrix if len(matrix) <= matrix.shape[1] else matrix.T


def square(h: Tensor) -> Tensor:
    """h h^T; in float64, because roots are taken of sums of it."""
    matrix = wide(h).double()
    return matrix @ matrix.T


def whitened(m: Tensor, s: Tensor) -> Tensor:
    """sqrt(columns) S^-1/2 m, shaped like m."""
    matrix, (values, basis) = wide(m).double(), torch.linalg.eigh(s)
    roots = (values.clamp(min=0) + FLOOR * values.mean()).clamp(min=TINY).sqrt()
    step: Tensor = ((basis * matrix.shape[1] ** 0.5 / roots) @ basis.T @ matrix).to(m)
    return (step.T if m.ndim > 1 and len(step) < len(m) else step).reshape(m.shape)


def scaled(m: Tree, s: Tree) -> Tree:
    """The same with one number for a whole tree."""
    total = torch.stack([matrix.trace() for matrix in s.values()]).sum()
    return m * (m.numel**0.5 / total.clamp(min=TINY).sqrt())  # type: ignore[no-any-return]
