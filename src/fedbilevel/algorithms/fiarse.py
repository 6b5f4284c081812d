"""FIARSE: submodels of the largest weights, whose sizes training itself adapts.

Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel
Extraction", NeurIPS 2024.
"""

from __future__ import annotations

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
    assign_submodels,
    magnitudes,
    maskable,
    masked_mean,
    weight_budget,
)
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation, Replies


def gradient_factor(w: Tensor, threshold: Tensor) -> Tensor:
    """Return the factor of a weight's gradient.

    It is 1 + 2 thr |w| / (|w| + thr)^2 where |w| >= thr, so that the weight is kept, and else 0.
    """
    size = w.abs()
    tiny = torch.finfo(w.dtype).tiny  # so that 0 / 0 is 0
    kept = size >= threshold
    return kept * (1 + 2 * threshold * size / (size + threshold).square().clamp(min=tiny))


def keep(w: Tensor, factor: Tensor) -> Tensor:
    """Return the weights that are kept, which are those with a factor above 0."""
    return w * (factor > 0)


class ThresholdTraining(Training):
    """Steps on the weights above a client's thresholds, with scaled gradients.

    The server sees each reply (`summed = False`): it counts which weights a client moved.
    """

    summed = False

    def descend(self, gradients: Gradients, x: Tree, y: Tree, part: Part) -> tuple[Tree, Tree]:
        """Take one step on the weights that are kept now."""
        factor_x = x.map(gradient_factor, part["x"])
        factor_y = y.map(gradient_factor, part["y"])
        d_x, d_y = gradients(x.map(keep, factor_x), y.map(keep, factor_y))
        x = x - self.lr_x * d_x.map(torch.mul, factor_x)
        y = y - self.lr_y * d_y.map(torch.mul, factor_y)
        return x, y


class TrainAboveThreshold(ThresholdTraining, Train):
    """Training above thresholds on batches."""


class TrainAboveThresholdOnEpisodes(ThresholdTraining, TrainOnEpisodes):
    """Training above thresholds on episodes."""


