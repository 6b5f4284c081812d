"""Single messages on Flower's grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from flwr.app import Array, Message

from fedbilevel.deploy.flower._grid import UNREADABLE_CODE, GridConnection, Sent
from fedbilevel.deploy.flower.wire import SHORT, bundle, is_bundle
from tests.support.flower import (
    QUADRATIC,
    FakeGrid,
    only_for,
    real_federation,
    resolve_config,
)

pytestmark = pytest.mark.usefixtures("in_process")


def test_a_reply_that_flower_cannot_read_is_refused() -> None:
    """Flower takes the first object that a node has sent for a message, whatever it is."""
    grid = FakeGrid(4)
    grid.behaviours[102] = only_for(
        "train", lambda message, handle: cast(Any, handle(message).content)
    )
    fed, run = real_federation(grid, resolve_config(QUADRATIC))
    run.advance()
    assert fed.transport.strikes.refusals == {2: 1}


@pytest.mark.parametrize("repeats", [1, 500])
def test_a_short_message_cannot_become_a_large_one(repeats: int) -> None:
    """Flower's arrays are chunks and a list of their indices, which may repeat one."""
    array = Array("float64", (256,), "raw", bytes(2048))
    chunks = array.slice_array()
    array.__dict__["_chunks"] = chunks * repeats
    sent = array.deflate()
    inflated: list[Array] = []

    class Flower:
        def pull_messages(self, _: object) -> list[Message]:
            inflated.append(Array.inflate(sent, dict(chunks)))
            return []

    reply = GridConnection(cast(Any, Flower())).pull(Sent("0", ""), SHORT)
    if repeats == 1:
        assert reply is None
        assert inflated[0].data == array.data
    else:
        assert reply is not None
        assert reply.error_code == UNREADABLE_CODE
        assert not inflated
    del array.__dict__["_chunks"]
    assert Array.inflate(sent, dict(chunks)).data == array.data * repeats  # elsewhere, no limit


def test_nodes_that_reply_with_bundles_are_sent_bundles() -> None:
    grid = FakeGrid(4)
    received: list[tuple[int, bool]] = []

    def reply_with_a_bundle(message: Message, handle: Callable[[Message], Message]) -> Message:
        received.append((message.metadata.dst_node_id, is_bundle(message.content)))
        reply = handle(message)
        reply.content = bundle(reply.content)
        return reply

    grid.behaviours[102] = reply_with_a_bundle
    _, run = real_federation(grid, resolve_config(QUADRATIC))
    run.advance()
    run.advance()
    assert received[0] == (102, False)  # before its first reply, no one knows that it bundles
    assert all(bundled for _, bundled in received[1:])
