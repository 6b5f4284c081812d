"""UniFBO, a method of our own for few rounds; docs/unifbo.md has its ablation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_asynchronous import NO_REPLIES, LatestReplies, LatestTuple
from fedbilevel.algorithms.shared_submodels import assign_submodels
from fedbilevel.algorithms.simfbo import Local
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Fraction, NonNegative, Positive
from fedbilevel.core.tree import Tree, norm, project, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Message, Number, Phase, Steps

Policy = Literal["static", "rolling", "importance"]
# This multiple of the mean eigenvalue is added to all: what is far below it is rounding.
EIGENVALUE_FLOOR = 1e-6
# The least divisor: where all directions so far were 0, the step is 0 and not 0 / 0.
TINY = torch.finfo(torch.float64).tiny


class State(NamedTuple):
    """The server's x, y and z, and what its steps are made of.

    Attributes:
        x: The upper variable.
        y: The lower variable.
        z: The running estimate of the solution of the linear system.
        m: The momenta of the directions of x, y and z.
        s: The sums S of h h^T, one matrix per tensor, for x, y and z.
        latest: Without a barrier, the fields of `LatestReplies` (see `shared_asynchronous`).
        idle: Without a barrier, the clients that wait for a task.
    """

    x: Tree
    y: Tree
    z: Tree
    m: tuple[Tree, ...]
    s: tuple[Tree, ...]
    latest: LatestTuple = NO_REPLIES
    idle: Sequence[int] = ()


class DirectionsAtPoint(Phase):
    """SimFBO's directions on tau_i batches at the server's point; replies with their means h_i."""

    name = "look"
    reply: ClassVar = {"hx": "x", "hy": "y", "hz": "y"}

    steps: Steps = "local"
    damping: NonNegative = 0.0

    def start(self, m: Message) -> Local:
        """Take the server's point, with sums that are 0."""
        zeros = Directions(zeros_like(m.x), zeros_like(m.y), zeros_like(m.z))
        return Local(m.x, m.y, m.z, q=zeros, steps=m.steps)

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        """Add the directions on one batch to the sums."""
        d = oracle.directions(c.x, c.y, c.z, batch, self.damping)
        return c._replace(q=Directions(c.q.x + d.x, c.q.y + d.y, c.q.z + d.z))

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the means."""
        return {"hx": c.q.x / c.steps, "hy": c.q.y / c.steps, "hz": c.q.z / c.steps}


class SeparateDirectionsAtPoint(DirectionsAtPoint):
    """As `DirectionsAtPoint`; the server reads every reply by itself, to remember it."""

    summed = False


class OwnMoves(DirectionsAtPoint):
    """As `DirectionsAtPoint`; the client takes the server's step on what it owns.

    It remembers the momenta and the sums of squares of these directions.

    Args:
        level: The level of which the clients own variables: "x", "y" (with z) or "both".
    """

    remembers = True

    lr_x: Number
    lr_y: Number
    lr_z: Number
    momentum_weight: Fraction
    radius: Positive
    level: Literal["x", "y", "both"]

    def moved(self, x: Tree, y: Tree, z: Tree) -> dict[str, Tree]:
        """Return those of three trees that the client moves."""
        trees = {"x": x, "y": y, "z": z}
        if self.level == "both":
            return trees
        return {name: tree for name, tree in trees.items() if (name == "x") == (self.level == "x")}

    def start(self, m: Message) -> Any:
        """Take the server's point, and the client's momenta and sums."""
        zeros = {name: zeros_like(tree) for name, tree in self.moved(m.x, m.y, m.z).items()}
        sums = {name: zero.map(gram) for name, zero in zeros.items()}
        return super().start(m), m.memory or {"m": zeros, "s": sums}

    def step(self, c: Any, oracle: Oracle, batch: Any) -> Any:
        """Add the directions on one batch to the sums."""
        local, memory = c
        return super().step(local, oracle, batch), memory

    def finish(self, c: Any) -> dict[str, Any]:
        """Reply with the means; remember the new momenta and sums of squares."""
        local, memory = c
        return {**super().finish(local), "memory": self.renew(local, memory)}

    def own(self, c: Any) -> dict[str, Tree]:
        """Keep x, or y and z, after a whitened step along the new momenta."""
        local, memory = c
        new = self.renew(local, memory)
        lr = {"x": self.lr_x, "y": self.lr_y, "z": self.lr_z}
        kept = {}
        for name, value in self.moved(local.x, local.y, local.z).items():
            kept[name] = value - lr[name] * new["m"][name].map(whiten, new["s"][name])
        if "z" in kept:
            kept["z"] = project(kept["z"], self.radius)
        return kept

    def renew(self, c: Local, memory: Any) -> dict[str, dict[str, Tree]]:
        """Return momenta and sums of squares with the directions of this task."""
        w = self.momentum_weight
        h = {name: q / c.steps for name, q in self.moved(*c.q).items()}
        return {
            "m": {name: (1 - w) * memory["m"][name] + w * h[name] for name in h},
            "s": {name: memory["s"][name] + h[name].map(gram) for name in h},
        }


class SeparateOwnMoves(OwnMoves):
    """As `OwnMoves`; the server reads every reply by itself, to remember it."""

    summed = False


@register("unifbo")
@dataclass(frozen=True, kw_only=True)
class UniFBO(Algorithm):
    """UniFBO (ours): SimFBO's loop, ShroFBO's means, momentum, and whitened server steps.

    It solves the bilevel problem with the global hypergradient. Choose it where rounds are
    expensive, or where no step size has been tuned: the length of a step does not depend on the
    scale of the losses. It works with one setting for iid and for heterogeneous clients, also on
    submodels and without a barrier. A tuned `SimFBO` or `ShroFBO` can end higher after many rounds;
    docs/unifbo.md has the comparison.

    Client i of the cohort C sends h_i, the mean over tau_i batches of SimFBO's directions at the
    server's point,

        d_y = grad_y g_i,   d_z = d2yy g_i z - grad_y f_i,   d_x = grad_x f_i - d2xy g_i z.

    The server, with h = sum_C p~_i h_i and w = `momentum_weight`, for every tensor of x, y and z as
    a matrix with no more rows than columns (a vector is one row), moves

        m <- (1 - w) m + w h,   S <- S + h h^T,
        var <- var - lr_var sqrt(columns) S^-1/2 m,   z <- P_r(z).

    S^-1/2 lets all directions of a tensor move alike, where a step size per coordinate (Adam)
    follows the few that dominate: that is what saves rounds. For a vector it is AdaGrad-Norm. The
    first step moves the entries of a tensor by w lr_var in root mean square, whatever the scale of
    the losses, and steps shorten as the squares add up: no server step has to fit a curvature.

    Clients do not move: they would drift apart, and with these server steps moving gains nothing
    where clients differ. So h is unbiased, whatever the tau_i, and the solution of the problem is
    the fixed point. If x is projected, all of x has one step size, sqrt(numel / trace S), because
    the projection of any other step can leave the solution.

    Clients that cannot hold the model get the submodels of `policy`, and h is in every coordinate
    the mean over the clients that hold it (as in `RABO`). With `barrier=False` every client works
    on the last point it was sent, and h is the mean over the last replies of all clients (as in
    `AFBO`), however old: every client counts once, whatever its speed. Steps are then divided by
    sqrt(1 + the mean age of these replies, in iterations), and models are whole.

    Where x or y belongs to the clients (`Problem.owner`), each takes the steps on its x_i, or its
    y_i and z_i, by itself, with its own m and S.

    Cost per iteration: one round; 3 gradients per client and local batch; x, y and z go down, three
    directions of the same sizes come up (those of the submodel, if clients hold one). The server
    decomposes one matrix per tensor, of the size of its smaller side.

    References:
        Ours; docs/unifbo.md. It combines parts of SimFBO, ShroFBO, ASFBO, RABO and AFBO.

    Args:
        lr_x: Server step size of x, a number or a schedule.
        lr_y: Server step size of y.
        lr_z: Server step size of z.
        momentum_weight: Weight w of the new directions in the momentum, in (0, 1].
        radius: Radius of the ball that z is projected onto.
        damping: Multiple of the identity that is added to the Hessian of z's system.
        policy: Which units a client holds that cannot hold the model: "importance", those with the
            largest weights; "static", the first; "rolling", a window that moves by one unit per
            iteration.
        barrier: Whether an iteration waits for its whole cohort.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.UniFBO(lr_x=0.3, lr_y=0.5, lr_z=0.5)
        >>> result = fb.solve(
        ...     task.problem, task.clients, method, rounds=50, evaluate=task.evaluate, every=50
        ... )
        >>> start, end = (row["hypergradient_norm"] for row in result.history)
        >>> result.status, end < 0.1 * start
        ('completed', True)
    """

    submodels = True
    client_levels = ("x", "y")

    lr_x: Step = 0.02
    lr_y: Step = 0.02
    lr_z: Step = 0.02
    momentum_weight: Fraction = 0.5
    radius: Positive = 1000.0
    damping: NonNegative = 0.0
    policy: Policy = "importance"
    barrier: bool = True

    def check(self, problem: Problem, environment: Environment) -> None:
        """Check as any algorithm, and that models are whole without a barrier."""
        if environment.uses_submodels and not self.barrier:
            raise ValueError(
                f"barrier is False and capacity is {environment.capacity}; "
                "without a barrier models are whole: barrier must be True, or capacity 1"
            )
        if "x" in problem.client_levels and problem.project_x is not None:
            name = min(problem.client_names & problem.x.keys())
            raise ValueError(
                f"owner gives {name!r} to the clients, whose whitened steps cannot be projected, "
                "and project_x is given; one of the two must be left out"
            )
        super().check(problem, environment)

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, with z, momenta and sums 0."""
        x, y = problem.start
        m = (zeros_like(x), zeros_like(y), zeros_like(y))
        return State(x, y, zeros_like(y), m, tuple(zero.map(gram) for zero in m))

    def iterate(self, s: State, fed: Federation) -> State:
        """Get the mean directions h, and take whitened steps along their momenta."""
        if self.barrier:
            h = self.ask_cohort(s, fed)
            scale = 1.0
        else:
            s, h, scale = self.collect_replies(s, fed)
        w = self.momentum_weight
        m = tuple((1 - w) * m_old + w * h_new for m_old, h_new in zip(s.m, h, strict=True))
        S = tuple(S_old + h_new.map(gram) for S_old, h_new in zip(s.s, h, strict=True))
        mx, my, mz = m
        Sx, Sy, Sz = S
        if fed.problem.project_x is None:
            dx = mx.map(whiten, Sx)
        else:
            dx = scale_whole(mx, Sx)
        z = s.z - scale * self.lr_z * mz.map(whiten, Sz)
        fed.record(projection_active=norm(z) > self.radius)
        return s._replace(
            x=fed.problem.project(s.x - scale * self.lr_x * dx),
            y=s.y - scale * self.lr_y * my.map(whiten, Sy),
            z=project(z, self.radius),
            m=m,
            s=S,
        )

    def ask_cohort(self, s: State, fed: Federation) -> tuple[Tree, ...]:
        """Return h, the mean over a cohort, with a barrier."""
        C = fed.sample()
        submodels = assign_submodels(fed, C, s.x, s.y, self.policy)
        phase: Phase = DirectionsAtPoint(damping=self.damping)
        if fed.problem.client_levels:
            phase = OwnMoves(**self.own_moves(fed.problem))
        r = fed.ask(phase, C, submodels=submodels, x=s.x, y=s.y, z=s.z)
        mean = r.coverage_mean if any(submodels) else r.mean
        return mean("hx"), mean("hy"), mean("hz")

    def own_moves(self, problem: Problem) -> dict[str, Any]:
        """Return the settings of the clients' own steps."""
        levels = problem.client_levels
        return {
            "damping": self.damping,
            "level": levels[0] if len(levels) == 1 else "both",
            "lr_x": self.lr_x,
            "lr_y": self.lr_y,
            "lr_z": self.lr_z,
            "momentum_weight": self.momentum_weight,
            "radius": self.radius,
        }

    def collect_replies(self, s: State, fed: Federation) -> tuple[State, tuple[Tree, ...], float]:
        """Return h, the mean over the last replies of all clients, and the scale of the steps."""
        phase: Phase = SeparateDirectionsAtPoint(damping=self.damping)
        if fed.problem.client_levels:
            phase = SeparateOwnMoves(**self.own_moves(fed.problem))
        fed.post(phase, s.idle or range(len(fed)), x=s.x, y=s.y, z=s.z)
        r = fed.collect()
        latest = LatestReplies.recall(s.latest, fed).with_replies(r, fed.iteration)
        s = s._replace(latest=latest.as_tuple(), idle=r.idle)
        h, scale = latest.scaled_means({"hx": s.x, "hy": s.y, "hz": s.z}, fed.iteration)
        return s, (h["hx"], h["hy"], h["hz"]), scale


