"""The federation over Flower computes what a simulation does, and survives what real clients do."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable

import pytest
import torch
from flwr.app import Message

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.core.tree import Tree, flatten
from fedbilevel.deploy.flower.wire import encode
from fedbilevel.federation import QuorumError
from fedbilevel.federation.conduct import Conduct
from fedbilevel.federation.stages import Clip
from fedbilevel.runs.run import Run
from tests.support.cases import CASES
from tests.support.conformance import NAMES
from tests.support.flower import (
    HYPER_REPRESENTATION,
    QUADRATIC,
    FakeGrid,
    Handler,
    advance,
    change_reply,
    control_clock,
    only_for,
    real_federation,
    reply_with_error,
    resolve_config,
    simulated_run,
    with_values,
    x_tree,
)

pytestmark = pytest.mark.usefixtures("in_process")

SHARED_LOWER_LEVEL = [
    name
    for name in NAMES
    if "shared" in algorithms.get(name).lower_levels and algorithms.get(name).has_server
]


@pytest.mark.parametrize("name", SHARED_LOWER_LEVEL)
def test_every_method_moves_as_in_simulation(name: str) -> None:
    table = {
        **QUADRATIC,
        "algorithm": {"name": name},
        "environment": {"local_steps": 2, "batch_size": 2},
    }
    for key, value in CASES[name].settings.items():
        if callable(value):
            value = {"schedule": type(value).__name__.lower(), **vars(value)}
        table["algorithm"][key] = value
    config = resolve_config(table)
    _, real = real_federation(FakeGrid(4), config)
    simulated = simulated_run(config)
    advance(3, real, simulated)
    for value, expected in zip(real.state, simulated.state, strict=True):
        if isinstance(value, Tree):
            assert torch.allclose(flatten(value), flatten(expected), rtol=0, atol=1e-9)
    ledger = real.fed.ledger
    assert ledger.phases == simulated.fed.ledger.phases
    assert ledger.refused_replies == 0
    assert ledger.lost_tasks == 0
    losses = real.fed.transport.losses(*real.state[:2])
    expected_losses = simulated.fed.transport.losses(*simulated.state[:2])
    assert losses == pytest.approx(expected_losses, abs=1e-9)


@pytest.mark.parametrize("name", ["dsbo", "prometheus"])
def test_a_method_without_a_server_is_refused_before_the_first_round(name: str) -> None:
    config = resolve_config({**QUADRATIC, "algorithm": {"name": name}})
    with pytest.raises(ValueError, match=f"{name} has no server: .* run in simulations"):
        real_federation(FakeGrid(4), config)


def test_weights_by_samples_and_epochs_use_what_the_clients_report() -> None:
    table = {
        **QUADRATIC,
        "task": HYPER_REPRESENTATION,
        "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.5},
        "algorithm": {"name": "fednest", "lower_steps": "1 epoch"},
        "weights": "samples",
        "environment": {"batch_size": 4},
    }
    config = resolve_config(table)
    _, real = real_federation(FakeGrid(3), config)
    simulated = simulated_run(config)
    advance(1, real, simulated)
    assert torch.allclose(flatten(real.state.x), flatten(simulated.state.x), atol=1e-5)
    assert list(real.fed.weights()) == pytest.approx(list(simulated.fed.weights()))


def test_submodels_are_cut_before_they_are_sent() -> None:
    table = {
        **QUADRATIC,
        "task": {"name": "loss-tuning", "clients": 4, "hidden": 8, "samples": 400},
        "data": {"name": "digits"},
        "algorithm": {"name": "rabo", "policy": "rolling", "lower_steps": 2},
        "environment": {"capacity": [1.0, 0.5], "batch_size": 8},
    }
    config = resolve_config(table)
    _, real = real_federation(FakeGrid(4), config)
    simulated = simulated_run(config)
    advance(2, real, simulated)
    assert torch.allclose(flatten(real.state.x), flatten(simulated.state.x), atol=1e-5)
    assert real.fed.ledger.phases == simulated.fed.ledger.phases


def test_a_reply_beyond_norm_bound_is_clipped_to_it() -> None:
    """As in a simulation with the same stage; shorter replies are not changed."""
    grid = FakeGrid(4)
    bound = 0.05
    config = resolve_config(QUADRATIC)
    fed, run = real_federation(grid, config, Conduct(norm_bound=bound))
    task = config.load_task(None)
    environment = dataclasses.replace(config.environment, stages=(Clip(norm=bound),))
    clipping = fb.simulated_federation(
        task.problem, task.clients, environment, seed=config.experiment.seed
    )
    clipped = Run(config.algorithm, clipping, {})
    unclipped = simulated_run(config)
    advance(3, run, clipped, unclipped)
    assert torch.allclose(flatten(run.state.x), flatten(clipped.state.x), rtol=0, atol=1e-12)
    assert not torch.allclose(flatten(run.state.x), flatten(unclipped.state.x), rtol=0, atol=1e-3)
    x, y, z = run.state[:3]
    for replied, accepted in ((1e9, bound), (0.01, 0.01)):
        grid.behaviours[102] = change_reply(with_values(qx=x_tree(0.0, 0.0, replied)))
        mean = fed.ask(config.algorithm.descend(), [2], x=x, y=y, z=z).mean("qx")
        assert mean["x"].tolist() == pytest.approx([0.0, 0.0, accepted], rel=1e-12)
    assert fed.ledger.refused_replies == 0
    assert fed.ledger.lost_tasks == 0


@pytest.mark.parametrize("name", ["simfbo", "afbo", "fedbioacc"])
def test_a_bound_that_nobody_exceeds_changes_nothing(name: str) -> None:
    table = {**QUADRATIC, "algorithm": {"name": name}, "environment": {"local_steps": 2}}
    config = resolve_config(table)
    fed, bounded = real_federation(FakeGrid(4), config, Conduct(norm_bound=1e6))
    _, unbounded = real_federation(FakeGrid(4), config, Conduct(norm_bound=None))
    advance(3, bounded, unbounded)
    assert fed.ledger.refused_replies == 0
    assert torch.allclose(flatten(bounded.state.x), flatten(unbounded.state.x), rtol=0, atol=1e-12)


def test_a_bound_is_refused_where_clients_remember_their_replies() -> None:
    """The server would have clipped a reply that the client remembers unclipped."""
    config = resolve_config({**QUADRATIC, "algorithm": {"name": "afbo", "memory": "client"}})
    with pytest.raises(ValueError, match=r"memory is 'client' and .*; memory must be 'server', or"):
        real_federation(FakeGrid(4), config, Conduct(norm_bound=1e6))
    _, run = real_federation(FakeGrid(4), config)
    run.advance()


def test_without_a_barrier_too_a_run_ends_when_all_clients_are_excluded() -> None:
    grid = FakeGrid(4)
    for node in grid.nodes:
        grid.behaviours[node] = only_for("train", reply_with_error(2))
    table = {**QUADRATIC, "algorithm": {"name": "afbo"}, "rounds": 50}
    _, run = real_federation(grid, resolve_config(table))
    for _ in run:
        pass
    assert run.status == "diverged"
    assert run.reason == "clients [0, 1, 2, 3] were excluded, 1 are needed"


@pytest.mark.parametrize("name", ["afbo", "adbo", "unifbo"])
def test_without_a_barrier_nobody_waits_for_a_client_that_is_absent(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim_too_much(message: Message, handle: Handler) -> Message:
        handle(message)
        return Message(encode(client=2, samples=[-5, 6]), reply_to=message)

    control_clock(monkeypatch)
    grid = FakeGrid(4)
    grid.behaviours[102] = only_for("query", claim_too_much)
    settings = {"barrier": False} if name == "unifbo" else {}
    table = {**QUADRATIC, "algorithm": {"name": name, **settings}}
    fed, run = real_federation(grid, resolve_config(table), Conduct(deadline_s=20.0))
    advance(3, run)
    assert fed.now < 10
    assert fed.heard == {0, 1, 3}
    del grid.nodes[102]
    grid.nodes[202] = {"partition-id": 2}
    advance(3, run)
    assert fed.heard == {0, 1, 2, 3}
    assert fed.ledger.lost_tasks == 0


def test_a_reply_that_is_announced_and_never_uploaded_does_not_block_the_others() -> None:
    """Flower waits a minute for its parts."""
    grid = FakeGrid(3)
    given_up = threading.Event()
    pull = grid.pull_messages

    def pull_messages(message_ids: Iterable[str]) -> list[Message]:
        ids = list(message_ids)
        message = grid.sent[int(ids[0])].metadata
        if message.dst_node_id == 101 and message.message_type == "train":
            given_up.wait(60)
        return pull(ids)

    config = resolve_config(QUADRATIC, **{"task.clients": 3})
    fed, run = real_federation(grid, config, Conduct(deadline_s=1.5))
    fed.weights()
    grid.pull_messages = pull_messages  # type: ignore[method-assign]
    began = time.monotonic()
    run.advance()
    assert time.monotonic() - began < 10
    given_up.set()
    assert fed.ledger.lost_tasks == 1
    assert fed.ledger.refused_replies == 0


def test_a_run_that_lacks_clients_ends_at_once_and_is_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_pass = control_clock(monkeypatch)
    grid = FakeGrid(2)

    def die(message: Message, handle: Handler) -> None:
        del grid.nodes[101]
        let_pass(20.0)

    grid.behaviours[101] = only_for("train", die)
    table = {**QUADRATIC, "environment": {"min_replies": 2}}
    config = resolve_config(table, **{"task.clients": 2})
    fed, run = real_federation(grid, config, Conduct(deadline_s=10.0))
    for _ in run:
        pass
    assert run.status == "diverged"
    assert "1 of 2 replies were accepted" in run.reason
    assert fed.now < 60


def test_too_few_replies_or_clients_end_the_run() -> None:
    config = resolve_config(QUADRATIC, **{"task.clients": 2})
    grid = FakeGrid(2)
    not_finite = x_tree(torch.nan, torch.nan, torch.nan)
    for node in grid.nodes:
        grid.behaviours[node] = change_reply(with_values(qx=not_finite))
    _, run = real_federation(grid, config)
    with pytest.raises(QuorumError, match="qx is not finite"):
        run.advance()
    fed, _ = real_federation(FakeGrid(1), config, Conduct(wait_s=0.5))
    with pytest.raises(QuorumError, match="1 clients are available, 2 are needed"):
        fed.weights()


def test_a_task_is_resent_when_a_client_that_died_returns() -> None:
    grid = FakeGrid(4)
    died = False

    def die_once(message: Message, handle: Handler) -> Message | None:
        nonlocal died
        if died:
            return handle(message)
        died = True
        del grid.nodes[101]
        grid.nodes[201] = {"partition-id": 1}  # it returns as another node
        return reply_with_error(5)(message, handle)

    grid.behaviours[101] = only_for("train", die_once)
    config = resolve_config(QUADRATIC)
    fed, run = real_federation(grid, config)
    undisturbed = simulated_run(config)
    advance(3, run, undisturbed)
    assert torch.allclose(flatten(run.state.x), flatten(undisturbed.state.x), rtol=0, atol=1e-12)
    assert fed.ledger.lost_tasks == 0


def test_a_client_past_its_deadline_is_lost_and_left_alone_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_pass = control_clock(monkeypatch)

    def stay_silent(message: Message, handle: Handler) -> None:
        let_pass(20.0)

    grid = FakeGrid(4)
    grid.behaviours[103] = stay_silent
    conduct = Conduct(deadline_s=10.0, start_clients=3)
    fed, run = real_federation(grid, resolve_config(QUADRATIC), conduct)
    run.advance()
    assert fed.ledger.lost_tasks == 0  # it has not answered its greeting, and is sent nothing
    del grid.behaviours[103]
    let_pass(20.0)  # the greeting expires, and it is greeted again
    run.advance()
    assert 3 in fed.transport.present
    grid.behaviours[103] = only_for("train", stay_silent)
    before = len(grid.sent)
    run.advance()
    assert fed.ledger.lost_tasks == 1
    asked = []
    for message in grid.sent[before:]:
        if message.metadata.message_type == "train":
            asked.append(message.metadata.dst_node_id)
    assert sorted(asked) == [100, 101, 102, 103]


def test_a_late_reply_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply is there when the next round begins, and changes nothing."""
    let_pass = control_clock(monkeypatch)
    grid = FakeGrid(4)
    late: list[Message] = []

    def be_late(message: Message, handle: Handler) -> None:
        let_pass(20.0)
        late.append(handle(message))

    grid.behaviours[103] = only_for("train", be_late)
    conduct = Conduct(deadline_s=10.0)
    fed, run = real_federation(grid, resolve_config(QUADRATIC), conduct)
    run.advance()
    assert fed.ledger.lost_tasks == 1
    del grid.behaviours[103]
    message_id = late[0].metadata.reply_to_message_id
    grid.replies[message_id] = late[0]
    run.advance()
    assert message_id in grid.replies
    assert fed.ledger.refused_replies == 0


