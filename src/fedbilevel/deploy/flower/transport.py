"""The transport over Flower: tasks reach real clients behind a SuperLink.

Flower carries messages and tells which nodes are there. Ours are: who is which client, deadlines, sending again, and
reading what arrives. Checking, averaging, quorums and costs are the federation's, as in a simulation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.deploy.flower._answers import heard_losses, opened
from fedbilevel.deploy.flower._members import EXPIRED, GONE, POLL_S, Mailbox, Members
from fedbilevel.deploy.flower.wire import encode
from fedbilevel.execution import losses
from fedbilevel.federation import Federation, QuorumError
from fedbilevel.federation.conduct import Conduct
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.replies import kinds_of, log
from fedbilevel.federation.stages import Clip
from fedbilevel.federation.task import Task
from fedbilevel.federation.transport import Arrived, Departed, Missed, Report, Transport


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
    """A federation of real clients behind a Flower `Grid`.

    Args:
        grid: Flower's connection to the nodes.
        problem: what is solved.
        clients: how many take part.
        environment: participation, local steps, batch size; delays and faults are for simulations.
        table: the experiment, as the clients are told of it.
        conduct: how the server deals with real clients.
        weights: "uniform" or "samples".
        seed: of everything that is drawn.
        device: where the server computes.
    """
    if clients == 0:
        raise ValueError("clients is empty; a federation needs at least one")
    environment = environment or Environment()
    conduct = conduct or Conduct()
    if conduct.norm_bound is not None:
        # First in the list, last to be undone: what is clipped is what the other stages have decoded.
        environment = replace(
            environment, stages=(Clip(norm=conduct.norm_bound), *environment.stages)
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
class Flight:
    """A task on its way: `message` is Flower's id of what was sent, None while it waits for its client."""

    task: Task
    due: float
    posted: bool
    message: str | None = None
    node: int = 0


