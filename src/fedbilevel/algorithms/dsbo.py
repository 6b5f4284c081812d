"""DSBO on gossip: no server; Jacobians and Hessians are averaged along links, as matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import Evaluation
from fedbilevel.algorithms.shared_gossip import Gossip, State, everywhere
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Fraction, Positive
from fedbilevel.core.tree import Tree, flatten, unflatten
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.kinds import Kind
from fedbilevel.federation.phase import Number

MOST_NUMBERS = 2**27  # in the matrices of one client


class Samples(Evaluation):
    """One sample of each estimate at the client's point, weighted by n p_i.

    s = grad_x f_i, h = grad_y f_i and U = d2xy g_i on one batch, and V_1 .. V_b = d2yy g_i, each on
    a batch of its own.

    Args:
        size_x: The numbers in x.
        size_y: The numbers in y.
        neumann_steps: b.
    """

    name = "samples"
    summed = False

    size_x: Count
    size_y: Count
    neumann_steps: Count

    @property
    def reply(self) -> dict[str, Kind]:  # type: ignore[override]
        """s, h, and the matrices U and V_1 .. V_b."""
        U = {"U": (self.size_x, self.size_y)}
        V = {"V": (self.neumann_steps, self.size_y, self.size_y)}
        return {"s": "x", "h": "y", "U": U, "V": V}

    @property
    def draws(self) -> int:
        """One batch, and one for each Hessian."""
        return 1 + self.neumann_steps

    def step(self, m: Mapping[str, Any], oracle: Oracle, batches: Any) -> dict[str, Tree]:
        """Evaluate all samples."""
        return self.sample(m["x"], m["y"], m["weight"], oracle, batches)

    def sample(
        self, x: Tree, y: Tree, weight: Any, oracle: Oracle, batches: tuple[Batch, ...]
    ) -> dict[str, Tree]:
        """Return the samples at a point."""
        batch, *for_hessians = batches
        s, h = oracle.upper_gradients(x, y, batch)
        U = oracle.cross_matrix(x, y, batch)
        V = torch.stack([oracle.hessian_matrix(x, y, other) for other in for_hessians])
        samples = {"s": s, "h": h, "U": Tree(U=U), "V": Tree(V=V)}
        return {name: weight * value for name, value in samples.items()}


class Update(Samples):
    """The client's part of an iteration.

    Args:
        lr_x: alpha.
        lr_y: gamma.
        momentum_weight: beta.
        neumann_lr: 1 / L.
    """

    name = "update"

    lr_x: Number
    lr_y: Number
    momentum_weight: Fraction
    neumann_lr: Positive

    @property
    def reply(self) -> dict[str, Kind]:  # type: ignore[override]
        """All values of a client."""
        return {"x": "x", "y": "y", **super().reply}

    def step(self, m: Mapping[str, Any], oracle: Oracle, batches: Any) -> dict[str, Tree]:
        """Move x and y, and renew the estimates."""
        own = m["own"]
        mixed = m["mixed"]
        weight = m["weight"]
        new = {
            "x": oracle.project_x(mixed["x"] - self.lr_x * self.hypergradient(own)),
            "y": mixed["y"]
            - self.lr_y * weight * oracle.lower_gradient_y(own["x"], own["y"], batches[0]),
        }
        b = self.momentum_weight
        for name, value in self.sample(own["x"], own["y"], weight, oracle, batches).items():
            new[name] = (1 - b) * mixed[name] + b * value
        return new

    def hypergradient(self, own: dict[str, Tree]) -> Tree:
        """Return s - U q with q = (1 / L) Q_b h, where Q_k = I + (I - V_k / L) Q_{k-1}, Q_0 = I."""
        h = flatten(own["h"])
        q = h
        for V in own["V"]["V"]:
            q = h + q - self.neumann_lr * (V @ q)
        indirect = own["U"]["U"] @ (self.neumann_lr * q)
        return own["s"] - unflatten(indirect, own["s"])


@register("dsbo")
@dataclass(frozen=True, kw_only=True)
class DSBO(Gossip):
    """DSBO: clients without a server gossip estimates of gradients, Jacobians and Hessians.

    It solves the bilevel problem with its shared lower level, up to a bias of the order of its
    steps: the inverse of the mean Hessian is taken of estimates of the mean, not averaged from
    inverses of single clients as in `Prometheus`. Each client has x, y, and estimates s, h, U and
    V_1 .. V_b of grad_x F, grad_y F, d2xy G and d2yy G. Per iteration, with W the mixing matrix of
    `Environment.topology`, client i does

        x_i <- sum_j W_ij x_j - alpha (s_i - U_i q_i),        q_i = (1 / L) Q_b h_i,
        y_i <- sum_j W_ij y_j - gamma grad_y g_i(x_i, y_i),
        o_i <- (1 - beta) sum_j W_ij o_j + beta (a sample of o at (x_i, y_i)),   o = s, h, U, V_k,

    with Q_0 = I and Q_k = I + (I - V_k / L) Q_{k-1}: a Neumann sum of b + 1 terms whose factors are
    independent. All right-hand sides are those before the iteration. With constant steps the
    clients do not quite agree, and end at a point that depends on W, alpha, beta and gamma, on the
    complete graph too, because what a client adds is its own; it tends to the solution (but for the
    Neumann sum) with alpha, beta and gamma. Identical clients are the centralised method.

    Cost per iteration: one round, in which x, y, s, h, U and V_1 .. V_b cross every link in both
    directions: 2 p + 2 d + p d + b d^2 numbers, p being those in x and d those in y. Gradients per
    client: 2 + 2 d (1 + b), because U and V are matrices; 1 + 2 d (1 + b) once at the start. On the
    MNIST network of 784-200-10 neurons U alone has 315 million numbers: the method is for small
    lower levels, and refuses matrices of more than 2^27 numbers per client.

    Departures from the paper: it was not at hand, so the method is written from memory; that x
    and y move along values before the iteration is as we remember it. Estimates start at their
    first samples. With weights p_i, samples are multiplied by n p_i. Clients that do not take part
    keep their values, and their weight in W goes to their neighbours' own values.

    References:
        Yang, Zhang and Wang, "Decentralized Gossip-Based Stochastic Bilevel Optimization over
        Communication Networks", NeurIPS 2022.

    Args:
        lr_x: Step size alpha of x, a number or a schedule.
        lr_y: Step size gamma of y, a number or a schedule.
        momentum_weight: The weight beta of a new sample, in (0, 1].
        neumann_lr: The step 1 / L of the Neumann sum.
        neumann_steps: The number b of its factors, and of Hessians.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=6)
        >>> ring = fb.Environment(topology="ring")
        >>> method = fb.algorithms.DSBO(lr_x=0.05, lr_y=0.2, neumann_lr=0.5)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=20, environment=ring)
        >>> result.status
        'completed'
    """

    sent = ("x", "y", "s", "h", "U", "V")

    lr_x: Step = 0.05
    lr_y: Step = 0.1
    momentum_weight: Fraction = 0.1
    neumann_lr: Positive = 0.1
    neumann_steps: Count = 5

    def begin(self, s: State, fed: Federation) -> dict[str, Any]:
        """Start the estimates at samples of the first point."""
        points = everywhere(s, fed)
        samples = Samples(size_x=s.x.numel, size_y=s.y.numel, neumann_steps=self.neumann_steps)
        return {**points, **fed.local(samples, range(len(fed)), **points)}

    def step(self, fed: Federation) -> Update:
        """Return the phase of this iteration."""
        x, y = fed.problem.start
        return Update(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            momentum_weight=self.momentum_weight,
            neumann_lr=self.neumann_lr,
            size_x=x.numel,
            size_y=y.numel,
            neumann_steps=self.neumann_steps,
        )

    def check(self, problem: Problem, environment: Environment) -> None:
        """Check as any algorithm, and that the matrices are not too large."""
        super().check(problem, environment)
        x, y = problem.start
        numbers = x.numel * y.numel + self.neumann_steps * y.numel**2
        if numbers > MOST_NUMBERS:
            raise ValueError(
                f"{self.name} keeps Jacobians and Hessians as matrices, {numbers:.2g} numbers per "
                f"client with {x.numel} in x and {y.numel} in y; at most {MOST_NUMBERS:.2g} fit"
            )
