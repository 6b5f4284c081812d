"""Prometheus: without a server; tracked, variance-reduced hypergradients of each client's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import Evaluation
from fedbilevel.algorithms.shared_gossip import Gossip, State, everywhere
from fedbilevel.algorithms.shared_hypergradients import OwnHypergradient
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, Fraction, Positive
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Number


class Estimates(OwnHypergradient, Evaluation):
    """p_i, the client's own hypergradient, weighted by n p_i, and v_i = grad_y g_i."""

    name = "estimates"
    summed = False
    reply: ClassVar = {"p": "x", "v": "y"}

    def step(self, m: Mapping[str, Any], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Evaluate both."""
        p, v = self.estimate(m["x"], m["y"], m["weight"], oracle, batch)
        return {"p": p, "v": v}

    def estimate(
        self, x: Tree, y: Tree, weight: Any, oracle: Oracle, batch: Batch
    ) -> tuple[Tree, Tree]:
        """Return the estimates on a batch."""
        embedded = oracle.embed(x, batch)
        p = self.own_hypergradient(oracle, x, y, embedded)
        return weight * p, oracle.lower_gradient_y(x, y, embedded)


class Move(Estimates):
    """Move x_i, y_i and u_i, and renew p_i and v_i; all samples if the phase is `full`.

    Args:
        lr_x: 1 / tau, the step of the proximal point.
        lr_y: beta.
        relaxation: alpha.
    """

    name = "move"
    reply: ClassVar = {"x": "x", "y": "y", "p": "x", "v": "y", "u": "x"}

    lr_x: Number
    lr_y: Number
    relaxation: Fraction

    def step(self, m: Mapping[str, Any], oracle: Oracle, batch: Batch) -> dict[str, Tree]:
        """Take the client's part of an iteration."""
        x, y, p, v, u = (m["own"][name] for name in ("x", "y", "p", "v", "u"))
        proximal = oracle.project_x(x - self.lr_x * u)
        new_x = oracle.project_x(m["mixed"]["x"] + self.relaxation * (proximal - x))
        new_y = y - self.lr_y * v
        new_p, new_v = self.estimate(new_x, new_y, m["weight"], oracle, batch)
        if not self.full:
            old_p, old_v = self.estimate(x, y, m["weight"], oracle, batch)
            new_p = p + new_p - old_p
            new_v = v + new_v - old_v
        return {"x": new_x, "y": new_y, "p": new_p, "v": new_v, "u": m["mixed"]["u"] + new_p - p}


@register("prometheus")
@dataclass(frozen=True, kw_only=True)
class Prometheus(Gossip):
    """Prometheus: clients without a server track the mean of their own hypergradients.

    Each client has a lower problem of its own, y_i ~ y_i*(x_i), and the clients agree on x: they
    minimise mean f_i(x, y_i*(x)), on any connected topology. Where the lower level is shared, as
    in federated bilevel problems, that is another problem: the method is biased on heterogeneous
    clients, like `LFedNest`; `DSBO` is the method without a server that is not. Per iteration,
    with W the mixing matrix of `Environment.topology` and P the projection of the problem,

        x_i <- sum_j W_ij x_j + alpha (P(x_i - lr_x u_i) - x_i),      y_i <- y_i - lr_y v_i,
        p_i <- p_i + h_i(new; b) - h_i(old; b),      v_i <- v_i + grad_y g_i(new; b) - (old; b),
        u_i <- sum_j W_ij u_j + p_i(new) - p_i(old),

    where h_i is the client's own hypergradient, with K Hessian products. In every `refresh`-th
    iteration p_i and v_i are evaluated on all samples. The mean of the u_i is always that of the
    p_i, so that with full batches and constant steps the clients agree on a point where the mean of
    the h_i is 0, whatever the topology: links cause no bias.

    Cost per iteration: one round, in which x_i and u_i cross every link in both directions.
    Gradients per client: 2 (2K + 5), or 2K + 5 when refreshed, and 2K + 5 once at the start.

    Departures from the paper: it was not at hand, so the method is written from memory; of the
    placement of alpha we are not sure. h(x), the part of the objective with a proximal operator, is
    0 on the problem's feasible set. x_i is projected once more, which changes nothing if
    alpha <= W_ii. One batch serves all terms of both estimates. Clients that do not take part keep
    their values, and their weight in W goes to their neighbours' own values.

    References:
        Liu, Zhang, Khanduri, Lu and Liu, "Prometheus: Taming Sample and Communication Complexities
        in Constrained Decentralized Stochastic Bilevel Learning", ICML 2023.

    Args:
        lr_x: Step of the proximal point, 1 / tau in the paper; a number or a schedule.
        lr_y: Step size beta of y, a number or a schedule.
        relaxation: How far alpha a client goes towards the proximal point, in (0, 1].
        refresh: How many iterations apart all samples are used.
        neumann_lr: The step of the Neumann sum.
        neumann_steps: Its number K of Hessian products.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=6)
        >>> ring = fb.Environment(topology="ring")
        >>> method = fb.algorithms.Prometheus(lr_x=0.2, lr_y=0.5, neumann_lr=0.5)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=20, environment=ring)
        >>> result.status
        'completed'
    """

    solves = "local"
    sent = ("x", "u")

    lr_x: Step = 0.1
    lr_y: Step = 0.1
    relaxation: Fraction = 0.3
    refresh: Count = 10
    neumann_lr: Positive = 0.1
    neumann_steps: Count = 5

    def begin(self, s: State, fed: Federation) -> dict[str, Any]:
        """Evaluate p_i and v_i at the start, on all samples; u_i = p_i."""
        points = everywhere(s, fed)
        estimates = Estimates(neumann_lr=self.neumann_lr, terms=self.neumann_steps + 1, full=True)
        first = fed.local(estimates, range(len(fed)), **points)
        return {**points, **first, "u": first["p"]}

    def step(self, fed: Federation) -> Move:
        """Return the phase of this iteration."""
        return Move(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            relaxation=self.relaxation,
            neumann_lr=self.neumann_lr,
            terms=self.neumann_steps + 1,
            full=(fed.iteration + 1) % self.refresh == 0,
        )
