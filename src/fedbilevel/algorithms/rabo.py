"""RABO and RAFBO: clients train the submodels they can hold; RAFBO without second derivatives.

Li et al., "Distributed Bilevel Optimization with Dual Pruning for Resource-limited Clients".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import Evaluation, LocalHypergradient, LowerRound
from fedbilevel.algorithms.shared_episodes import Episodes, descend_lower
from fedbilevel.algorithms.shared_hypergradients import HypergradientBatch, OwnHypergradient
from fedbilevel.algorithms.shared_submodels import Policy, assign_submodels, check_policy
from fedbilevel.core.client_data import Batch
from fedbilevel.core.embedding import AnyBatch, EmbeddedBatch
from fedbilevel.core.linear import directional
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, normal
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive, StepsOrEpochs, at_least, parse_epochs
from fedbilevel.core.tree import Tree, dot, flatten, norm, project, unflatten, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Number, Steps

DIRECTIONS_STREAM = 3  # folded into the key of a batch, for the random directions of "response"


class State(NamedTuple):
    """The server's x and y, and z, which moves only where the hypergradient is global."""

    x: Tree
    y: Tree
    z: Tree


class Lower(LowerRound):
    """T steps y_i <- y_i - lr_y grad_y g_i; replies with y_i - y."""

    name = "lower"

    lower: Literal["svrg", "sgd"] = "sgd"


class SecondOrder(OwnHypergradient):
    """Base of the phases that estimate hypergradients with second derivatives."""

    def global_directions(
        self, oracle: Oracle, x: Tree, y: Tree, z: Tree, batch: AnyBatch
    ) -> tuple[Tree, Tree]:
        """Return d_x = grad_x f_i - d2xy g_i z and d_z = d2yy g_i z - grad_y f_i."""
        d_z = oracle.hessian_product(x, y, z, batch) - oracle.upper_gradient_y(x, y, batch)
        d_x = oracle.hypergradient(x, y, z, batch)
        return d_x, d_z


