"""The federation over Flower, and its transport, which sends tasks to clients behind a SuperLink.

Flower carries messages and lists the nodes. What is here: which node is which client, deadlines,
resending, and reading replies. Checking, averaging, quorums and costs belong to the federation and
are the same as in a simulation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.deploy.flower._claims import Claims
from fedbilevel.deploy.flower._grid import (
    EXPIRED_CODE,
    NODE_DIED_CODES,
    REPLY_POLL_S,
    GridConnection,
    Sent,
)
from fedbilevel.deploy.flower._members import Members
from fedbilevel.deploy.flower._replies import (
    read_losses,
    read_metrics,
    read_task_reply,
    reply_limits,
    request_values,
)
from fedbilevel.deploy.flower.wire import Limits, Values, encode
from fedbilevel.execution.losses import evaluation_subset
from fedbilevel.federation import Federation, QuorumError
from fedbilevel.federation.conduct import Conduct
from fedbilevel.federation.environment import SIMULATED, Environment
from fedbilevel.federation.kinds import message_kinds
from fedbilevel.federation.phase import Side
from fedbilevel.federation.replies import log
from fedbilevel.federation.screening import Strikes
from fedbilevel.federation.stages import Clip
from fedbilevel.federation.task import Task
from fedbilevel.federation.transport import Arrived, Departed, Missed, Report, Transport

T = TypeVar("T")

FAREWELL_S = 15.0  # in which nodes hear that the study has ended; a stock SuperNode needs 5 to 10
MIN_TTL_S = 0.1  # of a message; Flower refuses a time to live that is not positive


def flower_federation(
    grid: Grid,
    problem: Problem,
    clients: int,
    environment: Environment | None,
    table: Mapping[str, Any],
    conduct: Conduct | None = None,
    *,
    weights: str = "uniform",
    seed: int = 0,
    device: str = "cpu",
) -> Federation:
    """Return a federation of real clients behind a Flower `Grid`.

    With the same seed, the same clients are sent the same tasks with the same random draws as by
    `fb.simulated_federation`, and the results agree to rounding.

    Args:
        grid: Flower's connection to the nodes, as the main function of a `ServerApp` receives it.
        problem: The bilevel problem; the server needs no data.
        clients: The number of registered clients.
        environment: Participation, local steps, batch size and so on; delays, faults and stragglers
            are for simulations. None: the default environment.
        table: The experiment as nested tables (`Config.table`), which the clients are sent.
        conduct: Deadlines, and how many refused replies a client is allowed. None: the defaults.
        weights: "uniform", or "samples" for weights in proportion to the training samples.
        seed: Seed of all random draws.
        device: Where the server computes.

    Returns:
        A federation for `fb.solve(..., federation=...)` or `Run`.

    Raises:
        ValueError: There are no clients, the environment simulates what real clients have by
            themselves, or `conduct.start_clients` does not fit the other settings.

    Examples:
        The server's main function; `flwr run` calls it.

        >>> from flwr.serverapp import ServerApp
        >>> import fedbilevel as fb
        >>> from fedbilevel.experiments import config as configs
        >>> app = ServerApp()
        >>> @app.main()
        ... def main(grid, context):
        ...     config = configs.resolve(*configs.read("digits"))
        ...     problem = config.load_task(None).problem
        ...     fed = flower_federation(grid, problem, 20, config.environment, config.table)
        ...     fb.solve(problem, [], "simfbo", rounds=10, federation=fed, out="runs/real")
    """
    if clients == 0:
        raise ValueError("clients is 0; a federation needs at least one")
    environment = environment or Environment()
    conduct = conduct or Conduct()
    if conduct.norm_bound is not None:
        # Stages are undone in reverse order: the first one clips what the others have decoded.
        clip = Clip(norm=conduct.norm_bound)
        environment = replace(environment, stages=(clip, *environment.stages))
    environment = replace(
        environment,
        norm_factor=environment.norm_factor or conduct.norm_factor,
        strikes=environment.strikes or conduct.strikes,
    )
    transport = FlowerTransport(
        grid,
        problem,
        clients,
        environment,
        table,
        conduct,
        weights=weights,
        seed=seed,
        device=device,
    )
    return Federation(
        problem,
        clients,
        transport,
        environment,
        weights=transport.weights,
        seed=seed,
        device=device,
    )


@dataclass(eq=False)
class PendingTask:
    """A client task without a reply so far.

    Attributes:
        task: The task.
        deadline: When it is lost, on the clock of `time.monotonic`.
        posted: Whether it was sent without a barrier.
        limits: How large its reply may be.
        sent: The message that carries it; None before it is sent, and after its node died.
        node: The node that it was sent to.
        departed: Whether it was sent at all.
    """

    task: Task
    deadline: float
    posted: bool
    limits: Limits
    sent: Sent | None = None
    node: int = 0
    departed: bool = False


class FlowerTransport(Transport):
    """Sends client tasks to nodes, resends them if a node died, and reports how they ended.

    A task has `conduct.deadline_s` seconds. Its message expires then, so that Flower drops a late
    reply, and the task is reported as lost (`_lose_late_task`). A late reply cannot be taken for
    the reply to another task either: it is pulled by the id of the message that it answers, is
    sealed with the token of that message, and repeats the number of its task.

    Args:
        grid: Flower's connection to the nodes.
        problem: The bilevel problem.
        clients: The number of registered clients.
        environment: The conditions under which clients take part.
        table: The experiment as nested tables, which the clients are sent.
        conduct: Deadlines, and how many refused replies a client is allowed.
        weights: "uniform" or "samples".
        seed: Seed of all random draws.
        device: Where the server computes.

    Attributes:
        job: The name of the run, hexadecimal; a resumed run keeps it.
        members: Which node is which client.
        strikes: How many replies of each client were refused.

    Raises:
        ValueError: The environment simulates what real clients have by themselves, or
            `conduct.start_clients` does not fit the other settings.

    Examples:
        >>> fed = flower_federation(grid, problem, 4, None, table)  # doctest: +SKIP
        >>> fed.transport.present  # doctest: +SKIP
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        grid: Grid,
        problem: Problem,
        clients: int,
        environment: Environment,
        table: Mapping[str, Any],
        conduct: Conduct,
        *,
        weights: str,
        seed: int,
        device: str,
    ) -> None:
        for name in SIMULATED:
            if getattr(environment, name) is not None:
                raise ValueError(
                    f"environment.{name} is for simulations; it must not be set for real clients"
                )
        self.weighting = checks.one_of("weights", weights, ("uniform", "samples"))
        self.start_clients = conduct.start_clients or clients
        checks.integer(
            "start_clients", self.start_clients, least=environment.min_replies, most=clients
        )
        if weights == "samples" and self.start_clients < clients:
            raise ValueError(
                f"start_clients is {self.start_clients}; "
                f"with weights by samples it must be all {clients} clients"
            )
        self.problem = problem
        self.clients = clients
        self.environment = environment
        self.table = dict(table)
        self.conduct = conduct
        self.seed = seed
        self.device = device
        self.job = secrets.token_hex(8)
        self.grid = GridConnection(grid)
        if conduct.samples is not None and len(conduct.samples) != clients:
            raise ValueError(
                f"conduct.samples has {len(conduct.samples)} numbers; there are {clients} clients"
            )
        self.claims = Claims(conduct.claim_factor, conduct.samples, environment.batch_size)
        self.members = Members(
            self.grid,
            clients,
            lambda: encode(job=self.job, table=self.table),
            conduct.deadline_s,
            self.claims,
        )
        self.strikes = Strikes(environment.strikes)
        self._pending: dict[int, PendingTask] = {}  # by the number of the task
        # Posted tasks of a server that was killed: their replies cannot reach this one.
        self._lost_in_restart: list[Task] = []
        self._started = False
        self._client_weights: list[float] = []
        self._wait_s = conduct.wait_s
        self._earlier_s = 0.0  # run time before the last restart
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the run began, without those between a kill and the restart."""
        return self._earlier_s + time.monotonic() - self._began

    @property
    def excluded(self) -> Collection[int]:
        """Clients that are sent nothing for the rest of the run, after too many refusals."""
        return self.strikes.excluded

    @property
    def present(self) -> list[int]:
        """The clients that can be sent tasks: connected, admitted and not excluded."""
        return sorted(client for client in self.members.node_of if client not in self.excluded)

    def unavailable(self, needed: int, busy: Collection[int]) -> Collection[int]:
        """Wait until `needed` clients are present and not busy; return all other clients."""
        self._wait_for_start()
        self._wait_for_clients(lambda: needed, busy)
        available = set(self.present) - set(busy)
        return set(range(self.clients)) - available

    def samples(self, client: int, side: Side) -> int:
        """Return the samples on one side that count for a client (see `Claims`).

        The number of steps of a task that lasts epochs is computed again when the task is sent.
        """
        return self.claims.samples(client, side)

    def weights(self) -> Sequence[float]:
        """Return p_i of each client; waits for the clients, whose samples they may depend on."""
        self._wait_for_start()
        return self._client_weights

    def farewell(self, status: str, x: Tree, y: Tree) -> None:
        """Tell the nodes that are present that the study has ended, so that `join` ends.

        A node that is not reached in time goes on waiting; nothing else depends on it.

        Args:
            status: "completed" or "diverged".
            x: The server's part of the final x, which makes a whole model of what a client owns.
            y: The server's part of the final y.
        """
        give_up_at = time.monotonic() + min(self.conduct.deadline_s, FAREWELL_S)
        unanswered = []
        for node in self.members.node_of.values():
            content = encode(job=self.job, table=self.table, ended=status, x=x, y=y)
            message_id = self.grid.push(Message(content, node, "query", ttl=FAREWELL_S))
            if message_id is not None:
                unanswered.append(message_id)
        while unanswered and time.monotonic() < give_up_at:
            unanswered = [name for name in unanswered if self.grid.pull(name) is None]
            time.sleep(REPLY_POLL_S)

    def _wait_for_start(self) -> None:
        """Wait for `start_clients` clients, once, before the first round of this process."""
        if self._started:
            return
        self._wait_for_clients(self._wanted_at_start, ())
        sizes = [1] * self.clients
        if self.weighting == "samples":
            sizes = [self.samples(client, "train") for client in range(self.clients)]
            self.claims.warn_of_bounded_samples()
        self._client_weights = [size / sum(sizes) for size in sizes]
        self._started = True
        log.info("%d of %d clients are present", len(self.present), self.clients)

    def _wanted_at_start(self) -> int:
        """Return how many clients must be present before round 1.

        One that was excluded before a restart will not come, nor will one whose node was refused.
        """
        hopeless = len(self.excluded) + self.members.refused_for_good
        wanted = min(self.start_clients, self.clients - hopeless)
        return max(wanted, self.environment.min_replies)

    def _wait_for_clients(self, needed: Callable[[], int], busy: Collection[int]) -> None:
        """Wait until `needed()` clients are present and not busy, `conduct.wait_s` at most.

        Once that was in vain, later calls do not wait: the run ends, and is evaluated on the way.
        """
        give_up_at = time.monotonic() + self._wait_s
        self.members.refresh()
        while len(set(self.present) - set(busy)) < needed():
            if time.monotonic() > give_up_at:
                self._wait_s = 0.0
                available = len(set(self.present) - set(busy))
                raise QuorumError(f"{available} clients are available, {needed()} are needed")
            if self.clients - len(self.excluded) < needed():
                raise QuorumError(f"clients {self.excluded} were excluded, {needed()} are needed")
            self.members.refresh()
            time.sleep(REPLY_POLL_S)

    def send(self, tasks: Sequence[Task], barrier: bool) -> Iterator[Report]:
        """Send tasks to their clients; the deadline of all of them counts from now."""
        self._wait_for_start()
        deadline = time.monotonic() + self.conduct.deadline_s
        for task in tasks:
            limits = reply_limits(task, self.problem)
            pending = PendingTask(task, deadline, posted=not barrier, limits=limits)
            self._pending[task.number] = pending
            yield from self._send_if_present(pending)

    def _send_if_present(self, pending: PendingTask) -> Iterator[Report]:
        """Send a task if its client is present; otherwise it stays pending without a message."""
        task = pending.task
        node = self.members.node_of.get(task.client)
        if node is None or task.client in self.excluded:
            return
        phase = task.broadcast.phase
        if phase.epochs is not None:  # the client may have joined after the task was made
            samples = self.samples(task.client, phase.epoch_side)
            task.steps = phase.steps_on(samples, self.environment.batch_size)
        ttl = max(pending.deadline - time.monotonic(), MIN_TTL_S)
        message = Message(
            _encode_task(task, self.problem, job=self.job, table=self.table), node, "train", ttl=ttl
        )
        pending.sent = self.grid.push(message)
        pending.node = node
        if pending.sent is None:
            self.members.remove(task.client, node)
        else:
            pending.departed = True
            yield Departed([task])

    def receive(self, tasks: Sequence[Task] | None, limit: int) -> Iterator[Report]:
        """Report how these tasks end; None: posted tasks, until `limit` replies have arrived."""
        if tasks is None:
            while self._lost_in_restart:
                yield Missed(self._lost_in_restart.pop())
            self._wait_for_clients(lambda: self.environment.min_replies, ())
        arrived: list[Arrived] = []
        while awaited := _pending_among(self._pending, tasks):
            self.members.refresh()
            nothing_new = True
            for pending in awaited:
                for report in self._poll(pending):
                    nothing_new = False
                    if isinstance(report, Arrived):
                        arrived.append(report)
                    else:
                        yield report
                if len(arrived) >= limit:
                    break
            if len(arrived) >= limit:
                break
            if nothing_new:
                time.sleep(REPLY_POLL_S)
        yield from self.claims.bound_costs(arrived)

    def _poll(self, pending: PendingTask) -> Iterator[Report]:
        """Send a task that is not sent yet, or read its reply, or give it up.

        Nobody waits for a client that has never joined, and without a barrier for none that is
        absent: it is idle, and is given a task in the next iteration.
        """
        task = pending.task
        if pending.sent is None:
            yield from self._send_if_present(pending)
            is_expected = not pending.posted and task.client in self.claims.sizes
            if not pending.departed and not is_expected:
                self._end(task)
                yield Missed(task, excluded=True)
                return
        elif (reply := self.grid.pull(pending.sent, pending.limits)) is not None:
            if reply.error_code in NODE_DIED_CODES:
                pending.sent = None  # resent if the client returns before the deadline
                self.members.remove(task.client, pending.node)
            elif reply.error_code == EXPIRED_CODE:
                pending.deadline = 0.0
            else:
                self._end(task)
                yield read_task_reply(task, reply, self.problem, self.device)
                return
        if task.client in self.excluded:
            self._end(task)
            yield Missed(task, excluded=True)
        elif time.monotonic() > pending.deadline:
            yield self._lose_late_task(pending)

    def _lose_late_task(self, pending: PendingTask) -> Missed:
        """Give up a task whose reply did not come in time; a late reply is never pulled.

        The client is sent no other task until it has answered a greeting.
        """
        task = pending.task
        self._end(task)
        self.members.remove(task.client, pending.node)
        log.warning("%s: client %d did not answer in time", task.broadcast, task.client)
        return Missed(task)

    def _end(self, task: Task) -> None:
        pending = self._pending.pop(task.number)
        if pending.posted:
            task.ended_at = self.now

    def notify_refused(self, clients: Sequence[int]) -> None:
        """Count refused replies; a client with too many of them is excluded."""
        for client in self.strikes.count(clients):
            count = self.strikes.refusals[client]
            log.warning("client %d is excluded after %d refused replies", client, count)

    def _request(
        self, what: str, clients: Collection[int], read: Callable[[Values], T], **values: Any
    ) -> dict[int, T]:
        """Return what those of the clients that are present answer to an `evaluate` message."""
        self._wait_for_start()
        with suppress(QuorumError):  # a run that ends because clients are missing is evaluated too
            self._wait_for_clients(lambda: 1, ())
        request = encode(job=self.job, table=self.table, **values)
        asked = set(clients) & set(self.present)
        deadline_s = self.conduct.deadline_s
        answers, refused = request_values(self.members, request, asked, deadline_s, what, read)
        self.notify_refused(refused)
        return answers

    def client_metrics(
        self, clients: Sequence[int], x: Tree, y: Tree
    ) -> dict[int, dict[str, float]]:
        """Return what clients report of their own models, measured as their task says."""
        reported = self._request("metrics", clients, read_metrics, x=x, y=y)
        return {client: reported[client] for client in sorted(reported)}

    def losses(self, x: Tree, y: Tree) -> dict[str, float]:
        """Return the mean losses that clients report; those without an answer are left out."""
        evaluated, share = evaluation_subset(self.seed, self.clients)
        reported = self._request("losses", evaluated, read_losses, x=x, y=y, share=share)
        reported = self.claims.bound_losses(reported)
        if not reported:
            return {"upper_loss": float("nan"), "lower_loss": float("nan")}
        total = sum(self._client_weights[client] for client in reported)
        upper = 0.0
        lower = 0.0
        for client, (upper_loss, lower_loss) in reported.items():
            upper += self._client_weights[client] * upper_loss
            lower += self._client_weights[client] * lower_loss
        return {"upper_loss": upper / total, "lower_loss": lower / total}

    def mark(self) -> tuple[dict[int, int], list[int]]:
        """Return what `rollback` needs: the refusals and the excluded clients."""
        return self.strikes.plain()

    def rollback(self, mark: Any) -> None:
        """Restore the refusals and the excluded clients of a mark."""
        self.strikes.restore(mark)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this transport for a checkpoint."""
        return {
            "strikes": self.strikes.plain(),
            "job": self.job,
            "now": self.now,
            "claims": self.claims.plain(),
        }

    def restore(self, snapshot: Mapping[str, Any], tasks: Mapping[int, Task]) -> None:
        """Resume from a snapshot; posted tasks are lost: no reply can reach a new server."""
        self.strikes.restore(snapshot["strikes"])
        self.job = snapshot["job"]
        self.claims.restore(snapshot["claims"])
        self._lost_in_restart = list(tasks.values())
        self._earlier_s = snapshot["now"]
        self._began = time.monotonic()


def _encode_task(task: Task, problem: Problem, **run: Any) -> RecordDict:
    """Encode a task; `run` has the name of the run and its experiment."""
    broadcast = task.broadcast
    kept = None
    if broadcast.submodel is not None:
        kept = dict(broadcast.submodel.kept)
    kinds = {}
    if broadcast.payload is not None:
        kinds = dict(message_kinds(broadcast.message, problem))
    return encode(
        **run,
        phase=broadcast.phase.to_dict(),
        number=task.number,
        steps=task.steps,
        key=task.key,
        round=broadcast.round,
        iteration=broadcast.iteration,
        kept=kept,
        shared=dict(broadcast.wire_message),
        kinds=kinds,
        each=dict(task.client_message),
    )


def _pending_among(
    pending: Mapping[int, PendingTask], tasks: Sequence[Task] | None
) -> list[PendingTask]:
    """Return those of the tasks that are pending; None stands for the posted ones."""
    if tasks is None:
        return [each for each in pending.values() if each.posted]
    return [pending[task.number] for task in tasks if task.number in pending]
