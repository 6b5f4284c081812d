"""Weighted sums over the replies of one exchange, and what follows from them: means and coverage.

Replies may come from submodels. A value shaped like x or y is then added at the coordinates that
its sender holds, and every coordinate has its own weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.problem import Problem
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree, flatten, unflatten, zeros_like
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.task import Values


class Totals:
    """Sums over accepted replies.

    Args:
        phase: What the clients did; it declares the kinds of their values.
        problem: Has the shapes of x and y.

    Attributes:
        count: How many replies were added; a tensor where they were counted on a GPU.
        sums: The sums by name, of values that were sent whole.
        spread: The sums of values from submodels by name, each one vector of the size of x or y.
        variables: The declared values that are shaped like x or y: "x" or "y" by name.
    """

    def __init__(self, phase: Phase, problem: Problem) -> None:
        self.problem = problem
        self.count: int | Tensor = 0
        self.sums: Values = {}
        self.spread: dict[str, Tensor] = {}
        self.variables: dict[str, str] = {}
        for name, kind in phase.reply.items():
            if kind in ("x", "y"):
                self.variables[name] = str(kind)
        self._whole_count: int | Tensor = 0  # of replies from the whole model
        self._whole_weight: float | Tensor = 0.0  # of the same
        self._holders: dict[str, Tensor] = {}  # for x and y, how many hold each coordinate
        self._holder_weights: dict[str, Tensor] = {}  # for x and y, the sum of their weights

    def add(
        self, sums: Values, count: int | Tensor, weight: float | Tensor, submodel: Submodel | None
    ) -> None:
        """Add the sums over `count` replies, whose weights sum to `weight`."""
        self.count = self.count + count
        spread: dict[str, str] = {}
        if submodel:
            spread = self.variables
            self._spread({name: sums[name] for name in spread}, submodel)
            for kind in dict.fromkeys(spread.values()):
                self._count_holders(kind, count, weight, submodel)
        else:
            self._whole_count = self._whole_count + count
            self._whole_weight = self._whole_weight + weight
        for name, total in sums.items():
            if name in spread:
                continue
            if name in self.sums:
                total = pytree.tree_map(torch.add, self.sums[name], total)
            self.sums[name] = total

    def _spread(self, sums: Mapping[str, Tree | Tensor], submodel: Submodel) -> None:
        """Add sums over replies from a submodel, each at its positions in x or y."""
        for name, part in sums.items():
            if isinstance(part, Tree):
                part = flatten(part)
            whole = Tree(getattr(self.problem, self.variables[name]))
            total = self.spread.setdefault(name, part.new_zeros(whole.numel))
            total.index_add_(0, submodel.positions(whole), part)

    def _count_holders(
        self, kind: str, count: int | Tensor, weight: float | Tensor, submodel: Submodel
    ) -> None:
        """Note that `count` replies hold the coordinates of a submodel."""
        whole = Tree(getattr(self.problem, kind))
        positions = submodel.positions(whole)
        tensor = next(iter(whole.values()))
        for totals, amount in ((self._holders, count), (self._holder_weights, weight)):
            total = totals.setdefault(kind, tensor.new_zeros(whole.numel))
            each = torch.as_tensor(amount, dtype=total.dtype, device=total.device)
            total.index_add_(0, positions, each.expand(len(positions)))

    def coverage_mean(self, name: str) -> Tree:
        """The weighted mean of a value, in every coordinate over the clients that hold it."""
        whole_weight = self._whole_weight
        if name not in self.spread:
            if not isinstance(whole_weight, Tensor) and not whole_weight:
                return zeros_like(self.sums[name])
            return self.sums[name] / whole_weight  # type: ignore[no-any-return]
        kind = self.variables[name]
        total = self.spread[name]
        if name in self.sums:
            total = total + flatten(self.sums[name])
        weight = self._holder_weights[kind] + whole_weight
        mean = torch.where(weight > 0, total / weight, 0.0)
        return unflatten(mean, Tree(getattr(self.problem, kind)))

    def coverage(self) -> dict[str, Tensor]:
        """The `coverage_metrics` of x and of y, where they come from submodels."""
        metrics: dict[str, Tensor] = {}
        for kind, holders in self._holders.items():
            metrics |= coverage_metrics(kind, holders + self._whole_count)
        return metrics


def coverage_metrics(kind: str, counts: Tensor) -> dict[str, Tensor]:
    """How well clients cover a variable.

    Args:
        kind: "x" or "y".
        counts: How many clients hold each coordinate.

    Returns:
        "min_coverage_{kind}", the least number of clients that hold a coordinate which somebody
        holds (C* in the papers), and "covered_{kind}", the fraction of coordinates that somebody
        holds: 0-d tensors, so that nobody waits for a GPU.
    """
    held = counts > 0
    least = counts.where(held, torch.inf).min()
    return {
        f"min_coverage_{kind}": least.where(least.isfinite(), 0.0),
        f"covered_{kind}": held.double().mean(),
    }
