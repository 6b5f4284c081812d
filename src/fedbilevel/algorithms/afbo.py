"""AFBO: asynchronous; any client answers at any time, after any number of local steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import CrossProduct, HessianProduct, UpperGradients
from fedbilevel.algorithms.shared_asynchronous import (
    MAX_LOSSES,
    NO_REPLIES,
    LatestReplies,
    LatestTuple,
    collect_within,
    to_double,
)
from fedbilevel.algorithms.simfbo import DescendMean
from fedbilevel.core.client_data import Batch
from fedbilevel.core.linear import neumann_sum, random_product
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, NonNegative, Positive
from fedbilevel.core.tree import Tree, project, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class OuterReply(TypedDict):
    """What the server keeps of a client for the steps on x with APHE.

    Attributes:
        iteration: The step on x for which the client was last heard.
        weight: n p_i.
        x: The server's x of that step.
        y: The server's y of that step.
        v: grad_y f_i at this point.
        h: The client's hypergradient H_i of that step.
    """

    iteration: int
    weight: float
    x: Tree
    y: Tree
    v: Tree
    h: Tree


def _mean(outer: Mapping[int, OuterReply], name: Literal["v", "h"]) -> Tree:
    """Return the weighted mean of a value over the clients heard so far."""
    weight = sum(reply["weight"] for reply in outer.values())
    total = [reply["weight"] * reply[name] for reply in outer.values()]
    return sum(total[1:], start=total[0]) / weight


class State(NamedTuple):
    """The server's x, y and z, and what an asynchronous server keeps of its clients.

    Attributes:
        latest: The fields of `LatestReplies`.
        idle: The clients that wait for a task.
        inner: The number of iterations since x moved.
        begun: Whether the first tasks have been posted.
        arrived: The clients heard since x moved; used by APHE.
        outer: What each client replied for its last step on x; used by APHE.
        losses: How often each client has lost its memory.
    """

    x: Tree
    y: Tree
    z: Tree
    latest: LatestTuple = NO_REPLIES
    idle: Sequence[int] = ()
    inner: int = 0
    begun: bool = False
    arrived: Sequence[int] = ()
    outer: Mapping[int, OuterReply] = {}
    losses: Mapping[int, int] = {}


class MeanDirections(DescendMean):
    """E_i local steps on x, y and z; replies with the means of the directions ("aligned").

    The server reads every reply by itself, to remember it.
    """

    name = "work"
    summed = False


class DifferenceBase(NamedTuple):
    """The reply that a client's next reply is a difference to, and the numbers of both.

    `base_number` is -1 and `values` are 0 if the next reply is whole.
    """

    values: dict[str, Tree]
    base_number: Tensor
    number: Tensor


class MeanDirectionDifferences(MeanDirections):
    """As `MeanDirections`; replies with the difference to the client's reply number `ack`.

    `ack` is the last reply that the server has added to its sums, -1 if there is none. A client
    that no longer has that reply sends a whole one. It remembers what the server's sum makes of its
    reply, in float64, and not the directions before rounding: so the differences add up.

    The client's memory holds its latest reply and the one before that the latest was a difference
    to, because it does not know whether the latest has arrived.
    """

    remembers = True
    reply: ClassVar = {"hx": "x", "hy": "y", "hz": "y", "ticket": {"base": (), "number": ()}}

    def contradiction(self, m: Message, values: Mapping[str, Any]) -> str | None:
        """A reply has the number of its message, and is a difference to `ack` or whole."""
        base = values["ticket"]["base"]
        number = values["ticket"]["number"]
        if bool(number == m.number) and bool((base == m.ack) | (base == -1)):
            return None
        return "the numbers in its ticket are not those of its message"

    def start(self, m: Message) -> Any:
        """Start as `MeanDirections`, and find the reply that the server has acknowledged."""
        shapes = {"hx": m.x, "hy": m.y, "hz": m.z}
        zeros = {name: zeros_like(tree) for name, tree in to_double(shapes).items()}
        none = torch.full_like(m.ack, -1)
        memory = m.memory or {"latest": zeros, "number": none, "base": zeros, "base_number": none}
        is_latest = (m.ack == memory["number"]) & (m.ack >= 0)
        is_base = (m.ack == memory["base_number"]) & (m.ack >= 0)
        known = is_latest | is_base

        def acknowledged(zero: Tensor, latest: Tensor, base: Tensor) -> Tensor:
            return torch.where(known, torch.where(is_latest, latest, base), zero)

        values = {
            name: zero.map(acknowledged, memory["latest"][name], memory["base"][name])
            for name, zero in zeros.items()
        }
        number = m.number + 0 * m.ack  # a tensor, as `ack` is
        return super().start(m), DifferenceBase(values, torch.where(known, m.ack, none), number)

    def step(self, c: Any, oracle: Oracle, batch: Any) -> Any:
        """Take one local step."""
        local, base = c
        return super().step(local, oracle, batch), base

    def finish(self, c: Any) -> dict[str, Any]:
        """Reply with the difference, its ticket, and what the client remembers."""
        local, (base, base_number, number) = c
        h = super().finish(local)

        def difference(new: Tensor, old: Tensor) -> Tensor:
            return (new.double() - old).to(new.dtype)

        change = {name: h[name].map(difference, base[name]) for name in base}
        latest = {name: base[name] + change[name].map(Tensor.double) for name in base}
        return {
            **change,
            "ticket": Tree({"base": base_number, "number": number}),
            "memory": {
                "latest": latest,
                "number": number,
                "base": base,
                "base_number": base_number,
            },
        }


class LowerMean(NamedTuple):
    """A client's copy of y, the sum q of its gradients, and the number of its steps."""

    x: Tree
    y: Tree
    q: Tree
    steps: Tensor