def test_a_reply_that_will_not_come_is_not_waited_for() -> None:
    """Flower reports a message that has expired, and a reply whose objects were never uploaded."""
    grid = FakeGrid(4)
    grid.behaviours[102] = only_for("train", reply_with_error(3))
    fed, run = real_federation(grid, resolve_config(QUADRATIC), Conduct(deadline_s=4.0))
    run.advance()
    assert fed.ledger.lost_tasks == 1
    assert fed.now < 4


class LateNodeGrid(FakeGrid):
    """Replies of the nodes before `first_early_node` are there at the second look only."""

    def __init__(self, clients: int, first_early_node: int) -> None:
        super().__init__(clients)
        self.first_early_node = first_early_node
        self.asked_for: set[str] = set()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ready = []
        for message_id in message_ids:
            node = self.sent[int(message_id)].metadata.dst_node_id
            if node >= self.first_early_node or message_id in self.asked_for:
                ready.append(message_id)
            self.asked_for.add(message_id)
        return super().pull_messages(ready)


def test_sums_do_not_depend_on_the_order_of_arrival() -> None:
    states = []
    for first_early_node in (100, 101, 102, 103):
        grid = LateNodeGrid(4, first_early_node)
        _, run = real_federation(grid, resolve_config(QUADRATIC))
        advance(3, run)
        states.append(flatten(run.state.x))
    assert all(torch.equal(state, states[0]) for state in states)