class GlobalDirections(SecondOrder, Evaluation):
    """d_x and d_z at the server's x, y and z."""

    name = "directions"
    reply: ClassVar = {"dx": "x", "dz": "y"}

    def step(self, m: Mapping[str, Tree], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate both directions."""
        embedded = oracle.embed(m["x"], batch)
        d_x, d_z = self.global_directions(oracle, m["x"], m["y"], m["z"], embedded)
        return {"dx": d_x, "dz": d_z}


class EpisodeHypergradients(SecondOrder, Episodes):
    """On each episode T steps on y from the shared start, then H_i at the y they lead to.

    Args:
        lr_y: The step size of y.
        inner_steps: T.
    """

    reply: ClassVar = {"h": "x", "dy": "y"}

    steps: Steps = "local"
    lr_y: Number
    inner_steps: Count

    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]:
        """Evaluate H_i, and the displacement of y."""
        embedded = oracle.embed(x, batch)
        y_T = descend_lower(oracle, x, y, embedded, self.inner_steps, self.lr_y)
        return {"h": self.own_hypergradient(oracle, x, y_T, embedded), "dy": y_T - y}


@register("rabo")
@dataclass(frozen=True, kw_only=True)
class RABO(Algorithm):
    """RABO: bilevel learning on submodels, for clients that cannot hold the whole model.

    Every client trains the part of x and y that its capacity allows, on both levels, and the server
    averages each coordinate over the clients that hold it. With `hypergradient="local"`, as
    printed, a client inverts its own Hessian, and the method is biased on heterogeneous clients;
    choose `hypergradient="global"` there, which shares one linear system and has the true solution
    as its fixed point. `RAFBO` is the variant without second derivatives. `UniFBO` is the other
    bilevel method on submodels; `HeteroFL`, `FedRolex`, `OAP` and `FIARSE` are the single-level
    baselines. RABO also takes problems with a private lower level (few-shot learning), with
    capacity 1 too.

    Client i holds the submodel x_i, y_i of its capacity, by default the units of every axis with
    the largest weights (`policy`). It takes T = `lower_steps` local steps, and the server averages,

        y_i <- y_i - lr_y grad_y g_i(x_i, y_i),           y <- y + mean of (y_i,T - y_i,0);

    then, at the new y,

        H_i = grad_x f_i - d2xy g_i [d2yy g_i]^-1 grad_y f_i,           x <- x - lr_x mean of H_i,

    with the inverse by a Neumann sum of N = `neumann_steps` terms or by N steps of conjugate
    gradients (`solver`). A mean is over the clients that hold a coordinate; where nobody does, it
    stays. With `hypergradient="global"` the second
    exchange has, as in `SimFBO`,

        d_x = grad_x f_i - d2xy g_i z,                    x <- x - lr_x mean of d_x,
        d_z = d2yy g_i z - grad_y f_i,                    z <- P_r(z - lr_z mean of d_z).

    Where y belongs to the clients (`Problem.owner`), each keeps its y_i, and the mean of the H_i is
    the true hypergradient, up to the truncation of the inverse.

    Where the lower level is private, a local step is an episode with its own y_i, which takes T
    steps from the shared y; y moves by the mean displacement and H_i is the mean over the local
    episodes.

    Cost per iteration: two rounds. Gradients per client: 1 per lower step, then 2N + 2 for H_i
    (2N + 4 with `solver="cg"`), or 6 with `hypergradient="global"`. Down, of the submodel: x and y
    twice (and z once if global). Up: the displacement of y, then H_i (or d_x and d_z). With a
    private lower level: one round and T + 2N + 2 gradients per client and episode; x and y go down,
    H_i and the displacement of y come up.

    Departures from the paper: y moves by the mean displacement, because lines 10 and 18 of
    Algorithm 1 together move it uphill. The paper has the exact inverse in eq. (7); along a
    direction of curvature c a Neumann sum keeps 1 - (1 - neumann_lr c)^N of it, which is 41% at c =
    1 for the defaults. `solver="cg"` with N of the order of the square root of the condition number
    is nearly exact. By default one mini-batch serves all factors of H_i, which are then dependent
    (paper: independent); `hypergradient_batch` has the alternatives. The server cuts and sends the
    submodel; the paper sends the whole model and masks it on the client. `hypergradient="global"`
    and the private lower level are ours: the paper has one y*(x) for all episodes, with which
    nothing can be learned where each episode numbers its own classes. docs/errata.md has the
    evidence.

    References:
        Li, Zhang, Zheng, Shi, Yuan, Cheng and Yu, "Distributed Bilevel Optimization with Dual
        Pruning for Resource-limited Clients": Algorithm 1.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        lr_z: Step size of z, a number or a schedule; used if the hypergradient is global.
        lower_steps: T: a number of steps, "N epochs", or None for the environment's `local_steps`.
        neumann_lr: The step of the Neumann sum.
        neumann_steps: The number N of its terms, or of steps of conjugate gradients.
        hypergradient: "local", each client's own, or "global", with one linear system for all.
        policy: Which units a client holds: "importance", those with the largest weights; "static",
            the first; "rolling", a window that moves by one unit per iteration; "segments".
        segments: With the policy "segments", the segment of every axis that each client holds; the
            list is repeated over the clients.
        radius: The radius of the ball that z is projected onto; used if the hypergradient is
            global.
        solver: "neumann", or "cg", conjugate gradients, which stop where the curvature is not
            positive; used if the hypergradient is local.
        hypergradient_batch: The data of H_i or of d_x and d_z: "one", one mini-batch; "fresh", one
            more for each Hessian product of the Neumann sum; or "full", all samples of the client.

    Examples:
        On heterogeneous clients only the global hypergradient leads to the solution:

        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4, condition=3.0)
        >>> steps = {"lr_x": 0.2, "lr_y": 0.5, "lr_z": 0.5, "lower_steps": 1, "neumann_lr": 1.0}
        >>> def gradient_norm(hypergradient):
        ...     method = fb.algorithms.RABO(**steps, hypergradient=hypergradient)
        ...     x = fb.solve(task.problem, task.clients, method, rounds=80, every=80).x
        ...     return float(task.gradient(x)["x"].norm())
        >>> gradient_norm("global") < 0.05 < gradient_norm("local")
        True
    """

    solves = "local"
    lower_levels = ("shared", "private")
    submodels = True
    client_levels = ("y",)
    local_phase: ClassVar[type[LocalHypergradient]] = LocalHypergradient
    global_phase: ClassVar[type[GlobalDirections]] = GlobalDirections
    episode_phase: ClassVar[type[EpisodeHypergradients]] = EpisodeHypergradients

    lr_x: Step = 0.05
    lr_y: Step = 0.1
    lr_z: Step = 0.1
    lower_steps: StepsOrEpochs = "5 epochs"
    neumann_lr: Positive = 0.1
    neumann_steps: Count = 5
    hypergradient: Literal["local", "global"] = "local"
    policy: Policy = "importance"
    segments: tuple[Annotated[int, at_least(0)], ...] = ()
    radius: Positive = 1000.0
    solver: Literal["neumann", "cg"] = "neumann"
    hypergradient_batch: HypergradientBatch = "one"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self.policy, self.segments)
        if self.hypergradient_batch == "fresh" and self.solver == "cg":
            raise ValueError(
                "hypergradient_batch is 'fresh' and solver 'cg', which needs one matrix; one of "
                "them must be another"
            )
        if self.hypergradient == "global":
            self.check_no_products("hypergradient is 'global'")

    def check_no_products(self, why: str) -> None:
        """Refuse settings of Hessian products where a setting leaves no products."""
        if self.solver == "cg":
            raise ValueError(f"solver is 'cg'; it must be 'neumann' where {why}")
        if self.hypergradient_batch == "fresh":
            raise ValueError(
                f"hypergradient_batch is 'fresh'; it must be 'one' or 'full' where {why}"
            )

    def check(self, problem: Problem, environment: Environment) -> None:
        """Refuse, besides, settings without a meaning where every episode has its own y."""
        super().check(problem, environment)
        self.check_whole_y(problem)
        if problem.client_levels and self.hypergradient == "global":
            raise ValueError(
                "hypergradient is 'global'; where y belongs to the clients, as here, their own "
                "Hessians are the right ones: it must be 'local'"
            )
        if problem.lower_level == "shared":
            return
        if self.hypergradient_batch != "one":
            raise ValueError(
                f"hypergradient_batch is {self.hypergradient_batch!r}; with a private lower level, "
                "as here, it must be 'one'"
            )
        if self.hypergradient == "global":
            raise ValueError(
                "hypergradient is 'global'; with a private lower level, as here, it must be 'local'"
            )
        if self.lower_steps is None:
            raise ValueError(
                "lower_steps is None; with a private lower level, as here, it must be a number "
                "or 'N epochs'"
            )

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, with z = 0."""
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        """Run Algorithm 1 once: a lower round, then a step along the mean hypergradient."""
        S = fed.sample()
        submodels = assign_submodels(fed, S, s.x, s.y, self.policy, self.segments)
        if fed.problem.lower_level == "private":
            r = fed.ask(self.episodes(), S, submodels=submodels, x=s.x, y=s.y)
            x = self.descend(s.x, r.coverage_mean("h"), fed)
            return State(x, s.y + r.coverage_mean("dy"), s.z)
        lower = Lower(lr_y=self.lr_y, steps=self.lower_steps or "local")
        r = fed.ask(lower, S, submodels=submodels, x=s.x, y=s.y)
        y = s.y + r.coverage_mean("dy")
        if self.hypergradient == "local":
            hypergradient = self.local_phase(**self.estimates())
            r = fed.ask(hypergradient, S, submodels=submodels, x=s.x, y=y)
            return State(self.descend(s.x, r.coverage_mean("h"), fed), y, s.z)
        directions = self.global_phase(**self.estimates())
        r = fed.ask(directions, S, submodels=submodels, x=s.x, y=y, z=s.z)
        z = project(s.z - self.lr_z * r.coverage_mean("dz"), self.radius)
        return State(self.descend(s.x, r.coverage_mean("dx"), fed), y, z)

    def descend(self, x: Tree, d: Tree, fed: Federation) -> Tree:
        """Return x after one step along d."""
        return fed.problem.project(x - self.lr_x * d)

    def estimates(self) -> dict[str, Any]:
        """Return the settings of the clients' estimates, which their phases take."""
        return {
            "neumann_lr": self.neumann_lr,
            "terms": self.neumann_steps,
            "solver": self.solver,
            "fresh": self.hypergradient_batch == "fresh",
            "full": self.hypergradient_batch == "full",
        }

    def episodes(self) -> EpisodeHypergradients:
        """Return the phase for episodes, whose support is one batch: a step is an epoch."""
        steps = parse_epochs(self.lower_steps) or int(self.lower_steps or 1)
        return self.episode_phase(lr_y=self.lr_y, inner_steps=steps, **self.estimates())


