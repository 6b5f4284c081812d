"""FedRep: the head first, then the representation, in every visit.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm, ClientLevels, Point
from fedbilevel.algorithms.registry import register
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Message, Number, Phase


class Local(NamedTuple):
    """A client's representation and head, the representation it was sent, and steps taken."""

    x: Tree
    y: Tree
    x0: Tree
    taken: Tensor


class HeadThenBody(Phase):
    """`head_steps` steps on y, the others on x; replies with the displacement of x, keeps y."""

    name = "head_then_body"
    batch = "train"
    reply: ClassVar = {"dx": "x"}

    lr_x: Number
    lr_y: Number
    head_steps: Count

    def start(self, m: Message) -> Local:
        """Start at the server's x and the client's own y."""
        return Local(m.x, m.y, m.x, 0 * m.steps)

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """Take one step on y or on x; one pass gives the gradients of both."""
        g_x, g_y = oracle.lower_gradients(c.x, c.y, batch)
        on_head = (c.taken < self.head_steps).to(c.taken.dtype)
        return Local(
            x=oracle.project_x(c.x - self.lr_x * (1 - on_head) * g_x),
            y=c.y - self.lr_y * on_head * g_y,
            x0=c.x0,
            taken=c.taken + 1,
        )

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the displacement of x."""
        return {"dx": c.x - c.x0}

    def own(self, c: Local) -> dict[str, Tree]:
        """Keep the head."""
        return {"y": c.y}


@register("fedrep")
@dataclass(frozen=True, kw_only=True)
class FedRep(Algorithm):
    """FedRep: each client fits its head to the common representation, and only then moves that.

    It is the single-level baseline that comes closest to a bilevel method: with many head steps y_i
    approaches argmin g_i(x, .), and x moves along grad_x g_i there, which is the hypergradient if
    the upper loss is the lower one. It never sees the upper loss.

    Client i, from the server's x and its own y_i,

        y_i <- y_i - lr_y grad_y g_i(x, y_i),   `head_steps` times,
        x   <- x - lr_x grad_x g_i(x, y_i),     `body_steps` times,

    and the server adds the mean displacement to x.

    Cost per iteration: one round; 1 gradient per client and step (one pass gives both gradients,
    of which one is used). x goes down, its displacement comes up.

    Departures from the paper: written from memory. The paper has one step on x in its algorithm and
    one epoch in its experiments, with momentum; here steps are counted, without momentum, and the
    environment's `local_steps` are not used.

    References:
        Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for
        Personalized Federated Learning", ICML 2021: Algorithm 1.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        head_steps: Steps on y in each visit.
        body_steps: Steps on x after them.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("hyper-representation", clients=4, hidden=8, owner="client")
        >>> result = fb.solve(task.problem, task.clients, "fedrep", rounds=5)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
    """

    solves = "single"
    second_derivatives = False
    client_levels: ClassVar[ClientLevels] = ("y",)

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    head_steps: Count = 5
    body_steps: Count = 1

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round: heads, then the representation."""
        phase = HeadThenBody(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            head_steps=self.head_steps,
            steps=self.head_steps + self.body_steps,
        )
        r = fed.ask(phase, fed.sample(), x=s.x, y=s.y)
        return s._replace(x=fed.problem.project(s.x + r.mean("dx")))

    def check(self, problem: Problem, environment: Environment) -> None:
        """Check as any algorithm, and that y belongs to the clients."""
        super().check(problem, environment)
        self.check_own_y(problem)
