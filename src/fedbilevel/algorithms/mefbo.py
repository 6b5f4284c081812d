"""MeFBO: MemFBO on the Moreau envelope, for lower levels that are not strongly convex."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedbilevel.algorithms.memfbo import Local, MemFBO, PenaltyDescend
from fedbilevel.algorithms.registry import register
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle, PenaltyDirections
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Positive


class EnvelopeDescend(PenaltyDescend):
    """The local steps of `PenaltyDescend`, with y at the proximal point of u."""

    envelope: Positive

    def directions(self, c: Local, oracle: Oracle, batch: Batch) -> PenaltyDirections:
        """Return d_x, d_y and d_u."""
        d = super().directions(c, oracle, batch)
        pull = (c.u - c.y) / self.envelope
        return PenaltyDirections(d.x, d.y - pull, d.u - pull)


class SeparateEnvelopeDescend(EnvelopeDescend):
    """As `EnvelopeDescend`; the server reads every reply by itself, to remember it."""

    summed = False


@register("mefbo")
@dataclass(frozen=True, kw_only=True)
class MeFBO(MemFBO):
    """MeFBO: first order, for lower levels with several solutions or without convexity.

    It solves

        min_x min_u F(x, u) + penalty (G(x, u) - E(x, u)),
        E(x, u) = min_y G(x, y) + ||y - u||^2 / (2 envelope),

    where E is the Moreau envelope of the lower loss. G - E is at least 0, and is 0 where u is a
    stationary point of G, as long as 1 / envelope exceeds the negative curvature of G: y is then
    unique although G may have many minimisers, and u goes to the one among them that F prefers.
    Choose it where the lower level is not strongly convex, as in networks; if it is, `MemFBO`
    has fewer settings. For envelope -> infinity it is `MemFBO`.

    Rounds are those of `MemFBO`, with the directions

        d_y = grad_y g_i(x, y) - (u - y) / envelope,
        d_u = grad_y g_i(x, u) + grad_y f_i(x, u) / penalty - (u - y) / envelope,
        d_x = grad_x f_i(x, u) + penalty (grad_x g_i(x, u) - grad_x g_i(x, y)).

    Steps on u should be shorter than those on y, which then stays near the proximal point.

    Cost per iteration: that of `MemFBO`.

    Departures from the papers: only the abstracts were at hand. The directions were
    recalled from the second, and compared with the code of a public library; the federated scheme
    is that of `MemFBO`, and all variables move at once. d_x and d_u are the paper's times the
    penalty and 1, so that step sizes are those of `MemFBO`.

    References:
        "MeFBO: A Moreau Envelope Based First-Order Stochastic Gradient Method for Nonconvex
        Federated Bilevel Optimization", submission to ICLR 2025; Liu, Liu, Yao, Zeng and Zhang,
        "Moreau Envelope for Nonconvex Bi-Level Optimization: A Single-loop and Hessian-free
        Solution Strategy", ICML 2024.

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y, the proximal point.
        lr_u: Local step size of u.
        server_lr_x: Server step size of x, applied to the mean direction.
        server_lr_y: Server step size of y.
        server_lr_u: Server step size of u.
        penalty: The weight of the lower loss, a number above 0 or a schedule.
        barrier: Whether an iteration waits for its whole cohort.
        adaptive: Whether the server's steps on y and u are Adam's, as in `MemFBO`.
        envelope: The parameter of the Moreau envelope, above 0.

    Examples:
        Only y_1 + y_2 matters to the lower level; the upper level chooses between its solutions:

        >>> import torch
        >>> import fedbilevel as fb
        >>> def lower(x, y, batch):
        ...     return (y["y"].sum() - x["x"].sum()) ** 2
        >>> def upper(x, y, batch):
        ...     return ((y["y"] - torch.tensor([1.0, 2.0])) ** 2).sum()
        >>> problem = fb.Problem(upper, lower, x={"x": torch.zeros(1)}, y={"y": torch.zeros(2)})
        >>> data = (torch.zeros(1),)
        >>> method = fb.algorithms.MeFBO(server_lr_u=0.1)
        >>> result = fb.solve(problem, [fb.ClientData(data, data)], method, rounds=800, every=800)
        >>> bool((result.y["y"] - torch.tensor([1.0, 2.0])).norm() < 0.05)
        True
    """

    with_barrier: ClassVar[type[PenaltyDescend]] = EnvelopeDescend
    without_barrier: ClassVar[type[PenaltyDescend]] = SeparateEnvelopeDescend

    lr_u: Step = 0.1
    server_lr_u: Step = 0.1
    envelope: Positive = 1.0

    def phase(self, kind: type[PenaltyDescend], **settings: Any) -> PenaltyDescend:
        """Return the clients' phase at this iteration's step sizes."""
        return super().phase(kind, envelope=self.envelope, **settings)
