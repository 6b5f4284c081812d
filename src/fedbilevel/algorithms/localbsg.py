"""LocalBSGM and LocalBSGVR: local steps along momenta of local hypergradients, then an average.

Gao, "On the Convergence of Momentum-Based Algorithms for Federated Bilevel Optimization Problems",
2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import storm
from fedbilevel.algorithms.shared_hypergradients import TruncatedHypergradient
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Fraction, Positive, at_least
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Steps


class State(NamedTuple):
    """x, y and their momenta u, v; `begun` once the momenta hold gradients."""

    x: Tree
    y: Tree
    u: Tree
    v: Tree
    begun: bool = False


class Point(NamedTuple):
    """A client's x, y and their momenta u, v."""

    x: Tree
    y: Tree
    u: Tree
    v: Tree


def displacements(now: Point, start: Point) -> dict[str, Tree]:
    """Return the reply dx, dy, du, dv: how far each variable moved."""
    return {f"d{name}": end - begin for name, end, begin in zip("xyuv", now, start, strict=True)}


class Local(NamedTuple):
    """Where a client is, and where it started."""

    now: Point
    start: Point


class Begin(TruncatedHypergradient):
    """The first momenta: local hypergradient and lower gradient at the start, on every sample."""

    name = "begin"
    reply: ClassVar = {"u": "x", "v": "y"}

    full: bool = True

    def start(self, m: Message) -> tuple[Tree, Tree]:
        """Start at the server's x and y."""
        return m.x, m.y

    def step(
        self, point: tuple[Tree, Tree], oracle: Oracle, batches: Sequence[Batch]
    ) -> tuple[Tree, Tree]:
        """Evaluate the local hypergradient and the lower gradient."""
        x, y = point
        return self.local_directions(oracle, x, y, batches)

    def finish(self, directions: tuple[Tree, Tree]) -> dict[str, Tree]:
        """Reply with both, as momenta."""
        d_x, d_y = directions
        return {"u": d_x, "v": d_y}


