"""AFBO: any client, at any time, with any number of local steps.

Li, Zhu, Gong, Mao and Zhou, "Anarchic Federated Bilevel Optimization".
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import HessianProduct, Hypergradient, UpperGradientY
from fedbilevel.algorithms.simfbo import DescendMean
from fedbilevel.core.linear import neumann_sum, random_product
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, NonNegative, Positive
from fedbilevel.core.tree import Tree, project, zeros_like
from fedbilevel.federation import Federation, Replies
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class Latest(NamedTuple):
    """What clients last said: `sums` of n p_i times it, over those who spoke, whose n p_i add up to `heard`.

    `said` holds, for each of them, the number of the iteration it was asked in, and what it said unless it keeps that
    itself. Sums are float64: they only ever change by differences, and would keep the rounding of larger days.
    """

    sums: Mapping[str, Tree]
    heard: float
    said: Mapping[int, tuple[int, Mapping[str, Tree]]]

    def mean(self, name: str, like: Tree) -> Tree:
        return (self.sums[name] / self.heard).map(lambda value, other: value.to(other.dtype), like)

    def age(self, now: int) -> float:
        """The mean age of what is in the sums, in iterations."""
        return sum(now - number for number, _ in self.said.values()) / len(self.said)

    def renew(self, replies: Replies, now: int) -> Latest:
        """Every reply takes the place of its client's last one."""
        sums, heard, said = dict(self.sums), self.heard, dict(self.said)
        for reply in replies:
            new, (_, old) = _trees(reply.values), said.get(reply.client, (0, {}))
            change = {
                name: value - old[name].map(Tensor.double) if old else value
                for name, value in _double(new)
            }
            _add(sums, reply.weight, change)
            heard += 0.0 if old else reply.weight
            said[reply.client] = (now - reply.staleness, new)
        return Latest(sums, heard, said)

    def add(self, replies: Replies) -> tuple[Latest, list[int]]:
        """The same from differences; and who has lost its memory: the sums begin anew without its unknown part."""
        sums, heard, said, forgetful = dict(self.sums), self.heard, dict(self.said), []
        for reply in replies:
            base = int(reply.values["ticket"]["base"])
            number = int(reply.values["ticket"]["number"])
            if base < 0 and reply.client in said:
                sums, heard, said = {}, 0.0, {}
                forgetful.append(reply.client)
            if base != said.get(reply.client, (-1, {}))[0]:
                continue  # a difference to what is not in the sums; the next message will be whole
            _add(sums, reply.weight, dict(_double(_trees(reply.values))))
            heard += 0.0 if reply.client in said else reply.weight
            said[reply.client] = (number, {})
        return Latest(sums, heard, said), forgetful


def _trees(values: Mapping[str, Any]) -> dict[str, Tree]:
    """What a client said, without the ticket that says of which message it is."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tree) and name != "ticket"
    }


def _double(trees: Mapping[str, Tree]) -> list[tuple[str, Tree]]:
    return [(name, tree.map(Tensor.double)) for name, tree in trees.items()]


def _add(sums: dict[str, Tree], weight: float, change: Mapping[str, Tree]) -> None:
    for name, value in change.items():
        sums[name] = sums[name] + weight * value if name in sums else weight * value


class State(NamedTuple):
    """`latest` as a plain tuple; `idle`: who waits for a task; `inner`: rounds since x moved."""

    x: Tree
    y: Tree
    z: Tree
    latest: Any = ({}, 0.0, {})
    idle: Any = ()
    inner: int = 0
    begun: bool = False


class Work(DescendMean):
    """E_i steps on x, y and z; replies with the means of the directions ("aligned")."""

    name = "work"
    summed = False


class Base(NamedTuple):
    """The message that a client's next one is a difference to, and the numbers of both (-1: it is whole)."""

    message: Any
    base: Tensor
    number: Tensor


