"""A federation on one machine, put together: executor, virtual clock, federation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

from fedbilevel.core import checks, devices, ranks
from fedbilevel.core.problem import ClientData, Problem, client_weights
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
    precision: Literal["fp32", "bf16"] = "fp32",
    compile: bool = False,
) -> Federation:
    """Clients held in memory, on a virtual clock.

    Args:
        problem: what is solved.
        clients: the data of each client; any sequence, and a lazy one is asked only for the cohort.
        environment: the conditions under which clients take part.
        weights: p_i, "uniform", "samples" or one number per client.
        seed: of everything that is drawn.
        device: where clients and server compute.
        mode: "stack" runs clients of equal batch shape together; "loop" runs them one by one and as they are written,
            for debugging and for losses that `vmap` cannot take. Both see the same draws and agree to rounding.
        memory: bytes that a stack may take, by default two gigabytes or a quarter of a GPU. Of what clients remember
            as many bytes are held in memory, the rest in a file.
        precision: of the backbone (`Problem.embed`).
        compile: whether tasks go through PyTorch's compiler, on a GPU.

    Raises:
        ValueError, TypeError: an argument, or the first client's data, does not fit.
    """
    if len(clients) == 0:
        raise ValueError("clients is empty; a federation needs at least one")
    environment = environment or Environment()
    environment.check(len(clients))
    checks.one_of("mode", mode, ("stack", "loop"))
    if compile and device == "cpu":
        raise ValueError(
            "compile is True, but device is 'cpu', where a compiled step is no faster; it must be False"
        )
    p = client_weights(weights, clients)
    episode = environment.batch_size if problem.lower_level == "private" else None
    with on_client(0, "before round 1"):
        problem.check(clients[0], device, episode)
    room = devices.stack_bytes(device) if memory is None else memory
    rounded = problem.rounded(precision)
    size = environment.batch_size
    executor: Executor
    if mode == "loop":
        executor = ReferenceExecutor(rounded, clients, size, device=device, memory=room)
    else:
        executor = StackedExecutor(
            rounded, clients, size, device=device, memory=room, compile=compile
        )
    if ranks.size() > 1:
        executor = RankedExecutor(executor, device)

    @functools.cache
    def evaluation() -> Losses:
        return Losses(
            problem, clients, p, environment, seed=seed, device=device, stack=mode == "stack"
        )

    def losses(x: Tree, y: Tree) -> dict[str, float]:
        return evaluation()(x, y)

    clock = VirtualClock(
        executor, len(clients), environment, seed=seed, device=device, losses=losses
    )
    return Federation(
        problem, len(clients), clock, environment, weights=lambda: p, seed=seed, device=device
    )
