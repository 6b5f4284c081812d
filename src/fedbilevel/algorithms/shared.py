"""The exchanges that double-loop methods are made of, each once: FedNest, FBO-AggITD and FedMBO combine them.

Clients reply with directions and displacements, never with iterates: means over a cohort are right for those only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedbilevel.core.linear import neumann_sum
from fedbilevel.core.oracle import AnyBatch, Oracle
from fedbilevel.core.problem import Batch
from fedbilevel.core.rng import fold_in, integers
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class Once(Phase):
    """One evaluation at the point m that was sent: its `step` makes the reply."""

    def start(self, m: Message) -> Any:
        return {name: value for name, value in vars(m).items() if name != "steps"}

    def finish(self, reply: Any) -> dict[str, Any]:
        return reply  # type: ignore[no-any-return]


class LowerGradient(Once):
    """q_i = grad_y g_i(x, y)."""

    name = "gradient"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"q": "y"}

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        return {"q": oracle.lower_gradient_y(m["x"], m["y"], batch)}


class UpperGradientY(Once):
    """v_i = grad_y f_i(x, y)."""

    name = "start"
    fixed_x = True
    batch = "val"
    reply: ClassVar = {"v": "y"}

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        return {"v": oracle.upper_gradient_y(m["x"], m["y"], batch)}


class HessianProduct(Once):
    """d2yy g_i(x, y) v."""

    name = "product"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"hv": "y"}

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        return {"hv": oracle.hessian_product(m["x"], m["y"], m["v"], batch)}


class Hypergradient(Once):
    """h_i = grad_x f_i(x, y) - d2xy g_i(x, y) p."""

    name = "hypergradient"
    batch = "both"
    reply: ClassVar = {"h": "x"}

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        return {"h": oracle.hypergradient(m["x"], m["y"], m["p"], batch)}


class Walk(NamedTuple):
    """Where a client is, where it started, and what stays as it was sent."""

    here: Tree
    start: Tree
    other: Tree
    direction: Any


class Corrected(Phase):
    """Local steps that are corrected by the gradient at the start, on the same batch.

    as_coded: as in the published code of FedNest, where that gradient draws another dropout mask and
    a step at the start evaluates a correction that is 0.
    """

    as_coded: bool = False

    def snapshot(self, batch: Batch) -> Batch:
        """The batch for the gradient at the start."""
        if not self.as_coded or not isinstance(batch.rng, Tensor):
            return batch
        return batch._replace(rng=fold_in(batch.rng, 77))


class LowerRound(Corrected):
    """tau_i steps y_i <- y_i - lr_y (grad_y g_i(x, y_i; b) - grad_y g_i(x, y; b) + q); replies with y_i - y.

    The SVRG type, as written; the SGD type drops the correction and takes no q. At y_i = y the
    correction leaves q alone, and the first step evaluates nothing.
    """

    name = "lower_round"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"dy": "y"}

    lr_y: Number
    lower: Literal["svrg", "sgd"] = "svrg"

    def start(self, m: Message) -> Walk:
        return Walk(m.y, m.y, m.x, m.q if self.lower == "svrg" else ())

    def first(self, c: Walk, oracle: Oracle, batch: Batch) -> Walk:
        if self.lower == "sgd" or self.as_coded:
            return self.step(c, oracle, batch)
        return c._replace(here=c.here - self.lr_y * c.direction)

    def step(self, c: Walk, oracle: Oracle, batch: Batch) -> Walk:
        d = oracle.lower_gradient_y(c.other, c.here, batch)
        if self.lower == "svrg":
            d = d - oracle.lower_gradient_y(c.other, c.start, self.snapshot(batch)) + c.direction
        return c._replace(here=c.here - self.lr_y * d)

    def finish(self, c: Walk) -> dict[str, Any]:
        return {"dy": c.here - c.start}


class UpperRound(Corrected):
    """tau_i steps x_i <- x_i - lr_x (h - grad_x f_i(x, y; b) + grad_x f_i(x_i, y; b)); replies with x_i - x.

    Only the direct part is corrected: the indirect one would need the global Hessian at x_i.
    """

    name = "upper_round"
    batch = "val"
    reply: ClassVar = {"dx": "x"}

    lr_x: Number

    def start(self, m: Message) -> Walk:
        return Walk(m.x, m.x, m.y, m.h)

    def first(self, c: Walk, oracle: Oracle, batch: Batch) -> Walk:
        """At x_i = x the correction is zero."""
        return c._replace(here=oracle.project_x(c.here - self.lr_x * c.direction))

    def step(self, c: Walk, oracle: Oracle, batch: Batch) -> Walk:
        there = oracle.upper_gradient_x(c.start, c.other, self.snapshot(batch))
        here = oracle.upper_gradient_x(c.here, c.other, batch)
        return c._replace(here=oracle.project_x(c.here - self.lr_x * (c.direction - there + here)))

    def finish(self, c: Walk) -> dict[str, Any]:
        return {"dx": c.here - c.start}


class Visit(NamedTuple):
    """What was sent, and the sums over the episodes so far."""

    x: Tree
    y: Tree
    sums: dict[str, Tree]
    steps: Any


class Episodes(Phase):
    """As many episodes as local steps, each at the point that was sent; replies with the means of what they give."""

    name = "episodes"

    steps: Steps = "local"

    @abstractmethod
    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]: ...

    def start(self, m: Message) -> Visit:
        sums = {name: zeros_like(getattr(m, str(kind))) for name, kind in self.reply.items()}
        return Visit(m.x, m.y, sums, m.steps)

    def step(self, c: Visit, oracle: Oracle, batch: Batch) -> Visit:
        found = self.episode(oracle, c.x, c.y, batch)
        return c._replace(sums={name: total + found[name] for name, total in c.sums.items()})

    def finish(self, c: Visit) -> dict[str, Any]:
        return {name: total / c.steps for name, total in c.sums.items()}


def storm(
    new: Iterable[Tree], momenta: Iterable[Tree], old: Iterable[Tree], weight: float
) -> list[Tree]:
    """STORM (Cutkosky and Orabona 2019): m <- d(new) + (1 - weight) (m - d(old)), both evaluated on one batch."""
    return [d + (1 - weight) * (m - was) for d, m, was in zip(new, momenta, old, strict=True)]


def settle(oracle: Oracle, x: Tree, y: Tree, batch: AnyBatch, steps: int, lr: float) -> Tree:
    """y after so many gradient steps on the lower level of one batch, at one x."""
    for _ in range(steps):
        y = y - lr * oracle.lower_gradient_y(x, y, batch)
    return y


def own_hypergradient(
    oracle: Oracle, x: Tree, y: Tree, batch: AnyBatch, terms: int, lr: float
) -> Tree:
    """grad_x f_i - d2xy g_i p_i, with p_i the client's own Neumann sum of so many terms."""
    v = oracle.upper_gradient_y(x, y, batch)
    p = neumann_sum(lambda v: oracle.hessian_product(x, y, v, batch), v, terms, lr)
    return oracle.hypergradient(x, y, p, batch)