@register("fiarse")
@dataclass(frozen=True, kw_only=True)
class FIARSE(FedAvg):
    """FIARSE: FedAvg on the weights that are largest now, by masks on single weights.

    A single-level baseline for clients that can train only some of the weights. Masks follow the
    magnitudes and training moves the magnitudes, so that which weights matter is learned, where
    `OAP` and `FedRolex` fix it by a rule. Masks save neither computation nor bytes here; choose
    `FIARSEStructured` for networks that are really smaller.

    Client i of capacity r_i holds the int(r_i^2 d) largest |w| of d, among x and y together; thr_i
    is the smallest of these when the round starts. A local step computes the mask
    m = 1[|w| >= thr_i] of the current weights, evaluates the network at w m, and differentiates
    the mask as a function of |w| with slope 2 thr_i / (|w| + thr_i)^2 where it is 1:

        w <- w - lr m (1 + 2 thr_i |w| / (|w| + thr_i)^2) grad g_i(w m).

    A weight that falls below thr_i stays there for the rest of the round. Displacements are
    averaged in each coordinate over the clients that moved it. This leaves out clients that held it
    with a gradient of 0, as of a dead unit; where nobody moved it, it stays.

    Cost per iteration: one round. Gradients per client: those of `FedAvg` (1 per local step).
    Tensors keep their shapes, so a client computes and sends as much as with the whole model. Down:
    x, y and the number thr_i. Up: the displacements of x and y. The server reads single replies to
    count which entries are not 0; this costs no bytes but rules out secure aggregation.

    Departures: this follows the paper, and not what its published code runs. There the mask is a
    boolean tensor, which PyTorch does not differentiate, so that the slope that the code writes
    down never runs: it trains with plain masks, w <- w - lr m grad g_i(w m). All else is from the
    code, which was read. There norm layers are exempt from masks by their kind; here all tensors
    that start with equal entries are. There r_i is the share of the weights; here it is a ratio of
    widths, and a submodel of width r_i has about r_i^2 of the weights. thr_i is 0 for r_i = 1
    (there the smallest |w|), so that clients with the whole model do as `FedAvg`.

    References:
        Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel
        Extraction", NeurIPS 2024.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        server_lr: Factor of the mean displacement.
        train: What is trained: "both", or "y" to leave x at its start.
        episode_steps: Gradient steps per episode; used with a private lower level only.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("loss-tuning", clients=4, hidden=8)
        >>> small = fb.Environment(capacity=0.5, batch_size=16)
        >>> method = fb.algorithms.FIARSE(lr_y=0.5, train="y")
        >>> result = fb.solve(task.problem, task.clients, method, rounds=3, environment=small)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
    """

    submodels = True
    batch_phase = TrainAboveThreshold
    episode_phase = TrainAboveThresholdOnEpisodes

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run one round; average each weight over the clients that moved it."""
        S = fed.sample()
        each = [{"part": thresholds} for thresholds in self.thresholds(s, fed, S)]
        r = fed.ask(self.phase(fed), S, x=s.x, y=s.y, each=each)
        dx = masked_mean(fed, r, "dx", _moved(r, "dx"))
        dy = masked_mean(fed, r, "dy", _moved(r, "dy"))
        return self.move(s, dx, dy, fed)

    def thresholds(
        self, s: Point, fed: Federation, S: Sequence[int]
    ) -> list[dict[str, dict[str, float]]]:
        """Return thr_i of the clients S, per tensor of x and of y; 0 for tensors without a mask."""
        w = maskable(fed.problem, s.x, s.y)
        sizes = magnitudes(w).sort(descending=True).values
        each = []
        for ratios in fed.environment.capacities(S):
            count = weight_budget(w, s.x, ratios)
            thr = 0.0
            if count < len(sizes):
                thr = float(sizes[count - 1])
            thresholds = {**dict.fromkeys([*s.x, *s.y], 0.0), **dict.fromkeys(w, thr)}
            thresholds_x = {name: thresholds[name] for name in s.x}
            thresholds_y = {name: thresholds[name] for name in s.y}
            each.append({"x": thresholds_x, "y": thresholds_y})
        return each


def _moved(r: Replies, name: str) -> list[Tree]:
    """Return which coordinates each client moved."""
    return [reply.values[name].map(lambda t: t != 0) for reply in r]


@register("fiarse-structured")
@dataclass(frozen=True, kw_only=True)
class FIARSEStructured(HeteroFL):
    """FIARSE's choice over whole units: HeteroFL on the units with the largest weights.

    Choose it over `FIARSE` for networks that are really smaller, and over `HeteroFL` where the
    first units are not to be preferred. The choice of units has no gradient: training does not aim
    at making units important.

    Client i of capacity r_i holds, of the K units of every axis, the ceil(r_i K) whose weights have
    the largest norm at the start of the iteration; it trains and is averaged as in `HeteroFL`.

    Cost per iteration: that of `HeteroFL`: one round, 1 gradient per client and local step. Down:
    the submodel's x and y. Up: their displacements.

    Departures from the paper: the method is ours: the paper masks single weights.

    References:
        After Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware
        Submodel Extraction", NeurIPS 2024.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        server_lr: Factor of the mean displacement; 1 averages the clients' weights.
        train: What is trained: "both", or "y" to leave x at its start.
        episode_steps: Gradient steps per episode; used with a private lower level only.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("loss-tuning", clients=4, hidden=8)
        >>> small = fb.Environment(capacity=0.5, batch_size=16)
        >>> method = fb.algorithms.FIARSEStructured(lr_y=0.5, train="y")
        >>> result = fb.solve(task.problem, task.clients, method, rounds=3, environment=small)
        >>> result.history[-1]["lower_loss"] < result.history[0]["lower_loss"]
        True
    """

    def assign(self, s: Point, fed: Federation, S: Sequence[int]) -> list[Submodel | None]:
        """Return the units with the largest weights, for the clients S."""
        return assign_submodels(fed, S, s.x, s.y, "importance")
