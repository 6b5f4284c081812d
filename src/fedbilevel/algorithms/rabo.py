"""RABO and RAFBO: clients train the submodels they can hold; RAFBO without second derivatives.

Li et al., "Distributed Bilevel Optimization with Dual Pruning for Resource-limited Clients".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import Episodes, LowerRound, Once, own_hypergradient, settle
from fedbilevel.algorithms.shared_submodels import Policy, check_policy, cut
from fedbilevel.core.linear import directional, neumann_sum
from fedbilevel.core.oracle import AnyBatch, Embedded, Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.rng import fold_in, normal
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Positive, StepsOrEpochs, at_least, epochs
from fedbilevel.core.tree import Tree, dot, flatten, norm, project, unflatten, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Number, Phase, Steps


class State(NamedTuple):
    """z is the server's solution of the linear system, where the hypergradient is global."""

    x: Tree
    y: Tree
    z: Tree


class Lower(LowerRound):
    """T steps y_i <- y_i - lr_y grad_y g_i."""

    name = "lower"

    lower: Literal["svrg", "sgd"] = "sgd"


class Exact(Phase):
    """Estimates with second derivatives."""

    neumann_lr: Positive
    neumann_steps: Count

    def local_hypergradient(self, oracle: Oracle, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """H_i, with the client's own Hessian."""
        return own_hypergradient(oracle, x, y, batch, self.neumann_steps, self.neumann_lr)

    def global_directions(
        self, oracle: Oracle, x: Tree, y: Tree, z: Tree, batch: AnyBatch
    ) -> tuple[Tree, Tree]:
        """d_x = grad_x f_i - d2xy g_i z and d_z = d2yy g_i z - grad_y f_i."""
        d_z = oracle.hessian_product(x, y, z, batch) - oracle.upper_gradient_y(x, y, batch)
        return oracle.hypergradient(x, y, z, batch), d_z


class LocalHypergradient(Exact, Once):
    """H_i at the point that was sent."""

    name = "hypergradient"
    reply: ClassVar = {"h": "x"}

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        return {"h": self.local_hypergradient(oracle, m["x"], m["y"], oracle.embed(m["x"], batch))}


class GlobalDirections(Exact, Once):
    """d_x and d_z at the point that was sent."""

    name = "directions"
    reply: ClassVar = {"dx": "x", "dz": "y"}

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        d_x, d_z = self.global_directions(
            oracle, m["x"], m["y"], m["z"], oracle.embed(m["x"], batch)
        )
        return {"dx": d_x, "dz": d_z}


class Hypergradients(Exact, Episodes):
    """T steps on y from the shared start, then H_i there."""

    reply: ClassVar = {"h": "x", "dy": "y"}

    steps: Steps = "local"
    lr_y: Number
    inner_steps: Count

    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]:
        episode = oracle.embed(x, batch)
        settled = settle(oracle, x, y, episode, self.inner_steps, self.lr_y)
        return {"h": self.local_hypergradient(oracle, x, settled, episode), "dy": settled - y}


@register("rabo")
@dataclass(frozen=True, kw_only=True)
class RABO(Algorithm):
    """RABO (Algorithm 1), two rounds an iteration, one where the lower level is private.

    Client i holds the submodel x_i, y_i of its capacity, the units of every axis with the largest weights (`policy`).

        T local steps (`lower_steps`):   y_i <- y_i - lr_y grad_y g_i(x_i, y_i);      y <- y + mean (y_i,T - y_i,0)
        H_i = grad_x f_i - d2xy g_i [d2yy g_i]^-1 grad_y f_i   at the new y_i;        x <- x - lr_x mean H_i

    Means are over those who hold a coordinate; where nobody does it stays. [d2yy g_i]^-1 is a Neumann sum of
    `neumann_steps` terms with step `neumann_lr`.

    hypergradient="local", as printed, averages H_i with the client's own Hessian: on heterogeneous clients that solves
    another problem. "global" has SimFBO's linear system on the server instead, and the true solution as fixed point:

        d_x = grad_x f_i - d2xy g_i z,         d_z = d2yy g_i z - grad_y f_i,
        x <- x - lr_x mean d_x,                z <- P_r(z - lr_z mean d_z).

    Departures from print: y moves by the mean displacement (line 10 with line 18 moves it uphill); the server cuts and
    sends submodels (print sends the model and masks it there); where the lower level is private every episode has its
    own y_i, from the shared start, which moves by their mean displacement, and H_i is a mean over the local episodes.
    """

    solves = "local"
    lower_levels = ("shared", "private")
    submodels = True
    on_clients: ClassVar[type[LocalHypergradient]] = LocalHypergradient
    on_the_server: ClassVar[type[GlobalDirections]] = GlobalDirections
    on_episodes: ClassVar[type[Hypergradients]] = Hypergradients

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self.policy, self.segments)

    def check(self, problem: Problem, environment: Environment) -> None:
        super().check(problem, environment)
        if problem.lower_level == "private" and (
            self.hypergradient == "global" or self.lower_steps is None
        ):
            key = "hypergradient" if self.hypergradient == "global" else "lower_steps"
            raise ValueError(
                f"{key} is {getattr(self, key)!r}; with a private lower level, as here, every episode has its own: "
                "hypergradient must be 'local' and lower_steps a number"
            )

    def init(self, problem: Problem) -> State:
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        S = fed.sample()
        parts = cut(fed, S, s.x, s.y, self.policy, self.segments)
        if fed.problem.lower_level == "private":
            r = fed.ask(self.episodes(), S, submodels=parts, x=s.x, y=s.y)
            return State(
                self.descend(s.x, r.coverage_mean("h"), fed), s.y + r.coverage_mean("dy"), s.z
            )
        lower = Lower(lr_y=self.lr_y, steps=self.lower_steps or "local")
        y = s.y + fed.ask(lower, S, submodels=parts, x=s.x, y=s.y).coverage_mean("dy")
        if self.hypergradient == "local":
            r = fed.ask(self.on_clients(**self.estimates()), S, submodels=parts, x=s.x, y=y)
            return State(self.descend(s.x, r.coverage_mean("h"), fed), y, s.z)
        r = fed.ask(self.on_the_server(**self.estimates()), S, submodels=parts, x=s.x, y=y, z=s.z)
        z = project(s.z - self.lr_z * r.coverage_mean("dz"), self.radius)
        return State(self.descend(s.x, r.coverage_mean("dx"), fed), y, z)

    def descend(self, x: Tree, d: Tree, fed: Federation) -> Tree:
        return fed.problem.project(x - self.lr_x * d)

    def estimates(self) -> dict[str, Any]:
        """How clients estimate products with the inverse Hessian."""
        return {"neumann_lr": self.neumann_lr, "neumann_steps": self.neumann_steps}

    def episodes(self) -> Hypergradients:
        """An episode's support set is one batch, so that a step is an epoch."""
        steps = epochs(self.lower_steps) or int(self.lower_steps or 1)
        return self.on_episodes(lr_y=self.lr_y, inner_steps=steps, **self.estimates())


