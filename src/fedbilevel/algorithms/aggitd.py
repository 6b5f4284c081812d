"""FBO-AggITD: the hypergradient is built along the lower-level rounds, in the same exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedbilevel.algorithms.base import Algorithm, Point
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import (
    Evaluation,
    HessianProduct,
    Hypergradient,
    LowerGradient,
    LowerRound,
    UpperGradientY,
    UpperRound,
)
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive, StepsOrEpochs
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment


class GradientAndStart(Evaluation):
    """q_i = grad_y g_i and, at t = Q, v_i = grad_y f_i (lines 4 and 5)."""

    name = "gradient_and_start"
    fixed_x = True
    batch = "both"
    reply: ClassVar = {"q": "y", "v": "y"}

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate q_i and v_i."""
        q = oracle.lower_gradient_y(m["x"], m["y"], batch)
        v = oracle.upper_gradient_y(m["x"], m["y"], batch)
        return {"q": q, "v": v}


class GradientAndProduct(Evaluation):
    """q_i = grad_y g_i and, at t > Q, d2yy g_i v (lines 4 and 6): from one pass on one batch.

    Args:
        independent_batches: Whether each of the two has a batch of its own.
    """

    name = "gradient_and_product"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"q": "y", "hv": "y"}

    independent_batches: bool = False

    @property
    def draws(self) -> int:
        """One batch, or one for q_i and one for the product."""
        return 2 if self.independent_batches else 1

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Any) -> dict[str, Tree]:
        """Evaluate q_i and the product."""
        if self.independent_batches:
            for_q, for_product = batch
            q = oracle.lower_gradient_y(m["x"], m["y"], for_q)
            hv = oracle.hessian_product(m["x"], m["y"], m["v"], for_product)
        else:
            q, hv = oracle.lower_gradient_and_product(m["x"], m["y"], m["v"], batch)
        return {"q": q, "hv": hv}


class OwnFactor(Evaluation):
    """v_i <- grad_y f_i at t = Q, v_i <- (I - lambda d2yy g_i) v_i later; the client keeps v_i.

    It replaces lines 5 and 6 where y belongs to the clients.

    Args:
        neumann_lr: The step lambda of the estimate.
        begins: Whether this is t = Q.
    """

    name = "factor"
    fixed_x = True
    batch = "both"
    reply: ClassVar = {}

    neumann_lr: Positive
    begins: bool

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate v_i."""
        if self.begins:
            return {"v": oracle.upper_gradient_y(m["x"], m["y"], batch)}
        product = oracle.hessian_product(m["x"], m["y"], m["v"], batch)
        return {"v": m["v"] - self.neumann_lr * product}

    def finish(self, c: dict[str, Tree]) -> dict[str, Tree]:
        """Reply with nothing."""
        return {}

    def own(self, c: dict[str, Tree]) -> dict[str, Tree]:
        """Keep v_i."""
        return c


class OwnFactorsHypergradient(Evaluation):
    """h_i = grad_x f_i - scale d2xy g_i v_i, with the v_i that the client has kept.

    Args:
        scale: lambda (N + 1).
    """

    name = "hypergradient"
    batch = "both"
    reply: ClassVar = {"h": "x"}

    scale: Positive

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate h_i."""
        return {"h": oracle.hypergradient(m["x"], m["y"], self.scale * m["v"], batch)}