class Differences(SecondOrder):
    """Estimates by differences of gradients, in the place of second derivatives.

    Args:
        estimator: "directional", "response" or "printed"; see `RAFBO`.
        directions: The number of random directions of "response".
        width: The distance over which differences are taken.
    """

    estimator: Literal["directional", "response", "printed"]
    directions: Count
    width: Positive

    def own_hypergradient(
        self, oracle: Oracle, x: Tree, y: Tree, batch: AnyBatch, fresh: Sequence[AnyBatch] = ()
    ) -> Tree:
        """Return H_i by the chosen estimator."""
        if self.estimator == "response":
            return self.response_hypergradient(oracle, x, y, batch)
        v = oracle.upper_gradient_y(x, y, batch)
        if self.estimator == "printed":
            return oracle.difference_hypergradient(x, y, -v, batch, self.width)

        def product(v: Tree, batch: AnyBatch) -> Tree:
            return directional(lambda y: oracle.lower_gradient_y(x, y, batch), y, self.width)(v)

        p = self.solve(product, v, batch, fresh)
        return oracle.difference_hypergradient(x, y, p, batch, self.width)

    def response_hypergradient(self, oracle: Oracle, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """Return H_i from how y_N(x) responds to random directions of x."""
        raw = batch.raw if isinstance(batch, EmbeddedBatch) else batch

        def response(x: Tree) -> Tree:
            embedded = oracle.embed(x, raw)
            return descend_lower(oracle, x, y, embedded, self.terms, self.neumann_lr)

        h, v = oracle.upper_gradients(x, y, batch)
        y_N = response(x)
        for p in range(self.directions):
            key = fold_in(fold_in(raw.rng, DIRECTIONS_STREAM), p)  # type: ignore[arg-type]
            e = unflatten(normal(key, (x.numel,), flatten(x).dtype), x)
            width = self.width / norm(e)
            h = h + e * (dot(response(x + e * width) - y_N, v) / (width * self.directions))
        return h

    def global_directions(
        self, oracle: Oracle, x: Tree, y: Tree, z: Tree, batch: AnyBatch
    ) -> tuple[Tree, Tree]:
        """Return d_x and d_z by directional differences."""
        product = directional(lambda y: oracle.lower_gradient_y(x, y, batch), y, self.width)
        d_z = product(z) - oracle.upper_gradient_y(x, y, batch)
        d_x = oracle.difference_hypergradient(x, y, z, batch, self.width)
        return d_x, d_z


class LocalHypergradientByDifferences(Differences, LocalHypergradient):
    """H_i at the server's x and y."""


class GlobalDirectionsByDifferences(Differences, GlobalDirections):
    """d_x and d_z at the server's x, y and z."""


class EpisodeHypergradientsByDifferences(Differences, EpisodeHypergradients):
    """On each episode T steps on y from the shared start, then H_i at the y they lead to."""

    steps: Steps = "local"


@register("rafbo")
@dataclass(frozen=True, kw_only=True)
class RAFBO(RABO):
    """RAFBO: RABO with differences of gradients in the place of second derivatives.

    Choose it over `RABO` where second derivatives are not available or need too much memory; keep
    the default estimator. Everything but the estimate of H_i is as in `RABO`, bias included.

    estimator="directional" (the default) takes both products with second derivatives from
    differences along v, at a cost that does not depend on the size of x: with h = width / ||v||,

        d2yy g v = (grad_y g(x, y + h v) - grad_y g(x, y - h v)) / 2h,
        d2xy g v = (grad_x g(x, y + h v) - grad_x g(x, y - h v)) / 2h.

    estimator="response" perturbs the solution of the lower level, as in the source that the paper
    follows: with e_1 .. e_k standard normal, k = `directions`, and y_N(x) the lower level after
    N = `neumann_steps` steps of `neumann_lr` from y,

        H_i = grad_x f_i + 1/k sum_p <(y_N(x + h e_p) - y_N(x)) / h, grad_y f_i> e_p,
        h = width / ||e_p||.

    Its expectation is that of the Neumann sum of N terms; its variance grows with the size of x.

    estimator="printed" is for the record only. With e_p the unit vector of coordinate p it is

        delta_p = (grad_y g_i(x + mu e_p, y) - grad_y g_i(x, y)) / mu,
        H_i = grad_x f_i + sum_p <delta_p, grad_y f_i> e_p = grad_x f_i + d2xy g_i grad_y f_i:

    the sign is wrong and the inverse Hessian is missing, so that it can ascend.

    Cost per iteration: rounds and bytes of `RABO`. Gradients per client: 1 per lower step, then
    2N + 2 for "directional", 1 + N (k + 1) for "response", 4 for "printed"; 6 with
    `hypergradient="global"`.

    Departures from the paper: those of `RABO`. The default estimator is ours. "printed" needs no
    loop over coordinates, because a directional difference gives the whole sum. docs/errata.md has
    the evidence against the printed estimator and its error bound.

    References:
        Li, Zhang, Zheng, Shi, Yuan, Cheng and Yu, "Distributed Bilevel Optimization with Dual
        Pruning for Resource-limited Clients": Algorithm 2. Sow, Ji and Liang 2022 (the source of
        "response").

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        lr_z: Step size of z, a number or a schedule; used if the hypergradient is global.
        lower_steps: T: a number of steps, "N epochs", or None for the environment's `local_steps`.
        neumann_lr: The step of the Neumann sum, or of the lower level's response.
        neumann_steps: The number N of its terms, or of steps of "cg" or of the response.
        hypergradient: "local", each client's own, or "global", with one linear system for all;
            "global" needs the estimator "directional".
        policy: Which units a client holds: "importance", "static", "rolling" or "segments".
        segments: With the policy "segments", the segment of every axis that each client holds.
        radius: The radius of the ball that z is projected onto; used if the hypergradient is
            global.
        solver: "neumann" or "cg", for the estimator "directional".
        hypergradient_batch: As in `RABO`; "fresh" is for the estimator "directional".
        estimator: "directional", "response" or "printed".
        directions: The number k of random directions of "response".
        width: The distance over which differences are taken. Longer Neumann sums need a larger one:
            each product adds the rounding error of a gradient divided by the width.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4, heterogeneity=0.0)
        >>> steps = {"lr_x": 0.1, "lr_y": 0.5, "lower_steps": 1, "neumann_lr": 1.0}
        >>> exact, differences = fb.algorithms.RABO(**steps), fb.algorithms.RAFBO(**steps)
        >>> x = fb.solve(task.problem, task.clients, exact, rounds=40).x["x"]
        >>> x_differences = fb.solve(task.problem, task.clients, differences, rounds=40).x["x"]
        >>> bool((x - x_differences).norm() < 1e-6 * x.norm())
        True
    """

    second_derivatives = False
    local_phase = LocalHypergradientByDifferences
    global_phase = GlobalDirectionsByDifferences
    episode_phase = EpisodeHypergradientsByDifferences

    estimator: Literal["directional", "response", "printed"] = "directional"
    directions: Count = 10
    width: Positive = 3e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator == "directional":
            return
        if self.hypergradient == "global":
            raise ValueError(
                f"estimator is {self.estimator!r}; with hypergradient 'global' it must be "
                "'directional'"
            )
        self.check_no_products(f"estimator is {self.estimator!r}")

    def estimates(self) -> dict[str, Any]:
        """Return the settings of the clients' estimates, which their phases take."""
        return {
            **super().estimates(),
            "estimator": self.estimator,
            "directions": self.directions,
            "width": self.width,
        }
