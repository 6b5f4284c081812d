"""Exchanges: tasks are sent, what the transport reports of them is booked, and replies are taken.

Whatever a transport reports passes through `Exchanges._handle_report`, where bytes and costs are
booked and replies are handed to `Replies`, which refuses wrong ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from fedbilevel.core.problem import Problem
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.ledger import Ledger, RepliesRefused, RoundStarted
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.replies import QuorumError, Replies, log
from fedbilevel.federation.reports import costs_of, end_time, ended_tasks, in_client_order
from fedbilevel.federation.screening import FEWEST, Screen
from fedbilevel.federation.task import Task
from fedbilevel.federation.transport import Arrived, Rejected, Report, Transport


class Exchanges:
    """The exchanges of a federation with its clients, with and without a barrier.

    Args:
        problem: Has the shapes of x and y.
        transport: Carries tasks to the clients.
        environment: Says how many replies are needed, and which are too long.

    Attributes:
        ledger: What the run has cost so far.
        in_flight: The posted tasks that have not ended, by client.
    """

    def __init__(self, problem: Problem, transport: Transport, environment: Environment) -> None:
        self.problem = problem
        self.transport = transport
        self.min_replies = environment.min_replies
        self.screen: Screen | None = None
        if environment.norm_factor is not None:
            self.screen = Screen(environment.norm_factor)
        self.ledger = Ledger()
        self.in_flight: dict[int, Task] = {}
        # The replies of the last `ask` until they are checked, and how many clients were asked.
        self._pending: tuple[int, Replies] | None = None
        self._deferred_quorum_error = ""

    def ask(self, phase: Phase, tasks: Sequence[Task], iteration: int) -> Replies:
        """Send tasks, and wait until all of them have ended: one communication round.

        Args:
            phase: The phase of all tasks.
            tasks: The tasks. Those of excluded clients are not sent.
            iteration: The present iteration.

        Returns:
            The accepted replies.

        Raises:
            QuorumError: Too few replies were accepted, now or where they were pending before.
        """
        asked = len(tasks)
        excluded = self.transport.excluded
        if excluded:
            tasks = [task for task in tasks if task.client not in excluded]
        replies = self._start_round(phase)
        self._send_and_receive(tasks, replies, iteration)
        replies.compare()
        replies.idle = [task.client for task in sorted(tasks, key=end_time)]
        # While these replies are computed on a GPU, those of the last `ask` are checked.
        self.check_pending()
        self._pending = asked, replies
        if not replies.has_pending:
            self.check_pending()
        return replies

    def local(self, phase: Phase, tasks: Sequence[Task], iteration: int) -> Replies:
        """Have clients do tasks on values of their own: nothing is sent, and it is no round.

        Args:
            phase: The phase of all tasks.
            tasks: The tasks.
            iteration: The present iteration.

        Returns:
            The replies, one per task.

        Raises:
            QuorumError: A reply is missing.
        """
        for task in tasks:
            task.broadcast.is_local = True
        label = f"phase {phase.name!r}, after round {self.ledger.rounds}"
        replies = Replies(label, phase, self.problem)
        self._send_and_receive(tasks, replies, iteration)
        if len(replies) < len(tasks):
            why = replies.refused[0] if replies.refused else "a task was lost"
            raise QuorumError(f"{label}: every client is needed, {why}")
        return replies

    def _send_and_receive(self, tasks: Sequence[Task], replies: Replies, iteration: int) -> None:
        """Send tasks with a barrier, and handle all reports of them."""
        reports: Iterable[Report] = itertools.chain(
            self.transport.send(tasks, True), self.transport.receive(tasks, len(tasks))
        )
        if not self.transport.ordered:
            reports = in_client_order(reports)
        for report in reports:
            self._handle_report(report, replies, iteration)

    def check_can_post(self, phase: Phase, clients: Sequence[int]) -> None:
        """Check that clients can be given tasks of a phase that are not waited for.

        Raises:
            RuntimeError: A client would have two tasks in flight, or tasks of another phase are in
                flight.
        """
        for client, times in Counter(clients).items():
            if client in self.in_flight or times > 1:
                raise RuntimeError(
                    f"client {client} would have two tasks in flight; it can have one at a time"
                )
        for other in itertools.islice(self.in_flight.values(), 1):
            if other.broadcast.phase.name != phase.name:
                name = other.broadcast.phase.name
                raise RuntimeError(
                    f"phase {phase.name!r} must wait: tasks of {name!r} are in flight"
                )

    def post(self, tasks: Sequence[Task]) -> None:
        """Send tasks without waiting for them; `collect` fetches their replies."""
        self.in_flight |= {task.client: task for task in tasks}
        for report in self.transport.send(tasks, False):
            self._handle_report(report, None, 0)

    def collect(self, count: int, iteration: int) -> Replies:
        """Wait for the next replies of posted tasks: one communication round.

        Args:
            count: How many accepted replies to wait for, at least.
            iteration: The present iteration.

        Returns:
            The accepted replies; fewer than `count` if nothing else is in flight.

        Raises:
            RuntimeError: The transport reports nothing more.
        """
        phase = next(iter(self.in_flight.values())).broadcast.phase
        if self.screen is not None and not self.screen.has_seen(phase.name):
            # Nobody knows yet how long a reply is: the first ones are compared with each other.
            count = max(count, min(FEWEST, len(self.in_flight)))
        replies = self._start_round(phase)
        while self.in_flight and len(replies) < count:
            reports = list(self.transport.receive(None, count - len(replies)))
            if not reports:
                name = type(self.transport).__name__
                raise RuntimeError(
                    f"{name} reports nothing of {len(self.in_flight)} tasks in flight"
                )
            for task in sorted(ended_tasks(reports), key=end_time):
                task.position = len(replies.idle)
                replies.idle.append(task.client)
            for report in reports:
                self._handle_report(report, replies, iteration)
            replies.compare()
        self._count_refused(replies)
        return replies

    def _start_round(self, phase: Phase) -> Replies:
        self.ledger.book(RoundStarted(phase.name))
        label = f"phase {phase.name!r}, round {self.ledger.rounds}"
        return Replies(label, phase, self.problem, self.screen)

    def _handle_report(self, report: Report, replies: Replies | None, iteration: int) -> None:
        """Book what a transport reports, and hand replies that arrived to `replies`."""
        if isinstance(report, Arrived):
            report.results.tasks[0].broadcast.check_unchanged()
        for event in costs_of(report):
            self.ledger.book(event)
        match report:
            case Arrived(results):
                assert replies is not None
                replies.accept(results, iteration)
            case Rejected(client, why):
                assert replies is not None
                replies.refuse(client, why)
        for task in ended_tasks([report]):
            if self.in_flight.get(task.client) is task:
                del self.in_flight[task.client]

    def check_pending(self) -> None:
        """Check the replies of the last `ask`, if they are still pending, and its quorum.

        Raises:
            QuorumError: Too few of them were accepted.
        """
        self._conclude_ask()
        if self._deferred_quorum_error:
            raise QuorumError(self._deferred_quorum_error)

    def _conclude_ask(self) -> None:
        """Count the refused replies of the last `ask`, and note whether a quorum is missing."""
        if self._pending is None:
            return
        asked, replies = self._pending
        self._pending = None
        replies.check_pending()
        self._count_refused(replies)
        needed = min(self.min_replies, asked) if replies.phase.quorum else 0
        if len(replies) < needed:
            accepted = f"{len(replies)} of {asked} replies were accepted"
            error = f"{replies.label}: {accepted}, at least {needed} needed"
            if replies.refused:
                error += f" ({replies.refused[0]})"
            self._deferred_quorum_error = error

    def refuse(self, client: int, why: str) -> None:
        """Count a reply that was accepted as refused after all."""
        log.warning("round %d: reply refused, client %d: %s", self.ledger.rounds, client, why)
        self.ledger.book(RepliesRefused(1))
        self.transport.notify_refused([client])

    def _count_refused(self, replies: Replies) -> None:
        self.ledger.book(RepliesRefused(len(replies.refused)))
        self.transport.notify_refused(replies.refused_clients)

    @contextmanager
    def uncharged(self, setting: str) -> Iterator[None]:
        """A context in which exchanges cost nothing and take no time.

        Args:
            setting: The setting that asks for it, for the error.

        Raises:
            RuntimeError: The transport has a real clock.
        """
        try:
            paused_clock = self.transport.paused_clock()
        except RuntimeError as error:
            raise RuntimeError(f"{setting}, but {error}") from None
        self.check_pending()  # pending replies are booked before the costs are set aside
        booked = self.ledger
        self.ledger = deepcopy(booked)
        try:
            with paused_clock:
                yield
                self.check_pending()
        finally:
            self.ledger = booked

    def mark(self) -> dict[str, Any]:
        """Mark the present state, for `rollback`; the previous mark is void."""
        return {
            "ledger": self.ledger.mark(),
            "transport": self.transport.mark(),
            "norms": self._norms(),
            "in_flight": dict(self.in_flight),
            "pending": self._pending,
            "deferred_quorum_error": self._deferred_quorum_error,
        }

    def rollback(self, mark: Mapping[str, Any]) -> None:
        """Undo everything since the mark."""
        self.ledger.rollback(mark["ledger"])
        self.transport.rollback(mark["transport"])
        self._restore_norms(mark["norms"])
        self.in_flight = dict(mark["in_flight"])
        self._pending = mark["pending"]
        self._deferred_quorum_error = mark["deferred_quorum_error"]

    def snapshot(self) -> dict[str, Any]:
        """The state as plain values and tensors, for a checkpoint, without the tasks in flight."""
        self._conclude_ask()
        return {
            "ledger": self.ledger.to_dict(),
            "transport": self.transport.snapshot(),
            "norms": self._norms(),
            "deferred_quorum_error": self._deferred_quorum_error,
        }

    def restore(self, snapshot: Mapping[str, Any], in_flight: Mapping[int, Task]) -> None:
        """Resume from a snapshot, with the tasks that were in flight."""
        self.ledger = Ledger.from_dict(snapshot["ledger"])
        self._restore_norms(snapshot["norms"])
        self._deferred_quorum_error = snapshot["deferred_quorum_error"]
        self.in_flight = dict(in_flight)
        self.transport.restore(snapshot["transport"], self.in_flight)

    def _norms(self) -> dict[str, Any]:
        if self.screen is None:
            return {}
        return self.screen.plain()

    def _restore_norms(self, norms: Mapping[str, Any]) -> None:
        if self.screen is not None:
            self.screen.restore(norms)
