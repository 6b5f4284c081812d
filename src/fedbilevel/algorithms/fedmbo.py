"""FedMBO: independent chains of Hessian products, one client a factor.

Huang, Zhang and Ji, "Achieving Linear Speedup in Non-IID Federated Bilevel Learning", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import (
    Episodes,
    HessianProduct,
    Hypergradient,
    LowerGradient,
    UpperGradientY,
    random_hypergradient,
    settle,
)
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Number


class State(NamedTuple):
    x: Tree
    y: Tree


class ChainStart(UpperGradientY):
    """v = grad_y f_i for one chain."""

    name = "chain_start"
    summed = False


class ChainProduct(HessianProduct):
    """d2yy g_i v for one chain."""

    name = "chain_product"
    summed = False


class Hypergradients(Episodes):
    """T steps on y from the shared start, then a chain of the episode's own Hessian products there."""

    reply: ClassVar = {"h": "x", "dy": "y"}

    lr_y: Number
    neumann_lr: Positive
    neumann_steps: Count
    inner_rounds: Count

    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]:
        settled = settle(oracle, x, y, batch, self.inner_rounds, self.lr_y)
        chain = [batch] * self.neumann_steps
        h = random_hypergradient(oracle, x, settled, chain, self.neumann_lr)
        return {"h": h, "dy": settled - y}


@register("fedmbo")
@dataclass(frozen=True, kw_only=True)
class FedMBO(Algorithm):
    """FedMBO, at most T + N + 1 rounds an iteration (T = `inner_rounds`, N = `neumann_steps`).

    T times:   y <- y - lr_y mean grad_y g_i(x, y).
    For each of |C| chains, with a length N' uniform on {0 .. N-1}, clients i_0, i_1, ... uniform on all clients, with
    replacement, and lambda = `neumann_lr`:

        r <- lambda N grad_y f_{i_0};   r <- r - lambda d2yy g_{i_k} r,   k = 1 .. N'.

    Then x <- x - lr_x mean over chains of (grad_x f_i - d2xy g_i r). Averaging independent chains shrinks the variance
    of the random truncation too, which one shared chain (FedNest) does not.

    Where the lower level is private a local step is an episode with a y and a chain of its own, both on the client: T
    steps from the shared y, which moves by the mean displacement, and r with the episode's own Hessian; an episode has
    one batch, so all factors are on it, and all N - 1 are evaluated. One round an iteration.

    Departures from print (recalled, not read: the paper was not at hand): with weights p_i that are not uniform every
    factor is scaled by n p_i, which keeps it unbiased; the step on x is taken on the server; private lower levels are
    ours.
    """

    lower_levels = ("shared", "private")

    lr_x: Step = 0.05
    lr_y: Step = 0.1
    neumann_lr: Positive = 0.1
    neumann_steps: Count = 5
    inner_rounds: Count = 1

    def init(self, problem: Problem) -> State:
        return State(*problem.start)

    def iterate(self, s: State, fed: Federation) -> State:
        if fed.problem.lower_level == "private":
            own = fed.ask(self.episodes(), fed.sample(), x=s.x, y=s.y)
            return State(fed.problem.project(s.x - self.lr_x * own.mean("h")), s.y + own.mean("dy"))
        lam, N, x, y = self.neumann_lr, self.neumann_steps, s.x, s.y
        for _ in range(self.inner_rounds):
            S = fed.sample()
            y = y - self.lr_y * fed.ask(LowerGradient(), S, x=x, y=y).mean("q")
        lengths = [fed.draw(N) for _ in S]
        starts = fed.ask(ChainStart(), self.anyone(fed, len(S)), x=x, y=y)
        r = {reply.position: lam * N * reply.weight * reply.values["v"] for reply in starts}
        for k in range(1, max(lengths) + 1):
            busy = [j for j in r if lengths[j] >= k]
            if busy:
                each = [{"v": r[j]} for j in busy]
                for reply in fed.ask(
                    ChainProduct(), self.anyone(fed, len(busy)), x=x, y=y, each=each
                ):
                    j = busy[reply.position]
                    r[j] = r[j] - lam * reply.weight * reply.values["hv"]
        each = [{"p": chain} for chain in r.values()]
        h = fed.ask(Hypergradient(), self.anyone(fed, len(r)), x=x, y=y, each=each).mean("h")
        return State(fed.problem.project(x - self.lr_x * h), y)

    def episodes(self) -> Hypergradients:
        return Hypergradients(
            lr_y=self.lr_y,
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            inner_rounds=self.inner_rounds,
        )

    def anyone(self, fed: Federation, count: int) -> list[int]:
        """Clients drawn uniformly, with replacement."""
        return [fed.draw(len(fed)) for _ in range(count)]
