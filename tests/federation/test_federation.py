"""The federation: who is asked, what reaches whom, what clients remember, and wrong calls."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.algorithms import Message, Phase
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.submodels import choose_submodels, segments
from fedbilevel.federation import ClientError, Federation, Ledger
from fedbilevel.federation.delays import Constant
from tests.support.probe import PROBE, VISITS, Visits, ask_each, federation, loss, post

# Messages and batches


def test_what_is_sent_to_all_and_to_each_reaches_its_client() -> None:
    replies = ask_each(federation(environment={"local_steps": [1, 3, 2]}), [2, 0, 1])
    found = {reply.client: float(reply.values["own"]) for reply in replies}
    assert found == {0: 0.0, 1: 10.0, 2: 20.0}
    assert {reply.client: reply.steps for reply in replies} == {0: 1, 1: 3, 2: 2}
    assert all(reply.staleness == 0 for reply in replies)
    assert replies.idle == [2, 0, 1]


def test_numbers_sent_to_each_client_keep_their_digits() -> None:
    fed = federation()
    (reply,) = fed.ask(PROBE, [0], each=[{"own": 0.1}], scale=1.0)
    assert float(reply.values["own"]) == 0.1


@pytest.mark.parametrize("mode", ["stack", "loop"])
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_every_client_takes_its_own_number_of_steps(mode: str, steps: list[int]) -> None:
    fed = federation(sizes=[3] * len(steps), environment={"local_steps": steps}, mode=mode)
    replies = ask_each(fed, range(len(steps)))
    assert [int(r.values["evaluations"]) for r in replies] == steps
    assert fed.ledger.totals()["gradients"] == sum(steps)
    assert fed.ledger.totals()["samples"] == 3 * sum(steps)


def test_full_batches_hold_every_sample() -> None:
    replies = ask_each(federation(sizes=[4, 6]), [0, 1])
    assert {r.client: float(r.values["mean"]["x"]) for r in replies} == {0: 1.5, 1: 102.5}


def test_minibatches_are_subsets_without_repetition() -> None:
    data = 2.0 ** torch.arange(8, dtype=torch.float64)
    clients = [fb.ClientData(train=(data.unsqueeze(1),), val=(data.unsqueeze(1),))]
    seen = set()
    for seed in range(20):
        fed = federation(clients=clients, environment={"batch_size": 3}, seed=seed)
        (reply,) = ask_each(fed, [0])
        total = round(3 * float(reply.values["mean"]["x"]))
        assert total.bit_count() == 3, "three distinct samples have three distinct powers of two"
        seen.add(total)
    assert len(seen) > 10


def test_a_batch_larger_than_the_data_is_the_full_batch() -> None:
    replies = ask_each(federation(sizes=[2, 9], environment={"batch_size": 4}), [0, 1])
    assert {r.client: r.steps for r in replies} == {0: 1, 1: 1}
    assert float(next(r for r in replies if r.client == 0).values["mean"]["x"]) == 0.5


def test_a_client_asked_twice_draws_two_batches() -> None:
    replies = list(ask_each(federation(sizes=[50], environment={"batch_size": 3}), [0, 0]))
    first, second = (float(r.values["mean"]["x"]) for r in replies)
    assert first != second


class Held(Phase):
    """Replies with the part of y that it was sent."""

    name = "held"
    batch = "train"
    reply: ClassVar = {"y": "y"}

    def start(self, m: Message) -> Any:
        return m.y

    def step(self, carry: Any, oracle: Oracle, batch: fb.Batch) -> Any:
        return carry

    def finish(self, carry: Any) -> dict[str, Any]:
        return {"y": carry}


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_submodels_of_equal_shape_keep_their_units_and_replies_their_order(
    mode: str, posted: bool
) -> None:
    """Clients with different submodels of one shape can be stacked, but hold other units."""
    x = fb.Tree(x=torch.ones(1, dtype=torch.float64))
    y = fb.Tree(y=torch.arange(1.0, 5.0, dtype=torch.float64))
    problem = fb.Problem(upper=loss, lower=loss, x=x, y=y, axes={"y": ("units",)})
    data = (torch.ones(3, 1, dtype=torch.float64),)
    environment = fb.Environment(capacity=[0.5], delay=Constant())
    clients = [fb.ClientData(train=data, val=data)] * 4
    fed = fb.simulated_federation(problem, clients, environment, mode=mode)
    parts = choose_submodels(problem.axes, x, y, segments, [(0.5, 0.5)] * 4, groups=[0, 1, 0, 1])
    if posted:
        fed.post(Held(), range(4), submodels=parts, x=x, y=y)
        replies = fed.collect(4)
    else:
        replies = fed.ask(Held(), range(4), submodels=parts, x=x, y=y)
    assert replies.coverage_mean("y")["y"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert replies.coverage() == {"min_coverage_y": 2.0, "covered_y": 1.0}
    assert [reply.client for reply in replies] == replies.idle == [0, 1, 2, 3]


# Cohorts


def test_sampling_is_uniform_without_replacement_and_keyed() -> None:
    fed = federation(sizes=[2] * 10, environment={"participation": 4})
    cohorts = [fed.sample() for _ in range(500)]
    assert all(len(set(c)) == 4 for c in cohorts)
    counts = torch.bincount(torch.tensor(cohorts).flatten(), minlength=10).double()
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert chi_square < 27.9  # 9 degrees of freedom, p = .001
    again = federation(sizes=[2] * 10, environment={"participation": 4})
    assert [again.sample() for _ in range(500)] == cohorts
    other_seed = federation(sizes=[2] * 10, environment={"participation": 4}, seed=1)
    assert other_seed.sample() != cohorts[0]


def test_fewer_clients_than_min_replies_can_be_asked() -> None:
    assert len(ask_each(federation(environment={"min_replies": 2}), [1])) == 1


class Lazy:
    """100,000 clients that are made when they are looked at; the data of client 7 are NaN."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> fb.ClientData:
        self.made.append(i)
        data = torch.full((3, 1), torch.nan if i == 7 else float(i), dtype=torch.float64)
        return fb.ClientData(train=(data,), val=(data,))


