"""FedNest and LFedNest: nested loops, each made of communication rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedbilevel.algorithms.base import Algorithm, Point
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import (
    Evaluation,
    HessianProduct,
    Hypergradient,
    LocalHypergradient,
    LowerGradient,
    LowerRound,
    UpperCarry,
    UpperGradientY,
    UpperRound,
)
from fedbilevel.algorithms.shared_hypergradients import HypergradientBatch, OwnHypergradient
from fedbilevel.core.client_data import Batch
from fedbilevel.core.linear import neumann_sum, random_product
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive, StepsOrEpochs
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Message, Number, StepBatch


@dataclass(frozen=True, kw_only=True)
class _NestedLoops(Algorithm):
    """What both variants share: the settings, and FedInn, T = `inner_rounds` rounds on y."""

    lr_x: Step = 0.01
    lr_y: Step = 0.003
    neumann_lr: Positive = 0.01
    neumann_steps: Count = 5
    inner_rounds: Count = 1
    lower: Literal["svrg", "sgd"] = "svrg"
    lower_steps: StepsOrEpochs = "5 epochs"
    upper_steps: StepsOrEpochs = None

    @property
    def as_coded(self) -> bool:
        """Whether phases do as the published code of FedNest does."""
        return False

    def fed_inn(self, x: Tree, y: Tree, fed: Federation) -> Tree:
        """FedInn, T times: return the new y."""
        for _ in range(self.inner_rounds):
            S = fed.sample()
            correction = {}
            if self.lower == "svrg":
                correction["q"] = fed.ask(LowerGradient(full=self.as_coded), S, x=x, y=y).mean("q")
            y = y + fed.ask(self.lower_round(), S, x=x, y=y, **correction).mean("dy")
        return y

    def lower_round(self) -> LowerRound:
        """Return the phase of a lower round at this iteration's step sizes."""
        return LowerRound(
            lr_y=self.lr_y,
            lower=self.lower,
            steps=self.lower_steps or "local",
            as_coded=self.as_coded,
        )


