"""Assignment of work: the tasks of an exchange, with their messages, numbers of steps and keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, fold_in_each, root, root_number
from fedbilevel.core.submodels import Submodel, count_units
from fedbilevel.core.tree import Tree
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.kinds import client_kinds, message_kinds, templates
from fedbilevel.federation.phase import Phase, Side
from fedbilevel.federation.stages import decode_values, encode_values
from fedbilevel.federation.task import Broadcast, Task, group_by_broadcast, on_client

ClientMessages = Sequence[Mapping[str, Any]] | None  # what each client alone is sent
Submodels = Sequence[Submodel | None] | None


class Assigner:
    """Makes the tasks of a federation's clients.

    Args:
        problem: What is solved.
        clients: How many clients are registered.
        environment: Local steps, batch size and stages.
        weights: Returns p_i for each client; called when it is first needed.
        samples: Returns how many samples a client holds on one side.
        seed: The root of all keys.

    Attributes:
        tasks_made: How many tasks were made so far; the next task has this number.
    """

    def __init__(
        self,
        problem: Problem,
        clients: int,
        environment: Environment,
        weights: Callable[[], Sequence[float]],
        samples: Callable[[int, Side], int],
        seed: int,
    ) -> None:
        self.problem = problem
        self.clients = clients
        self.environment = environment
        self.weights = weights
        self.samples = samples
        self.seed = seed
        self.tasks_made = 0
        self.reply_stages = [stage for stage in environment.stages if stage.direction == "up"]
        self.message_stages = [stage for stage in environment.stages if stage.direction == "down"]

    def assign(
        self,
        phase: Phase,
        clients: Sequence[int],
        each: ClientMessages,
        submodels: Submodels,
        message: Mapping[str, Any],
        round_: int,
        iteration: int,
    ) -> list[Task]:
        """Make one task per client.

        Args:
            phase: What each client does.
            clients: The clients; one may occur more than once.
            each: What `clients[j]` alone is sent.
            submodels: The part of the model that `clients[j]` holds.
            message: What everyone is sent.
            round_: The communication round.
            iteration: The iteration of the algorithm.

        Returns:
            The tasks, in the order of `clients`.
        """
        self._check(phase, clients, each, submodels)
        broadcasts: dict[Submodel | None, Broadcast] = {}
        for index, submodel in enumerate(dict.fromkeys(submodels or [None])):
            broadcasts[submodel] = self._broadcast(
                phase, message, round_, iteration, submodel, index
            )
        count = len(clients)
        numbers = range(self.tasks_made, self.tasks_made + count)
        self.tasks_made += count
        keys = fold_in_each([root_number(self.seed, phase.name)] * count, numbers, clients)
        weights = self.weights()
        columns = zip(
            [broadcasts[submodel] for submodel in submodels or [None] * count],
            numbers,
            itertools.count(),
            clients,
            self._steps(phase, keys, clients, round_),
            each or itertools.repeat({}),
            fold_in_each(keys, [1] * count),
            [self.clients * weights[client] for client in clients],
            strict=False,
        )
        return [Task(*column) for column in columns]

    def _check(
        self,
        phase: Phase,
        clients: Sequence[int],
        each: ClientMessages,
        submodels: Submodels,
    ) -> None:
        if not isinstance(phase, Phase):
            raise TypeError(f"phase is {phase!r}; it must be a Phase, such as Descend(lr_x=0.1)")
        for client in clients:
            checks.integer("client", client, least=0, most=self.clients - 1)
        for name, entries in (("each", each), ("submodels", submodels)):
            if entries is not None and len(entries) != len(clients):
                raise ValueError(
                    f"{name} has {len(entries)} entries; "
                    f"it must have one for each of {len(clients)} clients"
                )

    def _broadcast(
        self,
        phase: Phase,
        message: Mapping[str, Any],
        round_: int,
        iteration: int,
        submodel: Submodel | None,
        index: int,
    ) -> Broadcast:
        """Cut a message to a submodel and send it through its stages.

        The message is decoded here, as every client would decode it. `index` numbers the submodels
        of an exchange, for the draws of stages.
        """
        if submodel:
            parts = {}
            for name, value in message.items():
                parts[name] = submodel.cut(value) if isinstance(value, Tree) else value
            message = parts
        own = client_kinds(message, self.problem)
        up = self.reply_stages
        if not self.message_stages:
            return Broadcast(phase, message, round_, iteration, submodel, None, up, own)
        kinds = message_kinds(message, self.problem)
        key = fold_in(fold_in(root(self.seed, "stages"), self.tasks_made), index)
        payload, _ = encode_values(self.message_stages, message, kinds, key, {})
        like = templates(kinds, self.problem, submodel)
        received = decode_values(self.message_stages, payload, kinds, like)
        return Broadcast(phase, received, round_, iteration, submodel, payload, up, own)

    def _steps(
        self, phase: Phase, keys: Sequence[int], clients: Sequence[int], round_: int
    ) -> list[int]:
        """How many steps each client takes."""
        if phase.steps == "local":
            return self.environment.draw_local_steps(keys, clients)
        if phase.epochs is None:
            return [int(phase.steps)] * len(clients)
        steps = []
        for client in clients:
            with on_client(client, f"phase {phase.name!r}, round {round_}"):
                samples = self.samples(client, phase.epoch_side)
            steps.append(phase.steps_on(samples, self.environment.batch_size))
        return steps

    def tasks_to_dict(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """Tasks as plain values and tensors, for a checkpoint; `tasks_from_dict` reads them."""
        broadcasts = list(group_by_broadcast(tasks))
        index_of = {broadcast: index for index, broadcast in enumerate(broadcasts)}
        return {
            "broadcasts": [_plain_broadcast(broadcast) for broadcast in broadcasts],
            "tasks": [_plain_task(task, index_of[task.broadcast]) for task in tasks],
        }

    def tasks_from_dict(self, plain: Mapping[str, Any], device: str) -> list[Task]:
        """The tasks that plain values describe, with their tensors on a device."""
        axes = self.problem.axes
        total = count_units(axes, {**self.problem.x, **self.problem.y})

        def to_device(values: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda t: t.to(device), values)

        broadcasts = []
        for phase, message, round_, iteration, kept in plain["broadcasts"]:
            broadcasts.append(
                Broadcast(
                    Phase.from_dict(phase),
                    to_device(message),
                    round_,
                    iteration,
                    kept and Submodel(axes, total, kept),
                    stages=self.reply_stages,
                    client_kinds=client_kinds(message, self.problem),
                )
            )
        return [Task(broadcasts[index], *to_device(rest)) for index, *rest in plain["tasks"]]


def _plain_broadcast(broadcast: Broadcast) -> tuple[Any, ...]:
    kept = None
    if broadcast.submodel:
        kept = dict(broadcast.submodel.kept)
    return (
        broadcast.phase.to_dict(),
        dict(broadcast.message),
        broadcast.round,
        broadcast.iteration,
        kept,
    )


def _plain_task(task: Task, broadcast_index: int) -> tuple[Any, ...]:
    return (
        broadcast_index,
        task.number,
        task.position,
        task.client,
        task.steps,
        dict(task.client_message),
        task.key,
        task.weight,
    )
