"""FedNest and LFedNest: nested loops, each made of communication rounds.

Tarzanagh, Li, Thrampoulidis and Oymak, "FedNest: Federated Bilevel, Minimax, and Compositional Optimization", ICML
2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import (
    HessianProduct,
    Hypergradient,
    LowerGradient,
    LowerRound,
    Once,
    UpperGradientY,
    UpperRound,
    Walk,
    own_hypergradient,
)
from fedbilevel.core.linear import neumann_sum, random_product
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive, StepsOrEpochs
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Phase


class State(NamedTuple):
    x: Tree
    y: Tree


class PrivatePower(Once):
    """c_i <- c_i - lr d2yy g_i c_i: the published code lets each client multiply by its own Hessian only."""

    name = "private_power"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"c": "y"}
    summed = False

    neumann_lr: Positive

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        product = oracle.hessian_product(m["x"], m["y"], m["c"], batch)
        return {"c": m["c"] - self.neumann_lr * product}


@dataclass(frozen=True, kw_only=True)
class _Nested(Algorithm):
    """What both variants share: T = `inner_rounds` rounds on y."""

    lr_x: Step = 0.01
    lr_y: Step = 0.003
    neumann_lr: Positive = 0.01
    neumann_steps: Count = 5
    inner_rounds: Count = 1
    lower: Literal["svrg", "sgd"] = "svrg"
    lower_steps: StepsOrEpochs = "5 epochs"
    upper_steps: StepsOrEpochs = None

    def init(self, problem: Problem) -> State:
        return State(*problem.start)

    @property
    def as_coded(self) -> bool:
        """Whether phases do what FedNest's published code does."""
        return False

    def inner(self, x: Tree, y: Tree, fed: Federation) -> Tree:
        """FedInn, T times."""
        for _ in range(self.inner_rounds):
            S = fed.sample()
            correction = {}
            if self.lower == "svrg":
                correction["q"] = fed.ask(LowerGradient(full=self.as_coded), S, x=x, y=y).mean("q")
            y = y + fed.ask(self.lower_round(), S, x=x, y=y, **correction).mean("dy")
        return y

    def lower_round(self) -> LowerRound:
        return LowerRound(
            lr_y=self.lr_y,
            lower=self.lower,
            steps=self.lower_steps or "local",
            as_coded=self.as_coded,
        )