def random_hypergradient(
    oracle: Oracle, x: Tree, y: Tree, batches: Sequence[Batch], lr: float
) -> Tree:
    """The same with lr J times a product of J' random factors in the place of the sum of J = len(batches) terms.

    J' is uniform on {0 .. J-1} and comes from the first batch's key, so that two evaluations on the same batches share
    it; each factor is on a batch of its own. All J - 1 are evaluated, because a stack of clients has one length.
    """
    batch, J = batches[0], len(batches)
    key = fold_in(fold_in(batch.rng, 3), 0)  # type: ignore[arg-type]  # twice: an episode's losses fold into it once
    length, p = integers(key, 0, J - 1), lr * J * oracle.upper_gradient_y(x, y, batch)
    for k, fresh in enumerate(batches[1:], start=1):
        p = p - (k <= length) * (lr * oracle.hessian_product(x, y, p, fresh))
    return oracle.hypergradient(x, y, p, batch)


class LocalHypergradients(Phase):
    """What phases with local hypergradients share: their estimate of [d2yy g_i]^-1 grad_y f_i.

    truncation: "random", lambda J times a product of J' random factors, J' uniform on {0 .. J-1}, or
    "sum", the Neumann sum of J terms; J = `neumann_steps`, lambda = `neumann_lr`.
    """

    neumann_lr: Positive
    neumann_steps: Count
    truncation: Literal["random", "sum"] = "random"

    @property
    def draws(self) -> int:
        return self.neumann_steps

    def local_directions(self, oracle: Oracle, x: Tree, y: Tree, batches: Any) -> tuple[Tree, Tree]:
        """A client's own hypergradient grad_x f_i - d2xy g_i p_i, and its lower gradient grad_y g_i."""
        if self.truncation == "sum":
            d_x = own_hypergradient(oracle, x, y, batches[0], len(batches), self.neumann_lr)
        else:
            d_x = random_hypergradient(oracle, x, y, batches, self.neumann_lr)
        return d_x, oracle.lower_gradient_y(x, y, batches[0])