def wide_matrix(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix with no more rows than columns; a vector is one row."""
    rows = len(tensor) if tensor.ndim > 1 else 1
    matrix = tensor.reshape(rows, -1)
    if len(matrix) > matrix.shape[1]:
        return matrix.T
    return matrix


def gram(h: Tensor) -> Tensor:
    """Return h h^T of a tensor as a matrix; in float64, because roots are taken of its sums."""
    matrix = wide_matrix(h).double()
    return matrix @ matrix.T


def whiten(m: Tensor, S: Tensor) -> Tensor:
    """Return sqrt(columns) S^-1/2 m, in the shape of m."""
    matrix = wide_matrix(m).double()
    values, basis = torch.linalg.eigh(S)
    roots = (values.clamp(min=0) + EIGENVALUE_FLOOR * values.mean()).clamp(min=TINY).sqrt()
    step: Tensor = ((basis * matrix.shape[1] ** 0.5 / roots) @ basis.T @ matrix).to(m)
    if m.ndim > 1 and len(step) < len(m):
        step = step.T
    return step.reshape(m.shape)


def scale_whole(m: Tree, S: Tree) -> Tree:
    """Return sqrt(numel / trace S) m: one step size for all tensors of a tree."""
    total = torch.stack([matrix.trace() for matrix in S.values()]).sum()
    scale = m.numel**0.5 / total.clamp(min=TINY).sqrt()
    return m.map(lambda tensor: (tensor.double() * scale).to(tensor))