class Descend(TruncatedHypergradient):
    """tau_i steps, each of which renews the momenta and then moves along them.

    u <- (1 - w) u + w d_x,   v <- (1 - w) v + w d_y,   x <- x - lr_x u,   y <- y - lr_y v.
    """

    name = "descend"
    reply: ClassVar = {"dx": "x", "dy": "y", "du": "x", "dv": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    momentum_weight: Fraction

    def start(self, m: Message) -> Local:
        """Start at the server's point."""
        start = Point(m.x, m.y, m.u, m.v)
        return Local(start, start)

    def step(self, c: Local, oracle: Oracle, batches: Sequence[Batch]) -> Local:
        """Renew the momenta, then move along them."""
        x, y, u, v = c.now
        w = self.momentum_weight
        d_x, d_y = self.local_directions(oracle, x, y, batches)
        u = (1 - w) * u + w * d_x
        v = (1 - w) * v + w * d_y
        x = oracle.project_x(x - self.lr_x * u)
        y = y - self.lr_y * v
        return c._replace(now=Point(x, y, u, v))

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the displacements."""
        return displacements(c.now, c.start)


@register("localbsgm")
@dataclass(frozen=True, kw_only=True)
class LocalBSGM(Algorithm):
    """LocalBSGM: local steps along momenta of local hypergradients, one round per iteration.

    Every client solves its own linear system, so nothing but iterates and momenta is averaged and
    clients may take many local steps between rounds. The price is a bias: the mean of local
    hypergradients is the true one only where clients are alike, which the paper assumes. On
    heterogeneous clients the method converges to another point; choose `FedBiO` there, which
    shares one linear system. `LocalBSGVR` is the same method with variance-reduced momenta at
    twice the gradients; `LFedNest` does without momentum.

    With w = `momentum_weight`, every client repeats tau_i times

        u <- (1 - w) u + w (grad_x f_i - d2xy g_i p_i),       x <- x - lr_x u,
        v <- (1 - w) v + w grad_y g_i,                        y <- y - lr_y v,

    and the server averages x, y, u and v. With lambda = `neumann_lr` and J = `neumann_steps`,

        p_i = lambda J prod_{k <= J'} (I - lambda d2yy g_i) grad_y f_i,    J' uniform on {0 .. J-1},

    each factor on its own batch (`truncation="random"`), or the expectation of this product, the
    Neumann sum of J terms (`truncation="sum"`); both estimate [d2yy g_i]^-1 grad_y f_i.

    Cost per iteration: one round, one more in the first iteration for the first momenta. Gradients
    per client: 2J + 3 per local step, whatever length J' is drawn, and 2J + 3 once for the first
    momenta. Down: x, y, u, v. Up: the displacements of x, y, u and v.

    Departures from the paper: it was not at hand, so the method is written from memory. Each
    product of a step size and a constant is one number. Momenta start at the mean full-batch
    gradients, which takes a round. Under partial participation the server keeps the averages and
    adds mean displacements.

    References:
        Gao, "On the Convergence of Momentum-Based Algorithms for Federated Bilevel Optimization
        Problems", 2022.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        momentum_weight: The weight w of the new gradient in a momentum, in (0, 1].
        neumann_lr: The step lambda of the Neumann estimate, at most 1 / L, with L the largest
            curvature of g_i in y.
        neumann_steps: The number J of Neumann terms, at least 2.
        truncation: "random" for a product of random length, "sum" for its expectation.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4, heterogeneity=0.0)
        >>> method = fb.algorithms.LocalBSGM(lr_x=0.1, lr_y=0.5, neumann_lr=1.0, truncation="sum")
        >>> result = fb.solve(task.problem, task.clients, method, rounds=40)
        >>> result.status
        'completed'
        >>> bool(task.phi(result.x) < task.phi(task.problem.x))
        True
    """

    solves = "local"
    descend_phase: ClassVar[type[Descend]] = Descend

    lr_x: Step = 0.02
    lr_y: Step = 0.05
    momentum_weight: Fraction = 0.25
    neumann_lr: Positive = 0.1
    neumann_steps: Annotated[int, at_least(2)] = 5
    truncation: Literal["random", "sum"] = "random"

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, with momenta of 0."""
        x, y = problem.start
        return State(x, y, zeros_like(x), zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        """Run one round of local steps, then average."""
        S = fed.sample()
        if not s.begun:
            r = fed.ask(self.begin(), S, x=s.x, y=s.y)
            s = s._replace(u=r.mean("u"), v=r.mean("v"), begun=True)
        r = fed.ask(self.descend(), S, x=s.x, y=s.y, u=s.u, v=s.v)
        x = fed.problem.project(s.x + r.mean("dx"))
        y = s.y + r.mean("dy")
        return State(x, y, s.u + r.mean("du"), s.v + r.mean("dv"), begun=True)

    def begin(self) -> Begin:
        """Return the phase that computes the first momenta."""
        return Begin(
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            truncation=self.truncation,
        )

    def descend(self) -> Descend:
        """Return the phase with the local steps."""
        return self.descend_phase(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            momentum_weight=self.momentum_weight,
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            truncation=self.truncation,
        )


class DescendStorm(Descend):
    """tau_i steps, each of which moves along the momenta and then renews them (STORM).

    x <- x - lr_x u,   y <- y - lr_y v,   u <- d_x(new) + (1 - w) (u - d_x(old)),   v with d_y.
    """

    def step(self, c: Local, oracle: Oracle, batches: Sequence[Batch]) -> Local:
        """Move along the momenta, then renew them on one set of batches."""
        x, y, u, v = c.now
        old = self.local_directions(oracle, x, y, batches)
        x = oracle.project_x(x - self.lr_x * u)
        y = y - self.lr_y * v
        new = self.local_directions(oracle, x, y, batches)
        u, v = storm(new, (u, v), old, self.momentum_weight)
        return c._replace(now=Point(x, y, u, v))


@register("localbsgvr")
@dataclass(frozen=True, kw_only=True)
class LocalBSGVR(LocalBSGM):
    """LocalBSGVR: LocalBSGM with variance-reduced momenta (STORM), one round per iteration.

    Choose it over `LocalBSGM` where mini-batch noise, not the number of gradients, is the
    bottleneck, and `AdaFBiO` for adaptive steps besides. It has the same bias on heterogeneous
    clients; `FedBiOAcc` is the variance-reduced method without it.

    With w = `momentum_weight` and the directions d_x = grad_x f_i - d2xy g_i p_i and
    d_y = grad_y g_i of `LocalBSGM`, every client repeats tau_i times

        x <- x - lr_x u,      u <- d_x(new; b) + (1 - w) (u - d_x(old; b)),
        y <- y - lr_y v,      v <- d_y(new; b) + (1 - w) (v - d_y(old; b)),

    where both evaluations share the batches b and the random truncation: without that their
    difference would add variance instead of removing it. The server averages x, y, u and v.

    Cost per iteration: one round, one more in the first iteration for the first momenta. Gradients
    per client: 4J + 6 per local step (two evaluations), and 2J + 3 once for the first momenta.
    Down: x, y, u, v. Up: the displacements of x, y, u and v.

    Departures from the paper: those of `LocalBSGM`.

    References:
        Gao, "On the Convergence of Momentum-Based Algorithms for Federated Bilevel Optimization
        Problems", 2022.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        momentum_weight: The weight w with which a momentum forgets, in (0, 1]; 1 is no momentum.
        neumann_lr: The step lambda of the Neumann estimate.
        neumann_steps: The number J of Neumann terms, at least 2.
        truncation: "random" for a product of random length, "sum" for its expectation.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4, heterogeneity=0.0)
        >>> method = fb.algorithms.LocalBSGVR(lr_x=0.1, lr_y=0.5, neumann_lr=1.0)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=40)
        >>> result.status
        'completed'
        >>> bool(task.phi(result.x) < task.phi(task.problem.x))
        True
    """

    descend_phase: ClassVar[type[Descend]] = DescendStorm
