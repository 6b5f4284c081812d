"""Assembles a simulated federation on one machine: an executor, a virtual clock, a federation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Literal

import torch

from fedbilevel.core import checks, devices, ranks
from fedbilevel.core.capabilities import find_capabilities
from fedbilevel.core.client_data import (
    Batch,
    ClientData,
    Data,
    check_clients,
    client_weights,
    named_tensors,
    repack,
)
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.precision import Compile, Precision
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.execution.executor import Executor
from fedbilevel.execution.losses import Losses
from fedbilevel.execution.ranked import RankedExecutor
from fedbilevel.execution.reference import ReferenceExecutor
from fedbilevel.execution.stacked import StackedExecutor
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.task import on_client
from fedbilevel.transports.virtual_clock import VirtualClock

log = logging.getLogger("fedbilevel")


def simulated_federation(
    problem: Problem,
    clients: Sequence[ClientData],
    environment: Environment | None = None,
    *,
    weights: str | Sequence[float] = "uniform",
    seed: int = 0,
    device: str = "cpu",
    mode: Literal["stack", "loop"] = "stack",
    memory: int | None = None,
    precision: Precision = "fp32",
    compile: Compile = "auto",
) -> Federation:
    """Create a federation whose clients are simulated in this process, on a virtual clock.

    Args:
        problem: The bilevel problem, on the same device.
        clients: The data of each client. Any sequence will do; one that loads its entries on access
            is asked only for the clients of a cohort.
        environment: The conditions under which clients take part; by default all of them do, with
            one local step on all of their data.
        weights: The weights p_i: "uniform", "samples" (in proportion to the training samples), or
            one number per client.
        seed: The seed of all random draws.
        device: Where clients and server compute, as PyTorch names it: "cpu", "cuda" or "cuda:N".
        mode: "stack" computes clients with batches of equal shape together; "loop" computes them
            one by one, for debugging and for losses that `torch.vmap` does not support, where it
            also replaces "stack". Both make the same random draws, and agree up to rounding.
        memory: The bytes that a stack of clients may take, by default two gigabytes, or a quarter
            of a GPU. Client memory beyond the same number of bytes goes to a file.
        precision: The precision of the clients' products and convolutions: "fp32", which rounds
            nothing; "tf32", for GPUs; "bf16" for the backbone (`Problem.embed`) alone; or
            "bf16-all".
        compile: Whether client steps on a GPU go through PyTorch's compiler: all (True), none
            (False), or, with "auto", those that have run for about as long as compiling takes.

    Returns:
        The federation, for `fb.solve` or `Run`.

    Raises:
        ValueError: If an argument has a wrong value, or does not fit the number of clients.
        TypeError: If an argument has a wrong type.
        ClientError: If a loss fails on the data of the first client.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> pairs = fb.Environment(participation=2)
        >>> federation = fb.simulated_federation(task.problem, task.clients, pairs, mode="loop")
        >>> len(federation), len(federation.sample())
        (4, 2)
        >>> result = fb.solve(
        ...     task.problem, task.clients, "simfbo", rounds=3, federation=federation
        ... )
        >>> federation.ledger.rounds
        3
    """
    checks.instance("problem", problem, Problem)
    check_clients(clients)
    environment = checks.instance("environment", environment or Environment(), Environment)
    environment.check(len(clients))
    checks.one_of("mode", mode, ("stack", "loop"))
    _check_device(problem, device, precision, compile)
    if isinstance(weights, str) and weights == "samples":
        weights = [_training_samples(clients, i) for i in range(len(clients))]
    p = client_weights(weights, clients)
    batch_size = environment.batch_size
    episode = batch_size if problem.lower_level == "private" else None
    with on_client(0, "before round 1"):
        first = checks.instance("clients[0]", clients[0], ClientData)
        problem.check(first, device, episode)
        _warn_of_detached_losses(problem, first, device, batch_size)
        found = find_capabilities(problem, first, device, episode)
        if found.no_first:
            raise ValueError(f"the lower loss has no derivative in y: {found.no_first}")
    problem = found.problem
    if mode == "stack" and found.no_stacks:
        log.warning("clients run one by one, because losses cannot be stacked: %s", found.no_stacks)
        mode = "loop"
    if memory is None:
        memory = devices.stack_bytes(device)
    executor: Executor
    if mode == "loop":
        executor = ReferenceExecutor(
            problem, clients, batch_size, device=device, memory=memory, precision=precision
        )
    else:
        executor = StackedExecutor(
            problem,
            clients,
            batch_size,
            device=device,
            memory=memory,
            precision=precision,
            compile=compile,
        )
    if ranks.size() > 1:
        executor = RankedExecutor(executor, device)

    @functools.cache
    def evaluation() -> Losses:
        # Created at the first evaluation, because it reads the data of many clients.
        return Losses(
            problem,
            clients,
            p,
            environment,
            seed=seed,
            device=device,
            stack=mode == "stack" and not found.no_stacked_values,
            own=executor.own,
        )

    def losses(x: Tree, y: Tree) -> dict[str, float]:
        return evaluation()(x, y)

    clock = VirtualClock(
        executor, len(clients), environment, seed=seed, device=device, losses=losses
    )
    federation = Federation(
        problem, len(clients), clock, environment, weights=lambda: p, seed=seed, device=device
    )
    federation.runtime = {"mode": mode, "derivatives": problem.derivatives}
    federation.no_second_derivatives = found.no_second
    return federation


def _check_device(problem: Problem, device: str, precision: Precision, compile: Compile) -> None:
    """Refuse what the processes and devices of this run cannot do."""
    if problem.client_names and ranks.size() > 1:
        raise ValueError(
            f"owner gives {min(problem.client_names)!r} to the clients, but the run has "
            f"{ranks.size()} ranks; it must have one"
        )
    if compile is True and device == "cpu":
        raise ValueError(
            "compile is True, but device is 'cpu', where a compiled step is no faster; "
            "it must be False or 'auto'"
        )
    if precision == "tf32" and device == "cpu":
        raise ValueError(
            "precision is 'tf32', but device is 'cpu', which has none; "
            "it must be 'fp32', 'bf16' or 'bf16-all'"
        )


def _training_samples(clients: Sequence[ClientData], client: int) -> int:
    """Return a client's number of training samples; an error while loading names the client."""
    with on_client(client, "before round 1"):
        return clients[client].size("train")


def _warn_of_detached_losses(
    problem: Problem, client: ClientData, device: str, samples: int | None
) -> None:
    """Warn if a loss has no graph to what it is minimised over: its gradients would be zero."""
    client = problem.validated(client)

    def some(data: Data) -> Data:
        return repack(data, [tensor[:samples].to(device) for _, tensor in named_tensors(data)])

    key = torch.zeros((), dtype=torch.int64, device=device)
    batch = Batch(some(client.train), some(client.val), key)
    oracle = Oracle(problem)
    with torch.enable_grad():
        # Copies of leaves, because a loss may work in place.
        x, y = (
            tree.map(lambda t: t.detach().requires_grad_().clone())
            for tree in (Tree(problem.x), Tree(problem.y))
        )
        upper = oracle.upper(x, y, batch)
        lower = oracle.lower(x.map(torch.Tensor.detach), y, batch)
    if not upper.requires_grad:
        log.warning(
            "the upper loss depends on neither x nor y, so that there is nothing to minimise "
            "(a detach, or torch.no_grad?); fb.check tells more"
        )
    if not lower.requires_grad:
        log.warning(
            "the lower loss does not depend on y, which stays where it starts "
            "(a detach, or torch.no_grad?); fb.check tells more"
        )
