"""MemFBO: first order and a single loop, one communication round per iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_adam import Moments
from fedbilevel.algorithms.shared_asynchronous import NO_REPLIES, LatestReplies, LatestTuple
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle, PenaltyDirections
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class State(NamedTuple):
    """The server's point, and without a barrier what it remembers.

    Attributes:
        x: The upper variable.
        y: The lower variable, which minimises G.
        u: The lower variable that minimises G + F / penalty.
        latest: Without a barrier, the fields of `LatestReplies` (see `shared_asynchronous`).
        idle: Without a barrier, the clients that wait for a task.
        moments: With adaptive steps, the fields of the `Moments` of y and u.
    """

    x: Tree
    y: Tree
    u: Tree
    latest: LatestTuple = NO_REPLIES
    idle: Sequence[int] = ()
    moments: tuple[Any, ...] = ()


class Local(NamedTuple):
    """A client's copies of x, y and u, the sums of its directions, and the number of steps."""

    x: Tree
    y: Tree
    u: Tree
    sums: PenaltyDirections
    steps: Tensor


class PenaltyDescend(Phase):
    """tau_i local steps on x, y and u; replies with the means h_i of the directions."""

    name = "descend"
    reply: ClassVar = {"hx": "x", "hy": "y", "hu": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    lr_u: Number
    penalty: Number

    def start(self, m: Message) -> Local:
        """Start at the server's point, with sums that are 0."""
        zeros = PenaltyDirections(zeros_like(m.x), zeros_like(m.y), zeros_like(m.u))
        return Local(m.x, m.y, m.u, zeros, m.steps)

    def directions(self, c: Local, oracle: Oracle, batch: Batch) -> PenaltyDirections:
        """Return d_x, d_y and d_u."""
        return oracle.penalty_directions(c.x, c.y, c.u, batch, self.penalty)

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """Move all three copies at once, and add the directions to the sums."""
        d = self.directions(c, oracle, batch)
        return Local(
            x=oracle.project_x(c.x - self.lr_x * d.x),
            y=c.y - self.lr_y * d.y,
            u=c.u - self.lr_u * d.u,
            sums=PenaltyDirections(c.sums.x + d.x, c.sums.y + d.y, c.sums.u + d.u),
            steps=c.steps,
        )

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the means, which do not grow with the number of steps."""
        return {"hx": c.sums.x / c.steps, "hy": c.sums.y / c.steps, "hu": c.sums.u / c.steps}


class SeparatePenaltyDescend(PenaltyDescend):
    """As `PenaltyDescend`; the server reads every reply by itself, to remember it."""

    summed = False


@register("memfbo")
@dataclass(frozen=True, kw_only=True)
class MemFBO(Algorithm):
    """MemFBO: x, y and u move together by first derivatives alone, in one round per iteration.

    It solves the bilevel problem with the global hypergradient of the penalised problem

        min_x min_u F(x, u) + penalty (G(x, u) - min_y G(x, y)).

    Choose it for networks that have no second derivative, such as those with fused attention or
    recurrent layers, and for large ones: it holds one graph at a time. The solution is within
    O(1 / penalty) of that of the bilevel problem; a penalty that grows (`fb.schedules.Linear`)
    closes the gap. `SimFBO`, its counterpart with second derivatives, has no such gap.

    Client i of the cohort C takes tau_i steps   var <- var - lr_var d_var   on its copies of x, y
    and u, along

        d_y = grad_y g_i(x, y),   d_u = grad_y g_i(x, u) + grad_y f_i(x, u) / penalty,
        d_x = grad_x f_i(x, u) + penalty (grad_x g_i(x, u) - grad_x g_i(x, y)),

    and sends the means h_i of its directions, so that clients with unequal tau_i count by their
    weights alone. The server, with p~_i = (n / |C|) p_i, moves

        var <- var - server_lr_var sum_C p~_i h_i   for x, y and u.

    With tau_i = 1 the local step sizes have no effect. With lr_u = lr_y, penalty (u - y) follows
    the solution of [d2yy G] v = - grad_y F, as z does in `SimFBO` with its sign turned, and so d_x
    stays of its size however large the penalty is. With unequal ones u - y is large until both have
    settled, and a large penalty needs short steps on x.

    With `barrier=False` every client works on the last point it was sent, and the server moves
    along the mean of the last replies of all clients (as in `AFBO`), however old: every client
    counts once, whatever its speed. Steps are then divided by sqrt(1 + the mean age of these
    replies, in iterations).

    With `adaptive=True` the server takes Adam's steps on y and u, which transformers need. Both are
    divided by one scale, the root mean square of the larger of their directions, so that penalty
    (u - y) still goes to the solution of the same linear system; clients have no such state.

    Cost per iteration: one round; 3 gradients per client and local step; x, y and u go down, three
    directions of the same sizes come up.

    Departures from the paper: only the abstract was at hand (single loop, all variables
    at once, first derivatives alone for all local updates, partial participation); the update is
    ours, from the penalised problem of F2SA in the scheme of ShroFBO by the same group. We divide
    the step on u by the penalty (see `F2SA`). `barrier=False` and `adaptive` are ours.

    References:
        Yang, Xiao, Ma and Ji, "First-Order Federated Bilevel Learning", AAAI 2025.

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        lr_u: Local step size of u.
        server_lr_x: Server step size of x, applied to the mean direction.
        server_lr_y: Server step size of y.
        server_lr_u: Server step size of u.
        penalty: The weight of the lower loss, a number above 0 or a schedule.
        barrier: Whether an iteration waits for its whole cohort.
        adaptive: Whether the server's steps on y and u are Adam's; step sizes are then about how
            far an entry moves in a round, such as 0.001.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.MemFBO(
        ...     server_lr_x=0.1, server_lr_y=0.5, server_lr_u=0.5, penalty=100.0
        ... )
        >>> result = fb.solve(
        ...     task.problem, task.clients, method, rounds=50, evaluate=task.evaluate, every=50
        ... )
        >>> start, end = (row["hypergradient_norm"] for row in result.history)
        >>> result.status, end < 0.1 * start
        ('completed', True)
    """

    second_derivatives = False
    with_barrier: ClassVar[type[PenaltyDescend]] = PenaltyDescend
    without_barrier: ClassVar[type[PenaltyDescend]] = SeparatePenaltyDescend

    lr_x: Step = 0.05
    lr_y: Step = 0.2
    lr_u: Step = 0.2
    server_lr_x: Step = 0.05
    server_lr_y: Step = 0.2
    server_lr_u: Step = 0.2
    penalty: Step = 10.0
    barrier: bool = True
    adaptive: bool = False

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, and u = y."""
        x, y = problem.start
        return State(x, y, y, moments=tuple(Moments.of(y, 2)) if self.adaptive else ())

    def iterate(self, s: State, fed: Federation) -> State:
        """Run one round: local steps on the clients, and a step along their means."""
        if self.barrier:
            r = fed.ask(self.phase(self.with_barrier), fed.sample(), x=s.x, y=s.y, u=s.u)
            h: Mapping[str, Tree] = {name: r.mean(name) for name in ("hx", "hy", "hu")}
            scale = 1.0
        else:
            phase = self.phase(self.without_barrier)
            fed.post(phase, s.idle or range(len(fed)), x=s.x, y=s.y, u=s.u)
            r = fed.collect()
            latest = LatestReplies.recall(s.latest, fed).with_replies(r, fed.iteration)
            s = s._replace(latest=latest.as_tuple(), idle=r.idle)
            h, scale = latest.scaled_means({"hx": s.x, "hy": s.y, "hu": s.u}, fed.iteration)
        dy = h["hy"]
        du = h["hu"]
        if self.adaptive:
            moments, (dy, du) = Moments(*s.moments).step(dy, du)
            s = s._replace(moments=tuple(moments))
        return s._replace(
            x=fed.problem.project(s.x - scale * self.server_lr_x * h["hx"]),
            y=s.y - scale * self.server_lr_y * dy,
            u=s.u - scale * self.server_lr_u * du,
        )

    def phase(self, kind: type[PenaltyDescend], **settings: Any) -> PenaltyDescend:
        """Return the clients' phase at this iteration's step sizes."""
        return kind(
            lr_x=self.lr_x, lr_y=self.lr_y, lr_u=self.lr_u, penalty=self.penalty, **settings
        )
