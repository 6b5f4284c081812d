"""Clients that come after training."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fedbilevel as fb
from tests.support.cases import client_means
from tests.support.owners import client_owned


@pytest.mark.parametrize("owner", ["client", "server"])
def test_new_clients_take_gradient_steps_on_their_own_data(owner: Any) -> None:
    task = client_owned("y")
    problem = dataclasses.replace(task.problem, owner={"y": owner})
    x = fb.Tree(x=torch.linspace(-1, 1, 5, dtype=torch.float64))
    start = torch.zeros(4, dtype=torch.float64)
    server_y = fb.Tree()
    if owner == "server":
        start = torch.ones(4, dtype=torch.float64)
        server_y = fb.Tree(y=start)
    models = fb.adapt(problem, task.clients[2:], x, server_y, steps=3, lr=0.2)
    for (own_x, own_y), (A, B, c, *_) in zip(models, client_means(task)[2:], strict=True):
        y = start
        for _ in range(3):
            y = y - 0.2 * (A @ y - B @ x["x"] - c)
        torch.testing.assert_close(own_y["y"], y, rtol=0, atol=1e-12)
        assert torch.equal(own_x["x"], x["x"])


def test_the_whole_model_can_be_fitted() -> None:
    task = client_owned("y")
    x = fb.Tree(x=torch.ones(5, dtype=torch.float64))
    ((own_x, own_y),) = fb.adapt(
        task.problem, task.clients[:1], x, fb.Tree(), steps=2, lr=0.1, train="both"
    )
    A, B, c, *_ = client_means(task)[0]
    by_hand_x, y = x["x"], torch.zeros(4, dtype=torch.float64)
    for _ in range(2):
        g_x, g_y = -B.T @ y, A @ y - B @ by_hand_x - c
        by_hand_x, y = by_hand_x - 0.1 * g_x, y - 0.1 * g_y
    torch.testing.assert_close(own_x["x"], by_hand_x, rtol=0, atol=1e-12)
    torch.testing.assert_close(own_y["y"], y, rtol=0, atol=1e-12)


def test_what_cannot_be_adapted_is_refused() -> None:
    task = client_owned("x")
    x, y = task.problem.start
    with pytest.raises(ValueError, match="owner gives 'x' of x to the clients"):
        fb.adapt(task.problem, task.clients[:1], x, y)
    for argument, value in (("steps", 0), ("lr", -1.0), ("train", "x")):
        with pytest.raises(ValueError, match=argument):
            fb.adapt(task.problem, task.clients[:1], x, y, **{argument: value})


@pytest.mark.parametrize("rotated", [False, True])
def test_clients_that_a_task_holds_back_are_measured_after_adapting(rotated: bool) -> None:
    options: dict[str, Any] = {"clients": 12, "partition": "shards", "hidden": 16}
    task = fb.tasks.load(
        "hyper-representation", **options, owner="client", new_clients=4, rotated=rotated
    )
    assert len(task.clients) == 8
    method = fb.algorithms.SimFBO(lr_x=0.2, lr_y=0.2, lr_z=0.2, server_lr_x=0.2)
    result = fb.solve(
        task.problem,
        task.clients,
        method,
        rounds=20,
        environment=fb.Environment(local_steps=3, batch_size=32),
        every=20,
        evaluate=task.evaluate,
        evaluate_client=task.evaluate_client,
    )
    last = result.history[-1]
    whole = fb.tasks.load("hyper-representation", **options, owner="client", rotated=rotated)
    models = fb.adapt(task.problem, whole.clients[8:], result.x, result.y, steps=10, lr=0.1)
    accuracies = [
        whole.evaluate_client(*model, client)["test_accuracy"]
        for client, model in enumerate(models, start=8)
    ]
    assert last["new_test_accuracy"] == pytest.approx(sum(accuracies) / 4)
    assert last["new_test_accuracy_worst"] == min(accuracies)
    assert last["new_test_accuracy"] > result.history[0]["test_accuracy"] + 0.3


def test_the_images_of_a_client_are_turned_on_all_its_sides() -> None:
    options: dict[str, Any] = {"clients": 5, "hidden": 8, "held_out": 0.2}
    straight = fb.tasks.load("hyper-representation", **options)
    turned = fb.tasks.load("hyper-representation", **options, rotated=True)
    for number, (before, after) in enumerate(zip(straight.clients, turned.clients, strict=True)):
        for side in ("train", "val"):
            images, labels = getattr(before, side)
            images = images.unflatten(-1, (8, 8)) if images.ndim == 2 else images
            expected = images.rot90(number, (-2, -1))
            found, found_labels = getattr(after, side)
            assert torch.equal(found.reshape(expected.shape), expected)
            assert torch.equal(labels, found_labels)
    x, y = turned.problem.start
    losses = [task.evaluate_client(x, y, 1)["test_loss"] for task in (straight, turned)]
    assert losses[0] != losses[1]  # held-out samples, too
    assert straight.evaluate_client(x, y, 0) == turned.evaluate_client(x, y, 0)
