"""Which node is which client: nodes are greeted, say which client they are, and are admitted."""

from __future__ import annotations

import time
from collections.abc import Callable

from flwr.app import Message, RecordDict

from fedbilevel.core import checks
from fedbilevel.deploy.flower._claims import Claims
from fedbilevel.deploy.flower._grid import (
    EXPIRED_CODE,
    NODE_DIED_CODES,
    GridConnection,
    NodeReply,
    Sent,
)
from fedbilevel.deploy.flower.wire import WireError, one_line
from fedbilevel.federation.replies import log

NODE_LISTING_S = 0.5  # seconds between two listings of the nodes


class Members:
    """Greets new nodes and keeps track of the node of each client.

    Args:
        grid: The connection to the nodes.
        clients: The number of registered clients; a node must claim to be one of them.
        greeting: Returns the content of a greeting.
        ttl: Seconds in which a node must answer its greeting.
        claims: Is told how many samples each client claims to hold.

    Attributes:
        node_of: The node of each client that is present.
    """

    def __init__(
        self,
        grid: GridConnection,
        clients: int,
        greeting: Callable[[], RecordDict],
        ttl: float,
        claims: Claims,
    ) -> None:
        self.grid = grid
        self.clients = clients
        self.greeting = greeting
        self.ttl = ttl
        self.node_of: dict[int, int] = {}
        self.claims = claims
        # By node: the greeting that it has not answered yet, and when that expires.
        self._greeted: dict[int, tuple[Sent, float]] = {}
        # By node: the client that it claimed to be if that one was taken, None if refused for good.
        self._refused: dict[int, int | None] = {}
        self._key_names: dict[int, str] = {}
        self._listed_at = 0.0

    def refresh(self) -> None:
        """Read the answers to greetings, forget nodes that have left, and greet new ones."""
        self._read_answers()
        if time.monotonic() - self._listed_at >= NODE_LISTING_S:
            self._listed_at = time.monotonic()
            self._update_nodes()

    def remove(self, client: int, node: int) -> None:
        """Treat a client that did not answer as absent until it answers another greeting.

        Args:
            client: The client.
            node: The node that did not answer. A node that has taken its place since then stays.
        """
        if self.node_of.get(client) == node:
            del self.node_of[client]

    @property
    def refused_for_good(self) -> int:
        """How many connected nodes will never be admitted."""
        return sum(client is None for client in self._refused.values())

    def _read_answers(self) -> None:
        for node, (greeting, expires_at) in list(self._greeted.items()):
            reply = self.grid.pull(greeting)
            if reply is not None:
                del self._greeted[node]
                self._admit(node, reply)
            elif time.monotonic() > expires_at:
                del self._greeted[node]

    def _update_nodes(self) -> None:
        self._key_names = self.grid.node_names()
        present = self._key_names.keys()
        self.node_of = {client: node for client, node in self.node_of.items() if node in present}
        # A client that restarts as a new node is refused as long as its old node is listed.
        # Once that has left, the new node is no longer in this dict and is greeted again.
        self._refused = {
            node: client
            for node, client in self._refused.items()
            if node in present and (client is None or client in self.node_of)
        }
        for node in present - {*self.node_of.values(), *self._greeted, *self._refused}:
            greeting = self.grid.push(Message(self.greeting(), node, "query", ttl=self.ttl))
            if greeting is not None:
                self._greeted[node] = (greeting, time.monotonic() + self.ttl)

    def _admit(self, node: int, reply: NodeReply) -> None:
        """Admit the node as the client that it claims to be, or refuse it and log why."""
        if reply.error_code in (EXPIRED_CODE, *NODE_DIED_CODES):
            return  # a node that is still listed is greeted again
        try:
            client, sizes = self._read_claim(node, reply)
            if self.node_of.get(client, node) == node:
                self.claims.enter(client, sizes)
        except Exception as error:  # whatever the node has sent, it must not end the run
            self._refused[node] = None
            log.warning("node %d refused: %s", node, one_line(error))
            return
        if self.node_of.get(client, node) != node:
            self._refused[node] = client
            log.warning("node %d refused: another node serves client %d", node, client)
            return
        self.node_of[client] = node
        train, _ = self.claims.sizes[client]
        log.info("client %d has joined (node %d, %d training samples)", client, node, train)

    def _read_claim(self, node: int, reply: NodeReply) -> tuple[int, object]:
        """Return the client that a node claims to be, and the sizes of data that it claims."""
        values = reply.decode()
        client = checks.integer("client", values["client"], least=0, most=self.clients - 1)
        key_name = self._key_names.get(node, "")
        if key_name.startswith("client-") and key_name != f"client-{client}":
            raise WireError(f"its key is that of {key_name}, but it claims to be client {client}")
        return client, values["samples"]