@register("aggitd")
@dataclass(frozen=True, kw_only=True)
class AggITD(Algorithm):
    """FBO-AggITD: the hypergradient is estimated along the lower-level rounds.

    AggITD solves the bilevel problem with the global hypergradient, by a double loop. Choose it
    over `FedNest` to save rounds: Hessian products travel with the gradients of the lower rounds,
    so that an iteration has 2N + 3 rounds instead of 2T + N + 3. The single-loop methods (`SimFBO`)
    need one.

    Q is drawn uniformly from {0 .. N}, N = `inner_rounds`. For t = 0 .. N, on one cohort, with
    lambda = `neumann_lr`:

        q = mean grad_y g_i(x, y^t),   y^{t+1} by local steps corrected by q (t < N),
        z = mean grad_y f_i(x, y^t) at t = Q,   z <- z - lambda mean d2yy g_i(x, y^t) z for t > Q.

    Then p = lambda (N + 1) z estimates [d2yy G]^-1 grad_y F, and x takes a round of local steps
    along h = mean (grad_x f_i - d2xy g_i p) at (x, y^N). The steps are those of `LowerRound` and
    `UpperRound` in `shared`. All factors come from one cohort: with partial participation p is
    biased.

    Cost per iteration: 2N + 3 rounds. Gradients per client: 1 or 2 for each q (2 from t = Q on, 3
    with `independent_batches` and t > Q), 2 (tau - 1) for each lower round of tau steps, 1 or 2 at
    t = N, 3 for h, and 2 (tau - 1) for the upper round. Down go x and y in every round, with z, q,
    p or h where they are used; up come one or two trees like y per round, and two like x at the
    end. With `lower="sgd"` nobody uses q: it is not asked for, and the exchanges of t < Q are left
    out: 2N + 3 - Q rounds, on average 1.5 N + 3, and tau gradients for a lower round.

    Where y belongs to the clients (`Problem.owner`), each keeps its y_i and its z_i and applies the
    factors itself, with its own Hessian; the lower rounds need no q. The rounds t < Q have one
    exchange, later ones two, and x and h are all that travels.

    Departures from the paper: line 6 lacks lambda, and line 15 uses z^{N-1} for Q < N; both
    contradict the paper's own formula of the estimator, which is implemented (`printed=True` does
    as printed). q is not computed where nothing uses it, at t = N and with `lower="sgd"`. The
    theory has the steps lr_x / tau_i and lr_y / tau_i, which `step_scale="per-client"` takes; by
    default all clients take the same, so that one with more steps moves x and y further. q and the
    Hessian product of one t share a batch; the paper draws two (zeta and u), as
    `independent_batches=True` does. Clients send displacements, and the server adds their mean.
    Defaults are those of the paper's Table 2, whose counts fit N = 1 and 5 local epochs per lower
    round. Its tau is a number of "outer local epochs"; `upper_steps` and the environment's
    `local_steps` count steps, each on one batch of the validation data. See docs/errata.md.

    References:
        Xiao and Ji, "Communication-Efficient Federated Hypergradient Computation via Aggregated
        Iterative Differentiation", ICML 2023: Algorithms 1 to 4.

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        neumann_lr: The step lambda of the estimate.
        inner_rounds: The number N of lower rounds.
        lower: "svrg", lower rounds corrected by q; or "sgd", plain local steps.
        lower_steps: Local steps per lower round: a number, "N epochs", or None for the
            environment's.
        upper_steps: Local steps of the upper round, likewise; an epoch is a pass over the
            validation data.
        printed: Estimate as lines 6 and 15 are printed.
        step_scale: "same", all clients take lr_x and lr_y; or "per-client", lr_x / tau_i and
            lr_y / tau_i, with tau_i the client's number of steps in that round.
        independent_batches: Draw a batch for q and another for the Hessian product.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.AggITD(inner_rounds=2, lr_x=0.1, lr_y=0.5, neumann_lr=0.5)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=4 * 7)
        >>> result.status, result.history[-1]["iteration"]
        ('completed', 4)
    """

    client_levels = ("y",)

    lr_x: Step = 0.01
    lr_y: Step = 0.003
    neumann_lr: Positive = 0.01
    inner_rounds: Count = 1
    lower: Literal["svrg", "sgd"] = "svrg"
    lower_steps: StepsOrEpochs = "5 epochs"
    upper_steps: StepsOrEpochs = None
    printed: bool = False
    step_scale: Literal["same", "per-client"] = "same"
    independent_batches: bool = False

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run N lower rounds with the estimate of p along them, then one upper round."""
        if fed.problem.client_levels:
            return self.iterate_on_own_y(s, fed)
        N = self.inner_rounds
        x, y = s
        S = fed.sample()
        Q = fed.draw(N + 1)
        svrg = self.lower == "svrg"  # q is used, and travels with the estimate
        start = GradientAndStart() if svrg else UpperGradientY()
        product = self.gradient_and_product() if svrg else HessianProduct()
        lower_round = self.lower_round()
        for t in range(N):
            if t == Q:
                r = fed.ask(start, S, x=x, y=y)
                z = r.mean("v")
            elif t > Q:
                r = fed.ask(product, S, x=x, y=y, v=z)
                z = self.apply_factor(z, r.mean("hv"))
            elif svrg:
                r = fed.ask(LowerGradient(), S, x=x, y=y)
            correction = {"q": r.mean("q")} if svrg else {}
            y = y + fed.ask(lower_round, S, x=x, y=y, **correction).mean("dy")
        if Q == N:
            z = fed.ask(UpperGradientY(), S, x=x, y=y).mean("v")
        else:
            hz = fed.ask(HessianProduct(), S, x=x, y=y, v=z).mean("hv")
            if not self.printed:  # line 15 as printed leaves the last factor out
                z = self.apply_factor(z, hz)
        p = self.neumann_lr * (N + 1) * z
        h = fed.ask(Hypergradient(), S, x=x, y=y, p=p).mean("h")
        x = x + fed.ask(self.upper_round(), S, x=x, y=y, h=h).mean("dx")
        return Point(fed.problem.project(x), y)

    def iterate_on_own_y(self, s: Point, fed: Federation) -> Point:
        """Run the same loops where y belongs to the clients, who keep y_i and v_i."""
        N = self.inner_rounds
        x, y = s
        S = fed.sample()
        Q = fed.draw(N + 1)
        lower_round = LowerRound(lr_y=self.lr_y, lower="sgd", steps=self.lower_steps or "local")
        for t in range(N + 1):
            if t >= Q:
                factor = OwnFactor(neumann_lr=self.neumann_lr, begins=t == Q)
                fed.ask(factor, S, x=x, y=y, v=zeros_like(y))
            if t < N:
                fed.ask(lower_round, S, x=x, y=y)
        hypergradient = OwnFactorsHypergradient(scale=self.neumann_lr * (N + 1))
        h = fed.ask(hypergradient, S, x=x, y=y, v=zeros_like(y)).mean("h")
        x = x + fed.ask(self.upper_round(), S, x=x, y=y, h=h).mean("dx")
        return Point(fed.problem.project(x), y)

    def check(self, problem: Problem, environment: Environment) -> None:
        """Check as any algorithm, and settings without a meaning where y belongs to the clients."""
        super().check(problem, environment)
        self.check_whole_y(problem)
        if problem.client_levels and self.printed:
            raise ValueError(
                "printed is True; where y belongs to the clients, as here, it must be False"
            )

    def apply_factor(self, z: Tree, hz: Tree) -> Tree:
        """Return (I - lambda H) z, or (I - H) z as line 6 is printed."""
        if self.printed:
            return z - hz
        return z - self.neumann_lr * hz

    def gradient_and_product(self) -> GradientAndProduct:
        """Return the phase of q and a Hessian product."""
        return GradientAndProduct(independent_batches=self.independent_batches)

    def lower_round(self) -> LowerRound:
        """Return the phase of a lower round at this iteration's step sizes."""
        return LowerRound(
            lr_y=self.lr_y,
            lower=self.lower,
            steps=self.lower_steps or "local",
            step_scale=self.step_scale,
        )

    def upper_round(self) -> UpperRound:
        """Return the phase of the upper round at this iteration's step sizes."""
        return UpperRound(
            lr_x=self.lr_x, steps=self.upper_steps or "local", step_scale=self.step_scale
        )
