"""FedAvg on episodes; on batches the conformance suite has it."""

from __future__ import annotations

import dataclasses

import torch
from torch.func import grad

from fedbilevel.algorithms import FedAvg
from tests.support.episodes import curved, lower, run, upper

METHOD = FedAvg(lr_x=0.1, lr_y=0.2, episode_steps=3, server_lr=0.6)


def test_x_continues_from_episode_to_episode_and_y_starts_at_the_shared_one() -> None:
    problem, (client,) = curved(1)
    x, y = problem.start
    x_i = x
    dy = torch.zeros(3, dtype=torch.float64)
    for _ in range(2):
        y_i = y
        for _ in range(3):
            g_x, g_y = grad(lower, argnums=(0, 1))(x_i, y_i, client.train)
            f_x, f_y = grad(upper, argnums=(0, 1))(x_i, y_i, client.val)
            x_i = x_i - 0.1 * 0.5 * (g_x + f_x)
            y_i = y_i - 0.2 * 0.5 * (g_y + f_y)
        dy = dy + (y_i["y"] - y["y"]) / 2
    dx = x_i["x"] - x["x"]
    after = run(problem, [client], METHOD, {"local_steps": 2})
    torch.testing.assert_close(after.state.x["x"], x["x"] + 0.6 * dx, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.state.y["y"], y["y"] + 0.6 * dy, rtol=0, atol=1e-12)
    assert after.fed.ledger.totals()["gradients"] == 2 * 3 * 2


def test_x_stays_at_its_start_where_only_y_is_trained() -> None:
    problem, clients = curved(1)
    after = run(problem, clients, dataclasses.replace(METHOD, train="y"))
    assert torch.equal(after.state.x["x"], problem.start[0]["x"])
    assert not torch.equal(after.state.y["y"], problem.start[1]["y"])
