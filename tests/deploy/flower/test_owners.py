"""Variables that belong to the clients, on nodes: they never cross the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from safetensors.torch import load_file
from torch import Tensor
from torch.utils import _pytree as pytree

import fedbilevel as fb
from fedbilevel.cli.app import main
from fedbilevel.core.tree import flatten
from fedbilevel.deploy.flower import client
from fedbilevel.deploy.flower._replies import read_metrics
from fedbilevel.deploy.flower.transport import FlowerTransport
from fedbilevel.deploy.flower.wire import decode
from fedbilevel.execution.client_memory import OWN
from fedbilevel.experiments.runner import load_task
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
METHODS += [("unifbo", "x"), ("asfbo", "x")]


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


@pytest.mark.parametrize("method", ["simfbo", "afbo"])
@pytest.mark.parametrize(
    "task",
    [
        {"name": "hyper-cleaning", "clients": 3, "samples": 84},
        {**HYPER_REPRESENTATION, "hidden": 5},
    ],
)
def test_no_byte_of_what_clients_own_is_in_a_message(task: dict[str, Any], method: str) -> None:
    """Neither a tensor shaped like x_i or y_i nor four of its numbers in a row, in any message."""
    table = {"task": {**task, "owner": "client"}, "data": {"name": "digits"}}
    steps = {"lr_x": 0.7, "lr_y": 0.3, "lr_z": 0.3}
    environment = {"local_steps": 2}
    algorithm = {"name": method, **steps}
    config = resolve_config(
        {**table, "algorithm": algorithm, "environment": environment, "rounds": 3, "every": 1}
    )
    grid = FakeGrid(3)
    messages: list[RecordDict] = []

    def record(message: Message, handle: Handler) -> Message:
        reply = handle(message)
        messages.extend([message.content, reply.content])
        for content in messages[-2:]:
            shapes = {tuple(leaf.shape) for leaf in tensors(decode(content))}
            assert not shapes & own_shapes
            assert not any(numbers in serialized(content) for numbers in own_numbers())
        return reply

    def own_numbers() -> list[bytes]:
        """The first four numbers of every tensor that a client has kept so far."""
        found = []
        for _, worker in client._workers.values():
            for tree in worker._load_memory(client.NO_TASK).get(OWN, {}).values():
                found += [leaf.flatten()[:4].numpy().tobytes() for leaf in tree.values()]
        return [numbers for numbers in found if any(numbers)]

    problem = load_task(config).problem
    owned = problem.x if problem.client_levels == ("x",) else problem.y
    own_shapes = {tuple(tensor.shape) for tensor in owned.values()}
    for node in grid.nodes:
        grid.behaviours[node] = record
    fed, run = real_federation(grid, config)
    list(run)
    transport = fed.transport
    assert isinstance(transport, FlowerTransport)
    transport.farewell("completed", run.result.x, run.result.y)
    assert len(own_numbers()) >= 3
    shared = {**run.result.x, **run.result.y}
    last = next(iter(shared.values())).flatten()[-4:].numpy().tobytes()
    assert any(last in serialized(content) for content in messages), "the check sees nothing"


def serialized(content: RecordDict) -> bytes:
    return recorddict_to_proto(content).SerializeToString()


@pytest.mark.parametrize("method", ["simfbo", "ditto"])
def test_nodes_measure_and_keep_their_own_models(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"owner": "client"} if method == "simfbo" else {"held_out": 0.2}
    table = {"task": {**HYPER_REPRESENTATION, **own}, "data": {"name": "digits"}}
    config = resolve_config({**table, "algorithm": {"name": method}, "rounds": 2, "every": 2})
    grid = FakeGrid(3)
    asked: list[Any] = []

    def record(message: Message, handle: Handler) -> Message:
        asked.append(decode(message.content))
        return handle(message)

    for node in grid.nodes:
        grid.behaviours[node] = only_for("query", record)
    fed, run = real_federation(grid, config)
    simulated = simulated_run(config)
    for ours, theirs in zip(run, simulated, strict=True):
        for suffix in ("", "_median", "_worst", "_p10", "_spread"):
            for name in ("test_accuracy", "test_loss"):
                assert ours[name + suffix] == pytest.approx(theirs[name + suffix], abs=1e-6)
    assert run.client_metrics is not None
    assert run.client_metrics.summary()["test_accuracy"]["clients"] == [0, 1, 2]

    transport = fed.transport
    assert isinstance(transport, FlowerTransport)
    transport.farewell("completed", run.result.x, run.result.y)
    farewells = [each for each in asked if "ended" in each]
    assert len(farewells) == 3
    assert all(bool(each["y"]) == (method == "ditto") for each in farewells)
    module = fb.nets.mlp(64, HYPER_REPRESENTATION["hidden"], 10)
    for number in range(3):
        folder = client._workers[number][1].model_file.parent
        out = tmp_path / f"{number}.safetensors"
        with pytest.raises(SystemExit, match="0"):
            main(["export", str(folder), "--client", str(number), "--out", str(out)])
        capsys.readouterr()
        exported = load_file(out)
        module.load_state_dict(exported)
        x, y = simulated.result.personal(number)
        for name, tensor in {**x, **y}.items():
            torch.testing.assert_close(exported[name], tensor)
    start = simulated.fed.problem.y["head.weight"]
    assert not torch.equal(exported["head.weight"], run.result.y.get("head.weight", start))


def test_a_node_with_data_of_its_own_measures_nothing_on_that_of_the_task() -> None:
    table = {"task": {**HYPER_REPRESENTATION, "owner": "client"}, "data": {"name": "digits"}}
    config = resolve_config({**table, "algorithm": {"name": "simfbo"}, "rounds": 1, "every": 1})
    grid = FakeGrid(3)
    grid.nodes[sorted(grid.nodes)[0]]["client-data"] = "tests.deploy.flower.test_owners:own_data"
    _, run = real_federation(grid, config)
    assert [metrics["round"] for metrics in run] == [0, 1]
    assert run.client_metrics is not None
    assert len(run.client_metrics.summary()["test_accuracy"]["clients"]) == 2


def own_data(client: int) -> fb.ClientData:
    samples = (torch.randn(20, 1, 8, 8), torch.arange(20) % 10)
    return fb.ClientData(train=samples, val=samples)


@pytest.mark.parametrize(
    "metrics", [None, {"test_accuracy": float("nan")}, {"a": 1}, {"a b": 1.0}, {"a": "high"}]
)
def test_metrics_that_no_honest_node_reports_are_refused(metrics: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="its "):
        read_metrics({"metrics": metrics})


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