def test_lazy_clients_are_made_only_for_the_cohort_and_broken_ones_named() -> None:
    lazy = Lazy()
    fed = federation(clients=lazy, environment={"participation": 5})
    cohort = fed.sample()
    ask_each(fed, cohort)
    assert set(lazy.made) == {0, *cohort}
    with pytest.raises(
        ValueError, match=r"^client 7, phase 'probe', round 2: train\[0\] holds NaN or infinity"
    ):
        ask_each(fed, [7])


# What clients remember


class Forgets(Visits):
    """Leaves an empty memory."""

    name = "forgets"

    def finish(self, carry: Any) -> dict[str, Any]:
        return {"visits": carry, "memory": {}}


class WithoutMemory(Visits):
    """Declares that it remembers, but returns no memory."""

    name = "without-memory"

    def finish(self, carry: Any) -> dict[str, Any]:
        return {"visits": carry}


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_clients_remember_in_the_order_of_their_tasks_and_across_a_restart(mode: str) -> None:
    def visit(fed: Federation, *clients: int, phase: Phase = VISITS) -> list[float]:
        """The j-th task adds 10^j to the memory of its client."""
        powers = [{"own": 10.0**j} for j in range(len(clients))]
        return [float(reply.values["visits"]) for reply in fed.ask(phase, clients, each=powers)]

    fed = federation(mode=mode)
    assert visit(fed, 0, 1) == [1, 10]
    # Clients with and without a memory, and the same client twice.
    assert visit(fed, 2, 0, 0, 2) == [1, 11, 111, 1001]
    assert fed.ledger.totals()["bytes_up"] == 6 * 8, "a memory is not sent"
    twin = federation(mode=mode)
    twin.restore(fed.snapshot())
    assert visit(fed, 2, 1, 0) == visit(twin, 2, 1, 0) == [1002, 20, 211]
    assert visit(fed, 1, phase=Forgets()) == [21]
    assert sorted(fed.transport.executor.memories) == [0, 2]
    assert visit(fed, 1) == [1]
    sentence = "phase 'without-memory' remembers; its finish must return a memory beside its reply"
    with pytest.raises(TypeError, match=sentence):
        visit(fed, 0, phase=WithoutMemory())


# Records

NUMBERS = st.floats(-1e6, 1e6)
TENSORS = st.builds(torch.tensor, NUMBERS, dtype=st.sampled_from([torch.float32, torch.float64]))