class Differences(Exact):
    """Estimates with differences of gradients in the place of second derivatives."""

    estimator: Literal["directional", "response", "printed"]
    directions: Count
    width: Positive

    def local_hypergradient(self, oracle: Oracle, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        if self.estimator == "response":
            return self.response_hypergradient(oracle, x, y, batch)
        v = oracle.upper_gradient_y(x, y, batch)
        if self.estimator == "printed":
            return oracle.difference_hypergradient(x, y, -v, batch, self.width)
        product = directional(lambda y: oracle.lower_gradient_y(x, y, batch), y, self.width)
        p = neumann_sum(product, v, self.neumann_steps, self.neumann_lr)
        return oracle.difference_hypergradient(x, y, p, batch, self.width)

    def response_hypergradient(self, oracle: Oracle, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        raw = batch.raw if isinstance(batch, Embedded) else batch

        def response(x: Tree) -> Tree:
            return settle(oracle, x, y, oracle.embed(x, raw), self.neumann_steps, self.neumann_lr)

        h, v = oracle.upper_gradients(x, y, batch)
        y_n = response(x)
        for p in range(self.directions):
            key = fold_in(fold_in(raw.rng, 3), p)  # type: ignore[arg-type]
            e = unflatten(normal(key, (x.numel,), flatten(x).dtype), x)
            width = self.width / norm(e)
            h = h + e * (dot(response(x + e * width) - y_n, v) / (width * self.directions))
        return h

    def global_directions(
        self, oracle: Oracle, x: Tree, y: Tree, z: Tree, batch: AnyBatch
    ) -> tuple[Tree, Tree]:
        product = directional(lambda y: oracle.lower_gradient_y(x, y, batch), y, self.width)
        d_z = product(z) - oracle.upper_gradient_y(x, y, batch)
        return oracle.difference_hypergradient(x, y, z, batch, self.width), d_z


class LocalHypergradientByDifferences(Differences, LocalHypergradient):
    """H_i at the point that was sent."""


class GlobalDirectionsByDifferences(Differences, GlobalDirections):
    """d_x and d_z at the point that was sent."""


class HypergradientsByDifferences(Differences, Hypergradients):
    """T steps on y from the shared start, then H_i there."""

    steps: Steps = "local"


@register("rafbo")
@dataclass(frozen=True, kw_only=True)
class RAFBO(RABO):
    """RAFBO (Algorithm 2): RABO with differences of gradients in the place of second derivatives.

    estimator="directional" (default): with h = width / ||v||, at a cost that does not depend on the size of x,

        d2yy g v = (grad_y g(y + h v) - grad_y g(y - h v)) / 2h,     and with grad_x in their place d2xy g v.

    estimator="response", after the source that print follows (Sow, Ji and Liang 2022): with e_1 .. e_k standard normal
    (`directions`) and y_N(x) the lower level after N = `neumann_steps` steps of `neumann_lr` from y,

        H_i = grad_x f_i + 1/k sum_p <(y_N(x + h e_p) - y_N(x)) / h, grad_y f_i> e_p,    h = width / ||e_p||.

    Its expectation over e is the Neumann sum of N terms; its variance grows with the size of x.
    estimator="printed": delta_p = (grad_y g(x + mu e_p, y) - grad_y g(x, y)) / mu and H_i = grad_x f_i + sum_p
    <delta_p, grad_y f_i> e_p over all coordinates, which is grad_x f_i + d2xy g_i grad_y f_i: the sign is wrong and
    the inverse Hessian is missing, and it can ascend. For the record.

    Departures from print: those of `RABO`; the default estimator is ours, the printed one has no coordinate loop.
    """

    on_clients = LocalHypergradientByDifferences
    on_the_server = GlobalDirectionsByDifferences
    on_episodes = HypergradientsByDifferences

    estimator: Literal["directional", "response", "printed"] = "directional"
    directions: Count = 10
    width: Positive = 3e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hypergradient == "global" and self.estimator != "directional":
            raise ValueError(
                f"estimator is {self.estimator!r}; with hypergradient 'global' it must be 'directional'"
            )

    def estimates(self) -> dict[str, Any]:
        own = {"estimator": self.estimator, "directions": self.directions, "width": self.width}
        return {**super().estimates(), **own}