def test_a_server_that_was_killed_resumes_and_its_posted_tasks_are_lost() -> None:
    table = {**QUADRATIC, "algorithm": {"name": "afbo"}, "environment": {"participation": 2}}
    grid = FakeGrid(4)
    grid.behaviours[103] = only_for("train", lambda message, handle: None)
    killed, run = real_federation(grid, resolve_config(table))
    advance(2, run)
    snapshot = killed.snapshot()
    assert 3 in killed.in_flight
    del grid.behaviours[103]
    restarted, resumed = real_federation(grid, resolve_config(table))
    restarted.restore(snapshot)
    resumed.state = run.state
    assert restarted.now > snapshot["transport"]["now"] > 0
    assert sorted(restarted.in_flight) == sorted(killed.in_flight)
    resumed.advance()
    assert restarted.ledger.lost_tasks == len(killed.in_flight)
    advance(3, resumed)
    replies = resumed.state.latest[2]
    assert 3 in replies  # the client whose task was lost works again
    assert restarted.transport.job == killed.transport.job


def test_no_message_outlives_its_deadline() -> None:
    grid = FakeGrid(4)
    fed, run = real_federation(grid, resolve_config(QUADRATIC), Conduct(deadline_s=10.0))
    run.advance()
    fed.transport.losses(*run.state[:2])
    types = {message.metadata.message_type for message in grid.sent}
    assert types == {"query", "train", "evaluate"}
    assert all(0 < message.metadata.ttl <= 10 for message in grid.sent)


def test_settings_for_simulations_are_refused() -> None:
    for name, value in (("delay", {"model": "constant"}), ("topology", "ring")):
        simulated = {**QUADRATIC, "environment": {name: value}}
        with pytest.raises(ValueError, match=rf"environment\.{name} is for simulations"):
            real_federation(FakeGrid(4), resolve_config(simulated))
    weighted = {**QUADRATIC, "weights": "samples"}
    with pytest.raises(ValueError, match="with weights by samples it must be all 4 clients"):
        real_federation(FakeGrid(4), resolve_config(weighted), Conduct(start_clients=3))
