"""A warm node: one process that stays up and answers messages.

A stock SuperNode starts a process for each message, which takes seconds; a warm node is for tasks
that are shorter than that. It speaks Flower's Fleet API as a SuperNode does, with the same keys and
certificates. It runs the code that is installed here, never code that arrives over the wire.

Everything that we use of Flower's non-public modules is in this file. They may change with any
release; the tests in `tests/deploy/flower` compare the installed version with `FLWR_VERSION`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Array, Context, Error, Message, RecordDict
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
    InflatableObject,
    get_all_nested_objects,
    get_object_body,
    get_object_children_ids_from_object_content,
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

from fedbilevel.deploy.flower.wire import bundle, one_line
from fedbilevel.federation.replies import log

FLWR_VERSION = "1.41.0"
MESSAGE_POLL_S = 0.1  # each poll costs the SuperLink a few milliseconds
RECONNECT_S = 2.0
UPLOAD_TIMEOUT_S = 60.0  # for the objects of a message that was announced
APP_RAISED_CODE = 2  # Flower's code for a reply of an app that raised an exception
KEY_NEEDED_STATUS = 412  # HTTP status with which a SuperLink refuses a node without a key
RECONNECT_STATUSES = (401, 502, 503, 504)  # the session has expired, or the SuperLink is down

ClientFunction = Callable[[Message, Context], Message]  # a `ClientApp`, or what stands for one


class RefusedError(ConnectionError):
    """The SuperLink cannot be joined."""


@dataclass(frozen=True)
class ConnectionSettings:
    """Where the SuperLink is, and how to connect to it.

    Args:
        address: Host:port.
        ca: Certificate of the authority that signed the server's certificate. None: those that the
            system trusts.
        key: Private key of the node, as `fedbilevel keys` or ssh-keygen writes it. None: a new key,
            which a SuperLink accepts only if it does not authenticate nodes.
        plain: Whether to connect without encryption.
    """

    address: str
    ca: Path | None = None
    key: Path | None = None
    plain: bool = False

    @contextmanager
    def connect(self) -> Iterator[tuple[FleetHttpClient, bytes]]:
        """Yield a client of the Fleet API, and the public key of the node."""
        if self.key is None:
            private, public = generate_key_pairs()
        else:
            private, public = load_key_pair(self.key)
        interceptors = (
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, public),
        )
        certificate = None
        if self.ca is not None and not self.plain:
            certificate = self.ca.read_bytes()
        with FleetHttpClient.from_server_address(
            self.address, self.plain, certificate, interceptors
        ) as client:
            yield client, public_key_to_bytes(public)


def load_key_pair(path: Path) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    """Read a node's private key, and derive the public one.

    Args:
        path: A private key in OpenSSH format.

    Returns:
        The private and the public key.

    Raises:
        ValueError: The file holds no private key, or not one on an elliptic curve.
    """
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a private key as `fedbilevel keys` or ssh-keygen writes it: {error}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(
            f"{path} is not an elliptic-curve key, which SuperLinks require "
            "(ssh-keygen -t ecdsa -b 384)"
        )
    return key, key.public_key()


def patch_flower_pull_backoff() -> None:
    """Shorten Flower's waits for the objects of a message, in this process.

    A message is announced before its objects are uploaded. Whoever pulls in between waits: by
    default 1 s before the second attempt, and two hours in all. Flower has no option for this, so
    the default arguments of two internal functions are changed.
    """
    defaults: dict[str, object] = {
        "initial_backoff": 0.01,
        "backoff_cap": 0.2,
        "max_time": UPLOAD_TIMEOUT_S,
        "max_tries_per_object": None,
    }
    # The second function calls the first with its own arguments.
    functions: tuple[Callable[..., object], ...] = (
        inflatable_utils.pull_objects,
        inflatable_utils.pull_and_inflate_object_from_tree,
    )
    for function in functions:
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **defaults}


@contextmanager
def limit_flower_arrays(nbytes: int) -> Iterator[None]:
    """Let Flower put together no more than this many bytes of arrays in this thread, in the block.

    An array arrives as chunks and a list of their indices, which may name a chunk many times: a
    short message can become arbitrarily large before anyone else can look at it.

    Args:
        nbytes: The bytes of all arrays together; more of them are a `ValueError`.
    """
    if Array.__dict__["inflate"].__func__ is not _inflate_within_budget:
        Array.inflate = classmethod(_inflate_within_budget)  # type: ignore[assignment,method-assign]
    _budget.left = nbytes
    try:
        yield
    finally:
        del _budget.left


_budget = threading.local()  # `left`: the bytes of arrays that this thread may put together
_inflate = Array.__dict__["inflate"].__func__


def _inflate_within_budget(
    cls: type[Array], content: bytes, children: dict[str, InflatableObject] | None = None
) -> Array:
    """Put an array together, as Flower does, if the budget of this thread allows it."""
    if hasattr(_budget, "left"):
        names = get_object_children_ids_from_object_content(content)
        sizes = [len((children or {})[name].data) for name in names]  # type: ignore[attr-defined]
        chunks = json.loads(get_object_body(content, cls))["arraychunk_ids"]
        _budget.left -= sum(sizes[i] for i in chunks)
        if _budget.left < 0:
            raise ValueError("the message holds more bytes of arrays than its reader expects")
    array: Array = _inflate(cls, content, children)
    return array


def run_node(
    settings: ConnectionSettings,
    app: ClientFunction,
    node_config: Mapping[str, str | int],
    connect_timeout_s: float = 60.0,
    has_ended: Callable[[], bool] = lambda: False,
) -> None:
    """Answer messages until the study has ended; reconnect when the SuperLink was lost.

    Args:
        settings: Where the SuperLink is.
        app: Answers a message.
        node_config: What `app` finds in `context.node_config`.
        connect_timeout_s: Seconds in which the first connection must succeed. The SuperLink refuses
            a node that was killed and restarted until its old session has expired, about 20 s.
        has_ended: Whether the study has ended; by default it never does.

    Raises:
        RefusedError: The first connection did not succeed in time, or cannot succeed.
    """
    patch_flower_pull_backoff()
    keyless = settings.key is None
    give_up_at = time.monotonic() + connect_timeout_s
    was_connected = False
    logged_reason = ""
    while True:
        try:
            with (
                settings.connect() as (client, public_key),
                _activated_node(client, public_key, register=keyless) as node,
            ):
                was_connected = True
                logged_reason = ""
                log.info("connected to %s as node %d", settings.address, node.node_id)
                while not has_ended():
                    if not _answer_next_message(client, node, app, node_config):
                        time.sleep(MESSAGE_POLL_S)
            return
        except (httpx.HTTPError, RefusedError) as error:
            reason = _describe(error)
            hopeless = _is_permanent(error, keyless) or time.monotonic() > give_up_at
            if hopeless and not was_connected:
                raise RefusedError(f"{settings.address} cannot be joined: {reason}") from error
            if reason != logged_reason:
                log.warning("no connection to %s (%s); retrying", settings.address, reason)
            logged_reason = reason
        time.sleep(RECONNECT_S)


@contextmanager
def _activated_node(client: FleetHttpClient, public_key: bytes, register: bool) -> Iterator[Node]:
    """Activate this node at the SuperLink, send heartbeats meanwhile, and deactivate it."""
    if register:
        client.RegisterNode(RegisterNodeFleetRequest(public_key=public_key))
    # With the shortest interval that is allowed, a node that died is noticed soonest.
    interval = HEARTBEAT_MIN_INTERVAL
    request = ActivateNodeRequest(public_key=public_key, heartbeat_interval=interval)
    node = Node(node_id=client.ActivateNode(request).node_id)
    ended = threading.Event()

    def send_heartbeats() -> None:
        heartbeat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=interval)
        while not ended.wait(0.8 * interval):
            try:
                client.SendNodeHeartbeat(heartbeat)
            except httpx.HTTPError as error:
                log.debug("heartbeat failed: %s", error)

    threading.Thread(target=send_heartbeats, daemon=True).start()
    try:
        yield node
    finally:
        ended.set()
        with suppress(httpx.HTTPError):  # the SuperLink may be gone
            client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
            if register:
                client.UnregisterNode(UnregisterNodeFleetRequest(node_id=node.node_id))


def _answer_next_message(
    client: FleetHttpClient, node: Node, app: ClientFunction, node_config: Mapping[str, str | int]
) -> bool:
    """Pull one message and push the reply; return False if there was no message."""
    response = client.PullMessages(PullMessagesRequest(node=node))
    if not response.messages_list:
        return False
    run_id = response.messages_list[0].metadata.run_id
    tree = response.message_object_trees[0]
    try:
        message = inflatable_utils.pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(client.PullObject, node, run_id),
            make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run_id),
            return_type=Message,
        )
    except (inflatable_utils.ObjectPullError, ValueError, TypeError, KeyError) as error:
        log.warning("a message could not be read: %s", error)
        return True
    message.metadata.__dict__["_message_id"] = tree.object_id
    started = time.monotonic()
    context = Context(run_id, node.node_id, dict(node_config), RecordDict(), {})
    try:
        reply = app(message, context)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        reply = Message(Error(code=APP_RAISED_CODE, reason=reason), reply_to=message)
    if reply.has_content():
        reply.content = bundle(reply.content)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
    try:
        _push_reply(client, node, run_id, reply, time.monotonic() - started)
    except httpx.HTTPStatusError as error:
        if error.response.status_code in RECONNECT_STATUSES:
            raise
        # The run has ended, or the message has expired: this reply is late.
        log.warning("a reply was not accepted: %s", _describe(error))
    except inflatable_utils.ObjectPushError as error:
        log.warning("a reply was not accepted: %s", error)
    return True


def _push_reply(
    client: FleetHttpClient, node: Node, run_id: int, reply: Message, seconds: float
) -> None:
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
            make_push_object_fn_protobuf(client.PushObject, node, run_id, pushed.session_id),
            object_ids_to_push=set(pushed.objects_to_push),
        )


def _describe(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        flower_error = FlowerError.from_json(error.response.text)
        if flower_error:
            return f"[code {flower_error.code}] {flower_error.message}"
        return f"HTTP status {error.response.status_code}"
    return str(error) or type(error).__name__


def _is_permanent(error: Exception, keyless: bool) -> bool:
    """Return whether retrying is in vain: a certificate is not trusted, or a key is needed."""
    if "certificate" in str(error).lower():
        return True
    if not isinstance(error, httpx.HTTPStatusError):
        return False
    return keyless and error.response.status_code == KEY_NEEDED_STATUS