@given(st.lists(NUMBERS | TENSORS, min_size=1))
@settings(max_examples=50, deadline=None)
def test_records_are_means_and_of_names_with_max_and_min_extremes(
    recorded: list[float | torch.Tensor],
) -> None:
    fed = federation()
    for number in recorded:
        fed.record(max_loss=number, min_loss=number, loss=number, maximal=number)
    values = [float(number) for number in recorded]
    records = fed.records()
    mean = pytest.approx(sum(values) / len(values), abs=1e-6)
    assert records == {
        "max_loss": max(values),
        "min_loss": min(values),
        "loss": mean,
        "maximal": mean,
    }
    assert all(type(value) is float for value in records.values())


# Snapshots


def test_a_snapshot_restores_the_ledger_the_clock_the_draws_and_what_was_recorded() -> None:
    conditions = {"participation": 2, "delay": Constant(1.0)}
    fed = federation(environment=conditions)
    fed.iteration = 4
    ask_each(fed, fed.sample())
    for value in (2.0**24, 1.0):
        fed.record(
            residual=torch.tensor(value),
            active=torch.tensor(value > 1),
            max_norm=torch.tensor(value),
        )
    saved = fed.snapshot()
    assert saved["recorded"] == {
        "residual": (2.0**24 + 1, 2),
        "active": (1.0, 2),
        "max_norm": (2.0**24, 2),
    }
    assert all(isinstance(total, float) for total, _ in saved["recorded"].values())
    twin = federation(environment=conditions)
    twin.restore(saved)
    assert (twin.now, twin.iteration) == (fed.now, fed.iteration) == (1.0, 4)
    assert twin.ledger == fed.ledger
    assert twin.ledger == Ledger.from_dict(saved["ledger"])
    assert twin.sample() == fed.sample()
    expected = {"residual": 2.0**23 + 0.5, "active": 0.5, "max_norm": 2.0**24}
    assert twin.records() == fed.records() == expected
    assert twin.records() == {}
    for other in (fed, twin):
        other.restore(saved)
    fed.record(active=1.0)
    assert twin.records()["active"] == 0.5, "two federations restored from one snapshot are apart"


# Wrong calls


def test_a_wrong_ask_is_refused_in_one_sentence() -> None:
    fed = federation()
    with pytest.raises(ValueError, match="client is 3; it must be 0 to 2"):
        ask_each(fed, [3])
    with pytest.raises(
        ValueError, match="each has 1 entries; it must have one for each of 2 clients"
    ):
        fed.ask(PROBE, [0, 1], each=[{"own": 1.0}])
    with pytest.raises(ClientError, match="the message holds scale, steps, not 'own'"):
        fed.ask(PROBE, [0], scale=1.0)


def test_a_federation_without_clients_or_with_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="clients is empty"):
        federation(clients=[], sizes=[])
    with pytest.raises(ValueError, match="participation is 4; there are only 3 clients"):
        federation(environment={"participation": 4})


@pytest.mark.parametrize(
    ("clients", "phase", "sentence"),
    [
        ([2, 1], PROBE, "client 1 would have two tasks in flight; it can have one at a time"),
        ([2, 2], PROBE, "client 2 would have two tasks in flight; it can have one at a time"),
        ([2], VISITS, "phase 'visits' must wait: tasks of 'probe' are in flight"),
    ],
)
def test_a_post_to_a_busy_client_or_of_another_phase_is_refused(
    clients: list[int], phase: Phase, sentence: str
) -> None:
    fed = federation(environment={"delay": Constant()})
    post(fed, [0, 1], 1.0)
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
        post(fed, clients, 1.0, phase)
    assert len(fed.collect(5)) == 2, "a refused post leaves no trace"


def test_a_wrong_post_or_collect_is_refused_in_one_sentence() -> None:
    fed = federation(environment={"delay": Constant()})
    nothing = "nothing is in flight, so nothing can be collected; post a task first"
    with pytest.raises(RuntimeError, match=nothing):
        fed.collect(1)
    post(fed, [0, 1], 1.0)
    with pytest.raises(ValueError, match="count is 0; it must be at least 1"):
        fed.collect(0)
    with pytest.raises(ValueError, match="client is 3; it must be 0 to 2"):
        post(fed, [3], 1.0)
    assert len(fed.collect(5)) == 2
    with pytest.raises(RuntimeError, match=nothing):
        fed.collect()
    post(fed, [0], 1.0, VISITS)
    assert len(fed.collect(1)) == 1
    fed.post(PROBE, [1], scale=1.0)
    with pytest.raises(RuntimeError, match=r"^client 1, phase 'probe', round 3: .*not 'own'$"):
        fed.collect(1)
