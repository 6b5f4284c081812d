"""The upper and lower loss over the clients, by which a run is watched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.client_data import Batch, ClientData, Data, named_tensors, repack
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, root, rows, subset
from fedbilevel.core.tree import Tree
from fedbilevel.execution.vectorize import vectorized
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.task import on_client

MAX_CLIENTS = 100
MAX_SAMPLES = 2048  # per level, over all evaluated clients
CHECKED = 4  # how many times as many samples the losses are tried on before a run


def evaluation_subset(
    seed: int, clients: int, max_clients: int = MAX_CLIENTS, max_samples: int = MAX_SAMPLES
) -> tuple[list[int], int]:
    """Draw the clients whose losses are evaluated, once for a run.

    Args:
        seed: The seed of the run.
        clients: The number of clients in the federation.
        max_clients: The most clients to evaluate.
        max_samples: About how many samples to evaluate per level, over all of them.

    Returns:
        The numbers of the clients, and the samples per level that each of them evaluates.
    """
    numbers = subset(root(seed, "evaluation"), clients, min(clients, max_clients))
    samples_each = -(-max_samples // len(numbers))
    return numbers, samples_each


class ClientLosses:
    """One client's upper and lower loss, on a batch that is drawn once.

    Constructing it also tries both losses on `CHECKED` times as many samples, on all of a small
    client's, so that a loss that fails on them does so before the run.

    Args:
        oracle: The problem's derivatives and losses.
        data: The client's data.
        environment: Its batch size is the size of an episode, if the lower level is private.
        seed: The seed of the run.
        client: The client's number.
        samples: The most samples to evaluate per level.
        device: Where to evaluate.

    Attributes:
        batch: The samples that were drawn.
    """

    def __init__(
        self,
        oracle: Oracle,
        data: ClientData,
        environment: Environment,
        seed: int,
        client: int,
        samples: int,
        device: str,
    ) -> None:
        self.oracle = oracle
        data = oracle.problem.validated(data)
        key = fold_in(root(seed, "evaluation"), client)
        train_key = fold_in(key, 0)
        if oracle.problem.lower_level == "private":
            # Sample j of both sides belong together, so both sides draw the same ones.
            samples = environment.batch_size or data.size("train")
            val_key = train_key
        else:
            val_key = fold_in(key, 1)
        train = _subsample(data.train, train_key, samples)
        val = _subsample(data.val, val_key, samples)
        self.batch = _on_device(Batch(train, val, key), device)
        checked = self.batch
        if oracle.problem.lower_level == "shared":
            train = _subsample(data.train, fold_in(key, 2), CHECKED * samples)
            val = _subsample(data.val, fold_in(key, 3), CHECKED * samples)
            checked = _on_device(Batch(train, val, key), device)
        self(Tree(oracle.problem.x), Tree(oracle.problem.y), checked)

    def __call__(self, x: Tree, y: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the upper and the lower loss at (x, y) on a batch."""
        return self.oracle.upper(x, y, batch), self.oracle.lower(x, y, batch)


