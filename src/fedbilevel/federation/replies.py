"""Replies: what clients answered in one exchange, checked, weighted and averaged.

A reply of a wrong shape or dtype, or with a value that is not finite, is refused here; `kinds.py`
has the check of shapes. A late reply never gets here: the transport gives its task up at the
deadline, in a simulation by `OutcomeSampler.draw_outcomes` (transports/_outcomes.py), on Flower by
`FlowerTransport._lose_late_task` (deploy/flower/transport.py).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.devices import constant, fetch_async
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree, is_finite
from fedbilevel.federation.kinds import reply_mismatch, templates, unflatten_value
from fedbilevel.federation.phase import Message, Phase
from fedbilevel.federation.screening import Screen, stack_norms
from fedbilevel.federation.stacks import reply_at, weighted_sum
from fedbilevel.federation.stages import decode_values
from fedbilevel.federation.task import Broadcast, Results, Sums, Values
from fedbilevel.federation.totals import Totals

log = logging.getLogger("fedbilevel")


class QuorumError(RuntimeError):
    """An exchange ended with fewer accepted replies than `Environment.min_replies`.

    It is also raised for a mean over no reply, and where too few clients are available. It ends a
    run with the status "diverged".
    """


class Reply(NamedTuple):
    """One client's accepted reply.

    Args:
        position: The index of the client among those that were asked or, without a barrier, of its
            task among those that have ended.
        client: Who replied.
        steps: The number of local steps that it took.
        weight: n p_i; 1 for uniform weights.
        staleness: The iterations between the message and the arrival of the reply; 0 for an `ask`.
        values: The reply, by name; empty where the phase declares that replies are only `summed`.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> method = fb.algorithms.SimFBO()
        >>> s = method.init(task.problem)
        >>> for reply in fed.ask(method.descend(), [3, 1], x=s.x, y=s.y, z=s.z):
        ...     print(reply.position, reply.client, reply.weight, reply.staleness)
        0 3 1.0 0
        1 1 1.0 0
    """

    position: int
    client: int
    steps: int
    weight: float
    staleness: int
    values: Mapping[str, Any]


class _Pending(NamedTuple):
    """Replies whose sums were taken before anybody knew whether they are finite."""

    replies: Sequence[Reply]
    names: list[str]  # the value that each row of `finite` belongs to
    finite: Callable[[], Tensor]  # `Sums.finite`; waits for the device that computes it


class _Candidates(NamedTuple):
    """Replies of the declared shapes that are yet to be compared with each other."""

    replies: Sequence[Reply]
    stack: Values
    submodel: Submodel | None


class Replies:
    """The accepted replies of one exchange.

    Two means are taken over them. With C the clients whose replies were accepted, n the number of
    registered clients and p_i their weights,

        mean(v)          = sum over i in C of p~_i v_i,   p~_i = (n / |C|) p_i
        coverage_mean(v) = sum p_i v_i / sum p_i over those i in C that hold a coordinate

    `mean` is for directions and displacements, whose expectation over cohorts is the weighted mean
    over all clients. It is not for iterates: p~ sums to 1 only for uniform weights. `coverage_mean`
    is for submodels, and is taken coordinate by coordinate.

    Iterating over the replies yields each `Reply` in the order of `position`; `len(replies)` counts
    them.

    On a GPU, sums are taken without waiting to know whether all replies are finite. Such replies
    are pending until `check_pending` names those that are not; the sums never contain them.

    Args:
        label: The exchange in words, for messages: phase and round.
        phase: What the clients did; it declares the kinds of their values.
        problem: Has the shapes of x and y.
        screen: Refuses replies that are too long; None: no reply is.

    Attributes:
        idle: The clients whose tasks have ended, with or without a reply, in the order of ending.
        refused: For each refused reply the client and the reason, in words.
        refused_clients: For each refused reply the client.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> method = fb.algorithms.SimFBO()
        >>> s = method.init(task.problem)
        >>> replies = fed.ask(method.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        >>> len(replies), replies.idle, replies.refused
        (4, [0, 1, 2, 3], [])
        >>> sorted(replies.mean("qx"))
        ['x']
        >>> replies.mean("steps")
        1.0
    """

    def __init__(
        self, label: str, phase: Phase, problem: Problem, screen: Screen | None = None
    ) -> None:
        self.label = label
        self.phase = phase
        self.problem = problem
        self.screen = screen
        self._candidates: list[_Candidates] = []
        self.idle: list[int] = []
        self.refused: list[str] = []
        self.refused_clients: list[int] = []
        self._pending: list[_Pending] = []
        self._replies: list[Reply] = []  # accepted replies, without those pending
        self._totals = Totals(phase, problem)  # over accepted replies, those pending included

    def mean(self, name: str) -> Any:
        """The mean over accepted replies, with weights p~_i = (n / |C|) p_i.

        Args:
            name: A value that the phase replies with, or "steps" for the number of local steps.

        Returns:
            A tree, or a number for a scalar; a 0-d tensor where replies are pending on a GPU.

        Raises:
            QuorumError: No reply was accepted.
            KeyError: The phase replies with no such value.
            RuntimeError: The value comes from submodels; it has a `coverage_mean` only.
        """
        self._check_known(name)
        if name in self._totals.spread:
            raise RuntimeError(
                f"{self.label}: {name!r} comes from submodels; it has a coverage_mean, no mean"
            )
        mean = self._totals.sums[name]
        if self._pending:
            return mean / self._totals.count
        if len(self) > 1:
            mean = mean / len(self)
        if isinstance(mean, Tree):
            return mean
        return float(mean)

    def coverage_mean(self, name: str) -> Tree:
        """The weighted mean, in every coordinate over the clients that hold it.

        Args:
            name: A value shaped like x or y that the phase replies with.

        Returns:
            In every coordinate sum p_i v_i / sum p_i over the clients that hold it, 0 where nobody
            does. Where all clients hold the whole model, this is the weighted mean over the cohort.

        Raises:
            QuorumError: No reply was accepted.
            KeyError: The phase replies with no such value.
        """
        self._check_known(name)
        return self._totals.coverage_mean(name)

    def _check_known(self, name: str) -> None:
        """Refuse a mean over no reply, or of a value that the phase does not reply with."""
        if not self._pending and not self._replies:
            raise QuorumError(f"{self.label}: no reply was accepted")
        names = {**self._totals.sums, **self._totals.spread}
        if name not in names:
            raise KeyError(
                f"phase {self.phase.name!r} replies with {', '.join(names)}, not {name!r}"
            )

    def coverage(self) -> dict[str, Tensor]:
        """The `coverage_metrics` of x and of y, where they come from submodels."""
        return self._totals.coverage()

    def __len__(self) -> int:
        self.check_pending()
        return len(self._replies)

    def __iter__(self) -> Iterator[Reply]:
        self.check_pending()
        return iter(sorted(self._replies, key=lambda reply: reply.position))

    def accept(self, results: Results, iteration: int) -> None:
        """Take the replies that match their declaration, and refuse the others.

        Args:
            results: What has arrived.
            iteration: The present iteration, for the staleness of the replies.
        """
        groups: dict[Submodel | None, list[int]] = defaultdict(list)
        for index, task in enumerate(results.tasks):
            groups[task.broadcast.submodel].append(index)
        for indices in groups.values():
            self._accept_group(results.select(indices), iteration)

    def _accept_group(self, results: Results, iteration: int) -> None:
        """`accept` for replies from one submodel."""
        broadcast = results.tasks[0].broadcast
        replies = [
            Reply(
                task.position,
                task.client,
                task.steps,
                task.weight,
                iteration - task.broadcast.iteration,
                {},
            )
            for task in results.tasks
        ]
        if results.sums:
            self.add_sums(replies, results.sums, broadcast.submodel)
            return
        values = results.values
        why = None
        if broadcast.stages:
            values, why = self._decode(values, broadcast)
        if why is None:
            why = reply_mismatch(
                values, self.phase.reply, self.problem, broadcast.submodel, len(replies)
            )
        if why is not None:
            for reply in replies:
                self.refuse(reply.client, why)
            return
        if type(self.phase).contradiction is not Phase.contradiction:
            results, replies = self._without_contradictions(
                results._replace(values=values), replies
            )
            values = results.values
            if not replies:
                return
        if self.screen is not None:
            self._candidates.append(_Candidates(replies, values, broadcast.submodel))
        else:
            self.add_stack(replies, values, broadcast.submodel)

    def _without_contradictions(
        self, results: Results, replies: list[Reply]
    ) -> tuple[Results, list[Reply]]:
        """Refuse replies that contradict their messages; return the others."""
        kept = []
        for index, task in enumerate(results.tasks):
            message = Message(**task.broadcast.message, **task.client_message)
            why = self.phase.contradiction(message, reply_at(results.values, index))
            if why is None:
                kept.append(index)
            else:
                self.refuse(task.client, why)
        return results.select(kept), [replies[index] for index in kept]

    def compare(self) -> None:
        """Add the replies that wait for being compared, and refuse those that are too long."""
        if self.screen is None or not self._candidates:
            return
        norms: dict[str, list[float]] = defaultdict(list)
        for candidates in self._candidates:
            for name, value in candidates.stack.items():
                if each := stack_norms(value):
                    norms[name] += each
        reasons = iter(self.screen.judge(self.phase.name, norms)) if norms else iter(())
        for replies, stack, submodel in self._candidates:
            credible = []
            for index, reply in enumerate(replies):
                why = next(reasons, None)
                if why is None:
                    credible.append(index)
                else:
                    self.refuse(reply.client, why)
            if credible:
                chosen = [replies[index] for index in credible]
                part = pytree.tree_map(lambda t, rows=credible: t[rows], stack)
                self.add_stack(chosen, part, submodel)
        self._candidates = []

    def _decode(self, payload: Values, broadcast: Broadcast) -> tuple[Values, str | None]:
        """Decode a stack of replies: the values and None, or the payload and what went wrong."""
        kinds = self.phase.reply
        like = templates(kinds, self.problem, broadcast.submodel)

        def decode(payload: Values) -> Values:
            return decode_values(broadcast.stages, payload, kinds, like)

        try:
            return torch.func.vmap(decode)(payload), None
        except Exception as error:  # a client can send anything
            return payload, f"replied with what its stages cannot decode ({type(error).__name__})"

    def add_stack(
        self, replies: Sequence[Reply], stack: Values, submodel: Submodel | None = None
    ) -> None:
        """Add replies of the declared shapes, and refuse those that are not finite.

        Args:
            replies: The replies, without their values.
            stack: Their values; the leading axis goes over `replies`.
            submodel: The part of the model that these clients hold.
        """
        steps = constant(tuple([reply.steps for reply in replies]), "cpu", torch.float64)
        stack = {**stack, "steps": steps}
        sums = weighted_sum(stack, _weights(replies))
        if not is_finite(sums):
            indices = []
            for index, reply in enumerate(replies):
                if self._check_finite(reply.client, reply_at(stack, index)):
                    indices.append(index)
            if not indices:
                return
            replies = [replies[index] for index in indices]
            stack = pytree.tree_map(lambda t: t[indices], stack)
            sums = weighted_sum(stack, _weights(replies))
        self._totals.add(sums, len(replies), _total_weight(replies), submodel)
        if self.phase.summed:
            self._replies += replies
            return
        for index, reply in enumerate(replies):
            self._replies.append(reply._replace(values=reply_at(stack, index)))

    def add_sums(
        self, replies: Sequence[Reply], sums: Sums, submodel: Submodel | None = None
    ) -> None:
        """Add replies that were summed where they were computed; on a GPU, without waiting for it.

        Args:
            replies: The replies, without their values.
            sums: Their sums, and which of them are finite.
            submodel: The part of the model that these clients hold.
        """
        totals: Values = {"steps": sums.steps}
        for name, total in sums.totals.items():
            totals[name] = total
            if not submodel or name not in self._totals.variables:
                totals[name] = unflatten_value(total, self.phase.reply[name], self.problem)
        self._totals.add(totals, sums.accepted, sums.weight, submodel)
        self._pending.append(_Pending(replies, list(sums.totals), fetch_async(sums.finite)))
        if not sums.finite.is_cuda:
            self.check_pending()

    @property
    def has_pending(self) -> bool:
        """Whether some replies were summed and are yet to be checked."""
        return bool(self._pending)

    def check_pending(self) -> None:
        """Check the replies that are pending, and refuse those that are not finite."""
        for replies, names, finite in self._pending:
            for reply, checks in zip(replies, finite().T.tolist(), strict=True):
                if all(checks):
                    self._replies.append(reply)
                else:
                    self.refuse(reply.client, f"{names[checks.index(False)]} is not finite")
        self._pending = []

    def _check_finite(self, client: int, values: Mapping[str, object]) -> bool:
        for name, value in values.items():
            if not is_finite(value):
                self.refuse(client, f"{name} is not finite")
                return False
        return True

    def refuse(self, client: int, why: str) -> None:
        """Refuse a reply of a client, and log the reason."""
        self.refused_clients.append(client)
        self.refused.append(f"client {client}: {why}")
        log.warning("%s: reply refused, %s", self.label, self.refused[-1])


def _total_weight(replies: Sequence[Reply]) -> float:
    return sum(reply.weight for reply in replies)


def _weights(replies: Sequence[Reply]) -> Tensor:
    return constant(tuple([reply.weight for reply in replies]), "cpu", torch.float64)