class FlowerTransport(Transport):
    """Sends tasks to nodes, again if a node died with one, and reports what becomes of them."""

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
        for name in ("delay", "faults", "stragglers"):
            if getattr(environment, name) is not None:
                raise ValueError(
                    f"environment.{name} is for simulations; a real federation has its own"
                )
        self.weighting = checks.one_of("weights", weights, ("uniform", "samples"))
        self.start_clients = conduct.start_clients or clients
        checks.integer(
            "start_clients", self.start_clients, least=environment.min_replies, most=clients
        )
        if weights == "samples" and self.start_clients < clients:
            raise ValueError(
                f"start_clients is {self.start_clients}; weights by samples need all {clients} clients"
            )
        self.problem = problem
        self.clients = clients
        self.environment = environment
        self.table = dict(table)
        self.conduct = conduct
        self.seed = seed
        self.device = device
        self.mailbox = Mailbox(grid)
        self.members = Members(self.mailbox, clients, table, conduct.deadline_s)
        self.job = secrets.token_hex(8)
        self.refusals: dict[int, int] = {}
        self.aside: list[int] = []  # clients that are given nothing for the rest of the run
        self.flights: dict[int, Flight] = {}  # by the number of the task
        self.gone: list[
            Task
        ] = []  # posted tasks whose replies cannot reach a server that was started again
        self.started = False
        self.shares: list[float] = []
        self.patience_s = conduct.wait_s
        self.before = 0.0
        self.began = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the run began, not counting those between a kill and a restart."""
        return self.before + time.monotonic() - self.began

    @property
    def present(self) -> list[int]:
        return sorted(client for client in self.members.node if client not in self.aside)

    def absent(self, needed: int, busy: Collection[int]) -> Collection[int]:
        self._begin()
        self._wait(needed, busy)
        here = set(self.present) - set(busy)
        return {client for client in range(self.clients) if client not in here}

    def samples(self, client: int) -> int:
        return self.members.samples.get(client, 1)  # looked at again when the task is sent

    def weights(self) -> Sequence[float]:
        """p_i of each client; by samples they are known once all are there."""
        self._begin()
        return self.shares

    def _begin(self) -> None:
        """Wait for the clients that must be there before round 1, or before the first after a restart."""
        if self.started:
            return
        wanted = min(self.start_clients, self.clients - len(self.aside))
        self._wait(max(wanted, self.environment.min_replies), ())
        sizes = [1] * self.clients
        if self.weighting == "samples":
            sizes = [self.members.samples[client] for client in range(self.clients)]
        self.shares = [size / sum(sizes) for size in sizes]
        self.started = True
        log.info("%d of %d clients are there", len(self.present), self.clients)

    def _wait(self, needed: int, busy: Collection[int]) -> None:
        until = time.monotonic() + self.patience_s
        self.members.look(self.job)
        while len(set(self.present) - set(busy)) < needed:
            if time.monotonic() > until:
                self.patience_s = 0.0  # once is enough
                raise QuorumError(
                    f"{len(set(self.present) - set(busy))} clients are there, {needed} are needed"
                )
            if self.clients - len(self.aside) < needed:
                raise QuorumError(f"clients {self.aside} were put aside; {needed} are needed")
            self.members.look(self.job)
            time.sleep(POLL_S)

    def send(self, tasks: Sequence[Task], barrier: bool) -> Iterator[Report]:
        self._begin()
        due = time.monotonic() + self.conduct.deadline_s
        for task in tasks:
            flight = Flight(task, due, not barrier)
            self.flights[task.number] = flight
            yield from self._push(flight)

    def _push(self, flight: Flight) -> Iterator[Report]:
        """Send a task if its client is there."""
        task = flight.task
        broadcast = task.broadcast
        node = self.members.node.get(task.client)
        if node is None or task.client in self.aside:
            return
        if broadcast.phase.epochs is not None:  # now it is known how much data the client has
            task.steps = broadcast.phase.steps_on(
                self.samples(task.client), self.environment.batch_size
            )
        content = encode(
            job=self.job,
            table=self.table,
            phase=broadcast.phase.plain(),
            number=task.number,
            steps=task.steps,
            key=task.key,
            round=broadcast.round,
            iteration=broadcast.iteration,
            kept=dict(broadcast.submodel.kept) if broadcast.submodel else None,
            shared=dict(broadcast.travels),
            kinds=dict(kinds_of(broadcast.message, self.problem))
            if broadcast.payload is not None
            else {},
            each=dict(task.own),
        )
        ttl = max(flight.due - time.monotonic(), 0.1)
        flight.message = self.mailbox.push(Message(content, node, "train", ttl=ttl))
        flight.node = node
        if flight.message is None:
            self.members.node.pop(task.client, None)
        else:
            yield Departed([task])

    def receive(self, tasks: Sequence[Task] | None, limit: int) -> Iterator[Report]:
        if tasks is None:
            while self.gone:
                yield Missed(self.gone.pop())
            self._wait(self.environment.min_replies, ())
        arrived = 0
        while flights := self._awaited(tasks):
            self.members.look(self.job)
            for flight in flights:
                for report in self._advance(flight):
                    arrived += isinstance(report, Arrived)
                    yield report
                if arrived >= limit:
                    return
            time.sleep(POLL_S)

    def _awaited(self, tasks: Sequence[Task] | None) -> list[Flight]:
        if tasks is None:
            return [flight for flight in self.flights.values() if flight.posted]
        return [self.flights[task.number] for task in tasks if task.number in self.flights]

    def _advance(self, flight: Flight) -> Iterator[Report]:
        """Send a task that was not sent yet, take its reply if it has come, or give it up."""
        task = flight.task
        if flight.message is None:
            yield from self._push(flight)
        elif (reply := self.mailbox.pull(flight.message)) is not None:
            if reply.code in GONE:
                flight.message = None  # sent again if the client comes back in time
                self.members.missing(task.client, flight.node)
            elif reply.code != EXPIRED:
                self._land(task)
                yield opened(task, reply, self.problem, self.device)
                return
            else:
                flight.due = 0.0
        if task.client in self.aside:
            self._land(task)
            yield Missed(task, put_aside=True)
        elif time.monotonic() > flight.due:
            self._land(task)
            self.members.missing(task.client, flight.node)
            log.warning("%s: client %d did not answer in time", task.broadcast, task.client)
            yield Missed(task)

    def _land(self, task: Task) -> None:
        if self.flights.pop(task.number).posted:
            task.ended = self.now

    def refused(self, clients: Sequence[int]) -> None:
        for client in clients:
            self.refusals[client] = self.refusals.get(client, 0) + 1
            if self.refusals[client] >= self.conduct.strikes and client not in self.aside:
                self.aside.append(client)
                log.warning(
                    "client %d is put aside after %d refused replies", client, self.refusals[client]
                )

    def losses(self, x: Tree, y: Tree) -> dict[str, float]:
        """As the clients report them; those who do not answer in time, or not with numbers, are left out."""
        self._begin()
        with suppress(QuorumError):  # a run that ends for want of clients is measured too
            self._wait(1, ())
        read, share = losses.chosen(self.seed, self.clients)
        content = encode(job=self.job, table=self.table, x=x, y=y, share=share)
        asked = set(read) & set(self.present)
        said = heard_losses(self.members, self.job, content, asked, self.conduct.deadline_s)
        if not said:
            return {"upper_loss": float("nan"), "lower_loss": float("nan")}
        total = sum(self.shares[client] for client in said)
        upper = sum(self.shares[client] * pair[0] for client, pair in said.items()) / total
        lower = sum(self.shares[client] * pair[1] for client, pair in said.items()) / total
        return {"upper_loss": upper, "lower_loss": lower}

    def mark(self) -> Any:
        return dict(self.refusals), list(self.aside)

    def back(self, mark: Any) -> None:
        refusals, aside = mark
        self.refusals = dict(refusals)
        self.aside = list(aside)

    def snapshot(self) -> dict[str, Any]:
        return {
            "refusals": dict(self.refusals),
            "aside": list(self.aside),
            "job": self.job,
            "now": self.now,
            "samples": dict(self.members.samples),
        }

    def restore(self, snapshot: Mapping[str, Any], tasks: Mapping[int, Task]) -> None:
        """Tasks that were under way are lost: their replies cannot reach a new server."""
        self.refusals = dict(snapshot["refusals"])
        self.aside = list(snapshot["aside"])
        self.job = snapshot["job"]
        self.members.samples = dict(snapshot["samples"])
        self.gone = list(tasks.values())
        self.before = snapshot["now"]
        self.began = time.monotonic()
