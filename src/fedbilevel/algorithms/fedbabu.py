"""FedBABU: the representation is trained under a fixed head; heads are fitted at the end.

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedbilevel.algorithms.base import Algorithm, ClientLevels, Point
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import LowerRound
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class Local(NamedTuple):
    """A client's representation, its head, and the representation it was sent."""

    x: Tree
    y: Tree
    x0: Tree


class TrainBody(Phase):
    """tau_i gradient steps on x under the head as it is; replies with the displacement of x."""

    name = "train_body"
    batch = "train"
    reply: ClassVar = {"dx": "x"}

    steps: Steps = "local"
    lr_x: Number

    def start(self, m: Message) -> Local:
        """Start at the server's x."""
        return Local(m.x, m.y, m.x)

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """Take one step on x."""
        g_x, _ = oracle.lower_gradients(c.x, c.y, batch)
        return c._replace(x=oracle.project_x(c.x - self.lr_x * g_x))

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the displacement."""
        return {"dx": c.x - c.x0}


@register("fedbabu")
@dataclass(frozen=True, kw_only=True)
class FedBABU(Algorithm):
    """FedBABU: no head is trained until the representation is done; then each client fits its own.

    It is a single-level baseline for problems whose y belongs to the clients. All heads stay at the
    common start while x is trained by FedAvg on the lower loss, for `training_iterations`:

        x <- x - lr_x grad_x g_i(x, y_0),   tau_i times on client i; the server averages.

    Every later iteration lets every client, in the cohort or not, fine-tune its own head,

        y_i <- y_i - lr_y grad_y g_i(x, y_i),   `fine_tune_steps` times.

    A run should end one round after the training: personal metrics before show the untrained head.

    Cost per iteration: one round; 1 gradient per client and step. In training x goes down and its
    displacement comes up; in fine-tuning x goes down.

    Departures from the paper: written from memory. The paper also fine-tunes whole models; here the
    head alone, as x is common.

    References:
        Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image
        Classification", ICLR 2022.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of fine-tuning, a number or a schedule.
        training_iterations: Iterations on x, before heads are fitted.
        fine_tune_steps: Steps on y per iteration after them.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("hyper-representation", clients=4, hidden=8, owner="client")
        >>> method = fb.algorithms.FedBABU(training_iterations=5)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=6)
        >>> result.history[-1]["lower_loss"] < result.history[-2]["lower_loss"]
        True
    """

    solves = "single"
    second_derivatives = False
    client_levels: ClassVar[ClientLevels] = ("y",)

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    training_iterations: Count = 200
    fine_tune_steps: Count = 20

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round on the representation, or, after the training, on all heads."""
        if fed.iteration < self.training_iterations:
            r = fed.ask(TrainBody(lr_x=self.lr_x), fed.sample(), x=s.x, y=s.y)
            return s._replace(x=fed.problem.project(s.x + r.mean("dx")))
        fine_tune = LowerRound(lr_y=self.lr_y, lower="sgd", steps=self.fine_tune_steps)
        fed.ask(fine_tune, range(len(fed)), x=s.x, y=s.y)
        return s

    def check(self, problem: Problem, environment: Environment) -> None:
        """Check as any algorithm, and that y belongs to the clients."""
        super().check(problem, environment)
        self.check_own_y(problem)
