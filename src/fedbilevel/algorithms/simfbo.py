"""SimFBO and ShroFBO: a single loop, one communication round per iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import SingleLoopPhase
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Decay, NonNegative, Positive
from fedbilevel.core.tree import Tree, norm, project, zeros_like
from fedbilevel.federation import Federation, Replies
from fedbilevel.federation.phase import Message, Number, Steps


def coefficient(momentum: float, left: Any) -> Any:
    """a_i^(t,k) = (1 - b^left) / (1 - b), with b the momentum and left = tau_i - k; 1 for b = 0.

    A gradient enters the sum of the momenta m_k = b m_{k-1} + d_k this many times.
    """
    return (1 - momentum**left) / (1 - momentum)


def coefficient_norm(momentum: float, tau: Any) -> Any:
    """||a_i||_1, the sum of the tau_i coefficients; tau_i without momentum."""
    return (tau - momentum * coefficient(momentum, tau)) / (1 - momentum)


class State(NamedTuple):
    """The server's x, y and z."""

    x: Tree
    y: Tree
    z: Tree


class Local(NamedTuple):
    """A client's copies of x, y and z, the sums q of its directions, and the number of steps.

    `left` is the number of steps still to take; it is empty where all coefficients are 1.
    """

    x: Tree
    y: Tree
    z: Tree
    q: Directions
    steps: Tensor
    left: Tensor | tuple[()] = ()


