"""ProtoNet, distributed: a backbone whose class means tell classes apart.

Snell, Swersky and Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Algorithm, Point
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_episodes import Episodes
from fedbilevel.core.client_data import Batch, Data
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment


def features_and_labels(side: Data) -> tuple[Tensor, Tensor]:
    """Return the features, one row per sample, and the labels that `embed` returned."""
    if isinstance(side, dict) and {"features", "labels"} <= side.keys():
        return side["features"].flatten(1), side["labels"]
    kind = type(side).__name__
    if isinstance(side, dict):
        kind = f"dict with {', '.join(side)}"
    raise ValueError(f"embed returned a {kind}; protonet needs a dict with 'features' and 'labels'")


def prototype_loss(support: Data, query: Data) -> Tensor:
    """Return the mean over queries q of -log softmax_k(-||q - c_k||^2) at the query's own class k.

    The prototype c_k is the mean of the support features of class k.

    Args:
        support: What `embed` returns for the support: a dict with "features" and "labels".
        query: The same for the queries.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: If one of them is something else.
    """
    features, labels = features_and_labels(support)
    queries, query_labels = features_and_labels(query)
    # A class enters the softmax once per support sample, with weight 1 / (its number of samples),
    # so that nobody needs to know how many classes there are. ||q||^2 is the same for all classes
    # and left out.
    same = (labels[:, None] == labels).to(features)
    counts = same.sum(1)
    means = same @ features / counts[:, None]
    scores = 2 * queries @ means.T - means.square().sum(1) - counts.log()
    own_class = query_labels[:, None] == labels
    losses: Tensor = scores.logsumexp(1) - scores.masked_fill(~own_class, -torch.inf).logsumexp(1)
    return losses.mean()


class Prototypes(Episodes):
    """The gradient of an episode's loss in x."""

    reply: ClassVar = {"h": "x"}

    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]:
        """Evaluate the gradient of one episode."""
        return {"h": oracle.feature_gradient(prototype_loss, x, batch)}


@register("protonet")
@dataclass(frozen=True, kw_only=True)
class ProtoNet(Algorithm):
    """ProtoNet: learn features on which the nearest class mean classifies.

    A few-shot baseline, for problems with a private lower level whose `embed` returns features and
    labels. Neither y nor an inner loop is involved, which makes it the cheapest of the few-shot
    methods. Evaluate it by prototypes (`adapt="prototypes"` of the task "few-shot"): y is never
    trained. Choose `MAML` or `RABO` for a trained head.

    An episode has the prototypes c_k, the mean of the features of its training samples of class k,
    and the loss

        mean over its validation samples (q, k) of  ||q - c_k||^2 + log sum_j exp(-||q - c_j||^2).

    Client i replies with the mean gradient h_i of its tau_i episodes in x, and

        x <- x - lr_x mean h_i.

    Cost per iteration: one round. Gradients per client and episode: 2, one per side. Down: x, y.
    Up: h_i, which is shaped like x.

    Departures from the paper: it was not at hand, so the method is written from memory. Episodes
    belong to clients, and their gradients are averaged. The server takes plain gradient steps.

    References:
        Snell, Swersky and Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.

    Args:
        lr_x: Step size of x, a number or a schedule.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("few-shot", clients=1, ways=2, hidden=4, episodes=2)
        >>> episodes = fb.Environment(batch_size=2)
        >>> method = fb.algorithms.ProtoNet(lr_x=0.05)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=1, environment=episodes)
        >>> result.status, result.history[-1]["gradients"]
        ('completed', 2)
    """

    solves = "single"
    second_derivatives = False
    lower_levels = ("private",)

    lr_x: Step = 0.05

    def check(self, problem: Problem, environment: Environment) -> None:
        """Refuse, besides, a problem without features."""
        super().check(problem, environment)
        if problem.embed is None:
            raise ValueError(
                "protonet compares features; this problem has no embed that computes them"
            )

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round; step on x along the mean gradient of the episodes."""
        h = fed.ask(Prototypes(), fed.sample(), x=s.x, y=s.y).mean("h")
        return Point(fed.problem.project(s.x - self.lr_x * h), s.y)
