"""The server on Flower: `FlowerFederation` gives an algorithm `ask`, `post` and `collect` over a real SuperLink.

Flower carries messages and tells which nodes are there. Ours are: who is which client, deadlines, sending again,
checking what arrives, quorums, and the checkpoint.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import httpx
import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel import checks
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.environment import Environment
from fedbilevel.federation import losses
from fedbilevel.federation.base import Each, QuorumError, Replies, log, wrong
from fedbilevel.federation.conduct import Conduct
from fedbilevel.federation.flower.wire import WireError, decode, encode, one_line
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.runtime import Runtime, Submodels, by_submodel
from fedbilevel.federation.stacks import Values, join
from fedbilevel.federation.work import Assignment, Exchange, Took
from fedbilevel.problem import Problem
from fedbilevel.tree import Tree, flatten, nbytes, norm

POLL_S = 0.02  # between looks for replies
NODES_S = 0.5  # between looks for nodes
MOST_SAMPLES = 2**40  # that a client can say it has
GONE = (4, 5, 8)  # Flower's codes for a node or its process that died with a task: it can be sent again
EXPIRED, UNREADABLE = 3, -1


@dataclass
class Flight:
    """A task on its way: `message` is Flower's id of what was sent, None while it waits for its client."""

    work: Assignment
    due: float
    message: str | None = None
    node: int = 0


class Got(NamedTuple):
    """A reply: what it holds, or Flower's code for why there is none."""

    content: RecordDict | None
    code: int | None = None
    why: str = ""

    def read(self) -> dict[str, Any]:
        if self.content is None:
            raise WireError(self.why or f"Flower's error {self.code}")
        return decode(self.content)


@dataclass
class Ended:
    """How a task ended: with a reply, refused (`why`), or lost."""

    work: Assignment
    values: Values | None = None
    took: Took = Took()  # noqa: RUF009  (a tuple)
    why: str = ""


@dataclass
class Members:
    """Who is who: a node says which client it is before it is given anything to do."""

    node: dict[int, int] = field(default_factory=dict)  # of the clients that are there
    greeted: dict[int, tuple[str, float]] = field(default_factory=dict)  # nodes that are yet to answer, and until when
    refused: dict[int, int] = field(default_factory=dict)  # nodes, and the client whose place is taken (-1: for good)
    samples: dict[int, int] = field(default_factory=dict)  # training samples of every client that was ever there


