"""FedAvg: the single-level baseline.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm, Point
from fedbilevel.algorithms.registry import register
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Phase, Steps

Gradients = Callable[[Tree, Tree], tuple[Tree, Tree]]
"""(x, y) to the gradients in x and in y."""

Part = Mapping[str, Mapping[str, Tensor]]
"""For "x" and "y", what masks a client's weights; empty where it trains the whole model."""


class Local(NamedTuple):
    """Where a client is, where it started, and which part of the model it trains."""

    x: Tree
    y: Tree
    x0: Tree
    y0: Tree
    part: Part


def gradients_of(
    oracle: Oracle, x: Tree, y: Tree, batch: Batch, train: Literal["both", "y"]
) -> tuple[Tree, Tree]:
    """Return the gradients of the lower loss; 0 in x if only y is trained."""
    if train == "y":
        return zeros_like(x), oracle.lower_gradient_y(x, y, batch)
    return oracle.lower_gradients(x, y, batch)


class Training(Phase):
    """The gradient step that training on batches and on episodes share.

    Args:
        lr_x: Step size of x.
        lr_y: Step size of y.
        train: What is trained: "both", or "y" to leave x where it is.
    """

    reply: ClassVar = {"dx": "x", "dy": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    train: Literal["both", "y"] = "both"

    def descend(self, gradients: Gradients, x: Tree, y: Tree, part: Part) -> tuple[Tree, Tree]:
        """Take one gradient step; methods that mask weights read `part`."""
        d_x, d_y = gradients(x, y)
        return x - self.lr_x * d_x, y - self.lr_y * d_y


class Train(Training):
    """tau_i gradient steps on the lower loss; replies with the displacements of x and y."""

    name = "train"
    batch = "train"

    def start(self, m: Message) -> Local:
        """Start at the server's x and y."""
        return Local(m.x, m.y, m.x, m.y, vars(m).get("part", ()))

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """Take one step on the lower loss of a batch."""

        def gradients(x: Tree, y: Tree) -> tuple[Tree, Tree]:
            return gradients_of(oracle, x, y, batch, self.train)

        x, y = self.descend(gradients, c.x, c.y, c.part)
        return c._replace(x=oracle.project_x(x), y=y)

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the displacements."""
        return {"dx": c.x - c.x0, "dy": c.y - c.y0}


class EpisodesLocal(NamedTuple):
    """A client's x, its start, the sum dy of the episodes' displacements, and their number."""

    x: Tree
    x0: Tree
    y0: Tree
    dy: Tree
    part: Part
    steps: Tensor


class TrainOnEpisodes(Training):
    """tau_i episodes; replies with the displacement of x and the mean displacement of y.

    Args:
        episode_steps: Gradient steps per episode.
    """

    name = "episodes"

    episode_steps: Count

    def start(self, m: Message) -> EpisodesLocal:
        """Start at the server's x, with a sum of displacements that is 0."""
        return EpisodesLocal(m.x, m.x, m.y, zeros_like(m.y), vars(m).get("part", ()), m.steps)

    def step(self, c: EpisodesLocal, oracle: Oracle, batch: Batch) -> EpisodesLocal:
        """Train on one episode: x continues, y starts at the shared y."""

        def gradients(x: Tree, y: Tree) -> tuple[Tree, Tree]:
            g_x, g_y = oracle.lower_gradients(x, y, batch)
            f_x, f_y = oracle.upper_gradients(x, y, batch)
            if self.train == "y":
                return zeros_like(x), (g_y + f_y) / 2
            return (g_x + f_x) / 2, (g_y + f_y) / 2

        x = c.x
        y = c.y0
        for _ in range(self.episode_steps):
            x, y = self.descend(gradients, x, y, c.part)
            x = oracle.project_x(x)
        return c._replace(x=x, dy=c.dy + (y - c.y0))

    def finish(self, c: EpisodesLocal) -> dict[str, Tree]:
        """Reply with the displacement of x and the mean displacement of y."""
        return {"dx": c.x - c.x0, "dy": c.dy / c.steps}


@register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """FedAvg on the lower loss: what training without the upper level gives.

    It is the baseline that a bilevel method has to beat, and the base of the methods on submodels
    (`HeteroFL`, `FedRolex`, `OAP`, `FIARSE`). It never sees the upper loss, except on episodes.

    Client i takes tau_i steps

        x <- x - lr_x grad_x g_i,   y <- y - lr_y grad_y g_i,

    and the server adds `server_lr` times the mean displacement. `train="y"` leaves x at its start:
    choose it where x holds hyper-parameters, which are not for the lower loss to choose, and the
    default where x and y are one network. The weights of the mean are the problem's; `"samples"`
    is the classic choice.

    Where the lower level is private, a local step is an episode, and the client trains on all its
    labelled data: `episode_steps` times

        x <- x - lr_x grad_x (f + g) / 2,   y <- y - lr_y grad_y (f + g) / 2.

    x continues to the next episode; y starts each one at the shared y, which moves by the mean
    displacement over all episodes.

    Cost per iteration: one round. Gradients per client: 1 per local step; on episodes 2
    `episode_steps` per local step. Down: x, y. Up: their displacements (that of x is 0 with
    `train="y"`).

    Departures from the paper: what happens on episodes is ours, after Reptile: the paper does not
    say how a single-level method treats them, and one y for all episodes, each with its own
    labelling, would have nothing to learn (`docs/errata.md`, RABO).

    References:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
        Data", AISTATS 2017. Nichol, Achiam and Schulman, "On First-Order Meta-Learning
        Algorithms", 2018 (Reptile).

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        server_lr: Factor of the mean displacement; 1 averages the clients' models.
        train: What is trained: "both", or "y" to leave x at its start.
        episode_steps: Gradient steps per episode; used with a private lower level only.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.FedAvg(lr_y=0.4, train="y")
        >>> result = fb.solve(task.problem, task.clients, method, rounds=20)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
        >>> float(result.x["x"].norm())
        0.0
    """

    solves = "single"
    second_derivatives = False
    lower_levels = ("shared", "private")
    batch_phase: ClassVar[type[Train]] = Train
    episode_phase: ClassVar[type[TrainOnEpisodes]] = TrainOnEpisodes

    lr_x: Step = 0.05
    lr_y: Step = 0.05
    server_lr: Positive = 1.0
    train: Literal["both", "y"] = "both"
    episode_steps: Count = 5

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round of local training."""
        r = fed.ask(self.phase(fed), fed.sample(), x=s.x, y=s.y)
        return self.move(s, r.mean("dx"), r.mean("dy"), fed)

    def phase(self, fed: Federation) -> Training:
        """Return the local training that suits the problem: on batches or on episodes."""
        if fed.problem.lower_level == "shared":
            return self.batch_phase(lr_x=self.lr_x, lr_y=self.lr_y, train=self.train)
        return self.episode_phase(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            train=self.train,
            episode_steps=self.episode_steps,
        )

    def move(self, s: Point, dx: Tree, dy: Tree, fed: Federation) -> Point:
        """Return the state after the server's step along the mean displacements dx and dy."""
        return Point(fed.problem.project(s.x + self.server_lr * dx), s.y + self.server_lr * dy)
