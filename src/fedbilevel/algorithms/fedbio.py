"""FedBiO and FedBiOAcc: local steps on x, y and z together, then an average.

Li, Huang and Huang, "Communication-Efficient Federated Bilevel Optimization with Global and Local
Lower Level Problems", NeurIPS 2023. (An earlier paper of the authors, arXiv 2205.01608, uses the
same names for other methods.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fedbilevel.algorithms.base import Algorithm, ClientLevels
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import storm
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Fraction, Positive
from fedbilevel.core.tree import Tree, project, zeros_like
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class State(NamedTuple):
    """x, y and z: the server's state, and the point of a client."""

    x: Tree
    y: Tree
    z: Tree


def displacements(now: State, start: State) -> dict[str, Tree]:
    """Return the reply dx, dy, dz: how far each variable moved."""
    return {f"d{name}": end - begin for name, end, begin in zip("xyz", now, start, strict=True)}


class Local(NamedTuple):
    """Where a client is, and where it started."""

    now: State
    start: State


class Descend(Phase):
    """I steps on x, y and z; replies with their displacements."""

    name = "descend"
    batch = "both"
    reply: ClassVar = {"dx": "x", "dy": "y", "dz": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    lr_z: Number
    radius: Positive

    def start(self, m: Message) -> Local:
        """Start at the server's point."""
        start = State(m.x, m.y, m.z)
        return Local(start, start)

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        """Move x, y and z at once, along their directions at the old point."""
        d = oracle.directions(*c.now, batch)
        return c._replace(now=self.move(c.now, d, oracle))

    def move(self, point: State, d: Directions, oracle: Oracle) -> State:
        """Return the point after one step along d, with z projected to its ball."""
        return State(
            x=oracle.project_x(point.x - self.lr_x * d.x),
            y=point.y - self.lr_y * d.y,
            z=project(point.z - self.lr_z * d.z, self.radius),
        )

    def finish(self, c: Local) -> dict[str, Tree]:
        """Reply with the displacements."""
        return displacements(c.now, c.start)

    def own(self, c: Local) -> dict[str, Tree]:
        """Keep the last local values."""
        return c.now._asdict()


@register("fedbio")
@dataclass(frozen=True, kw_only=True)
class FedBiO(Algorithm):
    """FedBiO: I local steps on x, y and z, then an average; one round per iteration.

    The linear system of the hypergradient is solved along with the problem, by gradient steps on
    one z that all clients share. With one local step per round the fixed point is therefore the
    true solution, on heterogeneous clients too. It is close to `SimFBO`, with fewer settings: there
    are no server steps, the server takes the average of the clients' points. Choose `FedBiOAcc`
    where mini-batch noise is the bottleneck, and `ShroFBO` where clients take unequal numbers of
    steps.

    Every client repeats I times (the environment's `local_steps`), all right-hand sides at the old
    point,

        x <- x - lr_x (grad_x f_i - d2xy g_i z),
        y <- y - lr_y grad_y g_i,
        z <- P_r(z - lr_z (d2yy g_i z - grad_y f_i)),

    and the server averages x, y and z (the paper calls z u). Of what belongs to the clients
    (`Problem.owner`) each keeps its own last value.

    Cost per iteration: one round. Gradients per client: 3 per local step (one fused evaluation).
    Down: x, y, z. Up: their displacements.

    Departures from the paper: it was not at hand, so the method is written from memory. One
    training and one validation batch serve all three directions. Under partial participation, which
    the paper does not analyse, the server keeps x, y and z and adds the cohort's mean
    displacements.

    References:
        Li, Huang and Huang, "Communication-Efficient Federated Bilevel Optimization with Global
        and Local Lower Level Problems", NeurIPS 2023.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        lr_z: Step size of z, a number or a schedule.
        radius: The radius r of the ball that each step projects z onto; an upper bound of the norm
            of the solution.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.FedBiO(lr_x=0.05, lr_y=0.5, lr_z=0.5)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=50)
        >>> result.status
        'completed'
        >>> bool(task.phi(result.x) < task.phi(task.problem.x))
        True
    """

    client_levels: ClassVar[ClientLevels] = ("x", "y")

    lr_x: Step = 0.05
    lr_y: Step = 0.1
    lr_z: Step = 0.1
    radius: Positive = 1000.0

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, with z = 0."""
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        """Run one round of local steps, then average."""
        descend = Descend(lr_x=self.lr_x, lr_y=self.lr_y, lr_z=self.lr_z, radius=self.radius)
        r = fed.ask(descend, fed.sample(), x=s.x, y=s.y, z=s.z)
        x = fed.problem.project(s.x + r.mean("dx"))
        return State(x, s.y + r.mean("dy"), s.z + r.mean("dz"))


class AccState(NamedTuple):
    """x, y, z and their momenta; `begun` once the momenta hold directions."""

    x: Tree
    y: Tree
    z: Tree
    mx: Tree
    my: Tree
    mz: Tree
    begun: bool = False


class AccLocal(NamedTuple):
    """A client's point, its point one step ago, its momenta, and the values it was sent."""

    now: State
    before: State
    m: Directions
    start: State
    start_m: Directions


class Begin(Phase):
    """The first momenta: the directions at the start, on every sample."""

    name = "begin"
    reply: ClassVar = {"mx": "x", "my": "y", "mz": "y"}

    full: bool = True

    def start(self, m: Message) -> State:
        """Start at the server's point."""
        return State(m.x, m.y, m.z)

    def step(self, point: State, oracle: Oracle, batch: Batch) -> Directions:
        """Evaluate the directions."""
        return oracle.directions(*point, batch)

    def finish(self, d: Directions) -> dict[str, Tree]:
        """Reply with the directions, as momenta."""
        return {"mx": d.x, "my": d.y, "mz": d.z}

    def own(self, d: Directions) -> dict[str, Tree]:
        """Keep the momenta of what the client owns."""
        return {"my": d.y, "mz": d.z}


class DescendStorm(Descend):
    """I moves along the momenta, which are renewed between them.

    Replies with the displacements of x, y and z. The client remembers the rest: the last renewal
    needs the averaged point and is the task of `Renew`.
    """

    remembers = True

    momentum_weight: Fraction

    def start(self, m: Message) -> Any:
        """Start at the server's point and momenta."""
        point = State(m.x, m.y, m.z)
        momenta = Directions(m.mx, m.my, m.mz)
        return AccLocal(point, point, momenta, point, momenta)

    def first(self, c: Any, oracle: Oracle, batch: Batch) -> Any:
        """Move along the momenta that were sent: they already belong to the point that was sent."""
        return c._replace(now=self.move(c.now, c.m, oracle), before=c.now)

    def step(self, c: Any, oracle: Oracle, batch: Batch) -> Any:
        """Renew the momenta, then move along them."""
        new = oracle.directions(c.now.x, c.now.y, c.now.z, batch)
        old = oracle.directions(c.before.x, c.before.y, c.before.z, batch)
        m = Directions(*storm(new, c.m, old, self.momentum_weight))
        return self.first(c._replace(m=m), oracle, batch)

    def finish(self, c: Any) -> dict[str, Any]:
        """Reply with the displacements; remember what `Renew` needs."""
        memory = {"before": c.before._asdict(), "m": c.m._asdict(), "sent": c.start_m._asdict()}
        return {**displacements(c.now, c.start), "memory": memory}


class RenewLocal(NamedTuple):
    """The averaged point, the client's last point, its momenta, and the momenta it was sent."""

    average: State
    before: State
    m: Directions
    start_m: Directions


class Renew(Phase):
    """The momenta at the averaged point; replies with their changes since they were sent.

    STORM's old point is the client's own last one; both are evaluated on one batch.
    """

    name = "renew"
    batch = "both"
    remembers = True
    reply: ClassVar = {"dmx": "x", "dmy": "y", "dmz": "y"}

    momentum_weight: Fraction

    def start(self, m: Message) -> RenewLocal:
        """Start at the averaged point, with what `DescendStorm` left in memory."""
        before = State(**m.memory["before"])
        momenta = Directions(**m.memory["m"])
        return RenewLocal(State(m.x, m.y, m.z), before, momenta, Directions(**m.memory["sent"]))

    def step(self, c: RenewLocal, oracle: Oracle, batch: Batch) -> RenewLocal:
        """Renew the momenta."""
        new = oracle.directions(*c.average, batch)
        old = oracle.directions(*c.before, batch)
        return c._replace(m=Directions(*storm(new, c.m, old, self.momentum_weight)))

    def finish(self, c: RenewLocal) -> dict[str, Any]:
        """Reply with the changes of the momenta since they were sent, and empty the memory."""
        d = Directions(*(now - then for now, then in zip(c.m, c.start_m, strict=True)))
        return {"dmx": d.x, "dmy": d.y, "dmz": d.z, "memory": {}}

    def own(self, c: RenewLocal) -> dict[str, Tree]:
        """Keep the momenta of what the client owns."""
        return {"my": c.m.y, "mz": c.m.z}


@register("fedbioacc")
@dataclass(frozen=True, kw_only=True)
class FedBiOAcc(FedBiO):
    """FedBiOAcc: `FedBiO` with variance-reduced momenta (STORM), two rounds per iteration.

    Choose it over `FedBiO` where mini-batch noise is the bottleneck: it pays with twice the
    gradients, a second exchange and momenta on the wire. `LAASFBO` has variance reduction in one
    round, but starts its momenta afresh in every round.

    With w = `momentum_weight` and the directions d_x, d_y, d_z of `FedBiO`, every client repeats I
    times (the environment's `local_steps`)

        x <- x - lr_x mx,   y <- y - lr_y my,   z <- P_r(z - lr_z mz),
        m <- d(new; b) + (1 - w) (m - d(old; b))   for each momentum, both on one batch b.

    The server averages x, y and z after the last move, and only then do clients renew their
    momenta: at the averaged point, with their own last point as the old one. These momenta are
    averaged too, which is the second exchange.

    Where y belongs to the clients (`Problem.owner`) it is the paper's form for local lower-level
    problems, FedBiOAcc-Local: y_i, z_i and their momenta stay with the client, and only x and mx
    are averaged.

    Cost per iteration: two rounds, one more in the first iteration for the first momenta. Gradients
    per client: 6 per local step, and 3 once for the first momenta. Down: x, y, z and their momenta,
    then x, y, z. Up: the displacements of x, y and z, then the changes of the momenta.

    Departures from the paper: those of `FedBiO`. The paper's decreasing alpha_t is a schedule of
    lr_x, lr_y and lr_z, and w, its c alpha_t^2, is one number. Momenta start at the mean full-batch
    directions, which takes a round; a client's own momenta start so in the first cohort, and at 0
    elsewhere. The paper's local form, as recalled, estimates each hypergradient by a Neumann
    series; here z_i solves the same system along the way.

    References:
        Li, Huang and Huang, "Communication-Efficient Federated Bilevel Optimization with Global
        and Local Lower Level Problems", NeurIPS 2023.

    Args:
        lr_x: Step size of x, a number or a schedule.
        lr_y: Step size of y, a number or a schedule.
        lr_z: Step size of z, a number or a schedule.
        radius: The radius r of the ball that each step projects z onto.
        momentum_weight: The weight w with which a momentum forgets, in (0, 1]; 1 is no momentum.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> method = fb.algorithms.FedBiOAcc(lr_x=0.05, lr_y=0.5, lr_z=0.5)
        >>> result = fb.solve(task.problem, task.clients, method, rounds=101)
        >>> result.history[-1]["iteration"]
        50
        >>> bool(task.phi(result.x) < task.phi(task.problem.x))
        True
    """

    client_levels: ClassVar[ClientLevels] = ("y",)

    momentum_weight: Fraction = 0.25

    def init(self, problem: Problem) -> Any:
        """Start at the problem's x and y, with z = 0 and momenta of 0."""
        x, y, z = super().init(problem)
        return AccState(x, y, z, zeros_like(x), zeros_like(y), zeros_like(z))

    def iterate(self, s: Any, fed: Federation) -> Any:
        """Average the local steps, then the momenta renewed at the average."""
        S = fed.sample()
        if not s.begun:
            r = fed.ask(Begin(), S, x=s.x, y=s.y, z=s.z)
            s = s._replace(mx=r.mean("mx"), my=r.mean("my"), mz=r.mean("mz"), begun=True)
        r = fed.ask(self.descend(), S, x=s.x, y=s.y, z=s.z, mx=s.mx, my=s.my, mz=s.mz)
        x = fed.problem.project(s.x + r.mean("dx"))
        y = s.y + r.mean("dy")
        z = s.z + r.mean("dz")
        renew = Renew(momentum_weight=self.momentum_weight)
        r = fed.ask(renew, [reply.client for reply in r], x=x, y=y, z=z)
        mx = s.mx + r.mean("dmx")
        my = s.my + r.mean("dmy")
        mz = s.mz + r.mean("dmz")
        return AccState(x, y, z, mx, my, mz, begun=True)

    def descend(self) -> DescendStorm:
        """Return the phase with the local steps."""
        return DescendStorm(
            lr_x=self.lr_x,
            lr_y=self.lr_y,
            lr_z=self.lr_z,
            radius=self.radius,
            momentum_weight=self.momentum_weight,
        )
