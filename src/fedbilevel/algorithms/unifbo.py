"""UniFBO: one loop and few rounds, from whitened server steps and local steps without drift. A method of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms import register
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.simfbo import DescendMean, Local
from fedbilevel.federation.base import Federation
from fedbilevel.oracle import Directions, Oracle
from fedbilevel.phase import Message
from fedbilevel.problem import Problem
from fedbilevel.schedules import Step
from fedbilevel.tree import Tree, norm, project, zeros_like

FLOOR = 1e-6  # of the mean eigenvalue, added to all: what was hardly ever seen is rounding


class State(NamedTuple):
    """x, y, z, the momenta m of their directions, and the sums s of the directions' squares."""

    x: Tree
    y: Tree
    z: Tree
    mx: Tree
    my: Tree
    mz: Tree
    sx: Tree
    sy: Tree
    sz: Tree


class Walk(NamedTuple):
    """A client's local steps, and what corrects their directions."""

    local: Local
    correction: Directions


class DescendCorrected(DescendMean):
    """tau_i steps along d - d_0 + m, where d_0 is the first d; replies with the means of the d."""

    settings: UniFBO  # type: ignore[assignment]

    def start(self, m: Message) -> Walk:
        return Walk(super().start(m), Directions(m.mx, m.my, m.mz))

    def first(self, c: Walk, oracle: Oracle, batch: Any) -> Walk:
        d, m = self.directions(c.local, oracle, batch), c.correction
        return Walk(self.move(c.local, m, d, oracle), Directions(m.x - d.x, m.y - d.y, m.z - d.z))

    def step(self, c: Walk, oracle: Oracle, batch: Any) -> Walk:
        d, e = self.directions(c.local, oracle, batch), c.correction
        return c._replace(local=self.move(c.local, Directions(d.x + e.x, d.y + e.y, d.z + e.z), d, oracle))

    def finish(self, c: Walk) -> dict[str, Any]:
        return super().finish(c.local)


def wide(tensor: Tensor) -> Tensor:
    """A tensor as a matrix with no more rows than columns; a vector is one row."""
    matrix = tensor.reshape(len(tensor) if tensor.ndim > 1 else 1, -1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def square(tensor: Tensor) -> Tensor:
    """H H^T, in float64: eigenvalues far below the largest count."""
    matrix = wide(tensor).double()
    return matrix @ matrix.T


def whitened(m: Tensor, s: Tensor) -> Tensor:
    """sqrt(columns) S^-1/2 M, shaped like M."""
    values, basis = torch.linalg.eigh(s)
    values = values.clamp(min=0) + FLOOR * values.mean()
    matrix = wide(m)
    scale = (matrix.shape[1] / values.clamp(min=torch.finfo(s.dtype).tiny)).sqrt()
    step = (((basis * scale) @ basis.T) @ matrix.double()).to(m)
    return step.reshape(m.shape) if m.ndim < 2 or len(m) == len(step) else step.T.reshape(m.shape)


def scaled(m: Tree, s: Tree) -> Tree:
    """The same with one number for a whole tree."""
    total = torch.stack([matrix.trace() for matrix in s.values()]).sum()
    return m * (m.numel / total.clamp(min=torch.finfo(total.dtype).tiny)).sqrt()


@register("unifbo")
@dataclass(frozen=True, kw_only=True)
class UniFBO(Algorithm):
    """UniFBO, one round an iteration: ShroFBO's means, ASFBO's momentum and adaptive steps, SVRG's correction.

    Client i in C is sent x, y, z and the server's momenta m, and takes tau_i steps on its copies, for each of x, y, z

        var <- var - lr_var (d - d_0 + m),    d_y = grad_y g_i,  d_z = d2yy g_i z - grad_y f_i,  d_x = grad_x f_i - d2xy g_i z,

    where d_0 is the d of its first step. It sends h_i, the mean of its d. Server, with h = sum_C p~_i h_i, for every
    tensor of x, y and z, as a matrix of at least as many columns as rows (a vector is one row), and w = `momentum_weight`:

        m <- (1 - w) m + w h,    S <- S + h h^T,    var <- var - server_lr_var sqrt(columns) S^-1/2 m;    z <- P_r(z).

    Why it is right: where the mean d is 0 and m = 0, no client leaves the point it was sent, whatever its tau_i and the
    length of its local steps, so h = 0. The solution is a fixed point even where clients differ and take unequal numbers
    of long steps; nobody remembers anything. Why it is fast: S^-1/2 makes all directions of a tensor move alike, where a
    step for each coordinate (Adam) follows the few that dominate; for a vector it is AdaGrad-Norm, what ASFBO's text
    names. A first step moves a tensor's entries by w server_lr in root mean square whatever the losses' scale, and later
    ones shorten like those of AdaGrad: server steps need no tuning to scales.

    Where x is projected all of x has one step size, sqrt(numel / trace S): another would not leave the solution alone.
    The server needs an eigendecomposition of each tensor's smaller side a round. `damping` is that of `SimFBO`.
    """

    independent_batches: ClassVar[bool] = False
    phases: ClassVar = {"descend": DescendCorrected}

    lr_x: Step = 0.02
    lr_y: Step = 0.02
    lr_z: Step = 0.02
    server_lr_x: Step = 0.01
    server_lr_y: Step = 0.01
    server_lr_z: Step = 0.01
    momentum_weight: float = 0.5
    radius: float = 1000.0
    damping: float = 0.0

    def init(self, problem: Problem) -> State:
        (x, y), z = problem.start, zeros_like(Tree(problem.y))
        m = (zeros_like(x), z, z)
        return State(x, y, z, *m, *(v.map(square) for v in m))

    def iterate(self, s: State, fed: Federation) -> State:
        r = fed.ask("descend", fed.sample(), x=s.x, y=s.y, z=s.z, mx=s.mx, my=s.my, mz=s.mz)
        mx, sx = self.gather(s.mx, s.sx, r.mean("hx"))
        my, sy = self.gather(s.my, s.sy, r.mean("hy"))
        mz, sz = self.gather(s.mz, s.sz, r.mean("hz"))
        z = s.z - self.server_lr_z * mz.map(whitened, sz)
        fed.record(projection_active=norm(z) > self.radius)
        dx = mx.map(whitened, sx) if fed.problem.project_x is None else scaled(mx, sx)
        return State(
            x=fed.problem.project(s.x - self.server_lr_x * dx),
            y=s.y - self.server_lr_y * my.map(whitened, sy),
            z=project(z, self.radius),
            mx=mx,
            my=my,
            mz=mz,
            sx=sx,
            sy=sy,
            sz=sz,
        )

    def gather(self, m: Tree, s: Tree, h: Tree) -> tuple[Tree, Tree]:
        """The momentum and the sum of squares with h in them."""
        w = self.momentum_weight
        return (1 - w) * m + w * h, s + h.map(square)
