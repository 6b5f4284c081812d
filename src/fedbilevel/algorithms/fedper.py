"""FedPer: a common representation, and a personal head that is trained along with it.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization Layers", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedbilevel.algorithms.base import Algorithm, ClientLevels, Point
from fedbilevel.algorithms.fedavg import Local, Train
from fedbilevel.algorithms.registry import register
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment


class TrainWithOwnHead(Train):
    """tau_i gradient steps on x and y together; replies with the displacement of x, keeps y."""

    def own(self, c: Local) -> dict[str, Tree]:
        """Keep the head."""
        return {"y": c.y}


@register("fedper")
@dataclass(frozen=True, kw_only=True)
class FedPer(Algorithm):
    """FedPer: FedAvg on the representation x, while each client keeps its own head y_i.

    It is a single-level baseline for problems whose y belongs to the clients: it trains on the
    lower loss and never sees the upper one. `FedRep` trains the head first, `FedBABU` last, and a
    bilevel method such as `SimFBO` moves x along the hypergradient.

    Client i takes tau_i steps, from the server's x and its own y_i,

        x <- x - lr_x grad_x g_i(x, y_i),   y_i <- y_i - lr_y grad_y g_i(x, y_i),

    and the server adds the mean displacement to x.

    Cost per iteration: one round; 1 gradient per client and local step. x goes down, its
    displacement comes up.

    Departures from the paper: written from memory. The paper averages x with weights by samples;
    here they are those of the problem.

    References:
        Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization
        Layers", 2019.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("hyper-representation", clients=4, hidden=8, owner="client")
        >>> result = fb.solve(task.problem, task.clients, "fedper", rounds=5)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
    """

    solves = "single"
    second_derivatives = False
    client_levels: ClassVar[ClientLevels] = ("y",)

    lr_x: Step = 0.05
    lr_y: Step = 0.05

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round of local training."""
        train = TrainWithOwnHead(lr_x=self.lr_x, lr_y=self.lr_y)
        r = fed.ask(train, fed.sample(), x=s.x, y=s.y)
        return s._replace(x=fed.problem.project(s.x + r.mean("dx")))

    def check(self, problem: Problem, environment: Environment) -> None:
        """Check as any algorithm, and that y belongs to the clients."""
        super().check(problem, environment)
        self.check_own_y(problem)