class MeanLowerGradient(Phase):
    """E_i local steps on y; replies with the mean of the lower gradients (lines 5 to 8).

    y_i <- y_i - lr_y grad_y g_i(x, y_i)
    """

    name = "inner"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"hy": "y"}
    summed = False

    steps: Steps = "local"
    lr_y: Number

    def start(self, m: Message) -> LowerMean:
        """Start at the server's y, with a sum that is 0."""
        return LowerMean(m.x, m.y, zeros_like(m.y), m.steps)

    def step(self, c: LowerMean, oracle: Oracle, batch: Batch) -> LowerMean:
        """Take one step on y_i, and add its gradient to the sum."""
        d = oracle.lower_gradient_y(c.x, c.y, batch)
        return c._replace(y=c.y - self.lr_y * d, q=c.q + d)

    def finish(self, c: LowerMean) -> dict[str, Tree]:
        """Reply with the mean."""
        return {"hy": c.q / c.steps}


@register("afbo")
@dataclass(frozen=True, kw_only=True)
class AFBO(Algorithm):
    """AFBO: asynchronous; the server moves along the last replies of all clients, however old.

    Choose it where clients are slow, late or lost: no iteration waits for a straggler, and because
    every client counts once, whatever its speed, the fixed point is the solution of the problem, up
    to the drift of local steps, which is of the order of lr_x, lr_y and lr_z. Without delays and
    with everyone in every iteration it is `ShroFBO`, but for the factor rho. `UniFBO` with
    `barrier=False` has adaptive steps and the same memory; `AFL` has the same memory and local
    hypergradients, which are biased; `ADBO` waits for everyone at each new plane.

    The default is our linear-system variant, not the printed APHE. Client i works on the last x, y
    and z it was sent: it takes E_i local steps (the environment's) and sends the means h_i of
    `SimFBO`'s directions

        d_y = grad_y g_i,   d_z = d2yy g_i z - grad_y f_i,   d_x = grad_x f_i - d2xy g_i z.

    An iteration waits for the next replies, as many as the environment's participation. Then, with
    h the mean over all clients of their last h_i,

        y <- y - server_lr_y h_y,   z <- P_r(z - server_lr_z h_z),   x <- x - server_lr_x h_x,

    x only in every K-th iteration, K = `inner_rounds`, and the clients that answered get the new
    point. This is `hypergradient="linear-system"`.

    The other values are Algorithms 1 and 2 of the paper. Clients send means of grad_y g_i only, and
    after K iterations on y the server asks for the hypergradient. For the clients A that have
    arrived since x moved let (x_j, y_j) be the server's point (x, y); the others keep that of the
    step on x for which they were last heard. With H and J the means of d2yy g_j and d2xy g_j at
    (x_j, y_j), v that of grad_y f_j there, lambda = `neumann_lr`, U = `neumann_steps` and m
    clients,

        "printed":            p = lambda m (I - lambda H)^m v,   which tends to 0 as m grows
        "neumann":            p = lambda sum_{u < U} (I - lambda H)^u v
        "random-truncation":  p = lambda U (I - lambda H)^U' v,   U' uniform on {0 .. U-1}

        H_i <- grad_x f_i(x, y) - J p for i in A,   x <- x - server_lr_x mean over all i of H_i.

    Cost per iteration: one round. "linear-system": 3 gradients per client and local step; x, y and
    z go down, three directions of the same sizes come up (with `memory="client"` also two
    integers). APHE: 1 gradient per local step; x and y go down, one direction like y comes up; in
    every K-th iteration also a round over A for both gradients of f_i (1 gradient), one per product
    (2) and one for J p (2), which are barriers over all clients. A further round for each reply
    that `max_delay` makes it wait for.

    Departures from the paper: "linear-system", "neumann" and "random-truncation" are ours; the
    printed p keeps at most 36% of the indirect term at m = 18. Local steps on y are plain gradient
    steps (none are printed). Means go over the clients heard so far. A fresh reply has delay 0
    (paper: 1) and APHE has y^(t,K) (line 12: y^(t,K-1)). Clients compute APHE's products at their
    old points for the server, which in the paper seems to hold their Hessians. `memory="client"`
    and `delay_aware` are ours. See docs/errata.md.

    References:
        Li, Zhu, Gong, Mao and Zhou, "Anarchic Federated Bilevel Optimization": Algorithms 1 and 2.

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        lr_z: Local step size of z.
        server_lr_x: Server step size of x, applied to the mean direction.
        server_lr_y: Server step size of y.
        server_lr_z: Server step size of z.
        radius: Radius of the ball that the server's z is projected onto.
        damping: Multiple of the identity that is added to the Hessian of z's system.
        inner_rounds: The number K of iterations between two steps on x.
        hypergradient: "linear-system", or APHE with the p of "printed", "neumann" or
            "random-truncation".
        neumann_lr: The step lambda of APHE.
        neumann_steps: The number U of terms of APHE.
        memory: Who keeps the last reply of each client: "server"; or "client", where clients send
            differences to the last reply that the server has acknowledged, and the server keeps
            sums only. A client that has lost its memory makes the sums start again, up to three
            times; the metric `restarts` counts it.
        aphe: "clients" charges APHE's barriers in time and costs; "server" leaves them out, as the
            paper's simulation appears to.
        delay_aware: Divide the server's steps by 1 + the mean age of the replies in the sums, in
            iterations. The paper asks for smaller steps under longer delays and gives no rule.
        max_delay: The iterations within which a client must answer (Assumption 4.6): an iteration
            waits for the clients whose tasks were posted `max_delay` - 1 iterations before it. 1 is
            a barrier; None waits for nobody.

    Examples:
        Two of six clients are five times slower, and an iteration waits for two replies:

        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=6, condition=3.0, seed=3)
        >>> environment = fb.Environment(
        ...     participation=2,
        ...     delay=fb.delays.LogNormal(1.0, 0.5),
        ...     stragglers=fb.delays.Stragglers(2, 5.0),
        ... )
        >>> method = fb.algorithms.AFBO(server_lr_x=0.05, server_lr_y=0.25, server_lr_z=0.25)
        >>> result = fb.solve(
        ...     task.problem,
        ...     task.clients,
        ...     method,
        ...     rounds=100,
        ...     environment=environment,
        ...     evaluate=task.evaluate,
        ...     every=100,
        ... )
        >>> start, end = (row["hypergradient_norm"] for row in result.history)
        >>> result.status, end < 0.5 * start
        ('completed', True)
    """

    client_levels = ("x", "y")

    lr_x: Step = 0.01
    lr_y: Step = 0.05
    lr_z: Step = 0.05
    server_lr_x: Step = 0.05
    server_lr_y: Step = 0.1
    server_lr_z: Step = 0.1
    radius: Positive = 1000.0
    damping: NonNegative = 0.0
    inner_rounds: Count = 1
    hypergradient: Literal["linear-system", "neumann", "random-truncation", "printed"] = (
        "linear-system"
    )
    neumann_lr: Positive = 0.1
    neumann_steps: Count = 10
    memory: Literal["server", "client"] = "server"
    aphe: Literal["clients", "server"] = "clients"
    delay_aware: bool = False
    max_delay: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory == "client" and self.hypergradient != "linear-system":
            raise ValueError(
                "memory is 'client'; hypergradient must be 'linear-system', "
                f"not {self.hypergradient!r}"
            )

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, with z = 0 and no replies."""
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        """Post tasks to idle clients, collect the next replies, and move along all last replies."""
        latest = LatestReplies.recall(s.latest, fed)
        self.post_tasks(s, latest, fed)
        replies, idle = collect_within(fed, self.max_delay)
        if self.memory == "server":
            latest = latest.with_replies(replies, fed.iteration)
        else:
            latest, losses = latest.with_differences(replies, s.losses)
            self.judge_losses(losses, s.losses, fed)
            s = s._replace(losses=losses)
        s = s._replace(latest=latest.as_tuple(), idle=idle, inner=s.inner + 1, begun=True)
        if not latest.weight:
            return s  # no reply has been accepted yet
        scale = 1.0
        if self.delay_aware:
            scale = 1 / (1 + latest.mean_age(fed.iteration))
        s = s._replace(y=s.y - scale * self.server_lr_y * latest.mean("hy", s.y))
        if self.hypergradient == "linear-system":
            z = s.z - scale * self.server_lr_z * latest.mean("hz", s.z)
            s = s._replace(z=project(z, self.radius))
        else:
            heard = {*s.arrived, *(reply.client for reply in replies)}
            s = s._replace(arrived=sorted(heard))
        if s.inner < self.inner_rounds:
            return s
        if self.hypergradient == "linear-system":
            h = latest.mean("hx", s.x)
        else:
            outer = self.outer_replies(s, fed)
            s = s._replace(arrived=(), outer=outer)
            h = _mean(outer, "h")
        return s._replace(x=fed.problem.project(s.x - scale * self.server_lr_x * h), inner=0)

    def judge_losses(
        self, losses: Mapping[int, int], before: Mapping[int, int], fed: Federation
    ) -> None:
        """Record how often the sums restarted, and refuse clients that lose their memory often."""
        restarts = 0
        for client, count in losses.items():
            new = range(before.get(client, 0) + 1, count + 1)
            restarts += sum(loss <= MAX_LOSSES for loss in new)
            if count > max(MAX_LOSSES, before.get(client, 0)):
                fed.refuse(client, f"it says that it has lost its memory {count} times")
        fed.record(restarts=restarts)

    def post_tasks(self, s: State, latest: LatestReplies, fed: Federation) -> None:
        """Send the current point to the idle clients; in the first iteration to everyone."""
        idle = s.idle if s.begun else range(len(fed))
        if self.hypergradient != "linear-system":
            fed.post(MeanLowerGradient(lr_y=self.lr_y), idle, x=s.x, y=s.y)
        elif self.memory == "server":
            fed.post(self.directions_phase(MeanDirections), idle, x=s.x, y=s.y, z=s.z)
        else:
            phase = self.directions_phase(MeanDirectionDifferences)
            each = [{"ack": latest.replies.get(client, (-1, {}))[0]} for client in idle]
            fed.post(phase, idle, each=each, x=s.x, y=s.y, z=s.z, number=fed.iteration)

    def directions_phase(self, kind: type[MeanDirections]) -> MeanDirections:
        """Return a phase of this kind at this iteration's step sizes."""
        return kind(lr_x=self.lr_x, lr_y=self.lr_y, lr_z=self.lr_z, damping=self.damping)

    def outer_replies(self, s: State, fed: Federation) -> dict[int, OuterReply]:
        """Run APHE for the clients that have arrived; return the last outer replies of all."""
        outer = dict(s.outer)
        if not s.arrived:
            return outer
        lam = self.neumann_lr
        U = self.neumann_steps
        m = len(fed)
        costs: AbstractContextManager[None] = nullcontext()
        if self.aphe == "server":
            costs = fed.uncharged("aphe is 'server'")
        with costs:
            arrived = fed.ask(UpperGradients(), s.arrived, x=s.x, y=s.y)
            for reply in arrived:
                outer[reply.client] = {
                    "iteration": fed.iteration,
                    "weight": reply.weight,
                    "x": s.x,
                    "y": s.y,
                    "v": reply.values["gy"],
                    "h": reply.values["gx"],  # J p is still to be subtracted
                }
            points = [{"x": reply["x"], "y": reply["y"]} for reply in outer.values()]
            heard = list(outer)

            def product(v: Tree) -> Tree:
                return fed.ask(HessianProduct(), heard, each=points, v=v).coverage_mean("hv")

            v = _mean(outer, "v")
            if self.hypergradient == "neumann":
                p = neumann_sum(product, v, U, lam)
            elif self.hypergradient == "random-truncation":
                p = random_product(product, v, U, lam, fed.draw(U))
            else:
                p = random_product(product, v, m, lam, m)
            indirect = fed.ask(CrossProduct(), heard, each=points, v=p).coverage_mean("jv")
        for reply in arrived:
            renewed = outer[reply.client].copy()
            renewed["h"] = renewed["h"] - indirect
            outer[reply.client] = renewed
        ages = [fed.iteration - reply["iteration"] for reply in outer.values()]
        fed.record(outer_age=sum(ages) / len(ages), max_outer_age=max(ages))
        return outer

    def check(self, problem: Problem, environment: Environment) -> None:
        """Check as any algorithm, and that no stage changes replies that clients remember."""
        super().check(problem, environment)
        if problem.client_names and self.hypergradient != "linear-system":
            raise ValueError(
                f"hypergradient is {self.hypergradient!r}; where clients own variables, as here, "
                "it must be 'linear-system'"
            )
        if problem.client_names and self.memory == "client":
            raise ValueError(
                "memory is 'client'; where clients own variables, as here, it must be 'server'"
            )
        if self.memory == "client" and any(stage.direction == "up" for stage in environment.stages):
            raise ValueError(
                "memory is 'client' and stages change replies on their way: clients would remember "
                "what the server never took; memory must be 'server', or no stage may be on the "
                "way up (conduct.norm_bound is one)"
            )
