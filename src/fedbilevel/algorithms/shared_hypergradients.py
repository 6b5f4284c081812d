"""What methods share whose clients estimate hypergradients by themselves, from their own Hessians.

Such an estimate is biased on heterogeneous clients, because the inverse of the mean Hessian is not
the mean of the inverses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from fedbilevel.core.client_data import Batch
from fedbilevel.core.embedding import AnyBatch
from fedbilevel.core.linear import conjugate_gradients, neumann_sum
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import fold_in, integers
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree
from fedbilevel.federation.phase import Phase, StepBatch

# What keys are folded with, so that this draw shares nothing with those of the losses.
TRUNCATION_STREAM = 3

HypergradientBatch = Literal["one", "fresh", "full"]
"""The data of a client's own hypergradient, which contains a product of Hessians.

"one" is one mini-batch for the whole estimate. "fresh" is one more for each Hessian product, so
that the factors are independent, as papers have it. "full" is all of the client's samples.
"""


class OwnHypergradient(Phase):
    """Base of phases whose clients estimate grad_x f_i - d2xy g_i [d2yy g_i]^-1 grad_y f_i.

    The inverse is a Neumann sum, or conjugate gradients:

        p_i = neumann_lr sum_{k < terms} (I - neumann_lr d2yy g_i)^k grad_y f_i

    An estimate costs 1 + 2 (terms - 1) + 3 gradients; with `solver="cg"` 1 + 2 terms + 3.

    Args:
        neumann_lr: The step of the Neumann sum.
        terms: The number of its terms, or of steps of conjugate gradients.
        solver: "neumann" or "cg".
        fresh: Whether a step has a mini-batch for each Hessian product besides that for the rest.
    """

    neumann_lr: Positive
    terms: Count
    solver: Literal["neumann", "cg"] = "neumann"
    fresh: bool = False

    @property
    def draws(self) -> int:
        """One batch; if they are fresh, one more for each product."""
        return self.terms if self.fresh else 1

    def split(self, batches: StepBatch) -> tuple[Batch, Sequence[Batch]]:
        """Return the batch for everything but the products, and those for the products."""
        if self.draws == 1:
            return batches, ()
        return batches[0], batches[1:]

    def solve(
        self,
        product: Callable[[Tree, AnyBatch], Tree],
        v: Tree,
        batch: AnyBatch,
        fresh: Sequence[AnyBatch],
    ) -> Tree:
        """Return p_i, from a Hessian product on a given batch."""
        if self.solver == "cg":
            return conjugate_gradients(lambda v: product(v, batch), v, self.terms)
        batches = iter(fresh or itertools.repeat(batch))
        return neumann_sum(lambda v: product(v, next(batches)), v, self.terms, self.neumann_lr)

    def own_hypergradient(
        self, oracle: Oracle, x: Tree, y: Tree, batch: AnyBatch, fresh: Sequence[AnyBatch] = ()
    ) -> Tree:
        """Return the estimate, with second derivatives."""

        def product(v: Tree, batch: AnyBatch) -> Tree:
            return oracle.hessian_product(x, y, v, batch)

        p = self.solve(product, oracle.upper_gradient_y(x, y, batch), batch, fresh)
        return oracle.hypergradient(x, y, p, batch)


def random_hypergradient(
    oracle: Oracle, x: Tree, y: Tree, batches: Sequence[Batch], lr: float
) -> Tree:
    """Return a client's own hypergradient grad_x f_i - d2xy g_i p_i, with p_i by a random product.

        p_i = lr J prod_{k = 1 .. J'} (I - lr d2yy g_i(.; b_k)) grad_y f_i

    J = len(batches), and J' is uniform on {0 .. J-1}, so that the expectation of p_i is the Neumann
    sum of J terms. J' is drawn from the key of the first batch: two evaluations on the same batches
    share it. All J - 1 factors are evaluated, because a stack of clients has one length; it costs
    1 + 2 (J - 1) + 3 gradients.
    """
    batch = batches[0]
    J = len(batches)
    # Folded twice, because the losses of an episode may fold its key once.
    key = fold_in(batch.rng, TRUNCATION_STREAM)  # type: ignore[arg-type]
    length = integers(fold_in(key, 0), 0, J - 1)
    p = lr * J * oracle.upper_gradient_y(x, y, batch)
    for k, b_k in enumerate(batches[1:], start=1):
        p = p - (k <= length) * (lr * oracle.hessian_product(x, y, p, b_k))
    return oracle.hypergradient(x, y, p, batch)


class TruncatedHypergradient(Phase):
    """Base of phases whose clients estimate [d2yy g_i]^-1 grad_y f_i by themselves.

    Args:
        neumann_lr: The step lambda of the estimate.
        neumann_steps: The number J of its terms.
        truncation: "random", lambda J times a product of J' random factors, J' uniform on
            {0 .. J-1}; or "sum", the Neumann sum of J terms.
    """

    neumann_lr: Positive
    neumann_steps: Count
    truncation: Literal["random", "sum"] = "random"

    @property
    def draws(self) -> int:
        """One batch per factor."""
        return self.neumann_steps

    def local_directions(
        self, oracle: Oracle, x: Tree, y: Tree, batches: Sequence[Batch]
    ) -> tuple[Tree, Tree]:
        """Return the client's own hypergradient, and its lower gradient grad_y g_i."""
        batch = batches[0]
        if self.truncation == "sum":
            v = oracle.upper_gradient_y(x, y, batch)
            p = neumann_sum(
                lambda v: oracle.hessian_product(x, y, v, batch), v, len(batches), self.neumann_lr
            )
            d_x = oracle.hypergradient(x, y, p, batch)
        else:
            d_x = random_hypergradient(oracle, x, y, batches, self.neumann_lr)
        return d_x, oracle.lower_gradient_y(x, y, batch)