class PrivatePower(Evaluation):
    """c_i <- c_i - lambda d2yy g_i c_i, with the client's own Hessian, as in the published code.

    A loss with dropout draws its mask with the key in the message, the same for all factors.
    """

    name = "private_power"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"c": "y"}
    summed = False

    neumann_lr: Positive

    def step(self, m: Mapping[str, Any], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Multiply c_i by one factor."""
        if isinstance(batch.rng, Tensor):
            batch = batch._replace(rng=fold_in(batch.rng.new_zeros(()), m["key"]))
        product = oracle.hessian_product(m["x"], m["y"], m["c"], batch)
        return {"c": m["c"] - self.neumann_lr * product}


@register("fednest")
@dataclass(frozen=True, kw_only=True)
class FedNest(_NestedLoops):
    """FedNest: rounds on y, then a federated Neumann sum, then a round on x.

    FedNest solves the bilevel problem with the global hypergradient, by nested loops. It is the
    classic that other papers compare with. Choose `AggITD` for fewer rounds with the same kind of
    steps, a single-loop method (`SimFBO`) for one round per iteration, `LFedNest` for cheap rounds
    where clients are alike.

    FedInn, T = `inner_rounds` times: q = mean grad_y g_i(x, y); each client, tau_i times,

        y_i <- y_i - lr_y (grad_y g_i(x, y_i) - grad_y g_i(x, y) + q),   then y <- y + mean (y_i -
        y).

    FedIHGP, with v = mean grad_y f_i, lambda = `neumann_lr`, N = `neumann_steps`, and a round for
    each product with the mean Hessian H:

        truncation="sum":     p = lambda sum_{k <= N} (I - lambda H)^k v
        truncation="random":  p = lambda N (I - lambda H)^N' v,   N' uniform on {0 .. N-1}

    FedOut: h = mean (grad_x f_i - d2xy g_i p); each client, tau_i times,

        x_i <- x_i - lr_x (h - grad_x f_i(x, y) + grad_x f_i(x_i, y)),   then x <- x + mean (x_i -
        x).

    Cost per iteration: 2T + N + 3 rounds, T fewer with `lower="sgd"`; with `truncation="random"` N'
    in place of N. Gradients per client: 1 + 2 (tau - 1) for each FedInn of tau steps (tau with
    "sgd"), 1 for v, 2 per product, 3 for h, and 2 (tau - 1) for the steps on x. Down go x and y in
    every round, with q, the vector of the product, p or h where they are used; up comes a tree like
    y per round, and like x in the last two.

    Departures from the paper: the Neumann sum is deterministic by default; "random" is as
    published. Clients send displacements. A new cohort is drawn for every lower round, for v, for
    every factor of p, and for h with the steps on x: with one cohort for v and h their product
    would be biased.

    Where y belongs to the clients (`Problem.owner`), FedInn is plain local steps on y_i, without
    the correction q, and each client sums its own Neumann series: then the mean of these
    hypergradients is the true one. One cohort serves an iteration of T + 2 rounds, in which x and h
    are all that travels.

    `compat="reference"` does what the published code does, which is not the published algorithm
    (docs/errata.md): each client multiplies by its own Hessian H_i only, and the server averages
    the proposals of all factors so far, so that

        p = lambda (v + sum_{1 <= k <= N} (1/k) mean_i (I - lambda H_i)^k v).

    One cohort then serves p and x, gradients are full-batch, and a loss with dropout draws its own
    mask for each of the two gradients of a corrected step, and one per client for all factors of p.
    (The code has one number for lambda and lr_x.) Our server holds the clients' private vectors and
    the keys of these masks for them, so that each factor moves one more vector each way than in the
    code, and the key.

    References:
        Tarzanagh, Li, Thrampoulidis and Oymak, "FedNest: Federated Bilevel, Minimax, and
        Compositional Optimization", ICML 2022. Code: github.com/ucr-optml/FedNest.

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        neumann_lr: The step lambda of the estimate.
        neumann_steps: The number N of Hessian products.
        inner_rounds: The number T of calls of FedInn.
        lower: "svrg", lower rounds corrected by q; or "sgd", plain local steps.
        lower_steps: Local steps per lower round: a number, "N epochs", or None for the
        environment's.
        upper_steps: Local steps of the upper round, likewise.
        truncation: "sum" or "random".
        compat: "reference" for what the published code does, or None.

    Examples:
        An iteration takes 2 * 2 + 10 + 3 rounds:

        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.FedNest(
        ...     inner_rounds=2, neumann_steps=10, lr_x=0.2, lr_y=0.5, neumann_lr=1.0
        ... )
        >>> result = fb.solve(
        ...     task.problem,
        ...     task.clients,
        ...     method,
        ...     rounds=5 * 17,
        ...     evaluate=task.evaluate,
        ...     every=5 * 17,
        ... )
        >>> start, end = (row["hypergradient_norm"] for row in result.history)
        >>> result.history[-1]["iteration"], end < 0.5 * start
        (5, True)
    """

    client_levels = ("y",)

    truncation: Literal["sum", "random"] = "sum"
    compat: Literal["reference"] | None = None

    @property
    def as_coded(self) -> bool:
        """Whether phases do as the published code does."""
        return self.compat == "reference"

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run FedInn, FedIHGP and FedOut."""
        if fed.problem.client_levels:
            return self.iterate_on_own_y(s, fed)
        x = s.x
        y = self.fed_inn(s.x, s.y, fed)
        S = fed.sample()
        S_v = S if self.as_coded else fed.sample()
        v = fed.ask(UpperGradientY(full=self.as_coded), S_v, x=x, y=y).mean("v")
        if self.as_coded:
            p = self.reference_ihgp(x, y, v, S, fed)
        else:
            p = self.fed_ihgp(x, y, v, fed)
        h = fed.ask(Hypergradient(full=self.as_coded), S, x=x, y=y, p=p).mean("h")
        x = x + fed.ask(self.upper_round(), S, x=x, y=y, h=h).mean("dx")
        return Point(fed.problem.project(x), y)

    def iterate_on_own_y(self, s: Point, fed: Federation) -> Point:
        """Run the same loops where y belongs to the clients: only x and h travel."""
        S = fed.sample()
        lower_round = LowerRound(lr_y=self.lr_y, lower="sgd", steps=self.lower_steps or "local")
        for _ in range(self.inner_rounds):
            fed.ask(lower_round, S, x=s.x, y=s.y)
        ihgp = LocalHypergradient(neumann_lr=self.neumann_lr, terms=self.neumann_steps + 1)
        h = fed.ask(ihgp, S, x=s.x, y=s.y).mean("h")
        x = s.x + fed.ask(self.upper_round(), S, x=s.x, y=s.y, h=h).mean("dx")
        return s._replace(x=fed.problem.project(x))

    def check(self, problem: Problem, environment: Environment) -> None:
        """Check as any algorithm, and settings without a meaning where y belongs to the clients."""
        super().check(problem, environment)
        self.check_whole_y(problem)
        if not problem.client_levels:
            return
        if self.as_coded or self.truncation == "random":
            raise ValueError(
                f"truncation is {self.truncation!r} and compat {self.compat!r}; where y belongs to "
                "the clients, as here, they must be 'sum' and None"
            )

    def fed_ihgp(self, x: Tree, y: Tree, v: Tree, fed: Federation) -> Tree:
        """FedIHGP: return an estimate p of [mean H]^-1 v."""
        lam = self.neumann_lr
        N = self.neumann_steps

        def product(v: Tree) -> Tree:
            return fed.ask(HessianProduct(), fed.sample(), x=x, y=y, v=v).mean("hv")  # type: ignore[no-any-return]

        if self.truncation == "sum":
            return neumann_sum(product, v, N + 1, lam)
        return random_product(product, v, N, lam, fed.draw(N))

    def reference_ihgp(self, x: Tree, y: Tree, v: Tree, S: list[int], fed: Federation) -> Tree:
        """FedIHGP as coded: powers of local Hessians, the k-th weighted by 1/k."""
        power = PrivatePower(neumann_lr=self.neumann_lr, full=True)
        private = dict.fromkeys(S, v)
        keys = {i: fed.draw(1 << 31) for i in S}
        p = v
        for k in range(1, self.neumann_steps + 1):
            each = [{"c": private[i], "key": keys[i]} for i in S]
            r = fed.ask(power, S, x=x, y=y, each=each)
            private |= {reply.client: reply.values["c"] for reply in r}
            p = p + r.mean("c") / k
        return self.neumann_lr * p

    def upper_round(self) -> UpperRound:
        """Return the phase of the upper round at this iteration's step sizes."""
        return UpperRound(
            lr_x=self.lr_x,
            steps=self.upper_steps or "local",
            full=self.as_coded,
            as_coded=self.as_coded,
        )


class LocalUpperRound(OwnHypergradient):
    """tau_i local steps on x along the client's own hypergradient; replies with x_i - x.

    x_i <- x_i - lr_x (grad_x f_i - d2xy g_i p_i), with p_i the client's own Neumann sum
    """

    name = "local_upper_round"
    batch = "both"
    reply: ClassVar = {"dx": "x"}

    lr_x: Number

    def start(self, m: Message) -> UpperCarry:
        """Start at the server's x."""
        return UpperCarry(x_i=m.x, x=m.x, y=m.y, h=Tree())

    def step(self, c: UpperCarry, oracle: Oracle, batches: StepBatch) -> UpperCarry:
        """Take one step on x_i."""
        batch, fresh = self.split(batches)
        d = self.own_hypergradient(oracle, c.x_i, c.y, batch, fresh)
        return c._replace(x_i=oracle.project_x(c.x_i - self.lr_x * d))

    def finish(self, c: UpperCarry) -> dict[str, Tree]:
        """Reply with the displacement."""
        return {"dx": c.x_i - c.x}


@register("lfednest")
@dataclass(frozen=True, kw_only=True)
class LFedNest(_NestedLoops):
    """LFedNest: FedNest with local hypergradients, in few rounds; biased where clients differ.

    Each client inverts its own Hessian. Choose it over `FedNest` where clients are alike and rounds
    are expensive: on heterogeneous clients the mean of local hypergradients is not the
    hypergradient, and it solves another problem.

    FedInn as in `FedNest`, by default its SGD type. Then each client, tau_i times, with
    lambda = `neumann_lr` and N = `neumann_steps`,

        p_i = lambda sum_{k <= N} (I - lambda d2yy g_i)^k grad_y f_i,
        x_i <- x_i - lr_x (grad_x f_i - d2xy g_i p_i),

    and x <- x + mean (x_i - x).

    Cost per iteration: T + 1 rounds, T = `inner_rounds` (2T + 1 with `lower="svrg"`). Gradients per
    client: 1 per local step on y (those of `FedNest` with "svrg"), 2N + 4 per local step on x. x
    and y go down; a tree like y comes up from each FedInn, one like x at the end.

    Departures from the paper: clients send displacements, and the server adds their mean. By
    default one mini-batch serves the whole estimate of a local hypergradient, so that its factors
    are dependent and its mean over batches is biased; `hypergradient_batch` has the alternatives.

    References:
        Tarzanagh, Li, Thrampoulidis and Oymak, "FedNest: Federated Bilevel, Minimax, and
        Compositional Optimization", ICML 2022.

    Args:
        lr_x: Local step size of x, a number or a schedule.
        lr_y: Local step size of y.
        neumann_lr: The step lambda of the Neumann sum.
        neumann_steps: The number N of its Hessian products; it has N + 1 terms.
        inner_rounds: The number T of calls of FedInn.
        lower: "sgd", plain local steps; or "svrg", lower rounds corrected by the mean gradient.
        lower_steps: Local steps per lower round: a number, "N epochs", or None for the
        environment's.
        upper_steps: Local steps of the upper round, likewise.
        hypergradient_batch: "one", one mini-batch for all of p_i and for d2xy g_i; "fresh", one
            more for each Hessian product; or "full", all samples of the client.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.LFedNest(inner_rounds=2)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=4 * 3)
        >>> result.status, result.history[-1]["iteration"]
        ('completed', 4)
    """

    solves = "local"
    lower: Literal["svrg", "sgd"] = "sgd"
    hypergradient_batch: HypergradientBatch = "one"

    def iterate(self, s: Point, fed: Federation) -> Point:
        """Run FedInn, and one round of local steps on x."""
        y = self.fed_inn(s.x, s.y, fed)
        x = s.x + fed.ask(self.upper_round(), fed.sample(), x=s.x, y=y).mean("dx")
        return Point(fed.problem.project(x), y)

    def upper_round(self) -> LocalUpperRound:
        """Return the phase of the upper round at this iteration's step sizes."""
        return LocalUpperRound(
            lr_x=self.lr_x,
            neumann_lr=self.neumann_lr,
            terms=self.neumann_steps + 1,
            steps=self.upper_steps or "local",
            fresh=self.hypergradient_batch == "fresh",
            full=self.hypergradient_batch == "full",
        )
