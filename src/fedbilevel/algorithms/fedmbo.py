"""FedMBO: independent chains of Hessian products, one client per factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedbilevel.algorithms.base import Algorithm, Point
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import (
    HessianProduct,
    Hypergradient,
    LowerGradient,
    UpperGradientY,
)
from fedbilevel.algorithms.shared_episodes import Episodes, descend_lower
from fedbilevel.algorithms.shared_hypergradients import random_hypergradient
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation, QuorumError
from fedbilevel.federation.phase import Number

ATTEMPTS = 20  # how many clients are asked for one factor of a chain


class ChainStart(UpperGradientY):
    """v = grad_y f_i for one chain; the server reads every reply by itself."""

    name = "chain_start"
    summed = False


class ChainProduct(HessianProduct):
    """d2yy g_i v for one chain; the server reads every reply by itself."""

    name = "chain_product"
    summed = False
    quorum = False  # few chains are left at the end; for a reply that is lost, another is asked


class EpisodeHypergradients(Episodes):
    """T steps on y from the shared y, then a chain of the episode's own Hessian products there."""

    reply: ClassVar = {"h": "x", "dy": "y"}

    lr_y: Number
    neumann_lr: Positive
    neumann_steps: Count
    inner_rounds: Count

    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]:
        """Return the episode's hypergradient, and the displacement of its y."""
        adapted = descend_lower(oracle, x, y, batch, self.inner_rounds, self.lr_y)
        chain = [batch] * self.neumann_steps  # an episode has one batch, so all factors are on it
        h = random_hypergradient(oracle, x, adapted, chain, self.neumann_lr)
        return {"h": h, "dy": adapted - y}


@register("fedmbo")
@dataclass(frozen=True, kw_only=True)
class FedMBO(Algorithm):
    """FedMBO: an unbiased estimate from independent chains of Hessian products.

    FedMBO solves the bilevel problem with the global hypergradient, by a double loop. Choose it
    over `FedNest` and `AggITD` for partial participation: its chains draw their clients themselves,
    which keeps them unbiased, and a mean over independent chains reduces also the variance of the
    random truncation, which one chain for everyone does not. The single-loop methods (`SimFBO`)
    need fewer rounds. It also solves problems with a private lower level.

    T = `inner_rounds` times   y <- y - lr_y mean grad_y g_i(x, y).   Then, for each of |C| chains,
    with a length N' uniform on {0 .. N-1}, N = `neumann_steps`, with clients i_0, i_1, ... uniform
    on all clients, with replacement, and lambda = `neumann_lr`,

        r <- lambda N grad_y f_{i_0},   r <- r - lambda d2yy g_{i_k} r   for k = 1 .. N',

    and x <- x - lr_x mean over the chains of (grad_x f_i - d2xy g_i r), again with a new client i.

    Where the lower level is private, each local step is an episode with its own y and chain, both
    on the client: T steps from the shared y, which moves by the mean displacement, and r with the
    episode's own Hessian.

    Cost per iteration: T + 2 rounds and one per factor of the longest chain, at most T + N + 1; a
    factor whose reply is lost costs another one.
    Gradients: 1 per client and lower round, and per chain 1 to start, 2 per factor and 3 to end.
    Down go x and y in every round, and r with each factor and with the end; up come a tree like y,
    and like x at the end. Private lower level: one round, T + 2N + 2 gradients per episode (all N -
    1 factors are evaluated); x and y go down, two trees like them come up.

    Departures from the paper (recalled, not read: the paper was not at hand): with weights p_i that
    are not uniform every factor is scaled by n p_i, which keeps it unbiased; the step on x is taken
    on the server; private lower levels are ours.

    References:
        Huang, Zhang and Ji, "Achieving Linear Speedup in Non-IID Federated Bilevel Learning", 2023.

    Args:
        lr_x: Server step size of x, a number or a schedule.
        lr_y: Server step size of y; of an episode's y where the lower level is private.
        neumann_lr: The step lambda of the estimate.
        neumann_steps: The number N of terms that the estimate has in expectation.
        inner_rounds: The number T of steps on y.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.FedMBO(inner_rounds=2, neumann_steps=3)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=20)
        >>> result.status, 20 <= result.history[-1]["round"] < 26
        ('completed', True)
    """

    lower_levels = ("shared", "private")

    lr_x: Step = 0.05
    lr_y: Step = 0.1
    neumann_lr: Positive = 0.1
    neumann_steps: Count = 5
    inner_rounds: Count = 1

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run T rounds on y, estimate the hypergradient by chains, and move x."""
        if fed.problem.lower_level == "private":
            return self.iterate_episodes(s, fed)
        x, y = s
        for _ in range(self.inner_rounds):
            S = fed.sample()
            y = y - self.lr_y * fed.ask(LowerGradient(), S, x=x, y=y).mean("q")
        chains = self.run_chains(x, y, len(S), fed)
        clients = self.draw_clients(len(chains), fed)
        each = [{"p": r} for r in chains]
        h = fed.ask(Hypergradient(), clients, x=x, y=y, each=each).mean("h")
        return Point(fed.problem.project(x - self.lr_x * h), y)

    def run_chains(self, x: Tree, y: Tree, count: int, fed: Federation) -> list[Tree]:
        """Return the ends r of this many chains, without those whose start was lost."""
        lam = self.neumann_lr
        N = self.neumann_steps
        lengths = [fed.draw(N) for _ in range(count)]
        starts = fed.ask(ChainStart(), self.draw_clients(count, fed), x=x, y=y)
        r = {reply.position: lam * N * reply.weight * reply.values["v"] for reply in starts}
        for k in range(1, max(lengths) + 1):
            busy = {j: r[j] for j in r if lengths[j] >= k}
            for j, product in self.ask_products(busy, x, y, fed).items():
                r[j] = r[j] - lam * product
        return list(r.values())

    def ask_products(
        self, r: dict[int, Tree], x: Tree, y: Tree, fed: Federation
    ) -> dict[int, Tree]:
        """Return a product d2yy g_i r for each chain; one that is lost is asked of another client.

        The estimate would be biased if a chain went on without this factor, or not at all.
        """
        products: dict[int, Tree] = {}
        for _ in range(ATTEMPTS):
            chains = [j for j in r if j not in products]
            if not chains:
                return products
            clients = self.draw_clients(len(chains), fed)
            each = [{"v": r[j]} for j in chains]
            for reply in fed.ask(ChainProduct(), clients, x=x, y=y, each=each):
                products[chains[reply.position]] = reply.weight * reply.values["hv"]
        if len(products) < len(r):
            raise QuorumError(f"a product of a chain was lost {ATTEMPTS} times")
        return products

    def draw_clients(self, count: int, fed: Federation) -> list[int]:
        """Draw clients uniformly, with replacement, of those that have not been excluded."""
        left: Sequence[int] = range(len(fed))
        if fed.excluded:
            left = [client for client in left if client not in fed.excluded]
        return [left[fed.draw(len(left))] for _ in range(count)]

    def iterate_episodes(self, s: Point, fed: Federation) -> Point:
        """Run one iteration where the lower level is private."""
        phase = EpisodeHypergradients(
            lr_y=self.lr_y,
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            inner_rounds=self.inner_rounds,
        )
        r = fed.ask(phase, fed.sample(), x=s.x, y=s.y)
        x = fed.problem.project(s.x - self.lr_x * r.mean("h"))
        return Point(x, s.y + r.mean("dy"))
