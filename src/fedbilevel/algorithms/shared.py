"""Phases that several methods share.

FedNest, FBO-AggITD and FedMBO are combinations of the phases below. Clients reply with directions
and displacements, never with iterates: a mean over a cohort is unbiased for the former only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.shared_hypergradients import OwnHypergradient
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.rng import fold_in
from fedbilevel.core.settings import NonNegative
from fedbilevel.core.tree import Tree
from fedbilevel.federation.phase import Message, Number, Phase, StepBatch

# What keys are folded with, so that this draw shares nothing with those of the losses.
SNAPSHOT_STREAM = 77


class Evaluation(Phase):
    """One evaluation at the point that the server sent.

    The carry is the message as a dict. A subclass defines `step`, which turns it into the reply, a
    dict with the names of `reply`.
    """

    def start(self, message: Message) -> dict[str, Tree]:
        """Return the values of the message by name."""
        return {name: value for name, value in vars(message).items() if name != "steps"}

    def finish(self, reply: dict[str, Tree]) -> dict[str, Tree]:
        """Return what `step` made."""
        return reply


class LowerGradient(Evaluation):
    """q_i = grad_y g_i(x, y)."""

    name = "gradient"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"q": "y"}

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate q_i."""
        return {"q": oracle.lower_gradient_y(m["x"], m["y"], batch)}


class UpperGradientY(Evaluation):
    """v_i = grad_y f_i(x, y), the right-hand side of the linear system [d2yy G] p = grad_y F."""

    name = "start"
    fixed_x = True
    batch = "val"
    reply: ClassVar = {"v": "y"}

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate v_i."""
        return {"v": oracle.upper_gradient_y(m["x"], m["y"], batch)}


class HessianProduct(Evaluation):
    """d2yy g_i(x, y) v."""

    name = "product"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"hv": "y"}

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate the product."""
        return {"hv": oracle.hessian_product(m["x"], m["y"], m["v"], batch)}


class CrossProduct(Evaluation):
    """d2xy g_i(x, y) v."""

    name = "cross"
    batch = "train"
    reply: ClassVar = {"jv": "x"}

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate the product."""
        return {"jv": oracle.cross_product(m["x"], m["y"], m["v"], batch)}


class UpperGradients(Evaluation):
    """grad_x f_i and grad_y f_i at a client's own point; the server reads every reply by itself."""

    name = "gradients"
    batch = "val"
    summed = False
    reply: ClassVar = {"gx": "x", "gy": "y"}

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate both gradients from one pass."""
        gx, gy = oracle.upper_gradients(m["x"], m["y"], batch)
        return {"gx": gx, "gy": gy}


class Hypergradient(Evaluation):
    """h_i = grad_x f_i(x, y) - d2xy g_i(x, y) p."""

    name = "hypergradient"
    batch = "both"
    reply: ClassVar = {"h": "x"}

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate h_i."""
        return {"h": oracle.hypergradient(m["x"], m["y"], m["p"], batch)}


class LocalHypergradient(OwnHypergradient, Evaluation):
    """H_i = grad_x f_i - d2xy g_i [d2yy g_i]^-1 grad_y f_i at the point that the server sent."""

    name = "hypergradient"
    reply: ClassVar = {"h": "x"}

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batches: StepBatch) -> dict[str, Tree]:
        """Evaluate H_i."""
        batch, fresh = self.split(batches)
        embedded = oracle.embed(m["x"], batch)
        fresh_embedded = [oracle.embed(m["x"], other) for other in fresh]
        h = self.own_hypergradient(oracle, m["x"], m["y"], embedded, fresh_embedded)
        return {"h": h}


class CorrectedRound(Phase):
    """Local steps that are corrected by the gradient at the start, on the same batch (SVRG type).

    Args:
        as_coded: Do as the published code of FedNest: the gradient at the start draws its own
            dropout mask, and the first step evaluates a correction that is 0.
        step_scale: "same", every client takes the step size; or "per-client", it is divided by the
            client's number of steps tau_i.
    """

    as_coded: bool = False
    step_scale: Literal["same", "per-client"] = "same"

    def divisor(self, m: Message) -> Tensor | tuple[()]:
        """Return what the client's step size is divided by: tau_i, or nothing."""
        return m.steps if self.step_scale == "per-client" else ()

    def scaled(self, lr: float, divisor: Tensor | tuple[()]) -> float | Tensor:
        """Return the client's step size."""
        return lr / divisor if isinstance(divisor, Tensor) else lr

    def snapshot_batch(self, batch: Batch) -> Batch:
        """Return the batch for the gradient at the start."""
        if not self.as_coded or not isinstance(batch.rng, Tensor):
            return batch
        return batch._replace(rng=fold_in(batch.rng, SNAPSHOT_STREAM))


class LowerCarry(NamedTuple):
    """A client's copy y_i, and what the server sent; q is empty without a correction."""

    y_i: Tree
    y: Tree
    x: Tree
    q: Tree
    divisor: Tensor | tuple[()] = ()


