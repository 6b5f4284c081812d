"""Who is asked to do what: tasks with keyed draws, their number of steps, and the messages they are sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, root
from fedbilevel.core.submodels import Submodel, units
from fedbilevel.core.tree import Tree
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.replies import kinds_of, like
from fedbilevel.federation.stages import decoded, encoded
from fedbilevel.federation.task import Broadcast, Task, by_broadcast, on_client

Own = Sequence[Mapping[str, Any]] | None  # what each client alone is sent
Submodels = Sequence[Submodel | None] | None


class Assigner:
    """Makes the tasks of a federation's clients; `made` counts them.

    Args:
        problem: what is solved.
        clients: how many clients are registered.
        environment: local steps, batch size and stages.
        weights: returns p_i for each client; called when it is first needed.
        samples: how many training samples a client holds.
        seed: the draws of every task are keyed by it.
    """

    def __init__(
        self,
        problem: Problem,
        clients: int,
        environment: Environment,
        weights: Callable[[], Sequence[float]],
        samples: Callable[[int], int],
        seed: int,
    ) -> None:
        self.problem = problem
        self.clients = clients
        self.environment = environment
        self.weights = weights
        self.samples = samples
        self.seed = seed
        self.made = 0
        self.up = [stage for stage in environment.stages if stage.direction == "up"]
        self.down = [stage for stage in environment.stages if stage.direction == "down"]

    def assign(
        self,
        phase: Phase,
        clients: Sequence[int],
        each: Own,
        submodels: Submodels,
        message: Mapping[str, Any],
        round_: int,
        iteration: int,
    ) -> list[Task]:
        """A task per client."""
        self._check(phase, clients, each, submodels)
        broadcasts: dict[Submodel | None, Broadcast] = {}
        for index, part in enumerate(dict.fromkeys(submodels or [None])):
            key = fold_in(fold_in(root(self.seed, "stages"), self.made), index)
            broadcasts[part] = self._broadcast(phase, message, round_, iteration, part, key)
        numbers = torch.arange(self.made, self.made + len(clients))
        self.made += len(clients)
        keys = fold_in(fold_in(root(self.seed, phase.name), numbers), torch.tensor(clients))
        weights = self.weights()
        columns = zip(
            [broadcasts[part] for part in submodels or [None] * len(clients)],
            numbers.tolist(),
            itertools.count(),
            clients,
            self._steps(phase, keys, clients, round_),
            each or itertools.repeat({}),
            fold_in(keys, 1).tolist(),
            [self.clients * weights[client] for client in clients],
            strict=False,
        )
        return [Task(*column) for column in columns]

    def _check(self, phase: Phase, clients: Sequence[int], each: Own, submodels: Submodels) -> None:
        if not isinstance(phase, Phase):
            raise TypeError(f"phase is {phase!r}; it must be a Phase, such as Descend(lr_x=0.1)")
        for client in clients:
            checks.integer("client", client, least=0, most=self.clients - 1)
        if each is not None and len(each) != len(clients):
            raise ValueError(
                f"each has {len(each)} entries; it must have one for each of {len(clients)} clients"
            )
        if submodels is not None and len(submodels) != len(clients):
            raise ValueError(
                f"submodels has {len(submodels)} entries; it must have one for each of {len(clients)}"
            )

    def _broadcast(
        self,
        phase: Phase,
        message: Mapping[str, Any],
        round_: int,
        iteration: int,
        part: Submodel | None,
        key: Tensor,
    ) -> Broadcast:
        """A message, cut to a submodel, with its stages: encoded here, and decoded as every client would."""
        if part:
            message = {
                name: part.cut(value) if isinstance(value, Tree) else value
                for name, value in message.items()
            }
        if not self.down:
            return Broadcast(phase, message, round_, iteration, part, stages=self.up)
        kinds = kinds_of(message, self.problem)
        payload, _ = encoded(self.down, message, kinds, key, {})
        received = decoded(self.down, payload, kinds, like(kinds, self.problem, part))
        return Broadcast(phase, received, round_, iteration, part, payload, self.up)

    def _steps(self, phase: Phase, keys: Tensor, clients: Sequence[int], round_: int) -> list[int]:
        """How many steps each client takes."""
        if phase.steps == "local":
            return self.environment.steps(fold_in(keys, 0), clients)
        if phase.epochs is None:
            return [int(phase.steps)] * len(clients)
        steps = []
        for client in clients:
            with on_client(client, f"phase {phase.name!r}, round {round_}"):
                samples = self.samples(client)
            steps.append(phase.steps_on(samples, self.environment.batch_size))
        return steps

    def plain(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """Tasks as plain values and tensors, for a file."""
        broadcasts = list(by_broadcast(tasks))
        numbers = {broadcast: number for number, broadcast in enumerate(broadcasts)}
        return {
            "broadcasts": [_plain(b) for b in broadcasts],
            "tasks": [t.plain(numbers[t.broadcast]) for t in tasks],
        }

    def load(self, plain: Mapping[str, Any], device: str) -> list[Task]:
        """The tasks that `plain` describes."""
        axes = self.problem.axes
        total = units(axes, {**self.problem.x, **self.problem.y})

        def here(values: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda t: t.to(device), values)

        broadcasts = []
        for phase, message, round_, iteration, kept in plain["broadcasts"]:
            part = kept and Submodel(axes, total, kept)
            broadcasts.append(
                Broadcast(Phase.load(phase), here(message), round_, iteration, part, stages=self.up)
            )
        return [Task(broadcasts[number], *here(rest)) for number, *rest in plain["tasks"]]


def _plain(broadcast: Broadcast) -> tuple[Any, ...]:
    kept = dict(broadcast.submodel.kept) if broadcast.submodel else None
    return (
        broadcast.phase.plain(),
        dict(broadcast.message),
        broadcast.round,
        broadcast.iteration,
        kept,
    )
