"""Screening: what one client says is compared with what the others have said.

Whatever is bounded here is bounded by a median, which fewer than half of the clients cannot move
far. There is one rule for the norms of replies (`Screen`, used by `Replies` on every transport) and
for what clients claim of themselves (deploy/flower/_claims.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

FEWEST = 3  # of fewer numbers, a median says nothing about a single one
RECENT = 100  # how many accepted numbers a running median goes over


class RunningMedian:
    """The median of the last `RECENT` numbers, at its highest so far.

    It does not fall again: directions become short where a run converges, and an honest client
    whose batch is unlike the others' is then many times longer than most.

    Attributes:
        highest: The highest median so far; 0 before there were `FEWEST` numbers.
        recent: The last numbers.

    Examples:
        >>> median = RunningMedian()
        >>> median.enter([1.0, 2.0])
        >>> median.bound([], factor=10.0)
        inf
        >>> median.enter([3.0])
        >>> median.bound([], factor=10.0)
        20.0
    """

    def __init__(self, highest: float = 0.0, recent: Sequence[float] = ()) -> None:
        self.highest = highest
        self.recent = list(recent)

    def bound(self, together: Sequence[float], factor: float) -> float:
        """The largest number that is credible.

        Args:
            together: Numbers that have arrived together, the one in question among them: all of
                them may have grown since the last ones.
            factor: How many times the median a number may be.

        Returns:
            `factor` times the larger of the highest running median and the median of `together`;
            infinity while there are too few numbers to tell. Zeros do not count.
        """
        reference = self.highest
        positive = _positive(together)
        if len(positive) >= FEWEST:
            reference = max(reference, statistics.median_low(positive))
        return factor * reference or float("inf")

    def enter(self, numbers: Sequence[float]) -> None:
        """Add accepted numbers."""
        self.recent = [*self.recent, *_positive(numbers)][-RECENT:]
        if len(self.recent) >= FEWEST:
            self.highest = max(self.highest, statistics.median_low(self.recent))


def _positive(numbers: Sequence[float]) -> list[float]:
    return [number for number in numbers if 0 < number < math.inf]


class Screen:
    """Refuses replies that are many times longer than those of others.

    Args:
        factor: How many times the running median a norm may be.

    Attributes:
        medians: The running median of the norms of each value, by phase and value.

    Examples:
        >>> screen = Screen(factor=10.0)
        >>> screen.judge("descend", {"dx": [1.0, 50.0, 2.0, 3.0]})
        [None, 'dx has norm 50, more than 10 times the median of 2', None, None]
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.medians: dict[str, RunningMedian] = {}

    def judge(self, phase: str, norms: Mapping[str, Sequence[float]]) -> list[str | None]:
        """Say which of some replies are too long, and remember the others.

        Args:
            phase: What the clients did.
            norms: For each value of a reply, its norm in each of the replies that are judged
                together. NaN, where an entry is not finite, is for others to refuse.

        Returns:
            For each reply the reason why it is refused; None for a credible one.
        """
        reasons: list[str | None] = [None] * max(len(each) for each in norms.values())
        for name, each in norms.items():
            median = self.medians.setdefault(f"{phase}.{name}", RunningMedian())
            bound = median.bound(each, self.factor)
            for index, norm in enumerate(each):
                if norm > bound and reasons[index] is None:
                    reasons[index] = (
                        f"{name} has norm {norm:.3g}, "
                        f"more than {self.factor:g} times the median of {bound / self.factor:.3g}"
                    )
        for name, each in norms.items():
            credible = [norm for norm, why in zip(each, reasons, strict=True) if why is None]
            self.medians[f"{phase}.{name}"].enter(credible)
        return reasons

    def has_seen(self, phase: str) -> bool:
        """Whether a single reply of this phase can be compared with earlier ones."""
        medians = [each for name, each in self.medians.items() if name.startswith(f"{phase}.")]
        return any(each.highest for each in medians)

    def plain(self) -> dict[str, tuple[float, list[float]]]:
        """The running medians as plain values, for a mark or a checkpoint."""
        return {name: (each.highest, list(each.recent)) for name, each in self.medians.items()}

    def restore(self, plain: Mapping[str, tuple[float, Sequence[float]]]) -> None:
        """Return to what `plain` returned."""
        self.medians = {name: RunningMedian(*values) for name, values in plain.items()}


class Strikes:
    """Counts the refused replies of each client, and puts a client aside after too many.

    Args:
        limit: After how many refused replies; None: never.

    Attributes:
        refusals: How many replies of each client were refused.
        excluded: The clients that are given no more tasks, in the order of their exclusion.

    Examples:
        >>> strikes = Strikes(limit=2)
        >>> strikes.count([3, 5]), strikes.count([3])
        ([], [3])
        >>> strikes.excluded
        [3]
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.refusals: dict[int, int] = {}
        self.excluded: list[int] = []

    def count(self, clients: Sequence[int]) -> list[int]:
        """Count refused replies, one per entry; return the clients that are excluded now."""
        new = []
        for client in clients:
            self.refusals[client] = self.refusals.get(client, 0) + 1
            too_many = self.limit is not None and self.refusals[client] >= self.limit
            if too_many and client not in self.excluded:
                new.append(client)
                self.excluded.append(client)
        return new

    def plain(self) -> tuple[dict[int, int], list[int]]:
        """The counts as plain values, for a mark or a checkpoint."""
        return dict(self.refusals), list(self.excluded)

    def restore(self, plain: tuple[Mapping[int, int], Sequence[int]]) -> None:
        """Return to what `plain` returned."""
        self.refusals = dict(plain[0])
        self.excluded = list(plain[1])


def stack_norms(value: Any) -> list[float]:
    """The Euclidean norm of a value of each of some clients.

    Args:
        value: A tensor or a tree, with a leading axis over clients. Whole numbers are left out.

    Returns:
        One norm per client; NaN if an entry is not finite. Norms are computed relative to the
        largest entry, whose square may be too large for a number.

    Examples:
        >>> stack_norms(torch.tensor([[3.0, 4.0], [0.0, 1e200]], dtype=torch.float64))
        [5.0, 1e+200]
    """
    rows = []
    for tensor in pytree.tree_leaves(value):
        if tensor.is_floating_point():
            rows.append(tensor.detach().double().reshape(len(tensor), -1))
    if not rows:
        return []
    matrix = torch.cat(rows, 1)
    if not matrix.numel():
        return [0.0] * len(matrix)
    largest = matrix.abs().amax(1, keepdim=True)
    scaled = matrix / torch.where(largest > 0, largest, 1.0)
    norms: Tensor = largest.squeeze(1) * torch.linalg.vector_norm(scaled, dim=1)
    return norms.tolist()
