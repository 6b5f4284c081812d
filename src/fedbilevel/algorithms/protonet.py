"""ProtoNet, distributed: the backbone on which the means of a class's samples tell classes apart.

Snell, Swersky and Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import Episodes
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment


class State(NamedTuple):
    x: Tree
    y: Tree


def prototype_loss(support: Any, query: Any) -> Tensor:
    """The mean over queries of -log softmax over classes k of -||q - c_k||^2, at the query's own class.

    A class is in the softmax once for each of its n support samples, each time with weight 1/n, so that nobody needs to
    know how many classes there are; ||q||^2 is the same for all of them and left out.
    """
    for side in (support, query):
        if not isinstance(side, dict) or not {"features", "labels"} <= side.keys():
            got = f"dict with {', '.join(side)}" if isinstance(side, dict) else type(side).__name__
            raise ValueError(
                f"embed returned a {got}; protonet needs a dict with 'features' and 'labels'"
            )
    same = (support["labels"][:, None] == support["labels"]).to(support["features"])
    means, counts = same @ support["features"].flatten(1) / same.sum(1, keepdim=True), same.sum(1)
    scores = 2 * query["features"].flatten(1) @ means.T - means.square().sum(1) - counts.log()
    own = query["labels"][:, None] == support["labels"]
    losses: Tensor = scores.logsumexp(1) - scores.masked_fill(~own, -torch.inf).logsumexp(1)
    return losses.mean()


class Prototypes(Episodes):
    """The gradient in x of an episode's loss."""

    reply: ClassVar = {"h": "x"}

    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]:
        return {"h": oracle.feature_gradient(prototype_loss, x, batch)}


@register("protonet")
@dataclass(frozen=True, kw_only=True)
class ProtoNet(Algorithm):
    """ProtoNet, one round an iteration; only for private lower levels whose `embed` gives features and labels.

    An episode has the prototypes c_k = mean of the features of its training samples of class k, and the loss

        mean over its validation samples (q, k) of  ||q - c_k||^2 + log sum_j exp(-||q - c_j||^2).

    Client i replies with the mean gradient of its tau_i episodes at x; x <- x - lr_x mean. y stays at its start: what
    is learned is made for classifying by prototypes.

    Departures from print (recalled, not read: the paper was not at hand): episodes are the clients', their gradients
    averaged; plain gradient steps.
    """

    solves = "single"
    lower_levels = ("private",)

    lr_x: Step = 0.05

    def check(self, problem: Problem, environment: Environment) -> None:
        super().check(problem, environment)
        if problem.embed is None:
            raise ValueError("protonet compares features; this problem has no embed to give them")

    def init(self, problem: Problem) -> State:
        return State(*problem.start)

    def iterate(self, s: State, fed: Federation) -> State:
        h = fed.ask(Prototypes(), fed.sample(), x=s.x, y=s.y).mean("h")
        return State(fed.problem.project(s.x - self.lr_x * h), s.y)