class WorkOnDifferences(Work):
    """As `Work`; replies with the difference to the client's message number `ack`, the last one the server has taken.

    A client that no longer has that message sends a whole one. It remembers what the server's sum makes of it, in
    float64, not what it meant: so differences add up.
    """

    remembers = True
    reply: ClassVar = {"hx": "x", "hy": "y", "hz": "y", "ticket": {"base": (), "number": ()}}

    def start(self, m: Message) -> Any:
        point = {"hx": m.x, "hy": m.y, "hz": m.z}
        zero = {name: zeros_like(value.map(Tensor.double)) for name, value in point.items()}
        none = torch.full_like(m.ack, -1)
        last = m.memory or {"sent": zero, "number": none, "taken": zero, "base": none}
        sent = (m.ack == last["number"]) & (m.ack >= 0)
        known = sent | ((m.ack == last["base"]) & (m.ack >= 0))
        message = {
            name: zero[name].map(
                lambda nothing, new, old: torch.where(known, torch.where(sent, new, old), nothing),
                *(last["sent"][name], last["taken"][name]),
            )
            for name in zero
        }
        return super().start(m), Base(
            message, torch.where(known, m.ack, none), m.number + 0 * m.ack
        )

    def step(self, c: Any, oracle: Oracle, batch: Any) -> Any:
        return super().step(c[0], oracle, batch), c[1]

    def finish(self, c: Any) -> dict[str, Any]:
        h, (message, base, number) = super().finish(c[0]), c[1]
        change = {
            name: h[name].map(lambda new, old: (new.double() - old).to(new.dtype), message[name])
            for name in message
        }
        sent = {name: message[name] + change[name].map(Tensor.double) for name in message}
        return {
            **change,
            "ticket": Tree({"base": base, "number": number}),
            "memory": {"sent": sent, "number": number, "taken": message, "base": base},
        }


class Inner(Phase):
    """E_i steps y_i <- y_i - lr_y grad_y g_i(x, y_i); replies with the mean of the gradients (lines 5 to 8)."""

    name = "inner"
    fixed_x = True
    batch = "train"
    reply: ClassVar = {"hy": "y"}
    summed = False

    steps: Steps = "local"
    lr_y: Number

    def start(self, m: Message) -> Any:
        return m.x, m.y, zeros_like(m.y), m.steps

    def step(self, c: Any, oracle: Oracle, batch: Batch) -> Any:
        x, y, q, steps = c
        d = oracle.lower_gradient_y(x, y, batch)
        return x, y - self.lr_y * d, q + d, steps

    def finish(self, c: Any) -> dict[str, Any]:
        return {"hy": c[2] / c[3]}


