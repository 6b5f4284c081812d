"""One learnt weight per client, for any problem with a shared lower level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData, Data
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree

WEIGHTS = "client_weights"  # the name of the weights in x
NUMBER = "client_number"  # the name of the additional entry of data that are dicts


def weighted(
    problem: Problem, clients: Sequence[ClientData], *, shrinkage: float = 0.0
) -> tuple[Problem, Sequence[ClientData]]:
    """The same problem with one weight per client as an additional upper variable.

    The weights w are learnt on the validation data together with x, by every method:

        min over x and w of F(x, y*(x, w))   with   y*(x, w) = argmin_y sum_i p_i (n w_i) g_i(x, y),
        w in the simplex: w_i >= 0, sum_i w_i = 1.

    They start at 1/n, where the problem is the given one. Of a client that they leave out (w_i = 0)
    only the validation data count.

    A client must know which weight is its own. Its number is therefore part of its data: every
    sample carries it, so that the weights are learnt on every runtime, and on batches of any size.
    The losses of `problem` receive the batches that they receive without weights.

    Args:
        problem: A problem with a shared lower level.
        clients: The data of each client. A list is copied with the numbers added; of another
            sequence, an entry is loaded when it is used.
        shrinkage: The factor s of a penalty s n/2 ||w - 1/n||^2 that is added to the upper loss. It
            keeps weights near 1/n, and so fewer clients are left out by chance where validation
            data are few.

    Returns:
        The problem, whose x has the weights as `x["client_weights"]`, and the data of its clients,
        both for `fb.solve` and everything else that takes a problem and clients.

    Raises:
        ValueError: The lower level is private, there are no clients, `shrinkage` is negative, or x
            or the data have an entry of the name that would be added.

    References:
        Learnt client weights: Wu et al., "Auto-FedAvg: learnable federated averaging for
        multi-institutional medical image segmentation", 2021. The projection onto the simplex:
        Held, Wolfe, Crowder, "Validation of subgradient optimization", 1974.

    Examples:
        The lower losses pull y towards 0, 1 and 5, and the upper losses ask for 0.8:

        >>> import torch
        >>> import fedbilevel as fb
        >>> pulls = torch.tensor([0.0, 1.0, 5.0])
        >>> problem = fb.Problem(
        ...     upper=lambda x, y, batch: 0.5 * (y["y"] + x["shift"] - 0.8) ** 2 + x["shift"] ** 2,
        ...     lower=lambda x, y, batch: 0.5 * ((y["y"] - batch[0]) ** 2).mean(),
        ...     x={"shift": torch.tensor(0.0)},
        ...     y={"y": torch.tensor(0.0)},
        ... )
        >>> clients = [fb.ClientData(train=(pull[None],), val=(pull[None],)) for pull in pulls]
        >>> problem, clients = fb.weighted(problem, clients)
        >>> method = fb.algorithms.SimFBO(lr_x=0.01, server_lr_x=0.01)
        >>> result = fb.solve(problem, clients, method, rounds=300)
        >>> w = result.x["client_weights"]
        >>> [round(float(value), 2) for value in (w.sum(), w @ pulls)]
        [1.0, 0.8]
    """
    if problem.lower_level != "shared":
        raise ValueError(
            "weights of clients need lower_level='shared'; this problem's is 'private', "
            "where no client changes the y of another"
        )
    if len(clients) == 0:
        raise ValueError("clients is empty; weights need at least one client")
    if WEIGHTS in problem.x or WEIGHTS in problem.y:
        raise ValueError(f"the problem has a variable {WEIGHTS!r} already; rename it")
    checks.non_negative("shrinkage", shrinkage)
    count = len(clients)
    inner = problem

    def upper(x: Tree, y: Tree, data: Data, rng: Tensor) -> Tensor:
        loss: Tensor = inner.upper(_without_weights(x), y, _without_number(data)[0], rng)
        if shrinkage:
            loss = loss + 0.5 * shrinkage * count * ((x[WEIGHTS] - 1 / count) ** 2).sum()
        return loss

    def lower(x: Tree, y: Tree, data: Data, rng: Tensor) -> Tensor:
        data, number = _without_number(data)
        own_weight = x[WEIGHTS].gather(0, number[:1]).squeeze(0)
        return count * own_weight * inner.lower(_without_weights(x), y, data, rng)

    def project(x: Tree) -> Tree:
        projected = inner.project(_without_weights(x))
        return Tree({**projected, WEIGHTS: project_to_simplex(x[WEIGHTS])})

    example = next(iter(problem.x.values()))
    start = torch.full((count,), 1 / count, dtype=example.dtype, device=example.device)
    outer = replace(
        problem,
        upper=upper,
        lower=lower,
        x={**problem.x, WEIGHTS: start},
        project_x=project,
        embed=_weighted_embed(problem),
    )
    if isinstance(clients, list):
        return outer, _numbered(clients)
    return outer, _NumberedClients(clients)


def project_to_simplex(v: Tensor) -> Tensor:
    """The point of {w : w_i >= 0, sum_i w_i = 1} that is closest to v.

    It is max(v - theta, 0) with theta = max_k (v_1 + ... + v_k - 1) / k, where the entries of v are
    in descending order.

    Args:
        v: A vector.

    Returns:
        The projected vector.

    Examples:
        >>> import torch
        >>> project_to_simplex(torch.tensor([0.5, 0.75, -3.0]))
        tensor([0.3750, 0.6250, 0.0000])
    """
    sums = v.sort(descending=True).values.cumsum(0)
    counts = torch.arange(1, len(v) + 1, dtype=v.dtype, device=v.device)
    theta = ((sums - 1) / counts).amax()
    return (v - theta).clamp(min=0)


def _without_weights(x: Tree) -> Tree:
    return Tree({name: value for name, value in x.items() if name != WEIGHTS})


def _with_number(data: Data, number: Tensor) -> Data:
    if isinstance(data, dict):
        return {**data, NUMBER: number}
    return (*data, number)


def _without_number(data: Data) -> tuple[Data, Tensor]:
    """Split data into what they were without the client's number, and the number of each sample."""
    if isinstance(data, dict):
        rest = {name: value for name, value in data.items() if name != NUMBER}
        return rest, data[NUMBER]
    return data[:-1], data[-1]


