"""What one client remembers between its tasks, part by part.

A memory is a dict of trees and tensors. It holds the entries of the client's phases under their own
names, what the stages of its replies remember (`STAGES`), and the values of the variables that
belong to the client (`OWN`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation.kinds import Kind
from fedbilevel.federation.phase import Carry, Phase
from fedbilevel.federation.task import Broadcast, Values

Memory = dict[str, Any]

# The space keeps these names apart from identifiers, which phases use.
STAGES = "stages "
OWN = "own "


def phase_memory(memory: Memory) -> Memory:
    """Return what the phases of a client remember."""
    return {name: value for name, value in memory.items() if name not in (STAGES, OWN)}


def stage_memory(memory: Memory) -> Memory:
    """Return what the stages of a client's replies remember."""
    return memory.get(STAGES, {})  # type: ignore[no-any-return]


def personal_values(memory: Memory) -> dict[str, Tree]:
    """Return what a client has of a model for itself: its own variables, or a whole model.

    Args:
        memory: The memory of the client.

    Returns:
        Trees by name in messages, such as "y".
    """
    return {**memory.get("personal", {}), **memory.get(OWN, {})}


def own_values(memory: Memory, kinds: Mapping[str, Kind], problem: Problem) -> dict[str, Tree]:
    """Return a client's part of the values of a message, as the client has kept it.

    Args:
        memory: The memory of the client.
        kinds: "x" or "y" for each value, by name (`Broadcast.client_kinds`).
        problem: Has the start of x and y; other values start at 0.

    Returns:
        Trees by name, on the device of the problem.
    """
    kept = memory.get(OWN, {})
    values = {}
    for name, kind in kinds.items():
        start = problem.client_part(problem.x if kind == "x" else problem.y)
        if name in kept:
            values[name] = kept[name]
        elif name == kind:
            values[name] = start
        else:
            values[name] = zeros_like(start)
    return values


def renew(
    memory: Memory,
    *,
    phases: Memory | None = None,
    stages: Memory | None = None,
    own: Memory | None = None,
) -> Memory:
    """Return a client's memory with some of its parts replaced.

    Args:
        memory: The memory so far.
        phases: What phases remember from now on; None to leave it.
        stages: What stages remember from now on; None to leave it.
        own: Values of variables that belong to the client; values of other names are kept.
    """
    renewed = dict(phase_memory(memory) if phases is None else phases)
    stages = stage_memory(memory) if stages is None else stages
    if stages:
        renewed[STAGES] = stages
    own = {**memory.get(OWN, {}), **(own or {})}
    if own:
        renewed[OWN] = own
    return renewed


def join_message(
    values: Values, own: Mapping[str, Tree], broadcast: Broadcast, problem: Problem
) -> Values:
    """Return the values of a message whole: the server's part, and the client's own."""
    whole = dict(values)
    for name, kind in broadcast.client_kinds.items():
        whole[name] = problem.join_parts(str(kind), values[name], own[name])
    return whole


def finish_task(phase: Phase, carry: Carry, broadcast: Broadcast, problem: Problem) -> Values:
    """Return the reply of a phase, without the client's part, which is under `OWN`."""
    reply = phase.finish(carry)
    if not broadcast.client_kinds:
        return reply
    for name, kind in phase.reply.items():
        if kind in problem.client_levels and isinstance(reply.get(name), Tree):
            reply[name] = problem.server_part(reply[name])
    kept = {}
    for name, value in phase.own(carry).items():
        if part := problem.client_part(value):
            kept[name] = part
    return {**reply, OWN: kept}


def pop_memory(phase: Phase, reply: Values) -> Memory:
    """Remove and return the new memory in what the `finish` of a phase returned.

    Raises:
        TypeError: The phase remembers, but `finish` returned no memory.
    """
    if "memory" not in reply:
        raise TypeError(
            f"phase {phase.name!r} remembers; its finish must return a memory beside its reply"
        )
    return reply.pop("memory")  # type: ignore[no-any-return]
