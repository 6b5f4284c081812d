"""FBO-AggITD: the hypergradient is built along the lower-level rounds, in the same exchanges.

Xiao and Ji, "Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative Differentiation",
2023.
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
)
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive, StepsOrEpochs
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation


class State(NamedTuple):
    x: Tree
    y: Tree


class GradientAndStart(Once):
    """q_i = grad_y g_i and, at t = Q, v_i = grad_y f_i (lines 4 and 5)."""

    name = "gradient_and_start"
    fixed_x = True
    batch = "both"
    reply: ClassVar = {"q": "y", "v": "y"}

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        x, y = m["x"], m["y"]
        return {
            "q": oracle.lower_gradient_y(x, y, batch),
            "v": oracle.upper_gradient_y(x, y, batch),
        }


class GradientAndProduct(Once):
    """q_i = grad_y g_i and, at t > Q, d2yy g_i v (lines 4 and 6), from one pass."""

    name = "gradient_and_product"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"q": "y", "hv": "y"}

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        q, hv = oracle.lower_gradient_and_product(m["x"], m["y"], m["v"], batch)
        return {"q": q, "hv": hv}


@register("aggitd")
@dataclass(frozen=True, kw_only=True)
class AggITD(Algorithm):
    """FBO-AggITD (Algorithms 1 to 4), 2N + 3 rounds an iteration, N = `inner_rounds`.

    Q is drawn uniformly from {0 .. N}. For t = 0 .. N, on one cohort:

        q = mean grad_y g_i(x, y^t);   y^{t+1} by a round of local steps that q corrects (t < N);
        z = mean grad_y f_i(x, y^t) at t = Q;   z <- z - lambda mean d2yy g_i(x, y^t) z for t > Q.

    Then p = lambda (N + 1) z estimates [d2yy G]^-1 grad_y F, and x takes a round of local steps along
    h = mean (grad_x f_i - d2xy g_i p) at (x, y^N); lambda = `neumann_lr`.

    Departures from print: line 6 lacks lambda, and line 15 uses z^{N-1} for Q < N; both go against the paper's own
    formula of the estimator (`printed=True` does as printed). q is not computed at t = N, where nothing uses it.
    Clients send displacements and the server adds their mean. `lower="sgd"` is the SGD type of the lower round.
    Defaults are those of the paper's Table 2, whose counts fit N = 1 and 5 local epochs a lower round.
    """

    lr_x: Step = 0.01
    lr_y: Step = 0.003
    neumann_lr: Positive = 0.01
    inner_rounds: Count = 1
    lower: Literal["svrg", "sgd"] = "svrg"
    lower_steps: StepsOrEpochs = "5 epochs"
    upper_steps: StepsOrEpochs = None
    printed: bool = False

    def init(self, problem: Problem) -> State:
        return State(*problem.start)

    def iterate(self, s: State, fed: Federation) -> State:
        N, lam, x, y = self.inner_rounds, self.neumann_lr, s.x, s.y
        S, Q = fed.sample(), fed.draw(N + 1)
        lower_round = LowerRound(
            lr_y=self.lr_y, lower=self.lower, steps=self.lower_steps or "local"
        )
        upper_round = UpperRound(lr_x=self.lr_x, steps=self.upper_steps or "local")
        for t in range(N):
            if t < Q:
                r = fed.ask(LowerGradient(), S, x=x, y=y)
            elif t == Q:
                r = fed.ask(GradientAndStart(), S, x=x, y=y)
                z = r.mean("v")
            else:
                r = fed.ask(GradientAndProduct(), S, x=x, y=y, v=z)
                z = self.factor(z, r.mean("hv"))
            correction = {"q": r.mean("q")} if self.lower == "svrg" else {}
            y = y + fed.ask(lower_round, S, x=x, y=y, **correction).mean("dy")
        if Q == N:
            z = fed.ask(UpperGradientY(), S, x=x, y=y).mean("v")
        else:
            last = self.factor(z, fed.ask(HessianProduct(), S, x=x, y=y, v=z).mean("hv"))
            z = z if self.printed else last
        h = fed.ask(Hypergradient(), S, x=x, y=y, p=lam * (N + 1) * z).mean("h")
        x = x + fed.ask(upper_round, S, x=x, y=y, h=h).mean("dx")
        return State(fed.problem.project(x), y)

    def factor(self, z: Tree, hz: Tree) -> Tree:
        """(I - lambda H) z."""
        return z - hz if self.printed else z - self.neumann_lr * hz
