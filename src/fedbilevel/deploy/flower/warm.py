"""A warm node: one process that stays up, for tasks that are shorter than the seconds a SuperNode takes to start one.

Everything of Flower that is not public and that we use is in this file; `tests/flower` fails clearly when it changes.
A warm node speaks Flower's Fleet API as a SuperNode does, with the same keys and certificates. It runs the code that is
installed here, never code that came over the wire.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedbilevel.deploy.flower.wire import one_line
from fedbilevel.federation.replies import log

FLWR_VERSION = "1.41.0"
POLL_S = 0.1  # every look costs the SuperLink a few milliseconds
RAISED = 2  # Flower's code for an app that raised
UPLOAD_S = 60.0  # a message whose parts have not come by then is given up
RETRY_S = 2.0


class RefusedError(ConnectionError):
    """The SuperLink does not want this node."""


@dataclass(frozen=True)
class Link:
    """Where the SuperLink is and how to reach it. `key`: the node's own, as ssh-keygen writes it."""

    address: str
    ca: Path | None = None
    key: Path | None = None
    plain: bool = False

    @contextmanager
    def client(self) -> Iterator[tuple[FleetHttpClient, bytes]]:
        private, public = generate_key_pairs() if self.key is None else load_key(self.key)
        signed: list[Any] = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, public),
        ]
        ca = None if self.plain or self.ca is None else self.ca.read_bytes()
        with FleetHttpClient.from_server_address(self.address, self.plain, ca, signed) as client:
            yield client, public_key_to_bytes(public)


def load_key(path: Path) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except ValueError as error:
        raise ValueError(
            f"{path} is no private key as `fedbilevel keys` or ssh-keygen makes them: {error}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(
            f"{path} is not an elliptic-curve key; SuperLinks want one (ssh-keygen -t ecdsa -b 384)"
        )
    return key, key.public_key()


def quicken() -> None:
    """A message is announced before its parts are there: look for them often, and not for two hours."""
    waits = {
        "initial_backoff": 0.01,
        "backoff_cap": 0.2,
        "max_time": UPLOAD_S,
        "max_tries_per_object": None,
    }
    pulls: tuple[Any, ...] = (
        inflatable_utils.pull_objects,
        inflatable_utils.pull_and_inflate_object_from_tree,
    )
    for pull in pulls:  # the second passes its own on to the first
        pull.__kwdefaults__ |= waits


def serve(
    link: Link,
    app: Callable[[Message, Context], Message],
    node_config: Any,
    patience_s: float = 60.0,
) -> None:
    """Answer messages until the process is ended; a lost SuperLink is waited for.

    patience_s: how long to try before the first connection. A node that was killed is refused until the SuperLink has
    noticed, which takes about 20 s.
    """
    quicken()
    first, last = time.monotonic(), ""
    connected = False
    while True:
        try:
            with (
                link.client() as (client, public),
                _active(client, public, link.key is None) as node,
            ):
                connected, last = True, ""
                log.info("connected to %s as node %d", link.address, node.node_id)
                while True:
                    if not _answer(client, node, app, node_config):
                        time.sleep(POLL_S)
        except (httpx.HTTPError, RefusedError) as error:
            why = _why(error)
            if not connected and (
                _hopeless(error, link.key is None) or time.monotonic() - first > patience_s
            ):
                raise RefusedError(f"{link.address} cannot be joined: {why}") from error
            if why != last:
                log.warning("no connection to %s (%s); trying again", link.address, why)
            last = why
        time.sleep(RETRY_S)


@contextmanager
def _active(client: FleetHttpClient, public: bytes, register: bool) -> Iterator[Node]:
    if register:
        client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
    interval = HEARTBEAT_MIN_INTERVAL  # the shortest allowed: the sooner a dead node is missed
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=interval)
    node = Node(node_id=client.ActivateNode(request).node_id)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.8 * interval):
            try:
                client.SendNodeHeartbeat(
                    SendNodeHeartbeatRequest(node=node, heartbeat_interval=interval)
                )
            except httpx.HTTPError as error:
                log.debug("no heartbeat: %s", error)

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield node
    finally:
        ended.set()
        try:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
            if register:
                client.UnregisterNode(UnregisterNodeFleetRequest(node_id=node.node_id))
        except httpx.HTTPError:
            pass  # it is gone, and so are we


def _answer(
    client: FleetHttpClient,
    node: Node,
    app: Callable[[Message, Context], Message],
    node_config: Any,
) -> bool:
    """Take one message and answer it; False if there was none."""
    response = client.PullMessages(PullMessagesRequest(node=node))
    if not response.messages_list:
        return False
    run, tree = response.messages_list[0].metadata.run_id, response.message_object_trees[0]
    try:
        message = inflatable_utils.pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(client.PullObject, node, run),
            make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run),
            return_type=Message,
        )
    except (inflatable_utils.ObjectPullError, ValueError, TypeError, KeyError) as error:
        log.warning("a message could not be taken: %s", error)
        return True
    message.metadata.__dict__["_message_id"] = tree.object_id
    started = time.monotonic()
    context = Context(run, node.node_id, dict(node_config), RecordDict(), {})
    try:
        reply = app(message, context)
    except Exception as error:
        reply = Message(
            Error(code=RAISED, reason=f"{type(error).__name__}: {one_line(error)}"),
            reply_to=message,
        )
    reply.metadata.__dict__["_message_id"] = reply.object_id
    try:
        _push(client, node, run, reply, time.monotonic() - started)
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (401, 502, 503, 504):
            raise
        log.warning(
            "a reply came to nothing: %s", _why(error)
        )  # the run is over, or the message has expired
    except inflatable_utils.ObjectPushError as error:
        log.warning("a reply came to nothing: %s", error)
    return True


def _push(client: FleetHttpClient, node: Node, run: int, reply: Message, seconds: float) -> None:
    with no_object_id_recompute():
        pushed = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
        )
        inflatable_utils.push_objects(
            get_all_nested_objects(reply),
            make_push_object_fn_protobuf(client.PushObject, node, run, pushed.session_id),
            object_ids_to_push=set(pushed.objects_to_push),
        )


def _why(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        if told := FlowerError.from_json(error.response.text):
            return f"[code {told.code}] {told.message}"
        return f"HTTP status {error.response.status_code}"
    return str(error) or type(error).__name__


def _hopeless(error: Exception, keyless: bool) -> bool:
    """Whether trying again is in vain: one side does not trust the other's certificate, or a key is needed."""
    wants_key = (
        keyless and isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 412
    )
    return wants_key or "certificate" in str(error).lower()