class Descend(SingleLoopPhase):
    """tau_i local steps on x, y and z (eq. 3); replies with the sums q_i of directions (eq. 4)."""

    name = "descend"
    reply: ClassVar = {"qx": "x", "qy": "y", "qz": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    lr_z: Number
    coefficient_momentum: Decay = 0.0
    radius: Positive = 1000.0

    def start(self, m: Message) -> Local:
        """Start at the server's point, with sums that are 0."""
        zeros = Directions(zeros_like(m.x), zeros_like(m.y), zeros_like(m.z))
        left = m.steps if self.coefficient_momentum else ()
        return Local(m.x, m.y, m.z, q=zeros, steps=m.steps, left=left)

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        """Move all three copies at once by a_k d_k, and add a_k d_k to the sums."""
        d = self.directions(oracle, c.x, c.y, c.z, batch)
        left = c.left
        if isinstance(left, Tensor):
            a = coefficient(self.coefficient_momentum, left)
            d = Directions(a * d.x, a * d.y, a * d.z)
            left = left - 1
        return Local(
            x=oracle.project_x(c.x - self.lr_x * d.x),
            y=c.y - self.lr_y * d.y,
            z=c.z - self.lr_z * d.z,
            q=Directions(c.q.x + d.x, c.q.y + d.y, c.q.z + d.z),
            steps=c.steps,
            left=left,
        )

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the sums."""
        return {"qx": c.q.x, "qy": c.q.y, "qz": c.q.z}

    def own(self, c: Local) -> dict[str, Tree]:
        """Keep the last local values, with z in its ball, as the server does."""
        return {"x": c.x, "y": c.y, "z": project(c.z, self.radius)}


class DescendMean(Descend):
    """The same steps as `Descend`; replies with the means h_i = q_i / ||a_i||_1 (eq. 6)."""

    reply: ClassVar = {"hx": "x", "hy": "y", "hz": "y"}

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the means, which do not grow with the number of steps."""
        b = self.coefficient_momentum
        a = coefficient_norm(b, c.steps) if b else c.steps
        return {"hx": c.q.x / a, "hy": c.q.y / a, "hz": c.q.z / a}


@register("simfbo")
@dataclass(frozen=True, kw_only=True)
class SimFBO(Algorithm):
    """SimFBO: x, y and the linear system's z move together, in one round per iteration.

    SimFBO solves min_x F(x, y*(x)), y*(x) = argmin_y G(x, y), with the true (global) hypergradient.
    A third variable z follows the solution of [d2yy G] z = grad_y F, so that no inner loop is
    needed. It is the first method to try: no method that follows the global hypergradient has a
    cheaper iteration. Choose `ShroFBO` if clients take unequal numbers of local steps: SimFBO then
    solves the problem with weights proportional to p_i tau_i instead of p_i. Choose `ASFBO` or
    `UniFBO` for server steps that adapt to the size of the directions.

    Client i of the cohort C takes tau_i steps   var <- var - lr_var a_k d_var   on its copies of x,
    y and z, k = 0 .. tau_i - 1, along

        d_y = grad_y g_i,   d_z = d2yy g_i z - grad_y f_i,   d_x = grad_x f_i - d2xy g_i z,

    and sends the sums q_i of a_k d. The coefficients are those of a momentum b,

        a_k = (1 - b^(tau_i - k)) / (1 - b),   b = `coefficient_momentum`,   1 by default (b = 0).

    The server, with p~_i = (n / |C|) p_i and q = sum_C p~_i q_i, moves

        x <- x - server_lr_x q_x,   y <- y - server_lr_y q_y,   z <- P_r(z - server_lr_z q_z),

    P_r the projection onto the ball of `radius`. With tau_i = 1 the local step sizes have no
    effect.

    What belongs to the clients (`Problem.owner`) takes the local steps alone: client i keeps its
    last y_i and P_r(z_i), or its last x_i. A client's own y has its own linear system, so that the
    mean of d_x follows the mean of the clients' hypergradients, which is then the true one.

    Cost per iteration: one round; 3 gradients per client and local step (one fused evaluation), 7
    with `independent_batches`; x, y and z go down, three directions of the same sizes come up.

    Departures from the paper: it leaves the coefficients a_k open, and says that they cover
    momentum and variance reduction. Those of momentum give the sum of its gradients, but steps as
    printed (eq. 3) are not momentum steps: the first moves by a_0 > 1 times a gradient, so that
    later gradients are taken elsewhere (`ASFBO` has local momentum). None give variance reduction,
    which needs gradients of old points on new samples (`LAASFBO`). One training and one validation
    batch serve all three directions; `independent_batches=True` draws three pairs, as printed. r =
    L_f / mu is unknown in practice and a setting; the metric `projection_active` is the share of
    iterations in which the projection acts. `damping` is ours. Defaults are the paper's for MNIST.
    docs/errata.md lists what is unclear in the paper; no update changes.

    References:
        Yang, Xiao and Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient Federated
        Bilevel Learning", NeurIPS 2023: Algorithm 1, eq. (3) to (5).

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        lr_z: Local step size of z.
        server_lr_x: Server step size of x, applied to the sum of the directions.
        server_lr_y: Server step size of y.
        server_lr_z: Server step size of z.
        radius: Radius of the ball that the server's z is projected onto.
        damping: Multiple of the identity that is added to the Hessian of z's system.
        independent_batches: Draw new batches for each of the three directions.
        coefficient_momentum: The momentum b of the coefficients, in [0, 1); 0 makes them 1.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.SimFBO(server_lr_x=0.1, server_lr_y=0.5, server_lr_z=0.5)
        >>> result = fb.solve(
        ...     task.problem, task.clients, method, rounds=50, evaluate=task.evaluate, every=50
        ... )
        >>> start, end = (row["hypergradient_norm"] for row in result.history)
        >>> result.status, end < 0.1 * start
        ('completed', True)
    """

    client_levels = ("x", "y")
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
    coefficient_momentum: Decay = 0.0

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, with z = 0."""
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        """Run one round: eq. (3) and (4) on the clients, eq. (5) on the server."""
        r = fed.ask(self.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        z = s.z - self.server_lr_z * r.mean("qz")
        fed.record(projection_active=norm(z) > self.radius)
        return State(
            x=fed.problem.project(s.x - self.server_lr_x * r.mean("qx")),
            y=s.y - self.server_lr_y * r.mean("qy"),
            z=project(z, self.radius),
        )

    def descend(self) -> Descend:
        """Return the clients' phase at this iteration's step sizes."""
        return self.local_phase(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            lr_z=self.lr_z,
            damping=self.damping,
            independent_batches=self.independent_batches,
            coefficient_momentum=self.coefficient_momentum,
            radius=self.radius,
        )


@register("shrofbo")
@dataclass(frozen=True, kw_only=True)
class ShroFBO(SimFBO):
    """ShroFBO: SimFBO that keeps the clients' weights under unequal numbers of local steps.

    Choose it over `SimFBO` whenever tau_i differs between clients; with equal tau_i they are the
    same. The re-weighting has two parts. Client i sends the means h_i = q_i / ||a_i||_1 instead of
    the sums, so that a client with more steps does not count for more (`DescendMean.finish`);
    ||a_i||_1 is the sum of its coefficients, tau_i where they are 1. The server, with h =
    sum_C p~_i h_i, multiplies by the mean rho = sum_C p~_i ||a_i||_1, so that steps are as long as
    SimFBO's (`ShroFBO.iterate`):

        x <- x - rho server_lr_x h_x,   y <- y - rho server_lr_y h_y,
        z <- P_r(z - rho server_lr_z h_z).

    Cost per iteration: that of `SimFBO`.

    Departures from the paper: those of `SimFBO`. rho is defined over all n clients, but the server
    hears only from the cohort C: it is estimated from C (docs/errata.md).

    References:
        Yang, Xiao and Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient Federated
        Bilevel Learning", NeurIPS 2023: Algorithm 1, eq. (6) to (8).

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        lr_z: Local step size of z.
        server_lr_x: Server step size of x, applied to rho times the mean direction.
        server_lr_y: Server step size of y.
        server_lr_z: Server step size of z.
        radius: Radius of the ball that the server's z is projected onto.
        damping: Multiple of the identity that is added to the Hessian of z's system.
        independent_batches: Draw new batches for each of the three directions.
        coefficient_momentum: The momentum b of the coefficients, in [0, 1); 0 makes them 1.

    Examples:
        One client takes twice as many local steps as the other, and x still converges to the
        solution of the problem with equal weights:

        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=2, condition=2.0, seed=5)
        >>> environment = fb.Environment(local_steps=[1, 2])
        >>> options = {"rounds": 30, "every": 30, "environment": environment}
        >>> local = {"lr_x": 1e-4, "lr_y": 1e-4, "lr_z": 1e-4}
        >>> server = {"server_lr_x": 0.15, "server_lr_y": 0.4, "server_lr_z": 0.4}
        >>> def distance(method):
        ...     result = fb.solve(task.problem, task.clients, method, **options)
        ...     return float((result.x["x"] - task.x_star()["x"]).norm())
        >>> distance(fb.algorithms.ShroFBO(**local, **server)) < 0.01
        True
        >>> distance(fb.algorithms.SimFBO(**local, **server)) > 0.4
        True
    """

    local_phase: ClassVar[type[Descend]] = DescendMean

    def iterate(self, s: State, fed: Federation) -> State:
        """Run one round: eq. (6) on the clients, eq. (7) and (8) on the server."""
        r = fed.ask(self.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        rho = self.mean_norm(r)  # each client divided by its own (`DescendMean`)
        z = s.z - rho * self.server_lr_z * r.mean("hz")
        fed.record(projection_active=norm(z) > self.radius)
        return State(
            x=fed.problem.project(s.x - rho * self.server_lr_x * r.mean("hx")),
            y=s.y - rho * self.server_lr_y * r.mean("hy"),
            z=project(z, self.radius),
        )

    def mean_norm(self, r: Replies) -> Any:
        """Return the mean of ||a_i||_1 over the replies; without momentum, of tau_i."""
        b = self.coefficient_momentum
        if not b:
            return r.mean("steps")
        return sum(reply.weight * coefficient_norm(b, reply.steps) for reply in r) / len(r)