@register("fednest")
@dataclass(frozen=True, kw_only=True)
class FedNest(_Nested):
    """FedNest, 2T + N + 3 rounds an iteration (T = `inner_rounds`, N = `neumann_steps`; T fewer with `lower="sgd"`).

    FedInn, T times: q = mean grad_y g_i(x, y); on each client, tau_i times,
        y_i <- y_i - lr_y (grad_y g_i(x, y_i) - grad_y g_i(x, y) + q);   then y <- y + mean (y_i - y).
    FedIHGP, with v = mean grad_y f_i, lambda = `neumann_lr` and a mean Hessian product a round:
        p = lambda sum_{k <= N} (I - lambda H)^k v                               (`truncation="sum"`)
        p = lambda N (I - lambda H)^N' v,   N' drawn uniformly from {0 .. N-1}     (`truncation="random"`, as published)
    FedOut: h = mean (grad_x f_i - d2xy g_i p); on each client, tau_i times,
        x_i <- x_i - lr_x (h - grad_x f_i(x, y) + grad_x f_i(x_i, y));   then x <- x + mean (x_i - x).

    Departures from print: the Neumann sum is deterministic by default; clients send displacements. A new cohort is
    drawn for every lower round, for v, for every factor of p, and for h with the steps on x: with one cohort for v and
    h their product would be biased.

    `compat="reference"` does what the published code does, which is not the published algorithm: each client multiplies
    by its own Hessian only, and the server averages the proposals of all factors so far, so that

        p = lambda (v + sum_{k <= N} (1/k) mean_i (I - lambda H_i)^k v);

    one cohort serves p and x, gradients are full-batch, and a loss with dropout draws a mask of its own for each of the
    two gradients of a corrected step. (The code has one number for lambda and lr_x.) Our server
    holds the clients' private vectors for them: a factor moves one vector more each way.
    """

    truncation: Literal["sum", "random"] = "sum"
    compat: Literal["reference"] | None = None

    @property
    def as_coded(self) -> bool:
        return self.compat == "reference"

    def iterate(self, s: State, fed: Federation) -> State:
        x, y = s.x, self.inner(s.x, s.y, fed)
        S = fed.sample()
        R = S if self.as_coded else fed.sample()
        v = fed.ask(UpperGradientY(full=self.as_coded), R, x=x, y=y).mean("v")
        if self.as_coded:
            p = self.reference_product(x, y, v, S, fed)
        else:
            p = self.inverse_product(x, y, v, fed)
        h = fed.ask(Hypergradient(full=self.as_coded), S, x=x, y=y, p=p).mean("h")
        x = x + fed.ask(self.upper_round(), S, x=x, y=y, h=h).mean("dx")
        return State(fed.problem.project(x), y)

    def upper_round(self) -> UpperRound:
        return UpperRound(
            lr_x=self.lr_x,
            steps=self.upper_steps or "local",
            full=self.as_coded,
            as_coded=self.as_coded,
        )

    def inverse_product(self, x: Tree, y: Tree, v: Tree, fed: Federation) -> Tree:
        """FedIHGP: an estimate of [mean H]^-1 v."""
        lam, N = self.neumann_lr, self.neumann_steps

        def product(v: Tree) -> Tree:
            return fed.ask(HessianProduct(), fed.sample(), x=x, y=y, v=v).mean("hv")  # type: ignore[no-any-return]

        if self.truncation == "sum":
            return neumann_sum(product, v, N + 1, lam)
        return random_product(product, v, N, lam, fed.draw(N))

    def reference_product(self, x: Tree, y: Tree, v: Tree, S: list[int], fed: Federation) -> Tree:
        """As coded: powers of local Hessians, the k-th weighted 1/k."""
        private, p = dict.fromkeys(S, v), v
        for k in range(1, self.neumann_steps + 1):
            r = fed.ask(
                PrivatePower(neumann_lr=self.neumann_lr, full=True),
                S,
                x=x,
                y=y,
                each=[{"c": private[i]} for i in S],
            )
            private |= {reply.client: reply.values["c"] for reply in r}
            p = p + r.mean("c") / k
        return self.neumann_lr * p


class LocalUpperRound(Phase):
    """tau_i steps x_i <- x_i - lr_x (grad_x f_i - d2xy g_i p_i), p_i its own Neumann sum; replies with x_i - x."""

    name = "local_upper_round"
    batch = "both"
    reply: ClassVar = {"dx": "x"}

    lr_x: Number
    neumann_lr: Positive
    neumann_steps: Count

    def start(self, m: Message) -> Walk:
        return Walk(m.x, m.x, m.y, ())

    def step(self, c: Walk, oracle: Oracle, batch: Batch) -> Walk:
        terms = self.neumann_steps + 1
        d = own_hypergradient(oracle, c.here, c.other, batch, terms, self.neumann_lr)
        return c._replace(here=oracle.project_x(c.here - self.lr_x * d))

    def finish(self, c: Walk) -> dict[str, Any]:
        return {"dx": c.here - c.start}


@register("lfednest")
@dataclass(frozen=True, kw_only=True)
class LFedNest(_Nested):
    """LFedNest, T + 1 rounds an iteration (2T + 1 with `lower="svrg"`): everything above is local.

    FedInn as in `FedNest` (by default its SGD type), then on each client, tau_i times,

        p_i = lambda sum_{k <= N} (I - lambda d2yy g_i)^k grad_y f_i,   x_i <- x_i - lr_x (grad_x f_i - d2xy g_i p_i),

    and x <- x + mean (x_i - x). It averages local hypergradients: on heterogeneous clients it solves another problem.
    """

    solves = "local"
    lower: Literal["svrg", "sgd"] = "sgd"

    def iterate(self, s: State, fed: Federation) -> State:
        y = self.inner(s.x, s.y, fed)
        x = s.x + fed.ask(self.upper_round(), fed.sample(), x=s.x, y=y).mean("dx")
        return State(fed.problem.project(x), y)

    def upper_round(self) -> LocalUpperRound:
        return LocalUpperRound(
            lr_x=self.lr_x,
            neumann_lr=self.neumann_lr,
            neumann_steps=self.neumann_steps,
            steps=self.upper_steps or "local",
        )
