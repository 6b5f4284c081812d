"""Who is who behind a Flower grid: a node says which client it is before it is given anything to do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbilevel.core import checks
from fedbilevel.deploy.flower.wire import WireError, decode, encode, one_line
from fedbilevel.federation.replies import log

POLL_S = 0.02  # between looks for replies
NODES_S = 0.5  # between looks for nodes
MOST_SAMPLES = 2**40  # that a client can say it has
GONE = (
    4,
    5,
    8,
)  # Flower's codes for a node or its process that died with a message: it can be sent again
EXPIRED, UNREADABLE = 3, -1


class Got(NamedTuple):
    """A reply: what it holds, or Flower's code for why there is none."""

    content: RecordDict | None
    code: int | None = None
    why: str = ""

    def read(self) -> dict[str, Any]:
        if self.content is None:
            raise WireError(self.why or f"Flower's error {self.code}")
        return decode(self.content)


class Mailbox:
    """Pushes messages to nodes and pulls their replies, one at a time."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def push(self, message: Message) -> str | None:
        """Flower's id of the message, None if it could not be sent."""
        return next(iter(self.grid.push_messages([message])), None) or None

    def pull(self, message: str) -> Got | None:
        """The reply to a message, if it is there; one that cannot be read takes no other along."""
        try:
            found = list(self.grid.pull_messages([message]))
            if not found:
                return None
            if found[0].has_error():
                return Got(None, found[0].error.code, one_line(found[0].error.reason))
            return Got(found[0].content)
        except httpx.HTTPError:
            raise  # the SuperLink itself
        except Exception as error:  # Flower's own reading of what a node has sent
            return Got(None, UNREADABLE, f"the message cannot be read ({type(error).__name__})")


class Members:
    """Greets nodes that are new, and knows which client each of them is.

    Attributes:
        node: the node of each client that is there.
        samples: the training samples of each client that was ever there.
    """

    def __init__(
        self, mailbox: Mailbox, clients: int, table: Mapping[str, Any], ttl: float
    ) -> None:
        self.mailbox = mailbox
        self.clients = clients
        self.table = dict(table)
        self.ttl = ttl
        self.node: dict[int, int] = {}
        self.samples: dict[int, int] = {}
        self.greeted: dict[
            int, tuple[str, float]
        ] = {}  # nodes that are yet to answer, and until when
        self.refused: dict[
            int, int
        ] = {}  # nodes, and the client whose place is taken (-1: refused for good)
        self.names: dict[int, str] = {}  # what nodes with keys are registered as
        self.looked = 0.0

    def look(self, job: str) -> None:
        """Hear who has answered, forget nodes that are gone, and greet those that are new."""
        now = time.monotonic()
        for node, (message, until) in list(self.greeted.items()):
            reply = self.mailbox.pull(message)
            if reply is not None or now > until:
                del self.greeted[node]
            if reply is not None:
                self._introduce(node, reply)
        if now - self.looked < NODES_S:
            return
        self.looked = now
        self.names = {info.node_id: info.name for info in self.mailbox.grid.get_nodes()}
        self.node = {client: node for client, node in self.node.items() if node in self.names}
        self.refused = {  # who came too early, while its predecessor was not yet missed, is greeted again
            node: client
            for node, client in self.refused.items()
            if node in self.names and (client < 0 or client in self.node)
        }
        known = {*self.node.values(), *self.greeted, *self.refused}
        for node in self.names.keys() - known:
            content = encode(job=job, table=self.table)
            if message_id := self.mailbox.push(Message(content, node, "query", ttl=self.ttl)):
                self.greeted[node] = (message_id, time.monotonic() + self.ttl)

    def _introduce(self, node: int, reply: Got) -> None:
        if reply.code in (EXPIRED, *GONE):
            return  # it is greeted again if it is still there
        taken = -1
        try:
            said = reply.read()
            client = checks.integer("client", said["client"], least=0, most=self.clients - 1)
            train, _ = (
                checks.integer("samples", count, least=1, most=MOST_SAMPLES)
                for count in said["samples"]
            )
            name = self.names.get(node, "")
            if name.startswith("client-") and name != f"client-{client}":
                raise WireError(f"its key is that of {name}, but it says it is client {client}")
            if self.node.get(client, node) != node:
                taken = client
                raise WireError(f"client {client} is here already")
        except (ValueError, TypeError, KeyError) as error:
            self.refused[node] = taken
            log.warning("node %d refused: %s", node, one_line(error))
            return
        if client in self.samples and self.samples[client] != train:
            log.warning(
                "client %d now has %d training samples, not %d", client, train, self.samples[client]
            )
        self.node[client] = node
        self.samples[client] = train
        log.info("client %d has joined (node %d, %d training samples)", client, node, train)

    def missing(self, client: int, node: int) -> None:
        """A client that did not answer in time is given nothing until it has answered to another greeting."""
        if self.node.get(client) == node:  # and not another that has taken its place since
            del self.node[client]
