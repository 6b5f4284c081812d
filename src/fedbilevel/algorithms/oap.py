"""OAP: online adaptive pruning. Every client trains its own part of the current model.

Zhou, Lan, Venkataramani and Ding, "Every Parameter Matters: Ensuring the Convergence of Federated
Learning with Dynamic Heterogeneous Models Reduction", NeurIPS 2023.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Point
from fedbilevel.algorithms.fedavg import (
    FedAvg,
    Gradients,
    Part,
    Train,
    Training,
    TrainOnEpisodes,
)
from fedbilevel.algorithms.heterofl import HeteroFL
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_submodels import (
    magnitudes,
    maskable,
    masked_mean,
    weight_budget,
)
from fedbilevel.core.settings import Fraction
from fedbilevel.core.submodels import Submodel, UnitSelector, choose_submodels, importance
from fedbilevel.core.tree import Tree, unflatten
from fedbilevel.federation import Federation

GOLDEN_RATIO = (5**0.5 - 1) / 2


def core_and_slices(largest: UnitSelector, core: float, t: int) -> UnitSelector:
    """Give all clients the largest units, and each client a different slice of the rest.

    All clients hold the ceil(core * total) largest units, or as many of them as they can hold. The
    rest, in order of size, is cut into slices that adjoin from client to client, so that every unit
    is held if the lengths of the slices add up to the rest. In iteration t, the first slice starts
    at t times the golden ratio (mod 1) of the rest, so that shorter slices still reach every unit
    within few iterations.

    Args:
        largest: The selector of the largest units, in descending order.
        core: The share of units that everyone holds.
        t: The iteration.

    Returns:
        A selector, to be called once per client and axis.
    """
    offsets: dict[str, int] = defaultdict(int)

    def select(axis: str, total: int, count: int, group: int) -> Tensor:
        order = largest(axis, total, total, group)
        core_count = math.ceil(core * total)
        top = order[: min(core_count, count)]
        rest = order[core_count:]
        slice_length = count - len(top)
        if not slice_length:
            return top
        first = int(t * GOLDEN_RATIO % 1 * len(rest)) + offsets[axis]
        offsets[axis] += slice_length
        return torch.cat([top, rest[(first + torch.arange(slice_length)) % len(rest)]])

    return select


class MaskedTraining(Training):
    """Steps on the weights that a client's mask m_i holds: w <- w - lr m_i grad g_i(w m_i)."""

    def descend(self, gradients: Gradients, x: Tree, y: Tree, part: Part) -> tuple[Tree, Tree]:
        """Take one step on the weights that the mask holds."""
        d_x, d_y = gradients(x.map(torch.mul, part["x"]), y.map(torch.mul, part["y"]))
        x = x - self.lr_x * d_x.map(torch.mul, part["x"])
        y = y - self.lr_y * d_y.map(torch.mul, part["y"])
        return x, y


class TrainMasked(MaskedTraining, Train):
    """Masked training on batches."""


class TrainMaskedOnEpisodes(MaskedTraining, TrainOnEpisodes):
    """Masked training on episodes."""