class Losses:
    """The upper and lower loss over all clients, weighted as in the problem.

    F(x, y) = sum_i p_i f_i(x, y)   and   G(x, y) = sum_i p_i g_i(x, y)

    A federation may be too large to evaluate as a whole. At most `clients` clients, drawn once, are
    evaluated on about `samples` samples per level. Up to that size the losses are exact. The losses
    of episodes (`lower_level="private"`) are taken at the y that the episodes start from.

    Args:
        problem: The losses f and g.
        data: The data of each client; only the clients that are evaluated are read.
        weights: p_i, one number per client.
        environment: Its batch size is the size of an episode.
        seed: The seed of the run, which determines what is drawn.
        device: Where to evaluate.
        stack: Whether clients with batches of equal shape are evaluated together, under `vmap`.
        clients: The most clients to evaluate.
        samples: About how many samples to evaluate per level.
        own: Returns what a client has kept of the variables that it owns (`Executor.own`).

    Attributes:
        groups: For each group of clients that are evaluated together, their weights (which sum to 1
            over all groups) and their batches as a stack.

    Raises:
        ClientError, ValueError, TypeError: A loss fails on the data of a client; the message names
            the client.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.execution.losses import Losses
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> losses = Losses(
        ...     task.problem, task.clients, [0.25] * 4, fb.Environment(), seed=0, device="cpu"
        ... )
        >>> x, y = task.problem.start
        >>> sorted(losses(x, y))
        ['lower_loss', 'upper_loss']
    """

    def __init__(
        self,
        problem: Problem,
        data: Sequence[ClientData],
        weights: Sequence[float],
        environment: Environment,
        *,
        seed: int,
        device: str,
        stack: bool = True,
        clients: int = MAX_CLIENTS,
        samples: int = MAX_SAMPLES,
        own: Callable[[int], Mapping[str, Tree]] = lambda _: {},
    ) -> None:
        self.problem = problem
        self.own = own
        self.oracle = Oracle(problem)
        numbers, samples_each = evaluation_subset(seed, len(data), clients, samples)
        groups: dict[Hashable, list[tuple[int, Batch]]] = defaultdict(list)
        for i in numbers:
            with on_client(i, "before round 1"):
                self.client_losses = ClientLosses(
                    self.oracle, data[i], environment, seed, i, samples_each, device
                )
            batch = self.client_losses.batch
            key: Hashable = i
            if stack:
                key = repr([tensor.shape for tensor in pytree.tree_leaves(batch)])
            groups[key].append((i, batch))
        total = sum(weights[i] for i in numbers)
        self.groups: list[tuple[list[float], Batch]] = []
        self.clients: list[list[int]] = []  # of each group
        for group in groups.values():
            self.clients.append([i for i, _ in group])
            batches = [batch for _, batch in group]
            stacked = pytree.tree_map(lambda *tensors: torch.stack(tensors), *batches)
            self.groups.append(([weights[i] / total for i, _ in group], stacked))

    def __call__(self, x: Tree, y: Tree) -> dict[str, float]:
        """Evaluate both losses.

        Args:
            x: The upper variables; of variables that belong to the clients, each uses its own.
            y: The lower variables, likewise.

        Returns:
            `upper_loss` and `lower_loss`.
        """
        upper_loss = 0.0
        lower_loss = 0.0
        with torch.no_grad():
            for (weights, batch), clients in zip(self.groups, self.clients, strict=True):
                upper, lower = self._group_losses(x, y, batch, clients)
                p = torch.tensor(weights, dtype=upper.dtype, device=upper.device)
                upper_loss += float((p * upper).sum())
                lower_loss += float((p * lower).sum())
        return {"upper_loss": upper_loss, "lower_loss": lower_loss}

    def _group_losses(
        self, x: Tree, y: Tree, batch: Batch, clients: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of each client of a group."""
        problem = self.problem
        parts = []
        for client in clients:
            own = self.own(client) if problem.client_names else {}
            point = problem.client_point(x, y, own)
            parts.append(dict(zip("xy", map(problem.client_part, point), strict=True)))

        def losses(batch: Batch, own: dict[str, Tree]) -> tuple[Tensor, Tensor]:
            return self.client_losses(*problem.client_point(x, y, own), batch)

        if len(clients) == 1:
            alone = pytree.tree_map(lambda tensor: tensor[0], batch)
            return losses(alone, parts[0])
        stacked = pytree.tree_map(lambda *tensors: torch.stack(tensors), *parts)
        values: tuple[Tensor, Tensor] = vectorized(losses)(batch, stacked)
        return values


def _on_device(batch: Batch, device: str) -> Batch:
    moved: Batch = pytree.tree_map(lambda tensor: tensor.to(device), batch)
    return moved


def _subsample(data: Data, key: Tensor, count: int) -> Data:
    """Return at most `count` of a client's samples, drawn uniformly."""
    size = len(named_tensors(data)[0][1])
    if size <= count:
        return data
    indices = rows(key, size, count)
    return repack(data, [tensor[indices] for _, tensor in named_tensors(data)])
