"""What methods without a server share: the state of all clients, and an exchange along links."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.stacks import copies, rows_of, with_rows


class State(NamedTuple):
    """What the clients have, and the means over clients, at which a run is evaluated.

    Attributes:
        x: The mean of the clients' x_i.
        y: The mean of the clients' y_i.
        clients: The values of all clients by name, with a row per client; empty before the first
            iteration. Only `Federation.mix` shows a client values of others.
    """

    x: Tree
    y: Tree
    clients: dict[str, Any]


@dataclass(frozen=True)
class Gossip(Algorithm):
    """Base of methods without a server.

    In an iteration each client sends values to its neighbours, mixes what arrives, and computes its
    next values.

    Attributes:
        sent: The names of the values that travel.
    """

    has_server = False
    sent: ClassVar[tuple[str, ...]]

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y."""
        return State(*problem.start, clients={})

    def iterate(self, s: State, fed: Federation) -> State:
        """Mix along the links, then have every client compute its next values."""
        S = fed.sample()
        clients = s.clients or self.begin(s, fed)
        own = rows_of(clients, S)
        mixed = fed.mix(S, **{name: own[name] for name in self.sent})
        own = fed.local(self.step(fed), S, own=own, mixed=mixed)
        return means(with_rows(clients, S, own), fed)

    @abstractmethod
    def begin(self, s: State, fed: Federation) -> dict[str, Any]:
        """Return what the clients have before the first iteration."""

    @abstractmethod
    def step(self, fed: Federation) -> Phase:
        """Return the phase of an iteration; it replies with all of a client's values."""


def everywhere(s: State, fed: Federation) -> dict[str, Any]:
    """Return x and y as they are at the start, for every client."""
    return {"x": copies(s.x, len(fed)), "y": copies(s.y, len(fed))}


def means(clients: dict[str, Any], fed: Federation) -> State:
    """Return the state, and record how far the x_i are from their mean."""
    x, y = (clients[name].map(lambda t: t.mean(0)) for name in ("x", "y"))
    squares = [((clients["x"][name] - mean) ** 2).sum() for name, mean in x.items()]
    fed.record(disagreement=torch.stack(squares).sum().sqrt() / len(fed) ** 0.5)
    return State(x, y, clients)
