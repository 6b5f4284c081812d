"""SDBO and ADBO: consensus inside a polyhedron of cutting planes, with everyone at once or without a barrier.

Jiao, Yang, Wu, Song and Jian, "Asynchronous Distributed Bilevel Optimization", ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import Once
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, NonNegative
from fedbilevel.core.tree import Tree, dot, zeros_like
from fedbilevel.federation import Federation, Replies
from fedbilevel.federation.phase import Message, Number, Phase


class State(NamedTuple):
    """x and y, the planes (stacked along axis 0) with their multipliers, and what the server keeps of every client:

    copies x and y, the multiplier theta, its part b of the planes, push = sum_l lambda_l b_l as it was when the client
    got its task, the weight, and the iteration it was last heard in.
    """

    x: Tree
    y: Tree
    a: Tree
    c: Tree
    kappa: Tensor
    lam: Tensor
    clients: list[dict[str, Any]]
    idle: list[int]  # clients without a task
    t: int = 0


class UpperGradients(Once):
    """grad_x f_i and grad_y f_i at the client's copies."""

    name = "gradients"
    batch = "val"
    summed = False
    reply: ClassVar = {"gx": "x", "gy": "y"}

    def step(self, m: Any, oracle: Oracle, batch: Batch) -> Any:
        gx, gy = oracle.upper_gradients(m["x"], m["y"], batch)
        return {"gx": gx, "gy": gy}


class Settle(Phase):
    """One step of y'_i. A message with x begins at the y_i it brings; the others go on from there."""

    name = "settle"
    batch = "train"
    remembers = True
    summed = False
    reply: ClassVar = {"y": "y"}

    lr_y: Number
    penalty: NonNegative

    def start(self, m: Message) -> Any:
        if hasattr(m, "x"):
            return m.x, m.y, zeros_like(m.y), (m.own,)
        return m.memory["x"], m.y, m.phi, m.memory["way"]

    def step(self, c: Any, oracle: Oracle, batch: Batch) -> Any:
        x, y, phi, way = c
        d = oracle.lower_gradient_y(x, way[-1], batch) + phi + self.penalty * (way[-1] - y)
        return x, (*way, way[-1] - self.lr_y * d)

    def finish(self, c: Any) -> dict[str, Any]:
        x, way = c
        return {"y": way[-1], "memory": {"x": x, "way": way}}


class Cut(Settle):
    """The last step, and a_i = d/dx ||y_i - y'_i(x)||^2, backwards through all of them."""

    name = "cut"
    reply: ClassVar = {"y": "y", "a": "x"}

    def step(self, c: Any, oracle: Oracle, batch: Batch) -> Any:
        x, way = super().step(c, oracle, batch)
        r = way[0] - way[-1]
        a = zeros_like(x)
        for point in reversed(way[:-1]):
            cross, hessian = oracle.products(x, point, r, batch)
            a = a + 2 * self.lr_y * cross
            r = r - self.lr_y * (hessian + self.penalty * r)
        return {"y": way[-1], "a": a}

    def finish(self, c: Any) -> dict[str, Any]:
        return {**c, "memory": {}}