@register("oap")
@dataclass(frozen=True, kw_only=True)
class OAP(FedAvg):
    """OAP: FedAvg with a mask per client on single weights, renewed in each iteration.

    A single-level baseline for clients that can train only some of the weights. Every weight is
    held by somebody whenever the budgets allow: the minimum coverage index, on which the paper's
    rate depends, is then at least 1. Masks save neither computation nor bytes here; choose
    `OAPStructured` for networks that are really smaller, and `FIARSE` for masks that training
    itself adapts.

    Client i of capacity r_i holds, by its mask m_i, int(r_i^2 d) of d weights, about as many as a
    submodel of width r_i has:

        the ceil(core d) largest |w|, which everyone holds,
        and of the rest a different slice per client.

    From the server's w = (x, y) it takes the local steps

        w <- w - lr m_i grad g_i(w m_i),

    on batches or on episodes. Displacements are averaged in each coordinate over the clients that
    hold it; where nobody does, the coordinate stays.

    Cost per iteration: one round. Gradients per client: those of `FedAvg` (1 per local step).
    Tensors keep their shapes, so a client computes and sends as much as with the whole model. Down:
    x, y and the mask, one byte per weight. Up: the displacements of x and y.

    Departures from the paper: it was not at hand, so the method is written from memory. As far
    as we recall, the paper leaves the choice of masks open; this choice is ours. Tensors that start
    with equal entries, such as norm layers, are not masked.

    References:
        Zhou, Lan, Venkataramani and Ding, "Every Parameter Matters: Ensuring the Convergence of
        Federated Learning with Dynamic Heterogeneous Models Reduction", NeurIPS 2023.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        server_lr: Factor of the mean displacement.
        train: What is trained: "both", or "y" to leave x at its start.
        episode_steps: Gradient steps per episode; used with a private lower level only.
        core: The share of the weights that everyone holds, in (0, 1].

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("loss-tuning", clients=4, hidden=8)
        >>> small = fb.Environment(capacity=0.5, batch_size=16)
        >>> method = fb.algorithms.OAP(lr_y=0.5, train="y")
        >>> result = fb.solve(task.problem, task.clients, method, rounds=3, environment=small)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
    """

    submodels = True
    batch_phase = TrainMasked
    episode_phase = TrainMaskedOnEpisodes

    core: Fraction = 0.002

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round; average each weight over the clients that hold it."""
        S = fed.sample()
        masks = self.masks(s, fed, S)
        r = fed.ask(self.phase(fed), S, x=s.x, y=s.y, each=[{"part": mask} for mask in masks])
        dx = masked_mean(fed, r, "dx", [masks[reply.position]["x"] for reply in r])
        dy = masked_mean(fed, r, "dy", [masks[reply.position]["y"] for reply in r])
        return self.move(s, dx, dy, fed)

    def masks(self, s: Point, fed: Federation, S: Sequence[int]) -> list[dict[str, Tree]]:
        """Return the masks m_i of the clients S, for x and for y."""
        w = maskable(fed.problem, s.x, s.y)
        order = magnitudes(w).argsort(descending=True, stable=True)

        def largest(axis: str, total: int, count: int, group: int) -> Tensor:
            return order[:count]

        def everything(tensor: Tensor) -> Tensor:
            return torch.ones_like(tensor, dtype=torch.bool)

        whole = Tree({**s.x, **s.y}).map(everything)
        select = core_and_slices(largest, self.core, fed.iteration)
        masks = []
        for position, ratios in enumerate(fed.environment.capacities(S)):
            count = min(weight_budget(w, s.x, ratios), len(order))
            held = torch.zeros_like(order, dtype=torch.bool)
            held[select("", len(order), count, position)] = True  # all weights are one axis
            mask = {**whole, **unflatten(held, w)}
            mask_x = Tree({name: mask[name] for name in s.x})
            mask_y = Tree({name: mask[name] for name in s.y})
            masks.append({"x": mask_x, "y": mask_y})
        return masks


@register("oap-structured")
@dataclass(frozen=True, kw_only=True)
class OAPStructured(HeteroFL):
    """OAP's choice over whole units: HeteroFL on submodels that together cover all units.

    Choose it over `OAP` for networks that are really smaller, and over `HeteroFL` where no client
    can hold the whole model. Every unit is held by somebody whenever the budgets allow; a weight
    between units of two clients' slices may still be held by neither.

    Of the K units of an axis client i of capacity r_i holds ceil(r_i K):

        the ceil(core K) with the largest weights, which everyone holds,
        and of the rest a different slice per client.

    Clients train and are averaged as in `HeteroFL`.

    Cost per iteration: that of `HeteroFL`: one round, 1 gradient per client and local step. Down:
    the submodel's x and y. Up: their displacements.

    Departures from the paper: the method is ours. As far as we recall, the paper masks single
    weights.

    References:
        After Zhou, Lan, Venkataramani and Ding, "Every Parameter Matters: Ensuring the Convergence
        of Federated Learning with Dynamic Heterogeneous Models Reduction", NeurIPS 2023.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        server_lr: Factor of the mean displacement; 1 averages the clients' weights.
        train: What is trained: "both", or "y" to leave x at its start.
        episode_steps: Gradient steps per episode; used with a private lower level only.
        core: The share of the units that everyone holds, in (0, 1].

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("loss-tuning", clients=4, hidden=8)
        >>> small = fb.Environment(capacity=0.5, batch_size=16)
        >>> method = fb.algorithms.OAPStructured(lr_y=0.5, train="y")
        >>> result = fb.solve(task.problem, task.clients, method, rounds=3, environment=small)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
    """

    core: Fraction = 0.03

    def assign(self, s: Point, fed: Federation, S: Sequence[int]) -> list[Submodel | None]:
        """Return the largest units and a slice of the rest, for each client of S."""
        axes = fed.problem.axes
        ratios = fed.environment.capacities(S)
        largest = importance(axes, {**s.x, **s.y})
        select = core_and_slices(largest, self.core, fed.iteration)
        return choose_submodels(axes, s.x, s.y, select, ratios, groups=range(len(S)))