def _weighted_embed(problem: Problem) -> Callable[..., Data] | None:
    """`embed` for data with numbers, which it hands on; with `rng` only if the given one has it."""
    embed = problem.embed
    if embed is None:
        return None

    def embed_with_rng(x: Tree, data: Data, rng: Tensor) -> Data:
        data, number = _without_number(data)
        return _with_number(embed(_without_weights(x), data, rng), number)

    def embed_without_rng(x: Tree, data: Data) -> Data:
        return embed_with_rng(x, data, cast(Tensor, ()))

    if problem.embeds_samples:
        return embed_without_rng
    return embed_with_rng


def _numbered(clients: list[ClientData]) -> list[ClientData]:
    """All clients with their numbers, as slices of one tensor per side: a batch is one lookup."""
    sides = {}
    for side in ("train", "val"):
        sizes = [client.size(side) for client in clients]
        numbers = torch.arange(len(clients)).repeat_interleave(torch.tensor(sizes)).split(sizes)
        sides[side] = numbers
    pairs = zip(clients, sides["train"], sides["val"], strict=True)
    return [_number(client, train, val) for client, train, val in pairs]


def _number(client: ClientData, train: Tensor, val: Tensor) -> ClientData:
    for data in (client.train, client.val):
        if isinstance(data, dict) and NUMBER in data:
            raise ValueError(f"the data have an entry {NUMBER!r} already; rename it")
    return ClientData(_with_number(client.train, train), _with_number(client.val, val))


class _NumberedClients(Sequence[ClientData]):
    """Clients whose data are loaded on access, with their numbers."""

    def __init__(self, clients: Sequence[ClientData]) -> None:
        self.clients = clients

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, index: int) -> ClientData:  # type: ignore[override]  # no slices
        client = self.clients[index]
        train = torch.full((client.size("train"),), index)
        val = torch.full((client.size("val"),), index)
        return _number(client, train, val)
