"""Variables that belong to the clients, on nodes: they never cross the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.tree import flatten
from fedbilevel.deploy.flower import client
from fedbilevel.deploy.flower.wire import decode
from fedbilevel.execution.memories import OWN
from tests.support.flower import (
    HYPER_REPRESENTATION,
    FakeGrid,
    Handler,
    advance,
    only_for,
    real_federation,
    resolve_config,
    simulated_run,
)

pytestmark = pytest.mark.usefixtures("in_process")

METHODS = [("simfbo", "y"), ("afbo", "y"), ("rabo", "y"), ("simfbo", "x"), ("afbo", "x")]


def experiment(method: str, level: str) -> dict[str, Any]:
    name = f"tests.support.owners:client_owned_{level}"
    return {
        "task": {"name": name, "clients": 4, "dim_x": 3, "samples": 6, "noise": 0.5},
        "algorithm": {"name": method},
        "environment": {"local_steps": [1, 4], "batch_size": 2, "participation": 3},
        "rounds": 5,
    }


@pytest.mark.parametrize(("method", "level"), METHODS)
def test_nodes_compute_as_a_simulation_and_send_nothing_of_their_own(
    method: str, level: str
) -> None:
    config = resolve_config({**experiment(method, level), "runtime": {"mode": "loop"}})
    grid = FakeGrid(4)
    shapes: set[tuple[int, ...]] = set()

    def record(message: Message, handle: Handler) -> Message:
        reply = handle(message)
        for content in (decode(message.content)["shared"], decode(reply.content)["values"]):
            shapes.update(tuple(leaf.shape) for leaf in tensors(content))
        return reply

    for node, node_config in grid.nodes.items():
        node_config["task"] = config.table["task"]["name"]
        grid.behaviours[node] = only_for("train", record)
    fed, run = real_federation(grid, config)
    simulated = simulated_run(config)
    rounds = 4 if method != "afbo" else 1  # without a barrier nodes answer in another order
    advance(rounds, run, simulated)
    server = "x" if level == "y" else "y"
    expected = flatten(getattr(simulated.state, server))
    actual = flatten(getattr(run.state, server))
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
    assert shapes == {(3,) if level == "y" else (4,)}
    assert fed.ledger.totals()["bytes_up"] == simulated.fed.ledger.totals()["bytes_up"]
    for number, (_, worker) in client._workers.items():
        kept = worker._load_memory(client.NO_TASK).get(OWN, {})
        own = simulated.fed.transport.own(number)
        assert kept.keys() == own.keys()
        for name, tree in own.items():
            assert torch.allclose(flatten(kept[name]), flatten(tree), rtol=0, atol=1e-12)
    losses = simulated.fed.transport.losses(*run.state[:2])
    measured = fed.transport.losses(*run.state[:2])
    assert measured == pytest.approx(losses, abs=1e-12)
    with pytest.raises(LookupError, match="the own model of client 1 is with it"):
        run.result.personal(1)


def test_a_real_federation_does_not_ask_for_the_metrics_of_single_clients() -> None:
    task = {**HYPER_REPRESENTATION, "owner": "client"}
    table = {"task": task, "data": {"name": "digits"}, "algorithm": {"name": "simfbo"}}
    config = resolve_config({**table, "rounds": 1, "every": 1})
    _, run = real_federation(FakeGrid(3), config)
    assert [metrics["round"] for metrics in run] == [0, 1]
    assert "test_accuracy" not in run.history[-1]
    assert "test_accuracy_worst" in next(iter(simulated_run(config)))


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
