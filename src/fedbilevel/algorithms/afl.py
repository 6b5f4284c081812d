"""AFL: anarchic federated learning, with local hypergradients as its bilevel form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_asynchronous import (
    NO_REPLIES,
    LatestReplies,
    LatestTuple,
    collect_within,
)
from fedbilevel.algorithms.shared_hypergradients import HypergradientBatch, OwnHypergradient
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, StepBatch, Steps


class State(NamedTuple):
    """The server's x and y, and what an asynchronous server keeps of its clients.

    Attributes:
        latest: The fields of `LatestReplies`, see `shared_asynchronous`.
        idle: The clients that wait for a task.
        begun: Whether the first tasks have been posted.
    """

    x: Tree
    y: Tree
    latest: LatestTuple = NO_REPLIES
    idle: Sequence[int] = ()
    begun: bool = False


class Local(NamedTuple):
    """A client's copies of x and y, the sums of its directions, and the number of its steps."""

    x: Tree
    y: Tree
    qx: Tree
    qy: Tree
    steps: Tensor


class MeanLocalDirections(OwnHypergradient):
    """K_i local steps on x and y; replies with the means of the directions."""

    name = "work"
    reply: ClassVar = {"hx": "x", "hy": "y"}
    summed = False

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number

    def start(self, m: Message) -> Local:
        """Start at the server's x and y, with sums that are 0."""
        return Local(m.x, m.y, zeros_like(m.x), zeros_like(m.y), m.steps)

    def step(self, c: Local, oracle: Oracle, batches: StepBatch) -> Local:
        """Move both copies, and add their directions to the sums."""
        batch, fresh = self.split(batches)
        d_x = self.own_hypergradient(oracle, c.x, c.y, batch, fresh)
        d_y = oracle.lower_gradient_y(c.x, c.y, batch)
        return Local(
            x=oracle.project_x(c.x - self.lr_x * d_x),
            y=c.y - self.lr_y * d_y,
            qx=c.qx + d_x,
            qy=c.qy + d_y,
            steps=c.steps,
        )

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the means."""
        return {"hx": c.qx / c.steps, "hy": c.qy / c.steps}


@register("afl")
@dataclass(frozen=True, kw_only=True)
class AFL(Algorithm):
    """AFL (AFA-CS, AFA-CD): asynchronous, with local hypergradients.

    AFL is a single-level method; this is how the paper of AFBO makes a bilevel baseline of it. Each
    client inverts its own Hessian, so that on heterogeneous clients it solves another problem.
    Choose `AFBO` for the true solution; AFL is here for comparison. With `variant="cd"` fast
    clients count for more, too.

    Client i takes K_i local steps (the environment's) along

        d_x = grad_x f_i - d2xy g_i p_i,   d_y = grad_y g_i,
        p_i = lambda sum_{k <= N} (I - lambda d2yy g_i)^k grad_y f_i,

    lambda = `neumann_lr`, N = `neumann_steps`, and sends the means h_i of its directions. An
    iteration waits for the next replies, as many as the environment's participation, and the server
    moves

        x <- x - server_lr_x h_x,   y <- y - server_lr_y h_y,

    with h the mean of the last replies of all clients (`variant="cs"`, AFA-CS), or of the replies
    that have just arrived (`variant="cd"`, AFA-CD).

    Cost per iteration: one round; 2 N + 5 gradients per client and local step; x and y go down, two
    directions of the same sizes come up. A further round for each reply that `max_delay` makes it
    wait for.

    Departures from the paper (recalled, not read: the paper was not at hand): h_i is the mean
    direction, so that server steps do not depend on local ones; means go over the clients heard so
    far. By default one mini-batch serves the whole estimate of d_x, so that its factors are
    dependent and its mean over batches is biased, also on equal clients; `hypergradient_batch` has
    the alternatives.

    References:
        Yang, Zhang, Khanduri and Liu, "Anarchic Federated Learning", ICML 2022. The bilevel form:
        Li, Zhu, Gong, Mao and Zhou, "Anarchic Federated Bilevel Optimization".

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        server_lr_x: Server step size of x, applied to the mean direction.
        server_lr_y: Server step size of y.
        neumann_lr: The step lambda of the Neumann sum.
        neumann_steps: The number N of its Hessian products; it has N + 1 terms.
        variant: "cs", the mean over the last replies of all clients; or "cd", the mean over the
            replies that have just arrived.
        hypergradient_batch: "one", one mini-batch for d_y, grad_y f_i, all Hessian products and the
            cross product; "fresh", one more for each Hessian product; or "full", all samples of the
            client for both directions.
        max_delay: The iterations within which a client must answer, as in `AFBO`; None waits for
            nobody.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> environment = fb.Environment(participation=2, delay=fb.delays.Constant(1.0))
        >>> result = fb.solve(
        ...     task.problem, task.clients, "afl", rounds=4, environment=environment
        ... )
        >>> result.status, result.history[-1]["virtual_s"]
        ('completed', 2.0)
    """

    solves = "local"

    lr_x: Step = 0.01
    lr_y: Step = 0.05
    server_lr_x: Step = 0.05
    server_lr_y: Step = 0.1
    neumann_lr: Positive = 0.1
    neumann_steps: Count = 5
    variant: Literal["cs", "cd"] = "cs"
    hypergradient_batch: HypergradientBatch = "one"
    max_delay: Count | None = None

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, without replies."""
        return State(*problem.start)

    def iterate(self, s: State, fed: Federation) -> State:
        """Post tasks to idle clients, collect the next replies, and move along their mean."""
        idle = s.idle if s.begun else range(len(fed))
        fed.post(self.mean_directions(), idle, x=s.x, y=s.y)
        replies, idle = collect_within(fed, self.max_delay)
        latest = LatestReplies.recall(s.latest, fed)
        latest = latest.with_replies(replies, fed.iteration)
        s = s._replace(idle=idle, begun=True)
        if self.variant == "cs":
            s = s._replace(latest=latest.as_tuple())
        if not latest.weight:
            return s  # no reply has been accepted yet
        x = s.x - self.server_lr_x * latest.mean("hx", s.x)
        y = s.y - self.server_lr_y * latest.mean("hy", s.y)
        return s._replace(x=fed.problem.project(x), y=y)

    def mean_directions(self) -> MeanLocalDirections:
        """Return the clients' phase at this iteration's step sizes."""
        return MeanLocalDirections(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            neumann_lr=self.neumann_lr,
            terms=self.neumann_steps + 1,
            fresh=self.hypergradient_batch == "fresh",
            full=self.hypergradient_batch == "full",
        )
