"""OAP: online adaptive pruning, every client its own part of the current model, together all of it.

Zhou, Lan, Venkataramani and Ding, "Every Parameter Matters: Ensuring the Convergence of Federated Learning with Dynamic
Heterogeneous Models Reduction", NeurIPS 2023.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbilevel.algorithms.fedavg import FedAvg, Gradients, State, Train, Training, TrainOnEpisodes
from fedbilevel.algorithms.heterofl import HeteroFL
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_submodels import budget, held_mean, magnitudes, maskable
from fedbilevel.core.settings import Fraction
from fedbilevel.core.submodels import Pick, Submodel, choose, importance
from fedbilevel.core.tree import Tree, unflatten
from fedbilevel.federation import Federation

GOLDEN = (5**0.5 - 1) / 2


def deal(largest: Pick, core: float, t: int) -> Pick:
    """The ceil(core total) largest for everybody; the rest, in that order, in slices that follow each other from client
    to client, so that everything is held whenever the slices suffice for once around. In iteration t they begin at
    t times the golden section of the rest, so that they get everywhere soon where they do not."""
    dealt: dict[str, int] = defaultdict(int)

    def pick(axis: str, total: int, count: int, group: int) -> Tensor:
        order, head = largest(axis, total, total, group), math.ceil(core * total)
        top, rest = order[: min(head, count)], order[head:]
        own = count - len(top)
        if not own:
            return top
        first = int(t * GOLDEN % 1 * len(rest)) + dealt[axis]
        dealt[axis] += own
        return torch.cat([top, rest[(first + torch.arange(own)) % len(rest)]])

    return pick


class MaskedTraining(Training):
    """Steps on the weights that a client's mask m_i holds: w <- w - lr m_i grad g_i(w m_i)."""

    def descend(self, gradients: Gradients, x: Tree, y: Tree, part: Any) -> tuple[Tree, Tree]:
        d_x, d_y = gradients(x.map(torch.mul, part["x"]), y.map(torch.mul, part["y"]))
        x = x - self.lr_x * d_x.map(torch.mul, part["x"])
        return x, y - self.lr_y * d_y.map(torch.mul, part["y"])


class TrainMasked(MaskedTraining, Train):
    """On batches."""


class TrainMaskedOnEpisodes(MaskedTraining, TrainOnEpisodes):
    """On episodes."""


@register("oap")
@dataclass(frozen=True, kw_only=True)
class OAP(FedAvg):
    """OAP: FedAvg with masks on single weights, one for each client, chosen anew in each iteration.

    Client i holds, by its mask m_i, int(r_i^2 d) of d weights, about as many as a submodel of width r_i has:

        the ceil(core d) largest |w|, which everybody holds, and a slice of the rest, another for each client,

    so that every weight is held by somebody whenever the budgets allow: the minimum coverage index, on which the rate
    depends, is then at least 1. From w m_i a client takes steps w <- w - lr m_i grad g_i(w m_i). Displacements are
    averaged in each coordinate over the clients that hold it, and where nobody does it stays.

    Tensors keep their shape, so a client computes and sends as much as with the whole model, and gets its mask besides,
    a byte a weight; the ledger counts that.

    Departures from print (recalled, not read: the paper was not at hand): it leaves the masks open, so the recipe is
    ours; `submodel.maskable` says what is not masked.
    """

    submodels = True
    on_batches = TrainMasked
    on_episodes = TrainMaskedOnEpisodes

    core: Fraction = 0.002

    def iterate(self, s: State, fed: Federation) -> State:
        S = fed.sample()
        masks = self.masks(s, fed, S)
        r = fed.ask(self.phase(fed), S, x=s.x, y=s.y, each=[{"part": mask} for mask in masks])
        dx = held_mean(fed, r, "dx", [masks[reply.position]["x"] for reply in r])
        dy = held_mean(fed, r, "dy", [masks[reply.position]["y"] for reply in r])
        return self.move(s, dx, dy, fed)

    def masks(self, s: State, fed: Federation, S: Sequence[int]) -> list[dict[str, Tree]]:
        """m_i for x and for y."""
        w, each = maskable(fed.problem, s.x, s.y), []
        everything = {
            name: torch.ones_like(t, dtype=torch.bool) for name, t in {**s.x, **s.y}.items()
        }
        order = magnitudes(w).argsort(descending=True, stable=True)
        pick = deal(lambda axis, total, count, group: order[:count], self.core, fed.iteration)
        for place, ratios in enumerate(fed.environment.capacities(S)):
            held = torch.zeros_like(order, dtype=torch.bool)
            held[pick("", len(order), min(budget(w, s.x, ratios), len(order)), place)] = True
            mask = {**everything, **unflatten(held, w)}
            each.append(
                {
                    "x": Tree({name: mask[name] for name in s.x}),
                    "y": Tree({name: mask[name] for name in s.y}),
                }
            )
        return each


@register("oap-structured")
@dataclass(frozen=True, kw_only=True)
class OAPStructured(HeteroFL):
    """HeteroFL with OAP's choice over whole units.

    Of the K units of an axis everybody holds the ceil(core K) with the largest weights, and of the others each client a
    slice of its own. Ours, for networks that are really smaller: print masks single weights, as far as we recall.
    Somebody holds every unit whenever the budgets allow; a weight between units of two clients' slices may be held by
    neither.
    """

    core: Fraction = 0.03

    def hold(self, s: State, fed: Federation, S: Sequence[int]) -> list[Submodel | None]:
        axes = fed.problem.axes
        pick = deal(importance(axes, {**s.x, **s.y}), self.core, fed.iteration)
        return choose(axes, s.x, s.y, pick, fed.environment.capacities(S), groups=range(len(S)))