class LowerRound(CorrectedRound):
    """tau_i local steps on y, corrected by the mean gradient q; replies with y_i - y.

        y_i <- y_i - lr_y (grad_y g_i(x, y_i; b) - grad_y g_i(x, y; b) + q)

    This is the SVRG type, `lower="svrg"`. The SGD type has no correction and receives no q. At y_i
    = y the correction leaves q alone, so that the first step evaluates nothing.
    """

    name = "lower_round"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"dy": "y"}

    lr_y: Number
    lower: Literal["svrg", "sgd"] = "svrg"

    def start(self, m: Message) -> LowerCarry:
        """Start at the server's y."""
        q = m.q if self.lower == "svrg" else Tree()
        return LowerCarry(y_i=m.y, y=m.y, x=m.x, q=q, divisor=self.divisor(m))

    def first(self, c: LowerCarry, oracle: Oracle, batch: Batch) -> LowerCarry:
        """Take the step at y_i = y."""
        if self.lower == "sgd" or self.as_coded:
            return self.step(c, oracle, batch)
        return c._replace(y_i=c.y_i - self.scaled(self.lr_y, c.divisor) * c.q)

    def step(self, c: LowerCarry, oracle: Oracle, batch: Batch) -> LowerCarry:
        """Take one step on y_i."""
        d = oracle.lower_gradient_y(c.x, c.y_i, batch)
        if self.lower == "svrg":
            d = d - oracle.lower_gradient_y(c.x, c.y, self.snapshot_batch(batch)) + c.q
        return c._replace(y_i=c.y_i - self.scaled(self.lr_y, c.divisor) * d)

    def finish(self, c: LowerCarry) -> dict[str, Tree]:
        """Reply with the displacement."""
        return {"dy": c.y_i - c.y}

    def own(self, c: LowerCarry) -> dict[str, Tree]:
        """Keep y_i, where y belongs to the clients."""
        return {"y": c.y_i}


class UpperCarry(NamedTuple):
    """A client's copy x_i, and what the server sent; h is empty where the client has its own."""

    x_i: Tree
    x: Tree
    y: Tree
    h: Tree
    divisor: Tensor | tuple[()] = ()


class UpperRound(CorrectedRound):
    """tau_i local steps on x, corrected by the mean hypergradient h; replies with x_i - x.

        x_i <- x_i - lr_x (h - grad_x f_i(x, y; b) + grad_x f_i(x_i, y; b))

    Only the direct part is corrected: the indirect part would need the global Hessian at x_i. At
    x_i = x the correction is 0, so that the first step evaluates nothing.
    """

    name = "upper_round"
    batch = "val"
    reply: ClassVar = {"dx": "x"}

    lr_x: Number

    def start(self, m: Message) -> UpperCarry:
        """Start at the server's x."""
        return UpperCarry(x_i=m.x, x=m.x, y=m.y, h=m.h, divisor=self.divisor(m))

    def first(self, c: UpperCarry, oracle: Oracle, batch: Batch) -> UpperCarry:
        """Take the step at x_i = x."""
        lr = self.scaled(self.lr_x, c.divisor)
        return c._replace(x_i=oracle.project_x(c.x_i - lr * c.h))

    def step(self, c: UpperCarry, oracle: Oracle, batch: Batch) -> UpperCarry:
        """Take one step on x_i."""
        at_x = oracle.upper_gradient_x(c.x, c.y, self.snapshot_batch(batch))
        at_x_i = oracle.upper_gradient_x(c.x_i, c.y, batch)
        lr = self.scaled(self.lr_x, c.divisor)
        return c._replace(x_i=oracle.project_x(c.x_i - lr * (c.h - at_x + at_x_i)))

    def finish(self, c: UpperCarry) -> dict[str, Tree]:
        """Reply with the displacement."""
        return {"dx": c.x_i - c.x}


class SingleLoopPhase(Phase):
    """Base of phases that follow the directions d_x, d_y and d_z of `Oracle.directions`.

    Args:
        damping: Multiple of the identity that is added to the Hessian in d_z.
        independent_batches: Whether each direction has batches of its own; they then cost 7
            gradients instead of 3.
    """

    batch = "both"

    damping: NonNegative = 0.0
    independent_batches: bool = False

    @property
    def draws(self) -> int:
        """One pair of batches per step, or one per direction."""
        return 3 if self.independent_batches else 1

    def directions(self, oracle: Oracle, x: Tree, y: Tree, z: Tree, batch: Any) -> Directions:
        """Return the directions at (x, y, z): fused, or each on its own batches."""
        if not self.independent_batches:
            return oracle.directions(x, y, z, batch, self.damping)
        for_y, for_z, for_x = batch
        d_x = oracle.upper_gradient_x(x, y, for_x) - oracle.cross_product(x, y, z, for_x)
        d_y = oracle.lower_gradient_y(x, y, for_y)
        hessian_z = oracle.hessian_product(x, y, z, for_z) + self.damping * z
        return Directions(d_x, d_y, hessian_z - oracle.upper_gradient_y(x, y, for_z))


def storm(
    new: Iterable[Tree], momenta: Iterable[Tree], old: Iterable[Tree], weight: float
) -> list[Tree]:
    """Return STORM momenta, m <- d(new) + (1 - weight) (m - d(old)) (Cutkosky and Orabona 2019).

    Args:
        new: Directions at the new point.
        momenta: The momenta so far.
        old: Directions at the old point, on the same batch as the new ones.
        weight: The weight of the new directions, in (0, 1].

    Returns:
        The new momenta.
    """
    return [d + (1 - weight) * (m - d_old) for d, m, d_old in zip(new, momenta, old, strict=True)]