@register("sdbo")
@dataclass(frozen=True, kw_only=True)
class SDBO(Algorithm):
    """SDBO: cutting planes, everyone in every iteration; one round, and K = `plane_steps` more with a new plane.

    Clients have copies x_i, y_i and weights w_i = n p_i; planes l have multipliers lambda_l, clients theta_i:

        y_i <- y_i - lr_y (grad_y f_i + sum_l lambda_l b_il),   x_i <- x_i - lr_x (grad_x f_i + theta_i),
        x <- x - server_lr_x (sum_l lambda_l a_l - sum_i w_i theta_i),   y <- y - server_lr_y sum_l lambda_l c_l,
        lambda_l <- max(0, lambda_l + lr_dual_planes (P_l - c1 lambda_l)),
        theta_i <- theta_i + lr_dual_consensus (x_i - x - c2 theta_i),

    P_l = <a_l, x> + sum_i w_i <b_il, y_i> + <c_l, y> + kappa_l. In iterations 0, `plane_every`, ... planes with
    lambda_l < `prune_below` are dropped and the tangent of h = sum_i w_i ||y_i - y'_i(x)||^2 + ||y - y'||^2 is added.
    y'_i and y' are where K steps lead from y_i, y and phi_i = 0 (mu = `penalty`, on the right the old phi_i and y'):

        y'_i <- y'_i - lr_y (grad_y g_i(x, y'_i) + phi_i + mu (y'_i - y')),
        y' <- y' + server_lr_y sum_i w_i (phi_i + mu (y'_i - y')),   phi_i <- phi_i + lr_y (y'_i - y').

    It does not solve the bilevel problem. Planes come until h = 0, where lambda balances grad_y f_i, so that
    sum_i w_i (grad_x f_i - d2xy g_i q_i) = 0 with   q_i = lr_y sum_{k < K} (I - lr_y (d2yy g_i + mu))^k grad_y f_i:
    K terms of a Neumann sum, with the client's own Hessian plus mu, and one term at the published K = 1. The y_i agree
    by penalty, and exactly only as K grows. Constant steps come near that point; then planes add up, the multipliers
    grow with them and y swings, the later the smaller the steps.

    From the published code, not from print (recalled, not read: planes end, h <= eps, c1 and c2 decrease); of its two
    workers that for IJCNN1, which differentiates through all its steps; y' counts as constant in a. Mended: a, b and c
    come of the same K steps (there a of one more); theta_i begins at 0 (there at x). Ours: the server keeps the copies
    and takes the clients' steps, so a task is p + d numbers down and up (there p + |P| down, p + d up, and |P| d down
    with a plane); w_i (there 1). Defaults are the code's for hyper-cleaning.
    """

    solves = "local"

    lr_x: Step = 0.001
    lr_y: Step = 0.02
    server_lr_x: Step = 0.001
    server_lr_y: Step = 0.02
    lr_dual_planes: Step = 0.1
    lr_dual_consensus: Step = 0.001
    c1: NonNegative = 0.04
    c2: NonNegative = 0.002
    penalty: NonNegative = 1.0
    plane_every: Count = 50
    plane_steps: Count = 1
    prune_below: NonNegative = 1e-10

    def init(self, problem: Problem) -> State:
        x, y = problem.start
        none = next(iter(x.values())).new_zeros(0)
        return State(x, y, _empty(x), _empty(y), none, none, [], [])

    def iterate(self, s: State, fed: Federation) -> State:
        if not s.clients:
            start = {
                "x": s.x,
                "y": s.y,
                "theta": zeros_like(s.x),
                "b": _empty(s.y),
                "weight": 1.0,
                "heard": -1,
            }
            s = s._replace(clients=[start] * len(fed), idle=list(range(len(fed))))
        s = self.exchange(s, fed)
        x = s.x - self.server_lr_x * (
            _combine(s.lam, s.a) - _total(i["weight"] * i["theta"] for i in s.clients)
        )
        x, y = fed.problem.project(x), s.y - self.server_lr_y * _combine(s.lam, s.c)
        own = sum(i["weight"] * _values(i["b"], i["y"]) for i in s.clients)
        planes = _values(s.a, x) + own + _values(s.c, y) + s.kappa
        lam = (s.lam + self.lr_dual_planes * (planes - self.c1 * s.lam)).clamp(min=0)
        clients = [self.pulled(i, x) if i["heard"] == s.t else i for i in s.clients]
        s = s._replace(x=x, y=y, lam=lam, clients=clients)
        if s.t % self.plane_every == 0:
            s = self.cut(s, fed)
        fed.record(planes=len(s.lam))
        return s._replace(t=s.t + 1)

    def pulled(self, i: dict[str, Any], x: Tree) -> dict[str, Any]:
        return i | {
            "theta": i["theta"] + self.lr_dual_consensus * (i["x"] - x - self.c2 * i["theta"])
        }

    def exchange(self, s: State, fed: Federation) -> State:
        s, tasks = _tasks(s)
        return self.take(s._replace(idle=[]), fed.ask(UpperGradients(), s.idle, each=tasks), fed)

    def take(self, s: State, replies: Replies, fed: Federation) -> State:
        """The steps of the clients that answered."""
        clients = list(s.clients)
        for r in replies:
            i, gx, gy = clients[r.client], r.values["gx"], r.values["gy"]
            x, y = (
                fed.problem.project(i["x"] - self.lr_x * (gx + i["theta"])),
                i["y"] - self.lr_y * (gy + i["push"]),
            )
            clients[r.client] = i | {"x": x, "y": y, "weight": r.weight, "heard": s.t}
        return s._replace(clients=clients, idle=s.idle + replies.idle)

    def cut(self, s: State, fed: Federation) -> State:
        """Drop planes, add one. Clients whose answers are lost on the way are left out of it."""
        y, zero, asked = s.y, zeros_like(s.y), list(range(len(fed)))
        message: dict[str, Any] = {"each": [{"own": i["y"]} for i in s.clients], "x": s.x}
        phis = [zero for _ in asked]
        for kind in [Settle] * (self.plane_steps - 1) + [Cut]:
            r = fed.ask(kind(lr_y=self.lr_y, penalty=self.penalty), asked, y=y, **message)
            asked, gaps = [q.client for q in r], {q.client: q.values["y"] - y for q in r}
            y = y + self.server_lr_y * _total(
                q.weight * (phis[q.client] + self.penalty * gaps[q.client]) for q in r
            )
            for j in asked:
                phis[j] = phis[j] + self.lr_y * gaps[j]
            message = {"each": [{"phi": phis[j]} for j in asked]}
        own = {q.client: 2 * (s.clients[q.client]["y"] - q.values["y"]) for q in r}
        a, b, c = len(r) * r.mean("a"), [own.get(j, zero) for j in range(len(fed))], 2 * (s.y - y)
        part = sum(
            i["weight"] * dot(bi, i["y"] - bi / 4) for i, bi in zip(s.clients, b, strict=True)
        )
        kappa = (
            -dot(a, s.x) - part - dot(c, s.y - c / 4)
        )  # here P = h, and h = (sum_i w_i ||b_i||^2 + ||c||^2) / 4
        kept = s.lam >= self.prune_below

        def renew(rows: Tensor, new: Tensor) -> Tensor:
            return torch.cat([rows[kept], new.unsqueeze(0)])

        clients = [i | {"b": i["b"].map(renew, bi)} for i, bi in zip(s.clients, b, strict=True)]
        lam = renew(s.lam, torch.zeros_like(kappa))
        return s._replace(
            a=s.a.map(renew, a),
            c=s.c.map(renew, c),
            kappa=renew(s.kappa, kappa),
            lam=lam,
            clients=clients,
        )


