"""FedBiO and FedBiOAcc: local steps on three intertwined sequences, then an average.

Li, Huang and Huang, "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level
Problems", NeurIPS 2023 (an earlier paper of the authors, arXiv 2205.01608, uses the same name for another method).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import storm
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.problem import Batch, Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Fraction, Positive
from fedbilevel.core.tree import Tree, project, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class State(NamedTuple):
    x: Tree
    y: Tree
    z: Tree


class Local(NamedTuple):
    here: State
    start: State


class Descend(Phase):
    """I steps on x, y and z; replies with how far each came."""

    name = "descend"
    batch = "both"
    reply: ClassVar = {"dx": "x", "dy": "y", "dz": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    lr_z: Number
    radius: Positive

    def start(self, m: Message) -> Local:
        sent = State(m.x, m.y, m.z)
        return Local(sent, sent)

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        d = oracle.directions(*c.here, batch)
        return c._replace(here=self.move(c.here, d, oracle))

    def move(self, at: State, d: Directions, oracle: Oracle) -> State:
        return State(
            x=oracle.project_x(at.x - self.lr_x * d.x),
            y=at.y - self.lr_y * d.y,
            z=project(at.z - self.lr_z * d.z, self.radius),
        )

    def finish(self, c: Local) -> dict[str, Any]:
        return {
            f"d{name}": here - start
            for name, here, start in zip("xyz", c.here, c.start, strict=True)
        }


@register("fedbio")
@dataclass(frozen=True, kw_only=True)
class FedBiO(Algorithm):
    """FedBiO, one round for I local steps (the environment's).

    Every client, I times, all right-hand sides at the old point:

        y <- y - lr_y grad_y g_i,   x <- x - lr_x (grad_x f_i - d2xy g_i z),
        z <- P_r(z - lr_z (d2yy g_i z - grad_y f_i));

    then the server averages x, y and z (z is the paper's u).

    Departures from print (recalled, not read: the paper was not at hand): one training and one validation batch serve
    all three directions; with partial participation, which the paper does not analyse, the server keeps x, y, z and
    adds the cohort's mean displacement.
    """

    lr_x: Step = 0.05
    lr_y: Step = 0.1
    lr_z: Step = 0.1
    radius: Positive = 1000.0

    def init(self, problem: Problem) -> State:
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        descend = Descend(lr_x=self.lr_x, lr_y=self.lr_y, lr_z=self.lr_z, radius=self.radius)
        r = fed.ask(descend, fed.sample(), x=s.x, y=s.y, z=s.z)
        return State(
            fed.problem.project(s.x + r.mean("dx")), s.y + r.mean("dy"), s.z + r.mean("dz")
        )


class AccState(NamedTuple):
    """x, y, z and their momenta; `begun` once the momenta hold directions."""

    x: Tree
    y: Tree
    z: Tree
    mx: Tree
    my: Tree
    mz: Tree
    begun: bool = False


class Moving(NamedTuple):
    """Where a client is, where it was a step ago, its momenta, and what it was sent."""

    now: State
    before: State
    m: Directions
    start: State
    sent: Directions


class Begin(Phase):
    """The first momenta: the directions at the start, on every sample."""

    name = "begin"
    reply: ClassVar = {"mx": "x", "my": "y", "mz": "y"}

    full: bool = True

    def start(self, m: Message) -> State:
        return State(m.x, m.y, m.z)

    def step(self, at: State, oracle: Oracle, batch: Batch) -> Any:
        return oracle.directions(*at, batch)

    def finish(self, d: Any) -> dict[str, Any]:
        return {"mx": d.x, "my": d.y, "mz": d.z}


class DescendStorm(Descend):
    """I moves, with the momenta renewed between them; replies with how far x, y and z came, keeps the rest."""

    remembers = True

    momentum_weight: Fraction

    def start(self, m: Message) -> Any:
        point = State(m.x, m.y, m.z)
        momenta = Directions(m.mx, m.my, m.mz)
        return Moving(point, point, momenta, point, momenta)

    def first(self, c: Any, oracle: Oracle, batch: Batch) -> Any:
        """The momenta that were sent are those of the point that was sent."""
        return c._replace(now=self.move(c.now, c.m, oracle), before=c.now)

    def step(self, c: Any, oracle: Oracle, batch: Batch) -> Any:
        new = oracle.directions(c.now.x, c.now.y, c.now.z, batch)
        old = oracle.directions(c.before.x, c.before.y, c.before.z, batch)
        m = Directions(*storm(new, c.m, old, self.momentum_weight))
        return self.first(c._replace(m=m), oracle, batch)

    def finish(self, c: Any) -> dict[str, Any]:
        moved = {
            f"d{name}": now - start for name, now, start in zip("xyz", c.now, c.start, strict=True)
        }
        kept = {"before": c.before._asdict(), "m": c.m._asdict(), "sent": c.sent._asdict()}
        return {**moved, "memory": kept}


class Renew(Phase):
    """The momenta at the averaged point, on one batch with the client's own last point; replies with their change."""

    name = "renew"
    batch = "both"
    remembers = True
    reply: ClassVar = {"dmx": "x", "dmy": "y", "dmz": "y"}

    momentum_weight: Fraction

    def start(self, m: Message) -> Any:
        kept = m.memory
        return (
            State(m.x, m.y, m.z),
            State(**kept["before"]),
            Directions(**kept["m"]),
            Directions(**kept["sent"]),
        )

    def step(
        self, c: tuple[State, State, Directions, Directions], oracle: Oracle, batch: Batch
    ) -> Any:
        here, before, m, sent = c
        new, old = (oracle.directions(*point, batch) for point in (here, before))
        renewed = storm(new, m, old, self.momentum_weight)
        return Directions(*(now - then for now, then in zip(renewed, sent, strict=True)))

    def finish(self, d: Any) -> dict[str, Any]:
        return {"dmx": d.x, "dmy": d.y, "dmz": d.z, "memory": {}}


@register("fedbioacc")
@dataclass(frozen=True, kw_only=True)
class FedBiOAcc(FedBiO):
    """FedBiOAcc: FedBiO with variance-reduced momenta, two rounds for I local steps.

    Every client, I times:   x <- x - lr_x mx,   y <- y - lr_y my,   z <- P_r(z - lr_z mz),   and after each move

        m <- d(new point) + (1 - w) (m - d(old point)),   both on one batch,   w = `momentum_weight`,

    with the directions d of `FedBiO`. The last move is averaged first: momenta are renewed at the averaged point, with
    the client's own last point as the old one, and then averaged too. That is the second exchange.

    Departures from print (recalled, not read: the paper was not at hand): those of `FedBiO`; the paper's decreasing
    alpha_t is a schedule of lr_x, lr_y and lr_z, and w, its c alpha_t^2, one number; momenta begin at the mean
    full-batch directions, which takes one more round.
    """

    momentum_weight: Fraction = 0.25

    def init(self, problem: Problem) -> Any:
        x, y, z = super().init(problem)
        return AccState(x, y, z, zeros_like(x), zeros_like(y), zeros_like(z))

    def iterate(self, s: Any, fed: Federation) -> Any:
        S = fed.sample()
        if not s.begun:
            r = fed.ask(Begin(), S, x=s.x, y=s.y, z=s.z)
            s = s._replace(mx=r.mean("mx"), my=r.mean("my"), mz=r.mean("mz"), begun=True)
        descend = DescendStorm(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            lr_z=self.lr_z,
            radius=self.radius,
            momentum_weight=self.momentum_weight,
        )
        r = fed.ask(descend, S, x=s.x, y=s.y, z=s.z, mx=s.mx, my=s.my, mz=s.mz)
        x, y, z = fed.problem.project(s.x + r.mean("dx")), s.y + r.mean("dy"), s.z + r.mean("dz")
        r = fed.ask(
            Renew(momentum_weight=self.momentum_weight),
            [reply.client for reply in r],
            x=x,
            y=y,
            z=z,
        )
        mx, my, mz = s.mx + r.mean("dmx"), s.my + r.mean("dmy"), s.mz + r.mean("dmz")
        return AccState(x, y, z, mx, my, mz, begun=True)
