"""Which nodes are admitted, and as which client."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Message

from fedbilevel.algorithms.shared import LowerRound, UpperRound
from fedbilevel.deploy.flower.wire import encode
from fedbilevel.federation.conduct import Conduct
from tests.support.flower import (
    QUADRATIC,
    FakeGrid,
    Handler,
    only_for,
    real_federation,
    resolve_config,
)

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.mark.parametrize(
    "claim",
    [
        {"samples": [2**60, 1]},
        {"samples": [0, 1]},
        {"samples": [1]},
        {"client": 9},
        {"client": torch.zeros(40, 40)},
    ],
)
def test_a_node_with_an_invalid_claim_is_refused(
    claim: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    def answer(message: Message, handle: Handler) -> Message:
        handle(message)
        return Message(encode(**{"client": 1, "samples": [1, 1], **claim}), reply_to=message)

    grid = FakeGrid(2)
    grid.behaviours[101] = only_for("query", answer)
    config = resolve_config(QUADRATIC, **{"task.clients": 2})
    fed, _ = real_federation(grid, config, Conduct(start_clients=1))
    fed.weights()
    fed.transport.members.refresh()
    assert fed.transport.present == [0]
    (line,) = [record.message for record in caplog.records if "node 101 refused" in record.message]
    assert "\n" not in line


def test_an_epoch_is_counted_on_the_side_that_its_phase_is_given() -> None:
    def answer(message: Message, handle: Handler) -> Message:
        handle(message)
        return Message(encode(client=1, samples=[10, 4]), reply_to=message)

    grid = FakeGrid(2)
    grid.behaviours[101] = only_for("query", answer)
    fed, _ = real_federation(grid, resolve_config(QUADRATIC, **{"task.clients": 2}))
    fed.weights()
    assert fed.transport.samples(1, LowerRound(lr_y=0.1).epoch_side) == 10
    assert fed.transport.samples(1, UpperRound(lr_x=0.1).epoch_side) == 4


def test_a_client_that_restarts_is_admitted_once_its_old_node_has_left() -> None:
    grid = FakeGrid(2)
    fed, _ = real_federation(grid, resolve_config(QUADRATIC, **{"task.clients": 2}))
    members = fed.transport.members
    fed.weights()
    grid.nodes[201] = {"partition-id": 1}  # without a key, a node that restarts has a new id
    for _ in range(3):
        members.refresh()
    assert members.node_of[1] == 101
    del grid.nodes[101]
    for _ in range(3):
        members.refresh()
    assert members.node_of[1] == 201


def test_two_nodes_cannot_be_one_client_and_a_key_is_bound_to_its_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = FakeGrid(3)
    grid.nodes[102] = {"partition-id": 0}
    grid.key_names = {101: "client-7"}
    config = resolve_config(QUADRATIC, **{"task.clients": 3})
    fed, _ = real_federation(grid, config, Conduct(start_clients=1, wait_s=30.0))
    fed.weights()
    fed.transport.members.refresh()
    assert fed.transport.present == [0]
    assert "another node serves client 0" in caplog.text
    assert "its key is that of client-7" in caplog.text


def test_a_node_whose_client_cannot_be_set_up_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(3)
    grid.nodes[102] = {"partition-id": 2, "client-data": "nowhere:load"}
    config = resolve_config(QUADRATIC, **{"task.clients": 3})
    fed, _ = real_federation(grid, config, Conduct(start_clients=2))
    fed.weights()
    assert fed.transport.present == [0, 1]
    assert "node 102 refused: the client failed (ValueError)" in caplog.text
    assert "message not answered: ValueError: client-data is 'nowhere:load'" in caplog.text