class FlowerFederation(Runtime):
    """n clients behind a Flower `Grid`. `table` is the experiment, as the clients are told of it."""

    KEPT: ClassVar = (*Runtime.KEPT, "refusals", "aside", "job")

    def __init__(
        self,
        grid: Grid,
        problem: Problem,
        clients: int,
        algorithm: Algorithm,
        environment: Environment | None,
        table: Mapping[str, Any],
        conduct: Conduct | None = None,
        *,
        weights: str = "uniform",
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__(problem, clients, algorithm, environment, seed, device)
        for name in ("delay", "faults", "stragglers"):
            if getattr(self.environment, name) is not None:
                raise ValueError(f"environment.{name} is for simulations; a real federation has its own")
        self.grid, self.table, self.conduct = grid, dict(table), conduct or Conduct()
        self.weighting = checks.one_of("weights", weights, ("uniform", "samples"))
        self.start_clients = self.conduct.start_clients or clients
        checks.integer("start_clients", self.start_clients, least=self.environment.min_replies, most=clients)
        if weights == "samples" and self.start_clients < clients:
            raise ValueError(f"start_clients is {self.start_clients}; weights by samples need all {clients} clients")
        self.job = secrets.token_hex(8)
        self.members = Members()
        self.refusals: dict[int, int] = {}
        self.aside: list[int] = []
        self.flying: dict[int, Flight] = {}  # posted tasks by their number
        self.lost: list[tuple[int, dict[str, Any]]] = []  # clients whose tasks a server lost, phases
        self.names: dict[int, str] = {}  # what nodes with keys are registered as
        self.looked = 0.0
        self.started, self.patience_s = False, self.conduct.wait_s
        self.before, self.began = 0.0, time.monotonic()

    # The clock and the clients

    @property
    def now(self) -> float:
        """Seconds since the run began, not counting those between a kill and a restart."""
        return self.before + time.monotonic() - self.began

    @property
    def present(self) -> list[int]:
        return sorted(client for client in self.members.node if client not in self.aside)

    def sample(self) -> list[int]:
        self.begin()
        busy = {flight.work.client for flight in self.flying.values()}
        self._wait(self.environment.min_replies, busy)
        here = set(self.present) - busy
        away = [client for client in range(len(self)) if client not in here]
        return self._cohort(away, spare=len(away))

    def _samples(self, client: int, exchange: Exchange) -> int:
        return self.members.samples.get(client, 1)  # looked at again when the task is sent

    def begin(self) -> None:
        """Wait for the clients that must be there before round 1, or before the first after a restart."""
        if not self.started:
            wanted = min(self.start_clients, len(self) - len(self.aside))
            self._wait(max(wanted, self.environment.min_replies), frozenset())
            sizes = [self.members.samples[c] if self.weighting == "samples" else 1 for c in range(len(self))]
            self.weights = [size / sum(sizes) for size in sizes]
            self.started = True
            log.info("%d of %d clients are there", len(self.present), len(self))

    def _wait(self, needed: int, busy: frozenset[int] | set[int]) -> None:
        until = time.monotonic() + self.patience_s
        self._look()
        while len(set(self.present) - busy) < needed:
            if time.monotonic() > until:
                self.patience_s = 0.0  # once is enough
                raise QuorumError(f"{len(set(self.present) - busy)} clients are there, {needed} are needed")
            if len(self) - len(self.aside) < needed:
                raise QuorumError(f"clients {self.aside} were put aside; {needed} are needed")
            self._look()
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Greet nodes that are new, forget those that are gone, and hear who has answered."""
        members, now = self.members, time.monotonic()
        for node, (message, until) in list(members.greeted.items()):
            reply = self._pull(message)
            if reply is not None or now > until:
                del members.greeted[node]
            if reply is not None:
                self._introduce(node, reply)
        if now - self.looked < NODES_S:
            return
        self.looked = now
        self.names = {info.node_id: info.name for info in self.grid.get_nodes()}
        members.node = {client: node for client, node in members.node.items() if node in self.names}
        members.refused = {  # who came too early, while its predecessor was not yet missed, is greeted again
            node: client
            for node, client in members.refused.items()
            if node in self.names and (client < 0 or client in members.node)
        }
        known = {*members.node.values(), *members.greeted, *members.refused}
        for node in self.names.keys() - known:
            self._greet(node)

    def _greet(self, node: int) -> None:
        content = encode(job=self.job, table=self.table)
        ttl = self.conduct.deadline_s
        if message := self._push(Message(content, node, "query", ttl=ttl)):
            self.members.greeted[node] = (message, time.monotonic() + ttl)

    def _introduce(self, node: int, reply: Got) -> None:
        members, taken = self.members, -1
        if reply.code in (EXPIRED, *GONE):
            return  # it is greeted again if it is still there
        try:
            said = reply.read()
            client = checks.integer("client", said["client"], least=0, most=len(self) - 1)
            train, _ = (checks.integer("samples", count, least=1, most=MOST_SAMPLES) for count in said["samples"])
            name = self.names.get(node, "")
            if name.startswith("client-") and name != f"client-{client}":
                raise WireError(f"its key is that of {name}, but it says it is client {client}")
            if members.node.get(client, node) != node:
                taken = client
                raise WireError(f"client {client} is here already")
        except (ValueError, TypeError, KeyError) as error:
            members.refused[node] = taken
            log.warning("node %d refused: %s", node, one_line(error))
            return
        if client in members.samples and members.samples[client] != train:
            log.warning("client %d now has %d training samples, not %d", client, train, members.samples[client])
        members.node[client], members.samples[client] = node, train
        log.info("client %d has joined (node %d, %d training samples)", client, node, train)

    def _missing(self, client: int, node: int) -> None:
        """A client that did not answer in time is given nothing until it has answered to another greeting."""
        if self.members.node.get(client) == node:  # and not another that has taken its place since
            del self.members.node[client]

    # Messages

    def _push(self, message: Message) -> str | None:
        return next(iter(self.grid.push_messages([message])), None) or None

    def _pull(self, message: str) -> Got | None:
        """The reply to a message, if it is there. One at a time: a reply that cannot be read takes no other along."""
        try:
            found = list(self.grid.pull_messages([message]))
            if not found:
                return None
            if found[0].has_error():
                return Got(None, found[0].error.code, one_line(found[0].error.reason))
            return Got(found[0].content)
        except httpx.HTTPError:
            raise  # the SuperLink
        except Exception as error:  # Flower's own reading of what a node has sent
            return Got(None, UNREADABLE, f"the message cannot be read ({type(error).__name__})")

    def _send(self, flight: Flight) -> None:
        w, e = flight.work, flight.work.exchange
        node = self.members.node.get(w.client)
        if node is None or w.client in self.aside:
            return
        if e.role.epochs is not None:  # now it is known how much data it has
            w = flight.work = w._replace(steps=self._steps(e, torch.empty(0), [w.client])[0])
        content = encode(
            job=self.job,
            table=self.table,
            phase=e.role.plain(),
            number=w.number,
            steps=w.steps,
            key=w.key,
            round=e.round,
            iteration=e.iteration,
            kept=dict(e.submodel.kept) if e.submodel else None,
            shared=dict(e.shared),
            each=dict(w.each),
        )
        flight.message = self._push(Message(content, node, "train", ttl=max(flight.due - time.monotonic(), 0.1)))
        flight.node = node
        if flight.message is None:
            self.members.node.pop(w.client, None)
        else:
            sent = nbytes(dict(e.shared)) + nbytes(dict(w.each))
            self.ledger.charge(e.phase, [w.client], bytes_down=[sent])

    def _advance(self, flights: dict[int, Flight]) -> Iterator[Ended]:
        """Send what can be sent, take what has come, and say which tasks have ended."""
        self._look()
        for number, flight in list(flights.items()):
            client = flight.work.client
            if flight.message is None:
                self._send(flight)
            elif (reply := self._pull(flight.message)) is not None:
                if reply.code in GONE:
                    flight.message = None  # sent again if the client comes back in time
                    self._missing(client, flight.node)
                elif reply.code != EXPIRED:
                    del flights[number]
                    yield self._open(flight.work, reply)
                    continue
                else:
                    flight.due = 0.0
            if client in self.aside:
                del flights[number]  # it was never sent
                yield Ended(flight.work)
            elif time.monotonic() > flight.due:
                del flights[number]
                self._missing(client, flight.node)
                log.warning("%s: client %d did not answer in time", flight.work.exchange, client)
                yield Ended(flight.work)

    def _open(self, w: Assignment, reply: Got) -> Ended:
        """A reply as what its phase declares, or why it is refused."""
        try:
            said = reply.read()
            if (number := checks.integer("number", said["number"], least=0)) != w.number:
                raise WireError(f"answers task {number}, was given {w.number}")
            values = said["values"]
            if not isinstance(values, dict) or not all(isinstance(v, (Tree, Tensor)) for v in values.values()):
                raise WireError("replied with something else than tensors")
            if not all(isinstance(name, str) for name in values):
                raise WireError("replied with a name that is no text")
            declared = w.exchange.role.reply
            if why := wrong(values, declared, self.problem, w.exchange.submodel) or self._suspicious(values):
                raise WireError(why)
            took = Took(*(checks.integer(name, said["took"][name], least=0, most=2**62) for name in Took._fields))
            return Ended(w, pytree.tree_map(lambda t: t.to(self.device), values), took)
        except KeyError as error:
            return Ended(w, why=f"the reply has no {error}")
        except (ValueError, TypeError, IndexError) as error:
            return Ended(w, why=one_line(error))

    def _suspicious(self, values: Values) -> str | None:
        dtype, bound = next(iter(self.problem.x.values())).dtype, self.conduct.norm_bound
        for name, value in values.items():
            if isinstance(value, Tree):
                if any(tensor.dtype != dtype for tensor in value.values()):
                    return f"replied with {name!r} of another dtype than {dtype}"
                if bound is not None and (length := float(norm(value))) > bound:
                    return f"{name} has norm {length:.3g}, more than norm_bound {bound:g}"
            elif value.dtype not in (dtype, torch.float64, torch.float32, torch.int64):
                return f"replied with {name!r} as {value.dtype}"
            if not bool(torch.isfinite(flatten(value) if isinstance(value, Tree) else value).all()):
                return f"{name} is not finite"
        return None

    def _refuse(self, ended: Ended, replies: Replies) -> None:
        client = ended.work.client
        replies.refuse(client, ended.why)
        self.refusals[client] = self.refusals.get(client, 0) + 1
        if self.refusals[client] >= self.conduct.strikes and client not in self.aside:
            self.aside.append(client)
            log.warning("client %d is put aside after %d refused replies", client, self.refusals[client])

    def _settle(self, ended: Sequence[Ended], replies: Replies) -> None:
        """Count what has ended, and accept what can be."""
        good = [end for end in ended if end.values is not None]
        for end in ended:
            replies.idle.append(end.work.client)
            if end.why:
                self._refuse(end, replies)
            elif end.values is None:
                self.ledger.lost_tasks += end.work.client not in self.aside
            else:
                self._count([end.work], [end.took])
        for group in by_submodel([end.work for end in good]):
            alike = [good[j] for j in group]
            self._accept([end.work for end in alike], join([end.values or {} for end in alike]), replies)
        self.ledger.virtual_s = self.now

    # What algorithms call

    def ask(
        self, phase: Phase, clients: Sequence[int], *, each: Each = None, submodels: Submodels = None, **shared: Any
    ) -> Replies:
        self.begin()
        exchange, work = self._assign(phase, clients, each, submodels, shared)
        self.ledger.phase(phase.name).rounds += 1
        replies = Replies(str(exchange), exchange.role, self.problem)
        due = time.monotonic() + self.conduct.deadline_s
        flights = {w.number: Flight(w, due) for w in work}
        ended: list[Ended] = []
        while flights:
            ended += self._advance(flights)
            time.sleep(POLL_S)
        self._settle(sorted(ended, key=lambda end: end.work.place), replies)  # sums do not depend on who was first
        return self._quorum(len(work), replies)

    def post(
        self, phase: Phase, clients: Sequence[int], *, each: Each = None, submodels: Submodels = None, **shared: Any
    ) -> None:
        self.begin()
        busy = {flight.work.client: flight.work.exchange.phase for flight in self.flying.values()}
        for client, times in Counter(clients).items():
            if client in busy or times > 1:
                raise RuntimeError(f"client {client} would have two tasks in flight; it can have one at a time")
        for other in set(busy.values()) - {phase.name}:
            raise RuntimeError(f"phase {phase.name!r} must wait: tasks of {other!r} are in flight")
        _, work = self._assign(phase, clients, each, submodels, shared)
        due = time.monotonic() + self.conduct.deadline_s
        self.flying |= {w.number: Flight(w, due) for w in work}
        for w in work:
            self._send(self.flying[w.number])

    def collect(self, count: int | None = None) -> Replies:
        phases = [flight.work.exchange.role for flight in self.flying.values()]
        phases += [Phase.load(plain) for _, plain in self.lost]
        if not phases:
            raise RuntimeError("nothing is in flight, so nothing can be collected; post a task first")
        count = self.environment.cohort(len(self)) if count is None else checks.integer("count", count, least=1)
        self._wait(self.environment.min_replies, frozenset())
        name = phases[0].name
        self.ledger.phase(name).rounds += 1
        replies = Replies(f"phase {name!r}, round {self.ledger.rounds}", phases[0], self.problem)
        replies.idle += [client for client, _ in self.lost]
        self.lost = []
        while self.flying and len(replies) < count:
            for ended in self._advance(self.flying):
                self._settle([replace(ended, work=ended.work._replace(place=len(replies.idle)))], replies)
                if len(replies) == count:
                    break
            time.sleep(POLL_S)
        return self._collected(replies)

    def uncharged(self) -> AbstractContextManager[None]:
        raise RuntimeError("only a simulation can leave an exchange out of costs and time; aphe must be 'clients'")

    def losses(self, x: Tree, y: Tree) -> dict[str, float]:
        """As the clients tell them; those who do not answer in time, or with a number, are left out."""
        self.begin()
        with suppress(QuorumError):  # a run that ends for want of clients is measured too
            self._wait(1, frozenset())
        read, share = losses.chosen(self.seed, len(self))
        content = encode(job=self.job, table=self.table, x=x, y=y, share=share)
        due, said = time.monotonic() + self.conduct.deadline_s, dict[int, tuple[float, float]]()
        waiting = {}
        for client in set(read) & set(self.present):
            node = self.members.node[client]
            if pushed := self._push(Message(content, node, "evaluate", ttl=self.conduct.deadline_s)):
                waiting[client] = pushed, node
        while waiting and time.monotonic() < due:
            for client, (pushed, node) in list(waiting.items()):
                if (reply := self._pull(pushed)) is None:
                    if self.members.node.get(client) != node:
                        del waiting[client]
                    continue
                del waiting[client]
                try:
                    found = reply.read()
                    said[client] = _loss("upper", found["upper"]), _loss("lower", found["lower"])
                except (ValueError, TypeError, KeyError) as error:
                    log.warning("client %d did not tell its losses: %s", client, one_line(error))
            self._look()
            time.sleep(POLL_S)
        for client, (_, node) in waiting.items():
            log.warning("client %d did not tell its losses in time", client)
            self._missing(client, node)
        total = sum(self.weights[client] for client in said)
        means = [sum(self.weights[c] * pair[j] for c, pair in said.items()) / total for j in (0, 1)] if said else []
        upper, lower = means or (float("nan"), float("nan"))
        self.ledger.virtual_s = self.now
        return {"upper_loss": upper, "lower_loss": lower}

    def snapshot(self) -> dict[str, Any]:
        flying = [(flight.work.client, flight.work.exchange.role.plain()) for flight in self.flying.values()]
        own = {"lost": [*self.lost, *flying], "now": self.now, "samples": dict(self.members.samples)}
        return {**super().snapshot(), **own}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Tasks that were under way are lost: their replies cannot reach a new server."""
        super().restore(snapshot)
        self.lost, self.members.samples = list(snapshot["lost"]), dict(snapshot["samples"])
        self.ledger.lost_tasks += len(self.lost)
        self.before, self.began = snapshot["now"], time.monotonic()


def _loss(name: str, value: Any) -> float:
    if not isinstance(value, float):  # any whole number could be too large for one
        raise TypeError(f"its {name} loss is {value!r:.40}; it must be a number")
    return checks.number(f"its {name} loss", value)
