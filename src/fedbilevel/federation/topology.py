"""Topologies: which clients have a link between them, and with which weights they mix values.

A topology is a name ("ring", "grid", "complete", "erdos-renyi 0.3") or a mixing matrix. The matrix
of a name has the weights of Metropolis and Hastings: W_ij = 1 / (1 + max(d_i, d_j)) on a link, d_i
being the number of links of client i, and what is left of 1 in W_ii. On the complete graph all
weights are 1 / n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.rng import fold_in, root, uniform
from fedbilevel.core.settings import Rule
from fedbilevel.federation.task import Values

NAMES = ("ring", "grid", "complete")
RANDOM = "erdos-renyi"
ALLOWED = "'ring', 'grid', 'complete', 'erdos-renyi P' with P in (0, 1], or a mixing matrix"
TOLERANCE = 1e-9  # of the sums of a mixing matrix
DRAWS = 1000  # of a random graph, until one is connected


def check_topology(name: str, value: object) -> str | list[list[float]]:
    """Check a topology, as far as that is possible without the number of clients.

    Args:
        name: What the value is called in errors.
        value: A name, or a mixing matrix: rows of numbers, symmetric and doubly stochastic, whose
            links connect all clients.

    Returns:
        The value.

    Raises:
        ValueError: It is none of these.
        TypeError: It is neither a name nor rows of numbers.

    Examples:
        >>> check_topology("topology", "erdos-renyi 0.3")
        'erdos-renyi 0.3'
        >>> check_topology("topology", [[1.0, 0.0], [0.0, 1.0]])
        Traceback (most recent call last):
        ValueError: topology is a matrix without a path of links from client 0 to client 1
    """
    if isinstance(value, str):
        if value not in NAMES:
            _link_probability(name, value)
        return value
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(row, (list, tuple)) for row in value
    ):
        raise TypeError(f"{name} is {value!r:.80}; it must be {ALLOWED}")
    rows = [[float(checks.number(name, entry)) for entry in row] for row in value]
    if not rows or any(len(row) != len(rows) for row in rows):
        raise ValueError(f"{name} is a matrix that is not square; it needs a row per client")
    _check_mixing(name, torch.tensor(rows, dtype=torch.float64))
    return rows


def _check_mixing(name: str, W: Tensor) -> None:
    """Check that a square matrix is one that values can be mixed with."""
    if (W < 0).any():
        raise ValueError(f"{name} is a matrix with the weight {W.min():g}; all must be at least 0")
    for what, sums in (("row", W.sum(1)), ("column", W.sum(0))):
        worst = int((sums - 1).abs().argmax())
        if abs(sums[worst] - 1) > TOLERANCE:
            raise ValueError(
                f"{name} is a matrix that is not doubly stochastic: {what} {worst} sums to "
                f"{sums[worst]:g}; it must be 1"
            )
    if (W - W.T).abs().max() > TOLERANCE:
        raise ValueError(f"{name} is a matrix that is not symmetric; links have no direction")
    unreached = _unreached(W > 0)
    if unreached:
        raise ValueError(
            f"{name} is a matrix without a path of links from client 0 to client {unreached[0]}"
        )
    if torch.linalg.eigvalsh(W)[0] < TOLERANCE - 1:
        raise ValueError(
            f"{name} is a matrix with the eigenvalue -1, under which values swap for ever; "
            "a client must keep a part of its own value"
        )


Topology = Annotated[str | list[list[float]], Rule(ALLOWED, check_topology)]


def mixing_matrix(topology: str | list[list[float]], clients: int, seed: int) -> Tensor:
    """Return the mixing matrix of a topology.

    A grid has as many rows as the largest divisor of the number of clients up to its root, and no
    links around its edges. A random graph has each link with probability P; it is drawn again until
    it is connected.

    Args:
        topology: The topology.
        clients: How many clients there are.
        seed: The root of the draw of a random graph.

    Returns:
        W, in float64, symmetric and doubly stochastic, with W_ij > 0 only on links and for i = j.

    Raises:
        ValueError: A matrix is for another number of clients, or no draw of a random graph was
            connected.

    Examples:
        >>> 4 * mixing_matrix("complete", clients=4, seed=0)[0]
        tensor([1., 1., 1., 1.], dtype=torch.float64)
        >>> 3 * mixing_matrix("ring", clients=5, seed=0)[0]
        tensor([1., 1., 0., 0., 1.], dtype=torch.float64)
    """
    if not isinstance(topology, str):
        check_size(topology, clients)
        return torch.tensor(topology, dtype=torch.float64)
    if topology not in NAMES:
        return _metropolis(_random_links(topology, clients, seed))
    linked = torch.zeros(clients, clients, dtype=torch.bool)
    for i, j in _named_links(topology, clients):
        linked[i, j] = linked[j, i] = True
    return _metropolis(linked)


def check_size(topology: object, clients: int) -> None:
    """Refuse a mixing matrix for another number of clients."""
    if isinstance(topology, (list, tuple)) and len(topology) != clients:
        raise ValueError(
            f"topology is a matrix for {len(topology)} clients; there are {clients} clients"
        )


def among(W: Tensor, clients: Sequence[int]) -> Tensor:
    """Return the mixing matrix of some of the clients, in the order given.

    Links to the others carry nothing in this exchange, and their weight goes to W_ii, so that the
    matrix stays symmetric and doubly stochastic.
    """
    part = W[list(clients)][:, list(clients)]
    part = part.fill_diagonal_(0.0)
    return part + torch.diag(1 - part.sum(1))


def mix(W: Tensor, values: Values) -> Values:
    """Return sum_j W_ij v_j for stacks of values with a row per client."""

    def mix_rows(rows: Tensor) -> Tensor:
        weights = W.to(rows.device, rows.dtype)
        return (weights @ rows.reshape(len(rows), -1)).reshape(rows.shape)

    return pytree.tree_map(mix_rows, values)  # type: ignore[no-any-return]


def links_of(W: Tensor) -> list[int]:
    """Return how many links each client has."""
    neighbours = W != 0
    return (neighbours.sum(1) - neighbours.diagonal().long()).tolist()


def _named_links(topology: str, clients: int) -> list[tuple[int, int]]:
    if topology == "complete":
        return list(itertools.combinations(range(clients), 2))
    if topology == "ring":
        return [(i, (i + 1) % clients) for i in range(clients) if clients > 1]
    rows = next(r for r in range(math.isqrt(clients), 0, -1) if clients % r == 0)
    width = clients // rows
    links = [(i, i + 1) for i in range(clients) if (i + 1) % width]
    return links + [(i, i + width) for i in range(clients - width)]


def _link_probability(name: str, value: str) -> float:
    kind, _, probability = value.partition(" ")
    try:
        p = float(probability)
    except ValueError:
        p = math.nan
    if kind != RANDOM or not 0 < p <= 1:
        raise ValueError(f"{name} is {value!r}; it must be {ALLOWED}")
    return p


def _random_links(topology: str, clients: int, seed: int) -> Tensor:
    p = _link_probability("topology", topology)
    key = root(seed, "topology")
    for draw in range(DRAWS):
        drawn = uniform(fold_in(key, draw), (clients, clients), torch.float64) < p
        linked = drawn.triu(1)
        linked = linked | linked.T
        if not _unreached(linked):
            return linked
    raise ValueError(
        f"topology is {topology!r}; none of {DRAWS} draws with {clients} clients was connected"
    )


def _metropolis(linked: Tensor) -> Tensor:
    degrees = linked.sum(1)
    larger = torch.maximum(degrees.unsqueeze(0), degrees.unsqueeze(1))
    W = linked / (1.0 + larger.double())
    return W + torch.diag(1 - W.sum(1))


def _unreached(linked: Tensor) -> list[int]:
    """The clients without a path of links from client 0."""
    reached = torch.zeros(len(linked), dtype=torch.bool)
    reached[0] = True
    frontier = reached
    while frontier.any():
        frontier = linked[frontier].any(0) & ~reached
        reached = reached | frontier
    return (~reached).nonzero().flatten().tolist()
