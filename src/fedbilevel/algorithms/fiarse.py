"""FIARSE: submodels of the weights that are largest now, trained to become important or not.

Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbilevel.algorithms.fedavg import FedAvg, Gradients, State, Train, Training, TrainOnEpisodes
from fedbilevel.algorithms.heterofl import HeteroFL
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared_submodels import budget, cut, held_mean, magnitudes, maskable
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation


def slope(w: Tensor, threshold: Tensor) -> Tensor:
    """The factor of a weight's gradient: 1 + 2 thr |w| / (|w| + thr)^2 where it is kept, 0 where it is not."""
    size = w.abs()
    least = torch.finfo(w.dtype).tiny  # 0 / 0 is 0
    return (size >= threshold) * (
        1 + 2 * threshold * size / (size + threshold).square().clamp(min=least)
    )


class ThresholdTraining(Training):
    """Steps on the weights above a client's thresholds, whose gradients `slope` scales.

    The server sees each reply: which weights it moved is to be counted.
    """

    summed = False

    def descend(self, gradients: Gradients, x: Tree, y: Tree, part: Any) -> tuple[Tree, Tree]:
        by_x = x.map(slope, part["x"])
        by_y = y.map(slope, part["y"])
        d_x, d_y = gradients(
            *(w.map(lambda w, by: w * (by > 0), by) for w, by in ((x, by_x), (y, by_y)))
        )
        x = x - self.lr_x * d_x.map(torch.mul, by_x)
        return x, y - self.lr_y * d_y.map(torch.mul, by_y)


class TrainAboveThreshold(ThresholdTraining, Train):
    """On batches."""


class TrainAboveThresholdOnEpisodes(ThresholdTraining, TrainOnEpisodes):
    """On episodes."""


@register("fiarse")
@dataclass(frozen=True, kw_only=True)
class FIARSE(FedAvg):
    """FIARSE: FedAvg on the weights that are largest now, by masks on single weights.

    Client i holds the int(r_i^2 d) largest |w| of d, among x and y together; thr_i is the least of these when the round
    begins. A local step has m = 1[|w| >= thr_i], anew each time, runs the network with w m, and takes the mask for a
    function of |w| with slope 2 thr_i / (|w| + thr_i)^2 where it is 1:

        w <- w - lr m (1 + 2 thr_i |w| / (|w| + thr_i)^2) grad g_i(w m).

    A weight that falls below thr_i stays there for the rest of the round. Displacements are averaged in each coordinate
    over the clients that moved it, which leaves out those that held it and had a gradient of 0, as of a dead unit;
    where none did it stays.

    Tensors keep their shape, so a client computes and sends as much as with the whole model, and the ledger counts
    that; of the mask it gets thr_i alone. The server sees each reply by itself, to count what is not 0: that costs no
    bytes, but rules out sums that hide a client's own. r_i is a ratio of widths, and a submodel of that width has about
    as many weights; in print it is the share of the weights.

    Departures from print (read in the published code): norm layers are left out of masks there by their kind, here by
    `submodel.maskable`; thr_i is 0 for r_i = 1 (there the least |w|): whole clients are FedAvg's.
    """

    submodels = True
    on_batches = TrainAboveThreshold
    on_episodes = TrainAboveThresholdOnEpisodes

    def iterate(self, s: State, fed: Federation) -> State:
        S = fed.sample()
        each = [{"part": thresholds} for thresholds in self.thresholds(s, fed, S)]
        r = fed.ask(self.phase(fed), S, x=s.x, y=s.y, each=each)
        dx, dy = (
            held_mean(fed, r, name, [reply.values[name].map(lambda t: t != 0) for reply in r])
            for name in ("dx", "dy")
        )
        return self.move(s, dx, dy, fed)

    def thresholds(
        self, s: State, fed: Federation, S: Sequence[int]
    ) -> list[dict[str, dict[str, float]]]:
        """thr_i for each tensor of x and of y; 0 for those that are not masked."""
        w = maskable(fed.problem, s.x, s.y)
        sizes, each = magnitudes(w).sort(descending=True).values, []
        for ratios in fed.environment.capacities(S):
            count = budget(w, s.x, ratios)
            least = float(sizes[count - 1]) if count < len(sizes) else 0.0
            each.append(
                {
                    k: {n: least if n in w else 0.0 for n in tree}
                    for k, tree in (("x", s.x), ("y", s.y))
                }
            )
        return each


@register("fiarse-structured")
@dataclass(frozen=True, kw_only=True)
class FIARSEStructured(HeteroFL):
    """HeteroFL with FIARSE's choice over whole units: those whose weights have the largest norm now.

    Ours, for networks that are really smaller: print masks single weights. The choice has no gradient.
    """

    def hold(self, s: State, fed: Federation, S: Sequence[int]) -> list[Submodel | None]:
        return cut(fed, S, s.x, s.y, "importance")
