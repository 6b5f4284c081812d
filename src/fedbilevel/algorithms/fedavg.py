"""FedAvg: the single-level baseline.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from fedbilevel import checks
from fedbilevel.algorithms import register
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.federation.base import Federation
from fedbilevel.oracle import Oracle
from fedbilevel.phase import Message, Phase
from fedbilevel.problem import Batch, Problem
from fedbilevel.schedules import Step
from fedbilevel.tree import Tree


class State(NamedTuple):
    x: Tree
    y: Tree


class Local(NamedTuple):
    x: Tree
    y: Tree
    x0: Tree
    y0: Tree


class Train(Phase):
    """tau_i gradient steps on the lower loss; replies with how far it came."""

    steps = "local"
    batch = "train"
    reply: ClassVar = {"dx": "x", "dy": "y"}

    settings: FedAvg

    def start(self, m: Message) -> Local:
        return Local(m.x, m.y, m.x, m.y)

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        h = self.settings
        if h.train == "y":
            return c._replace(y=c.y - h.lr_y * oracle.lower_gradient_y(c.x, c.y, batch))
        g_x, g_y = oracle.lower_gradients(c.x, c.y, batch)
        return c._replace(x=oracle.project_x(c.x - h.lr_x * g_x), y=c.y - h.lr_y * g_y)

    def finish(self, c: Local) -> dict[str, Any]:
        return {"dx": c.x - c.x0, "dy": c.y - c.y0}


@register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """FedAvg on the lower loss: what training without the upper level gives.

    Client i takes tau_i steps x <- x - lr_x grad_x g_i, y <- y - lr_y grad_y g_i; the server adds `server_lr` times the
    mean displacement. `train="y"` leaves x at its start (untuned hyper-parameters); the default trains both (a network
    as a whole). The weights of the mean are the problem's: "samples" is the classic choice.
    """

    solves = "single"
    phases: ClassVar = {"train": Train}

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    server_lr: float = 1.0
    train: Literal["both", "y"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("server_lr", self.server_lr)
        checks.one_of("train", self.train, ("both", "y"))

    def init(self, problem: Problem) -> State:
        return State(*problem.start)

    def iterate(self, s: State, fed: Federation) -> State:
        r = fed.ask("train", fed.sample(), x=s.x, y=s.y)
        x, y = s.x + self.server_lr * r.mean("dx"), s.y + self.server_lr * r.mean("dy")
        return State(fed.problem.project(x), y)