@register("afbo")
@dataclass(frozen=True, kw_only=True)
class AFBO(Algorithm):
    """AFBO, one round an inner round: the server moves with what all clients last said, however old it is.

    Everyone works on the last x, y, z it was sent: client i takes E_i local steps (the environment's) and sends the
    means h_i of its directions d_y = grad_y g_i, d_z = d2yy g_i z - grad_y f_i, d_x = grad_x f_i - d2xy g_i z. When the
    next replies are in (as many as the environment's participation), with h the mean over all clients of the last h_i,

        y <- y - server_lr_y h_y,   z <- P_r(z - server_lr_z h_z),   x <- x - server_lr_x h_x,

    x only every K = `inner_rounds` times, and those who answered get the new point. Because every client counts once,
    whatever its speed, the fixed point is that of the problem. This is `hypergradient="linear-system"`, our default,
    and a departure from print.

    The paper's APHE asks all clients for products with the mean Hessian, lambda = `neumann_lr`, v = mean grad_y f_i:

        p = lambda sum_{u < U} (I - lambda H)^u v        ("neumann", U = `neumann_steps`)
        p = lambda U (I - lambda H)^U' v                 ("random-truncation", U' uniform on {0 .. U-1})
        p = lambda m (I - lambda H)^m v                  ("printed", m clients: tends to 0 as m grows)

    and x moves along mean (grad_x f_i - d2xy g_i p) after K inner rounds on y. Each product is a barrier over all
    clients, stragglers included, and is charged as one; `aphe="server"` leaves it out of time and costs, as the paper's
    simulation appears to.

    `memory="client"`: clients keep what they last said and send differences; the server holds sums, and with each
    task says which message it has taken last. A client that has lost its memory makes the sums begin anew (the
    metric `restarts` counts it). `delay_aware=True` divides the steps by 1 + the mean age of the messages in the
    sums, in iterations (the paper asks for smaller steps under longer delays and gives no rule). `damping` is that
    of `SimFBO`.

    Departures from print: as said; local steps on y are plain SGD (none are printed); means go over the clients heard
    so far; p is computed at the current point, where print has each client's last one.
    """

    lr_x: Step = 0.01
    lr_y: Step = 0.05
    lr_z: Step = 0.05
    server_lr_x: Step = 0.05
    server_lr_y: Step = 0.1
    server_lr_z: Step = 0.1
    radius: Positive = 1000.0
    damping: NonNegative = 0.0
    inner_rounds: Count = 1
    hypergradient: Literal["linear-system", "neumann", "random-truncation", "printed"] = (
        "linear-system"
    )
    neumann_lr: Positive = 0.1
    neumann_steps: Count = 10
    memory: Literal["server", "client"] = "server"
    aphe: Literal["clients", "server"] = "clients"
    delay_aware: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory == "client" and self.hypergradient != "linear-system":
            raise ValueError(
                f"memory is 'client'; hypergradient must be 'linear-system', not {self.hypergradient!r}"
            )

    def check(self, problem: Problem, environment: Environment) -> None:
        super().check(problem, environment)
        if self.memory == "client" and any(stage.direction == "up" for stage in environment.stages):
            raise ValueError(
                "memory is 'client' and stages change replies on their way: clients would remember what the server "
                "never took; memory must be 'server', or no stage may be on the way up (conduct.norm_bound is one)"
            )

    def init(self, problem: Problem) -> State:
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        idle = s.idle if s.begun else range(len(fed))
        latest = Latest(*s.latest)
        now = fed.iteration
        if self.hypergradient != "linear-system":
            fed.post(Inner(lr_y=self.lr_y), idle, x=s.x, y=s.y)
        elif self.memory == "server":
            fed.post(self.work(Work), idle, x=s.x, y=s.y, z=s.z)
        else:
            each = [{"ack": latest.said.get(client, (-1, {}))[0]} for client in idle]
            work = self.work(WorkOnDifferences)
            fed.post(work, idle, each=each, x=s.x, y=s.y, z=s.z, number=now)
        r = fed.collect()
        if self.memory == "server":
            latest = latest.renew(r, now)
        else:
            latest, forgetful = latest.add(r)
            fed.record(restarts=len(forgetful))
        s = s._replace(latest=tuple(latest), idle=r.idle, inner=s.inner + 1, begun=True)
        if not latest.heard:
            return s
        slower = 1 / (1 + latest.age(now)) if self.delay_aware else 1.0
        s = s._replace(y=s.y - slower * self.server_lr_y * latest.mean("hy", s.y))
        if self.hypergradient == "linear-system":
            s = s._replace(
                z=project(s.z - slower * self.server_lr_z * latest.mean("hz", s.z), self.radius)
            )
        if s.inner < self.inner_rounds:
            return s
        h = (
            latest.mean("hx", s.x)
            if self.hypergradient == "linear-system"
            else self.estimate(s, fed)
        )
        return s._replace(x=fed.problem.project(s.x - slower * self.server_lr_x * h), inner=0)

    def work(self, kind: type[Work]) -> Work:
        return kind(lr_x=self.lr_x, lr_y=self.lr_y, lr_z=self.lr_z, damping=self.damping)

    def estimate(self, s: State, fed: Federation) -> Tree:
        """APHE: grad_x F - d2xy G p, each mean a barrier over all clients."""
        everyone, lam, U = range(len(fed)), self.neumann_lr, self.neumann_steps

        def product(v: Tree) -> Tree:
            return fed.ask(HessianProduct(), everyone, x=s.x, y=s.y, v=v).mean("hv")  # type: ignore[no-any-return]

        with fed.uncharged() if self.aphe == "server" else nullcontext():
            v = fed.ask(UpperGradientY(), everyone, x=s.x, y=s.y).mean("v")
            if self.hypergradient == "neumann":
                p = neumann_sum(product, v, U, lam)
            elif self.hypergradient == "random-truncation":
                p = random_product(product, v, U, lam, fed.draw(U))
            else:
                p = random_product(product, v, len(fed), lam, len(fed))
            return fed.ask(Hypergradient(), everyone, x=s.x, y=s.y, p=p).mean("h")  # type: ignore[no-any-return]
