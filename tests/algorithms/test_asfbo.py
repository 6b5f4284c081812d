"""ASFBO and LA-ASFBO: batches of their own for the directions, and varrho as a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import ASFBO, LAASFBO
from fedbilevel.algorithms.asfbo import Descend, DescendStorm
from fedbilevel.core import settings
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.schedules import Cosine
from fedbilevel.federation.phase import Message
from tests.support.cases import Matrices, client_means, directions, start_xyz
from tests.support.conformance import build, iterate
from tests.support.estimators import load_quadratic

LR = {"x": 0.05, "y": 0.2, "z": 0.1}
BETA = 0.25
Triple = tuple[Tensor, Tensor, Tensor]


def batch_of(m: Matrices) -> fb.Batch:
    """A batch of one sample, which is these matrices."""
    stacked = [part.unsqueeze(0) for part in m]
    return fb.Batch(train=tuple(stacked[:3]), val=tuple(stacked[3:]))


def on_own_batches(batches: list[Matrices], point: list[Tensor]) -> Triple:
    """d_x, d_y and d_z on the third, the first and the second batch."""
    for_y, for_z, for_x = (directions(m, point[0], point[1], point[2]) for m in batches)
    return for_x[0], for_y[1], for_z[2]


def on_the_first_batch(batches: list[Matrices], point: list[Tensor]) -> Triple:
    return directions(batches[0], point[0], point[1], point[2])


def momentum_means(
    storm: bool, draws: list[list[Matrices]], direction: Callable[..., Triple]
) -> list[Tensor]:
    """h_x, h_y and h_z of eq. (15) to (26), from one entry of `draws` per step."""
    point = list(start_xyz(draws[0][0]))
    m = list(direction(draws[0], point))
    total = [torch.zeros_like(v) for v in point]
    for k in range(len(draws)):
        old = point
        total = [q + new for q, new in zip(total, m, strict=True)]
        point = [v - LR[name] * d for v, name, d in zip(point, "xyz", m, strict=True)]
        if k + 1 == len(draws):
            break
        at_new = direction(draws[k + 1], point)
        at_old = direction(draws[k + 1], old)
        for j in range(3):
            if storm:
                m[j] = at_new[j] + (1 - BETA) * (m[j] - at_old[j])
            else:
                m[j] = BETA * at_new[j] + (1 - BETA) * m[j]
    return [q / len(draws) for q in total]


@pytest.mark.parametrize("phase", [Descend, DescendStorm])
def test_each_direction_has_its_own_batches_and_storm_reuses_them_at_the_old_point(
    phase: type[Descend],
) -> None:
    """Nine clients of the quadratic task serve as the batches of three steps."""
    task = load_quadratic(clients=9)
    matrices: list[Any] = client_means(task)
    draws = [matrices[3 * k : 3 * k + 3] for k in range(3)]
    lr = {f"lr_{name}": value for name, value in LR.items()}
    work = phase(**lr, momentum_weight=BETA, independent_batches=True)
    assert work.draws == 3
    x, y = task.problem.start
    zero = fb.Tree(y=torch.zeros_like(y["y"]))
    steps = torch.tensor(3, dtype=torch.float64)
    carry = work.start(Message(x=x, y=y, z=zero, steps=steps))
    for k, batches in enumerate(draws):
        step = work.step if k else work.first
        carry = step(carry, Oracle(task.problem), tuple(map(batch_of, batches)))
    reply = work.finish(carry)
    replied = [reply["hx"]["x"], reply["hy"]["y"], reply["hz"]["y"]]

    storm = phase is DescendStorm
    by_hand = momentum_means(storm, draws, on_own_batches)
    shared = momentum_means(storm, draws, on_the_first_batch)
    for got, expected, broken in zip(replied, by_hand, shared, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)
        assert (got - broken).norm() > 1e-2


@pytest.mark.parametrize(("name", "evaluations"), [("asfbo", 3), ("la-asfbo", 5)])
def test_independent_batches_cost_seven_gradients_and_three_times_the_samples(
    name: str, evaluations: int
) -> None:
    task = fb.tasks.load("quadratic", clients=2)
    together, apart = (
        iterate(
            task,
            build(name, independent_batches=independent),
            2,
            environment={"local_steps": 3},
        )
        for independent in (False, True)
    )
    torch.testing.assert_close(together.state.x, apart.state.x, rtol=0, atol=1e-12)
    assert together.fed.ledger.totals()["gradients"] == 2 * 2 * 3 * evaluations
    assert apart.fed.ledger.totals()["gradients"] == 2 * 2 * 7 * evaluations
    assert apart.fed.ledger.totals()["samples"] == 3 * together.fed.ledger.totals()["samples"]


def running_norms(task: Any, varrho: Callable[[int], float], iterations: int) -> list[float]:
    """s_x by eq. (27) and (28) with one client and one local step, where h is d."""
    (m,) = client_means(task)
    point = list(start_xyz(m))
    s = [0.0, 0.0, 0.0]
    norms = []
    for t in range(iterations):
        h = directions(m, point[0], point[1], point[2])
        for j in range(3):
            s[j] = varrho(t) * s[j] + (1 - varrho(t)) * float(h[j].norm())
            point[j] = point[j] - 0.01 / (s[j] + 0.001) * h[j]
        norms.append(s[0])
    return norms


WIDE = {f"server_lr_{name}_bounds": (1e-9, 1e9) for name in "xyz"}
SERVER = {f"server_lr_{name}": 0.01 for name in "xyz"}


@pytest.mark.parametrize("method", [ASFBO, LAASFBO])
@pytest.mark.parametrize(
    "varrho", [lambda t: t / (t + 1), Cosine(0.9, 0.1, 4)], ids=["mean", "cosine"]
)
def test_varrho_may_follow_a_schedule(method: type[ASFBO], varrho: Callable[[int], float]) -> None:
    """With varrho^(t) = t / (t + 1) the running norm is the mean of all norms so far."""
    task = load_quadratic(clients=1)
    algorithm = method(**WIDE, **SERVER, norm_decay=varrho)
    by_hand = running_norms(task, varrho, 6)
    for t in (1, 6):
        state = iterate(task, algorithm, t).state
        assert state.sx == pytest.approx(by_hand[t - 1], rel=1e-12)
    constant = running_norms(task, lambda t: 0.75, 6)
    assert by_hand[-1] != pytest.approx(constant[-1], rel=1e-2)


def test_varrho_of_a_table_is_a_schedule_and_stays_below_one() -> None:
    table = {"norm_decay": {"schedule": "cosine", "start": 0.5, "end": 0.9, "iterations": 10}}
    algorithm = settings.build(ASFBO, "algorithm", table)
    assert algorithm.norm_decay == Cosine(0.5, 0.9, 10)
    assert algorithm.at(5).norm_decay == pytest.approx(0.7)
    with pytest.raises(ValueError, match=r"^norm_decay is 1.0; it must be in \[0, 1\)$"):
        ASFBO(norm_decay=1.0)
    with pytest.raises(ValueError, match=r"^norm_decay is 2; it must be in \[0, 1\)$"):
        ASFBO(norm_decay=lambda t: t).at(2)
