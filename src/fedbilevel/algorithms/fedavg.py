"""FedAvg: the single-level baseline.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Phase, Steps

Gradients = Callable[[Tree, Tree], tuple[Tree, Tree]]


class State(NamedTuple):
    x: Tree
    y: Tree


class Local(NamedTuple):
    """Where a client is, where it started, and what it was told of the part of the model it holds."""

    x: Tree
    y: Tree
    x0: Tree
    y0: Tree
    part: Any


class Training(Phase):
    """What training on batches and on episodes share: one gradient step.

    train: "both", or "y" to leave x where it is.
    """

    reply: ClassVar = {"dx": "x", "dy": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    train: Literal["both", "y"] = "both"

    def descend(self, gradients: Gradients, x: Tree, y: Tree, part: Any) -> tuple[Tree, Tree]:
        """One local step; `part` is what a client is told of the part of the model it trains."""
        d_x, d_y = gradients(x, y)
        return x - self.lr_x * d_x, y - self.lr_y * d_y


class Train(Training):
    """tau_i gradient steps on the lower loss; replies with how far it came."""

    name = "train"
    batch = "train"

    def start(self, m: Message) -> Local:
        return Local(m.x, m.y, m.x, m.y, vars(m).get("part", ()))

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        def gradients(x: Tree, y: Tree) -> tuple[Tree, Tree]:
            if self.train == "y":
                return zeros_like(x), oracle.lower_gradient_y(x, y, batch)
            return oracle.lower_gradients(x, y, batch)

        x, y = self.descend(gradients, c.x, c.y, c.part)
        return c._replace(x=oracle.project_x(x), y=y)

    def finish(self, c: Local) -> dict[str, Any]:
        return {"dx": c.x - c.x0, "dy": c.y - c.y0}


class Visit(NamedTuple):
    """The same over episodes: each begins at y0, and dy sums up how far they came."""

    x: Tree
    x0: Tree
    y0: Tree
    dy: Tree
    part: Any
    steps: Any


class TrainOnEpisodes(Training):
    """As many episodes as local steps; replies with the displacement of x and the mean one of y."""

    name = "episodes"

    episode_steps: Count

    def start(self, m: Message) -> Visit:
        return Visit(m.x, m.x, m.y, zeros_like(m.y), vars(m).get("part", ()), m.steps)

    def step(self, c: Visit, oracle: Oracle, batch: Batch) -> Visit:
        def gradients(x: Tree, y: Tree) -> tuple[Tree, Tree]:
            g_x, g_y = oracle.lower_gradients(x, y, batch)
            f_x, f_y = oracle.upper_gradients(x, y, batch)
            d_x = zeros_like(x) if self.train == "y" else (g_x + f_x) / 2
            return d_x, (g_y + f_y) / 2

        x, y = c.x, c.y0
        for _ in range(self.episode_steps):
            x, y = self.descend(gradients, x, y, c.part)
            x = oracle.project_x(x)
        return c._replace(x=x, dy=c.dy + (y - c.y0))

    def finish(self, c: Visit) -> dict[str, Any]:
        return {"dx": c.x - c.x0, "dy": c.dy / c.steps}


@register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """FedAvg on the lower loss: what training without the upper level gives.

    Client i takes tau_i steps x <- x - lr_x grad_x g_i, y <- y - lr_y grad_y g_i; the server adds `server_lr` times the
    mean displacement. `train="y"` leaves x at its start (untuned hyper-parameters); the default trains both (a network
    as a whole). The weights of the mean are the problem's: "samples" is the classic choice.

    Where the lower level is private, a local step is an episode, on all of whose labelled data the client trains:
    `episode_steps` times x <- x - lr_x grad_x (f + g)/2 and the same for y. x goes on to the next episode, y begins
    each at the shared one, which moves by the mean displacement of all. This is ours, and what Reptile does (Nichol,
    Achiam and Schulman 2018): print does not say what a single-level method does with episodes, and with one y for
    all of them, each labelling anew, there would be nothing to learn.
    """

    solves = "single"
    lower_levels = ("shared", "private")
    on_batches: ClassVar[type[Train]] = Train
    on_episodes: ClassVar[type[TrainOnEpisodes]] = TrainOnEpisodes

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    server_lr: Positive = 1.0
    train: Literal["both", "y"] = "both"
    episode_steps: Count = 5

    def init(self, problem: Problem) -> State:
        return State(*problem.start)

    def iterate(self, s: State, fed: Federation) -> State:
        r = fed.ask(self.phase(fed), fed.sample(), x=s.x, y=s.y)
        return self.move(s, r.mean("dx"), r.mean("dy"), fed)

    def phase(self, fed: Federation) -> Phase:
        if fed.problem.lower_level == "shared":
            return self.on_batches(lr_x=self.lr_x, lr_y=self.lr_y, train=self.train)
        return self.on_episodes(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            train=self.train,
            episode_steps=self.episode_steps,
        )

    def move(self, s: State, dx: Tree, dy: Tree, fed: Federation) -> State:
        return State(fed.problem.project(s.x + self.server_lr * dx), s.y + self.server_lr * dy)
