"""ASFBO and LA-ASFBO: a single loop with local momentum and adaptive server steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import SingleLoopPhase, storm
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import ScheduledDecay, Step
from fedbilevel.core.settings import Bounds, Fraction, NonNegative, Positive
from fedbilevel.core.tree import Tree, norm, project, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Steps


class State(NamedTuple):
    """The server's x, y and z, and the running norms of their directions."""

    x: Tree
    y: Tree
    z: Tree
    sx: float = 0.0
    sy: float = 0.0
    sz: float = 0.0


class Point(NamedTuple):
    """A client's copies of x, y and z."""

    x: Tree
    y: Tree
    z: Tree


class Local(NamedTuple):
    """A client's point, the point before, its momenta m, their sums q, and the number of steps."""

    point: Point
    previous: Point
    m: Directions
    q: Directions
    steps: Tensor


class Descend(SingleLoopPhase):
    """tau_i momentum steps from the server's point (eq. 15 to 22); replies with h_i (eq. 26)."""

    name = "descend"
    reply: ClassVar = {"hx": "x", "hy": "y", "hz": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    lr_z: Number
    momentum_weight: Fraction
    radius: Positive = 1000.0

    def start(self, msg: Message) -> Local:
        """Start at the server's point."""
        point = Point(msg.x, msg.y, msg.z)
        zeros = Directions(*map(zeros_like, point))
        return Local(point, point, m=zeros, q=zeros, steps=msg.steps)

    def first(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        """Step along m_0 = d at the server's point (eq. 16)."""
        return self.move(c, self.directions(oracle, *c.point, batch), oracle)

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        """Step along m_k = beta d(new point) + (1 - beta) m_{k-1} (eq. 20)."""
        beta = self.momentum_weight
        d = self.directions(oracle, *c.point, batch)
        m = Directions(*(beta * new + (1 - beta) * old for new, old in zip(d, c.m, strict=True)))
        return self.move(c, m, oracle)

    def move(self, c: Local, m: Directions, oracle: Oracle) -> Local:
        """Move var <- var - lr_var m (eq. 19), and add q <- q + m (eq. 22)."""
        x, y, z = c.point
        point = Point(
            x=oracle.project_x(x - self.lr_x * m.x),
            y=y - self.lr_y * m.y,
            z=z - self.lr_z * m.z,
        )
        q = Directions(c.q.x + m.x, c.q.y + m.y, c.q.z + m.z)
        return Local(point, previous=c.point, m=m, q=q, steps=c.steps)

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the means of the momenta."""
        return {"hx": c.q.x / c.steps, "hy": c.q.y / c.steps, "hz": c.q.z / c.steps}

    def own(self, c: Local) -> dict[str, Tree]:
        """Keep the last local values, with z in its ball, as the server does."""
        x, y, z = c.point
        return {"x": x, "y": y, "z": project(z, self.radius)}


@register("asfbo")
@dataclass(frozen=True, kw_only=True)
class ASFBO(Algorithm):
    """ASFBO: ShroFBO with momentum on the clients and adaptive steps on the server.

    It solves what `ShroFBO` solves, also under unequal numbers of local steps. Choose it over
    ShroFBO where batches are noisy (momentum) or where the size of the directions changes much
    along the run (adaptive steps); it has more settings, of which the bounds of the steps matter
    most. `LAASFBO` reduces the variance further, at twice the evaluations; `UniFBO` adapts its
    steps without bounds.

    Client i starts its momenta at the directions d of the server's point (those of `SimFBO`) and,
    for k = 0 .. tau_i - 1, with beta = `momentum_weight`,

        var <- var - lr_var m_k,   m_{k+1} = beta d(new point, new batch) + (1 - beta) m_k.

    It sends h_i = (1 / tau_i) sum_k m_k. The server, for each of x, y and z, with
    h = sum_C p~_i h_i, rho = sum_C p~_i tau_i, varrho = `norm_decay` and floor = `norm_floor`,

        s <- varrho s + (1 - varrho) ||h||,   gamma = clip(server_lr / (s + floor), bounds),
        var <- var - rho gamma h,

    and projects z onto the ball of `radius`.

    What belongs to the clients (`Problem.owner`) takes the local steps alone, as in `SimFBO`.

    Cost per iteration: one round; 3 gradients per client and local step, 7 with
    `independent_batches`; x, y and z go down, three directions of the same sizes come up.

    Departures from the paper: the norm ||a_i||_1 is tau_i, because by Lemma 1 the coefficients sum
    to it for every beta. The momentum after the last step is never used and not computed. The
    bounds of eq. (88), an assumption of the analysis, are enforced by clipping: without them the
    iterates do not settle. The text says AdaGrad-Norm; the rule printed, and implemented, averages
    norms. rho is estimated from the cohort, as in `ShroFBO`. One training and one validation batch
    serve all three directions of a step, as eq. (17) and (18) are printed;
    `independent_batches=True` draws three pairs, as Appendix B.3 says. varrho^(t) is printed as a
    sequence and never given: it is a number or a schedule. `damping` is ours. Defaults are the
    paper's. See docs/errata.md.

    References:
        "Communication-Efficient Adaptive Federated Bi-level Optimization with Data and System
        Heterogeneity", under double-blind review: Algorithm 1, eq. (15) to (30).

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        lr_z: Local step size of z.
        server_lr_x: Numerator of the server's adaptive step size of x.
        server_lr_y: Numerator of the server's adaptive step size of y.
        server_lr_z: Numerator of the server's adaptive step size of z.
        server_lr_x_bounds: Least and largest server step size of x.
        server_lr_y_bounds: Least and largest server step size of y.
        server_lr_z_bounds: Least and largest server step size of z.
        momentum_weight: Weight beta of the new directions in the momentum, in (0, 1].
        norm_decay: Weight varrho of the old norm in the running norm, in [0, 1), a number or a
            schedule.
        norm_floor: Number that is added to the running norm.
        radius: Radius of the ball that the server's z is projected onto.
        damping: Multiple of the identity that is added to the Hessian of z's system.
        independent_batches: Draw new batches for each of the three directions.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> result = fb.solve(
        ...     task.problem,
        ...     task.clients,
        ...     "asfbo",
        ...     rounds=15,
        ...     environment=fb.Environment(local_steps=(2, 4)),
        ...     evaluate=task.evaluate,
        ...     every=15,
        ... )
        >>> start, end = (row["hypergradient_norm"] for row in result.history)
        >>> result.status, end < 0.5 * start
        ('completed', True)
    """

    client_levels = ("x", "y")
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
    norm_decay: ScheduledDecay = 0.75
    norm_floor: Positive = 0.001
    radius: Positive = 1000.0
    damping: NonNegative = 0.0
    independent_batches: bool = False

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, with z and the running norms 0."""
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        """Run one round: eq. (15) to (26) on the clients, eq. (27) to (30) on the server."""
        r = fed.ask(self.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        rho = r.mean("steps")
        hx = r.mean("hx")
        hy = r.mean("hy")
        hz = r.mean("hz")
        sx = self.running_norm(s.sx, hx)
        sy = self.running_norm(s.sy, hy)
        sz = self.running_norm(s.sz, hz)
        gamma_x = self.adaptive_lr(self.server_lr_x, sx, self.server_lr_x_bounds)
        gamma_y = self.adaptive_lr(self.server_lr_y, sy, self.server_lr_y_bounds)
        gamma_z = self.adaptive_lr(self.server_lr_z, sz, self.server_lr_z_bounds)
        z = s.z - rho * gamma_z * hz
        fed.record(projection_active=norm(z) > self.radius)
        return State(
            x=fed.problem.project(s.x - rho * gamma_x * hx),
            y=s.y - rho * gamma_y * hy,
            z=project(z, self.radius),
            sx=sx,
            sy=sy,
            sz=sz,
        )

    def descend(self) -> Descend:
        """Return the clients' phase at this iteration's step sizes."""
        return self.local_phase(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            lr_z=self.lr_z,
            momentum_weight=self.momentum_weight,
            damping=self.damping,
            independent_batches=self.independent_batches,
            radius=self.radius,
        )

    def running_norm(self, s: float, h: Tree) -> float:
        """Return the running norm of a direction (eq. 27)."""
        return float(self.norm_decay * s + (1 - self.norm_decay) * float(norm(h)))

    def adaptive_lr(self, lr: Step, s: float, bounds: tuple[float, float]) -> float:
        """Return a server step size (eq. 28), clipped to its bounds (eq. 88)."""
        low, high = bounds
        return float(min(max(lr / (s + self.norm_floor), low), high))


class DescendStorm(Descend):
    """As `Descend`, with STORM's variance-reduced momentum."""

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        """Step along m_k = d(new point) + (1 - beta) (m_{k-1} - d(old point)) (eq. 21)."""
        new = self.directions(oracle, *c.point, batch)
        old = self.directions(oracle, *c.previous, batch)
        return self.move(c, Directions(*storm(new, c.m, old, self.momentum_weight)), oracle)


@register("la-asfbo")
@dataclass(frozen=True, kw_only=True)
class LAASFBO(ASFBO):
    """LA-ASFBO: ASFBO with variance-reduced (STORM) momentum.

    Choose it over `ASFBO` where batches are small: a client's momentum

        m_{k+1} = d(new point) + (1 - beta) (m_k - d(old point)),   both on the new batch,

    corrects itself for the point it was evaluated at. Everything else is as in `ASFBO`.

    Cost per iteration: that of `ASFBO`, with 6 gradients per client and local step, 3 in the first
    (2 tau_i - 1 fused evaluations); 14 and 7 with `independent_batches`.

    Departures from the paper: those of `ASFBO`. The l1 norm of STORM's coefficients is not tau_i,
    but their signed sum is, and h_i is normalised by that (docs/errata.md).

    References:
        "Communication-Efficient Adaptive Federated Bi-level Optimization with Data and System
        Heterogeneity", under double-blind review: Algorithm 1 with eq. (21).

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        lr_z: Local step size of z.
        server_lr_x: Numerator of the server's adaptive step size of x.
        server_lr_y: Numerator of the server's adaptive step size of y.
        server_lr_z: Numerator of the server's adaptive step size of z.
        server_lr_x_bounds: Least and largest server step size of x.
        server_lr_y_bounds: Least and largest server step size of y.
        server_lr_z_bounds: Least and largest server step size of z.
        momentum_weight: Weight beta of the new directions in the momentum, in (0, 1].
        norm_decay: Weight varrho of the old norm in the running norm, in [0, 1), a number or a
            schedule.
        norm_floor: Number that is added to the running norm.
        radius: Radius of the ball that the server's z is projected onto.
        damping: Multiple of the identity that is added to the Hessian of z's system.
        independent_batches: Draw new batches for each of the three directions.

    Examples:
        Three local steps are 2 * 3 - 1 fused evaluations, of 3 gradients each, on each of 4
        clients:

        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> environment = fb.Environment(local_steps=3)
        >>> result = fb.solve(
        ...     task.problem, task.clients, "la-asfbo", rounds=1, environment=environment
        ... )
        >>> result.history[-1]["gradients"] == 4 * 3 * (2 * 3 - 1)
        True
    """

    local_phase: ClassVar[type[Descend]] = DescendStorm