@register("adbo")
@dataclass(frozen=True, kw_only=True)
class ADBO(SDBO):
    """ADBO: SDBO without waiting for everyone; a new plane is still a barrier.

    An iteration ends when S clients (the environment's participation) have answered and nobody's last answer is
    `max_delay` iterations old; only their theta_i move. A client's step uses lambda and theta_i as they were when it
    got its task. Mended: answers under way when a plane is due are taken in first, so that the plane is the tangent at
    the y_i of that moment (in the published code at those of an answer before).
    """

    max_delay: Count = 15

    def exchange(self, s: State, fed: Federation) -> State:
        s, tasks = _tasks(s)
        fed.post(UpperGradients(), s.idle, each=tasks)
        s = self.take(s._replace(idle=[]), fed.collect(), fed)
        while len(s.idle) < len(fed) and s.t - min(i["heard"] for i in s.clients) >= self.max_delay:
            s = self.take(s, fed.collect(1), fed)
        return s

    def cut(self, s: State, fed: Federation) -> State:
        if busy := len(fed) - len(s.idle):
            s = self.take(s, fed.collect(busy), fed)
        return super().cut(s, fed)


def _tasks(s: State) -> tuple[State, list[dict[str, Tree]]]:
    """For everyone idle."""
    clients = list(s.clients)
    for j in s.idle:
        clients[j] = clients[j] | {"push": _combine(s.lam, clients[j]["b"])}
    return s._replace(clients=clients), [
        {"x": clients[j]["x"], "y": clients[j]["y"]} for j in s.idle
    ]


def _empty(like: Tree) -> Tree:
    return like.map(lambda t: t.new_zeros(0, *t.shape))


def _total(trees: Iterable[Tree]) -> Tree:
    first, *rest = trees
    return sum(rest, start=first)


def _combine(lam: Tensor, rows: Tree) -> Tree:
    """sum_l lambda_l row_l."""
    return rows.map(lambda t: torch.tensordot(lam, t, 1))


def _values(rows: Tree, point: Tree) -> Tensor:
    """<row_l, point> for every l."""
    return torch.stack([rows[name].flatten(1) @ point[name].flatten() for name in rows]).sum(0)
