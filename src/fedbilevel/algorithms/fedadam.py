"""FedAdam: FedAvg whose server takes Adam's steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.fedavg import Train
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_adam import Moments
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation


class State(NamedTuple):
    """The server's x and y, and the fields of the `Moments` of both."""

    x: Tree
    y: Tree
    moments_x: tuple[Any, ...]
    moments_y: tuple[Any, ...]


@register("fedadam")
@dataclass(frozen=True, kw_only=True)
class FedAdam(Algorithm):
    """FedAdam: FedAvg on the lower loss, with Adam on the server; clients keep no state.

    A single-level baseline for networks that plain gradient steps train slowly, such as
    transformers. `MemFBO` with `adaptive=True` is its bilevel counterpart.

    Client i takes tau_i steps as in `FedAvg`. The server, with the mean displacement D and entry by
    entry, for x and for y,

        m <- b1 m + (1 - b1) D,   v <- b2 v + (1 - b2) D^2,
        var <- var + server_lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + floor),

    with b1 = .9, b2 = .99. With one local step, lr_x and lr_y have no effect beyond the floor.

    Cost per iteration: that of `FedAvg`: one round, 1 gradient per client and local step; x and y
    go down, their displacements come up.

    Departures from the paper: written from memory. The paper has no 1 - b^t, and a floor of 1e-3,
    against which the size of displacements matters; here it is 1e-8.

    References:
        Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

    Args:
        lr_x: Step size of x on the clients, a number or a schedule.
        lr_y: Step size of y on the clients.
        server_lr: Step size of the server: about how far an entry moves in a round.
        train: What is trained: "both", or "y" to leave x at its start.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.FedAdam(server_lr=0.05, train="y")
        >>> result = fb.solve(task.problem, task.clients, method, rounds=20)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
    """

    solves = "single"
    second_derivatives = False

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    server_lr: Step = 0.001
    train: Literal["both", "y"] = "both"

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, with moments 0."""
        x, y = problem.start
        return State(x, y, tuple(Moments.of(x)), tuple(Moments.of(y)))

    def iterate(self, s: State, fed: Federation) -> State:
        """Run one round of local training, and step along the mean displacements."""
        phase = Train(lr_x=self.lr_x, lr_y=self.lr_y, train=self.train)
        r = fed.ask(phase, fed.sample(), x=s.x, y=s.y)
        moments_x, (dx,) = Moments(*s.moments_x).step(r.mean("dx"))
        moments_y, (dy,) = Moments(*s.moments_y).step(r.mean("dy"))
        return State(
            x=fed.problem.project(s.x + self.server_lr * dx),
            y=s.y + self.server_lr * dy,
            moments_x=tuple(moments_x),
            moments_y=tuple(moments_y),
        )
