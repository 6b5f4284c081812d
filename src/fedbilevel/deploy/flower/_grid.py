"""Flower's grid, one message at a time: push a message to a node, pull the reply of the node."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbilevel.deploy.flower.warm_node import limit_flower_arrays
from fedbilevel.deploy.flower.wire import (
    SHORT,
    Limits,
    Values,
    WireError,
    bundle,
    decode,
    is_bundle,
    one_line,
    stamp,
)

REPLY_POLL_S = 0.02  # seconds between two looks for replies
PULL_WAIT_S = 0.5  # after which a reply that is still being uploaded is waited for elsewhere

# Flower's codes of replies without content.
EXPIRED_CODE = 3  # the message has expired, or its reply was announced and never sent
NODE_DIED_CODES = (4, 5, 8)  # the node or its process ended with the message: it can be sent again
UNREADABLE_CODE = -1  # ours: Flower itself cannot read what the node has sent


@dataclass(eq=False)
class Sent:
    """A message that was sent.

    Attributes:
        message_id: Flower's id of it.
        token: The token that seals its reply.
        pulling: The reply, while it is announced and its parts have not all arrived.
    """

    message_id: str
    token: str
    pulling: Future[NodeReply | None] | None = None


class NodeReply(NamedTuple):
    """The reply of a node: its content, or the error code and the reason why there is none.

    `limits` is how large the content may be, and `token` is that of the message.
    """

    content: RecordDict | None
    error_code: int | None = None
    reason: str = ""
    limits: Limits = SHORT
    token: str = ""

    def decode(self) -> Values:
        """Return the values of the reply; raise a `WireError` if there are none."""
        if self.content is None:
            raise WireError(self.reason or f"Flower reports error {self.error_code}")
        return decode(self.content, self.limits, self.token)


class GridConnection:
    """Pushes and pulls single messages, so that one unreadable reply does not affect another.

    A node that replies with bundles, as warm nodes do, is sent bundles.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._bundling_nodes: set[int] = set()

    def push(self, message: Message) -> Sent | None:
        """Send a message to its node, with a fresh token; return None if the node has left."""
        token = secrets.token_hex(16)
        message.content = stamp(message.content, token)
        if message.metadata.dst_node_id in self._bundling_nodes:
            message.content = bundle(message.content)
        message_ids = list(self.grid.push_messages([message]))
        if not message_ids or not message_ids[0]:
            return None
        return Sent(message_ids[0], token)

    def pull(self, sent: Sent, limits: Limits = SHORT) -> NodeReply | None:
        """Return the reply to a message, of `limits` at most; None if there is none yet.

        A node may announce a reply and never upload it. Flower waits for its parts in a thread,
        while others are served.
        """
        wait_s = 0.0
        if sent.pulling is None:
            wait_s = PULL_WAIT_S
            sent.pulling = _start(lambda: self._pull(sent, limits))
        try:
            reply = sent.pulling.result(wait_s)
        except TimeoutError:
            return None
        except BaseException:
            sent.pulling = None
            raise
        sent.pulling = None
        return reply

    def _pull(self, sent: Sent, limits: Limits) -> NodeReply | None:
        try:
            with limit_flower_arrays(limits.tensor_bytes):
                replies = list(self.grid.pull_messages([sent.message_id]))
            if not replies:
                return None
            reply = replies[0]
            if reply.has_error():
                return NodeReply(None, reply.error.code, one_line(reply.error.reason))
            if is_bundle(reply.content):
                self._bundling_nodes.add(reply.metadata.src_node_id)
            else:
                self._bundling_nodes.discard(reply.metadata.src_node_id)
            return NodeReply(reply.content, limits=limits, token=sent.token)
        except httpx.HTTPError:
            raise  # the SuperLink cannot be reached: no fault of the node
        except Exception as error:  # Flower inflates here whatever the node has sent
            reason = f"the message cannot be read ({type(error).__name__})"
            return NodeReply(None, UNREADABLE_CODE, reason)

    def node_names(self) -> dict[int, str]:
        """Return the nodes that are connected, each with the name its key is registered under."""
        return {info.node_id: info.name for info in self.grid.get_nodes()}


def _start(pull: Callable[[], NodeReply | None]) -> Future[NodeReply | None]:
    """Run a function in a thread that does not keep the process from ending."""
    future: Future[NodeReply | None] = Future()

    def work() -> None:
        try:
            future.set_result(pull())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
