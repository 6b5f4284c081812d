"""What clients say of themselves is believed within bounds, and ends no run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.deploy.flower._claims import LOSS_FACTOR, MAX_COST, MAX_SAMPLES, Claims
from fedbilevel.deploy.flower.wire import decode, encode
from fedbilevel.federation.conduct import Conduct
from fedbilevel.federation.task import Results, TaskCost
from fedbilevel.federation.transport import Arrived
from tests.support.flower import (
    QUADRATIC,
    Behaviour,
    FakeGrid,
    Handler,
    advance,
    change_reply,
    only_for,
    real_federation,
    resolve_config,
)

pytestmark = pytest.mark.usefixtures("in_process")

WEIGHTED = {**QUADRATIC, "weights": "samples"}


def claiming(**values: object) -> Behaviour:
    """A node that answers its greeting with other values."""

    def answer(message: Message, handle: Handler) -> Message:
        honest = decode(handle(message).content)
        return Message(encode(**{**honest, **values}), reply_to=message)

    return only_for("query", answer)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 10**6), min_size=3, max_size=8),
    st.lists(st.integers(1, MAX_SAMPLES), max_size=3),
)
def test_a_claim_counts_for_no_more_than_the_factor_allows(
    honest: list[int], lies: list[int]
) -> None:
    lies = lies[: len(honest) - 1]
    claims = Claims(4.0, None, None)
    for client, samples in enumerate([*lies, *honest]):
        claims.enter(client, [samples, 1])
    counted = [claims.samples(client, "train") for client in range(len(honest) + len(lies))]
    assert max(counted) <= 4 * max(honest)
    for claimed, counts in zip([*lies, *honest], counted, strict=True):
        assert counts == claimed or counts == max(counted)


@pytest.mark.parametrize("claimed", [400, 2**40])
def test_a_share_is_bounded_by_the_median_and_named(
    claimed: int, caplog: pytest.LogCaptureFixture
) -> None:
    grid = FakeGrid(4)
    grid.behaviours[101] = claiming(samples=[claimed, 6])
    fed, run = real_federation(grid, resolve_config(WEIGHTED))
    assert list(fed.weights()) == pytest.approx([6 / 42, 24 / 42, 6 / 42, 6 / 42])
    assert f"client 1 claims {claimed} training samples and counts for 24" in caplog.text
    _, capped = real_federation(
        FakeGrid(4), resolve_config(WEIGHTED), Conduct(samples=[6, 24, 6, 6])
    )
    advance(5, run, capped)
    assert torch.equal(run.state.x["x"], capped.state.x["x"])


def test_registered_samples_count_instead_of_claims(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(4)
    grid.behaviours[101] = claiming(samples=[2**40, 6])
    conduct = Conduct(samples=[6, 600, 6, 6])
    fed, _ = real_federation(grid, resolve_config(WEIGHTED), conduct)
    assert list(fed.weights()) == pytest.approx([6 / 618, 600 / 618, 6 / 618, 6 / 618])
    assert "client 1 claims 1099511627776 training samples; 600 are registered" in caplog.text
    with pytest.raises(ValueError, match=r"conduct.samples has 2 numbers; there are 4 clients"):
        real_federation(FakeGrid(4), resolve_config(WEIGHTED), Conduct(samples=[1, 2]))


@pytest.mark.parametrize(
    "samples", [[-5, 1], [0, 1], [2**60, 1], [6], 6, ["6", "6"], [6.5, 1], [torch.ones(2), 1]]
)
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_an_impossible_claim_keeps_no_run_from_starting(weights: str, samples: Any) -> None:
    grid = FakeGrid(4)
    grid.behaviours[101] = claiming(samples=samples)
    config = resolve_config({**QUADRATIC, "weights": weights})
    fed, run = real_federation(grid, config, Conduct(wait_s=5.0))
    advance(2, run)
    assert fed.transport.present == [0, 2, 3]
    assert list(fed.weights()) == pytest.approx([0.25] * 4)


def test_the_number_of_steps_of_an_epoch_is_bounded_too() -> None:
    """Displacements are divided by the mean number of steps, which one client must not decide."""
    table = {**QUADRATIC, "algorithm": {"name": "fednest", "lower_steps": "1 epoch"}}
    grid = FakeGrid(4)
    grid.behaviours[101] = claiming(samples=[2**40, 6])
    fed, run = real_federation(grid, resolve_config(table))
    run.advance()
    steps = [
        decode(message.content)["steps"]
        for message in grid.sent
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 101
    ]
    assert max(steps) == 4 * 6 // 2
    assert fed.ledger.lost_tasks == 0


def with_cost(**cost: int) -> Behaviour:
    return change_reply(lambda reply: {**reply, "cost": {**reply["cost"], **cost}})


@pytest.mark.parametrize("claimed", [MAX_COST, 10**9])
def test_a_cost_that_cannot_be_believed_ends_no_budget(
    claimed: int, caplog: pytest.LogCaptureFixture
) -> None:
    grid = FakeGrid(4)
    grid.behaviours[101] = with_cost(
        flops=claimed, samples=claimed, gradients=claimed, peak_bytes=claimed
    )
    config = resolve_config({**QUADRATIC, "environment": {"local_steps": 2, "batch_size": 2}})
    lied, run = real_federation(grid, config)
    honest, other = real_federation(FakeGrid(4), config)
    advance(8, run, other)
    for name in ("flops", "samples", "gradients", "peak_bytes"):
        true = honest.ledger.totals()[name]
        most = 4 * true if name == "peak_bytes" else (4 + 3) / 4 * true
        assert true < lied.ledger.totals()[name] <= most + 1
    lines = [line for line in caplog.messages if "too many to be believed" in line]
    assert len(lines) == 1
    assert "client 1 claims" in lines[0]
    assert lied.ledger.clients[1]["flops"] > 0
    assert lied.ledger.refused_replies == 0


def test_a_cost_is_bounded_where_the_work_of_others_costs_nothing() -> None:
    claims = Claims(4.0, None, 2)
    for client in range(4):
        claims.enter(client, [6, 6])
    config = resolve_config(QUADRATIC)
    fed, _ = real_federation(FakeGrid(4), config)
    x, y, z = config.algorithm.init(fed.problem)
    tasks = fed.assigner.assign(
        config.algorithm.descend(), range(4), None, None, {"x": x, "y": y, "z": z}, 1, 0
    )
    arrived = []
    for task in tasks:
        cost = TaskCost(flops=MAX_COST if task.client == 1 else 0)
        arrived.append(Arrived(Results([task], [cost], 0, {})))
    flops = [each.results.costs[0].flops for each in claims.bound_costs(arrived)]
    assert [flops[0], *flops[2:]] == [0, 0, 0]
    assert flops[1] == 0


def test_honest_costs_of_unequal_clients_are_booked_as_they_are() -> None:
    """A full batch of a large client costs more, in proportion to its samples."""
    table = {
        **QUADRATIC,
        "task": {"name": "hyper-representation", "clients": 3, "model": "mlp", "hidden": 4},
        "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.3},
        "environment": {"batch_size": "full"},
    }
    config = resolve_config(table)
    unbounded, run = real_federation(FakeGrid(3), config, Conduct(claim_factor=1e9))
    bounded, other = real_federation(FakeGrid(3), config, Conduct())
    advance(2, run, other)
    assert bounded.ledger.phases == unbounded.ledger.phases


@pytest.mark.parametrize("lie", [1e300, -1e300, 1e9])
def test_a_loss_that_cannot_be_believed_ends_no_run(
    lie: float, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(message: Message, handle: Handler) -> Message:
        honest = decode(handle(message).content)
        return Message(encode(**{**honest, "upper": lie}), reply_to=message)

    grid = FakeGrid(4)
    _, run = real_federation(grid, resolve_config(QUADRATIC))
    _, honest = real_federation(FakeGrid(4), resolve_config(QUADRATIC))
    start = honest.fed.transport.losses(*honest.state[:2])["upper_loss"]
    grid.behaviours[101] = only_for("evaluate", answer)
    for _ in run:
        pass
    assert run.status == "completed"
    assert abs(run.history[-1]["upper_loss"]) <= LOSS_FACTOR * 2 * abs(start)
    assert "the upper loss of client 1 is" in caplog.text


def test_claims_are_kept_over_a_restart() -> None:
    grid = FakeGrid(4)
    grid.behaviours[101] = with_cost(flops=MAX_COST)
    fed, run = real_federation(grid, resolve_config(QUADRATIC))
    advance(3, run)
    restarted, again = real_federation(grid, resolve_config(QUADRATIC))
    restarted.restore(fed.snapshot())
    assert restarted.transport.claims.plain() == fed.transport.claims.plain()
    before = restarted.ledger.totals()["flops"]
    again.state = run.state
    again.advance()
    assert restarted.ledger.totals()["flops"] < 2 * before
