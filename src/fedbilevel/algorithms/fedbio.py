"""FedBiO: local steps on three intertwined sequences, then an average.

Li, Huang and Huang, "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level
Problems", NeurIPS 2023 (an earlier paper of the authors, arXiv 2205.01608, uses the same name for another method).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fedbilevel import checks
from fedbilevel.algorithms import register
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.federation.base import Federation
from fedbilevel.oracle import Oracle
from fedbilevel.phase import Message, Phase
from fedbilevel.problem import Batch, Problem
from fedbilevel.schedules import Step
from fedbilevel.tree import Tree, project, zeros_like


class State(NamedTuple):
    x: Tree
    y: Tree
    z: Tree


class Local(NamedTuple):
    here: State
    start: State


class Descend(Phase):
    """I steps on x, y and z; replies with how far each came."""

    steps = "local"
    batch = "both"
    reply: ClassVar = {"dx": "x", "dy": "y", "dz": "y"}

    settings: FedBiO

    def start(self, m: Message) -> Local:
        sent = State(m.x, m.y, m.z)
        return Local(sent, sent)

    def step(self, c: Local, oracle: Oracle, batch: Batch) -> Local:
        h, (x, y, z) = self.settings, c.here
        d = oracle.directions(x, y, z, batch)
        here = State(oracle.project_x(x - h.lr_x * d.x), y - h.lr_y * d.y, project(z - h.lr_z * d.z, h.radius))
        return c._replace(here=here)

    def finish(self, c: Local) -> dict[str, Any]:
        return {f"d{name}": here - start for name, here, start in zip("xyz", c.here, c.start, strict=True)}


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

    phases: ClassVar = {"descend": Descend}

    lr_x: Step = 0.05
    lr_y: Step = 0.1
    lr_z: Step = 0.1
    radius: float = 1000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("radius", self.radius)

    def init(self, problem: Problem) -> State:
        x, y = problem.start
        return State(x, y, zeros_like(y))

    def iterate(self, s: State, fed: Federation) -> State:
        r = fed.ask("descend", fed.sample(), x=s.x, y=s.y, z=s.z)
        return State(fed.problem.project(s.x + r.mean("dx")), s.y + r.mean("dy"), s.z + r.mean("dz"))
