"""The simulated federation: who is asked, what is counted, what is refused, and who is named."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Message, Phase
from fedbilevel.algorithms.rabo import LocalHypergradientByDifferences
from fedbilevel.algorithms.shared import HessianProduct, LowerRound
from fedbilevel.algorithms.simfbo import Descend
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import fold_in, rows
from fedbilevel.core.submodels import choose, segments
from fedbilevel.execution.stacked import _batches as batches
from fedbilevel.execution.stacked._batches import Extent
from fedbilevel.federation import ClientError, Federation, Ledger, QuorumError
from fedbilevel.federation.delays import Constant, Faults
from fedbilevel.federation.phase import Steps
from fedbilevel.federation.task import on_client


class Probe(Phase):
    """Replies with what the client was sent and saw, so that a test can read it."""

    name = "probe"
    batch = "train"
    reply: ClassVar = {"mean": "x", "evaluations": "scalar", "own": "scalar"}
    summed = False

    steps: Steps = "local"

    def start(self, m: Message) -> Any:
        return (
            fb.Tree(x=torch.zeros(1, dtype=torch.float64)),
            torch.zeros((), dtype=torch.float64),
            m.own * m.scale,
        )

    def step(self, carry: Any, oracle: Oracle, batch: fb.Batch) -> Any:
        seen, evaluations, own = carry
        oracle.lower_gradient_y(
            fb.Tree(x=seen["x"]), fb.Tree(y=torch.zeros(1, dtype=torch.float64)), batch
        )
        return seen + fb.Tree(x=batch.train[0].mean(0)), evaluations + 1, own

    def finish(self, carry: Any) -> dict[str, Any]:
        return dict(zip(("mean", "evaluations", "own"), carry, strict=True))


class SummedProbe(Probe):
    name = "summed"
    summed = True


class Visits(Phase):
    """Adds what it is sent to what it remembers."""

    name = "visits"
    batch = "train"
    remembers = True
    reply: ClassVar = {"visits": "scalar"}
    summed = False

    def start(self, m: Message) -> Any:
        return m.memory.get("visits", torch.zeros((), dtype=torch.float64)) + m.own

    def step(self, carry: Any, oracle: Oracle, batch: fb.Batch) -> Any:
        return carry

    def finish(self, carry: Any) -> dict[str, Any]:
        return {"visits": carry, "memory": {"visits": carry}}


class Forgets(Visits):
    name = "forgets"

    def finish(self, carry: Any) -> dict[str, Any]:
        return {"visits": carry, "memory": {}}


class Absent(Visits):
    name = "absent"

    def finish(self, carry: Any) -> dict[str, Any]:
        return {"visits": carry}


PROBE, VISITS = Probe(), Visits()


def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor]) -> Tensor:
    return 0.5 * ((y["y"] - batch[0]) ** 2).mean() + (x["x"] ** 2).sum()


def federation(sizes: Sequence[int] = (4, 4, 4), clients: Any = None, **options: Any) -> Federation:
    problem = fb.Problem(
        upper=options.pop("loss", loss),
        lower=loss,
        x={"x": torch.ones(1, dtype=torch.float64)},
        y={"y": torch.ones(1, dtype=torch.float64)},
    )
    data = [
        torch.arange(n, dtype=torch.float64).unsqueeze(1) + 100 * i for i, n in enumerate(sizes)
    ]
    clients = clients or [fb.ClientData(train=(d,), val=(d,)) for d in data]
    environment = fb.Environment(**options.pop("environment", {}))
    return fb.simulated_federation(problem, clients, environment, **options)


def ask(fed: Federation, clients: Sequence[int], phase: Phase = PROBE) -> Any:
    return fed.ask(phase, clients, each=[{"own": float(c)} for c in clients], scale=10.0)


def test_each_and_shared_reach_their_clients_in_the_order_asked() -> None:
    replies = ask(federation(environment={"local_steps": [1, 3, 2]}), [2, 0, 1])
    found = {reply.client: float(reply.values["own"]) for reply in replies}
    assert found == {0: 0.0, 1: 10.0, 2: 20.0}
    assert {reply.client: reply.steps for reply in replies} == {0: 1, 1: 3, 2: 2}
    assert all(reply.staleness == 0 for reply in replies)
    assert replies.idle == [2, 0, 1]


@pytest.mark.parametrize("mode", ["stack", "loop"])
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_evaluations_done_are_the_sum_of_the_steps(mode: str, steps: list[int]) -> None:
    fed = federation(sizes=[3] * len(steps), environment={"local_steps": steps}, mode=mode)
    replies = ask(fed, range(len(steps)))
    assert [int(r.values["evaluations"]) for r in replies] == steps
    assert fed.ledger.totals()["gradients"] == sum(steps)
    assert fed.ledger.totals()["samples"] == 3 * sum(steps)


@pytest.mark.parametrize(("epochs", "paired"), [(False, False), (False, True), (True, False)])
def test_draws_depend_on_client_side_step_and_draw_alone(
    epochs: bool, paired: bool, monkeypatch: Any
) -> None:
    """However many are found ahead."""
    keys, extents = (
        torch.tensor([3, 5]),
        {"train": Extent(2, 6, torch.tensor([5, 6])), "val": Extent(3, 4, ())},
    )

    def key(stream: int, turn: int, draw: int) -> Tensor:
        return fold_in(fold_in(fold_in(keys, stream), turn), draw)

    def drawn(stream: int, turn: int, draw: int, batch: int, most: int, sizes: Any) -> Tensor:
        epoch, place = divmod(turn, -(-most // batch)) if epochs else (turn, 0)
        sizes = None if isinstance(sizes, tuple) else sizes
        found = rows(
            key(0 if paired else stream, epoch, draw), most, most if epochs else batch, sizes
        )
        return found[:, place * batch : (place + 1) * batch]

    for ahead in (1, 5, 30, 1 << 22):
        monkeypatch.setattr(batches, "DRAWN", ahead)
        found = batches.Batches(
            keys,
            extents,
            lambda _, indices: (indices,),
            steps=7,
            draws=2,
            epochs=epochs,
            paired=paired,
        )
        for k in range(7):
            for draw, batch in enumerate(found.at(k, 2)):
                assert torch.equal(batch.rng, key(2, k, draw))
                for stream, side in enumerate(("train", "val")):
                    assert torch.equal(
                        getattr(batch, side)[0], drawn(stream, k, draw, *extents[side])
                    )


def test_as_coded_see_everything_and_minibatches_are_subsets_without_repetition() -> None:
    full = ask(federation(sizes=[4, 6]), [0, 1])
    assert {r.client: float(r.values["mean"]["x"]) for r in full} == {0: 1.5, 1: 102.5}
    data = 2.0 ** torch.arange(8, dtype=torch.float64)
    clients = [fb.ClientData(train=(data.unsqueeze(1),), val=(data.unsqueeze(1),))]
    seen = set()
    for seed in range(20):
        fed = federation(clients=clients, environment={"batch_size": 3}, seed=seed)
        total = round(3 * float(next(iter(ask(fed, [0]))).values["mean"]["x"]))
        assert total.bit_count() == 3, "three distinct samples have three distinct powers of two"
        seen.add(total)
    assert len(seen) > 10


def test_a_batch_larger_than_the_data_is_the_full_batch() -> None:
    replies = ask(federation(sizes=[2, 9], environment={"batch_size": 4}), [0, 1])
    assert {r.client: r.steps for r in replies} == {0: 1, 1: 1}
    assert float(next(r for r in replies if r.client == 0).values["mean"]["x"]) == 0.5


def test_a_client_asked_twice_draws_twice() -> None:
    replies = list(ask(federation(sizes=[50], environment={"batch_size": 3}), [0, 0]))
    first, second = (float(r.values["mean"]["x"]) for r in replies)
    assert first != second


@pytest.mark.parametrize("weights", ["uniform", "samples", [1.0, 2.0, 5.0]])
def test_means_are_unbiased_over_cohorts(weights: Any) -> None:
    """p~_i = (n / |C|) p_i: averaged over all cohorts of a size, the mean is the weighted mean over all clients."""
    fed = federation(sizes=[2, 3, 7], weights=weights)
    p = torch.tensor([fed.weights()[i] for i in range(3)])
    whole = ask(fed, [0, 1, 2]).mean("own")
    assert whole == pytest.approx(float((p * torch.tensor([0.0, 10.0, 20.0])).sum()))
    over_cohorts = sum(ask(fed, cohort).mean("own") for cohort in ([0, 1], [0, 2], [1, 2])) / 3
    assert over_cohorts == pytest.approx(whole)
    tree = ask(fed, [0, 1, 2]).mean("mean")
    assert float(tree["x"]) == pytest.approx(float((p * torch.tensor([0.5, 101.0, 203.0])).sum()))


def test_summed_replies_show_means_only() -> None:
    replies = ask(federation(), [0, 2], SummedProbe())
    assert replies.mean("own") == 10.0
    assert [(r.client, r.values) for r in replies] == [(0, {}), (2, {})]
    with pytest.raises(KeyError, match="replies with mean, evaluations, own, steps, not 'hx'"):
        replies.mean("hx")


def test_chunks_keep_to_the_memory_and_change_nothing() -> None:
    whole = federation(sizes=[4] * 9)
    replies = ask(whole, range(9))
    footprint = next(iter(whole.transport.executor.footprints.values()))
    small = federation(sizes=[4] * 9, memory=2 * footprint)
    sizes = []
    executor = small.transport.executor
    run_stack = executor._run_stack

    def noted(tasks: Any, *rest: Any) -> Any:
        sizes.append(len(tasks))
        return run_stack(tasks, *rest)

    executor._run_stack = noted
    assert ask(small, range(9)).mean("mean")["x"] == pytest.approx(float(replies.mean("mean")["x"]))
    assert sizes[1:] == [2, 2, 2, 2, 1]  # the first one measured the footprint
    assert small.ledger.phases == whole.ledger.phases


def test_sampling_is_uniform_without_replacement_and_keyed() -> None:
    fed = federation(sizes=[2] * 10, environment={"participation": 4})
    cohorts = [fed.sample() for _ in range(500)]
    assert all(len(set(c)) == 4 for c in cohorts)
    counts = torch.bincount(torch.tensor(cohorts).flatten(), minlength=10).double()
    assert (
        float(((counts - 200) ** 2 / 200).sum()) < 27.9
    )  # chi-square, 9 degrees of freedom, p = .001
    again = federation(sizes=[2] * 10, environment={"participation": 4})
    assert [again.sample() for _ in range(500)] == cohorts
    assert (
        federation(sizes=[2] * 10, environment={"participation": 4}, seed=1).sample() != cohorts[0]
    )


class Poisoned(Probe):
    def finish(self, carry: Any) -> dict[str, Any]:
        reply = super().finish(carry)
        return reply | {
            "mean": reply["mean"].map(lambda t: torch.where(reply["own"] == 10.0, torch.nan, t))
        }


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_a_reply_that_is_not_finite_is_refused_by_name_and_the_rest_counts(
    mode: str, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING, logger="fedbilevel")
    fed = federation(mode=mode)
    replies = ask(fed, [0, 1, 2], Poisoned())
    assert replies.refused == ["client 1: mean is not finite"]
    assert "phase 'probe', round 1: reply refused, client 1: mean is not finite" in caplog.text
    assert len(replies) == 2
    assert replies.mean("own") == 10.0
    assert fed.ledger.refused_replies == 1
    with pytest.raises(
        QuorumError, match="phase 'probe', round 2: 0 of 1 replies were accepted, at least 1 needed"
    ):
        ask(fed, [1], Poisoned())


def fails_on_client_1(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor]) -> Tensor:
    if batch[0].shape[0] == 5:
        raise IndexError("target 12 is out of bounds")
    return loss(x, y, batch)


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_a_failing_client_is_named_with_phase_and_round(mode: str) -> None:
    fed = federation(sizes=[4, 5, 4], mode=mode)
    object.__setattr__(
        fed.problem, "lower", lambda x, y, batch, rng: fails_on_client_1(x, y, batch)
    )
    with pytest.raises(
        ClientError,
        match=r"^client 1, phase 'probe', round 1: IndexError: target 12 is out of bounds$",
    ):
        ask(fed, [0, 1, 2])


def test_a_loss_that_cannot_be_stacked_is_told_so() -> None:
    fed = federation()

    def branching(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor], rng: Any) -> Tensor:
        return loss(x, y, batch) if batch[0].sum() > 0 else 2 * loss(x, y, batch)

    object.__setattr__(fed.problem, "lower", branching)
    with pytest.raises(
        ClientError, match=r"every client runs by itself but not in a stack.*mode='loop'"
    ):
        ask(fed, [0, 1, 2])


class Lazy:
    """100,000 clients that exist only while they are looked at; client 7 is broken."""

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
    ask(fed, cohort)
    assert set(lazy.made) == {0, *cohort}
    with pytest.raises(
        ValueError, match=r"^client 7, phase 'probe', round 2: train\[0\] holds NaN or infinity"
    ):
        ask(fed, [7])


class Unreadable(Sequence[fb.ClientData]):
    """Four clients; the data of client 2 cannot be loaded."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: Any) -> Any:
        if i == 2:
            raise self.error
        data = torch.full((3, 1), float(i), dtype=torch.float64)
        return fb.ClientData(train=(data,), val=(data,))


LOADING = pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            json.JSONDecodeError("Expecting value", "{", 0),
            ValueError,
            "JSONDecodeError: Expecting value",
        ),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            ValueError,
            "UnicodeDecodeError: 'utf-8' codec",
        ),
        (ValueError("no rows"), ValueError, "no rows"),
        (TypeError("not a table"), TypeError, "not a table"),
        (FileNotFoundError(2, "gone"), ClientError, "FileNotFoundError: [Errno 2] gone"),
        (KeyError("images"), ClientError, "KeyError: 'images'"),
        (AssertionError(), ClientError, "AssertionError: no message"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)


@pytest.mark.parametrize("mode", ["stack", "loop"])
@pytest.mark.parametrize("steps", [1, "2 epochs"])
@LOADING
def test_an_error_of_a_clients_own_loader_names_the_client_and_the_cause(
    error: Exception, kind: type[Exception], message: str, steps: Any, mode: str
) -> None:
    fed = federation(clients=Unreadable(error), mode=mode)
    sentence = f"client 2, phase 'probe', round 1: {message}"
    with pytest.raises(kind, match=f"^{re.escape(sentence)}") as raised:
        ask(fed, range(4), Probe(steps=steps))
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


@LOADING
def test_an_error_on_a_client_stays_a_value_or_type_error(
    error: Exception, kind: type[Exception], message: str
) -> None:
    sentence = f"client 7, here: {message}"
    with pytest.raises(kind, match=f"^{re.escape(sentence)}") as raised, on_client(7, "here"):
        raise error
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [ClientError("client 3, there: gone"), KeyboardInterrupt("now")])
def test_an_interrupt_or_an_error_that_names_its_client_stays_as_it_is(
    error: BaseException,
) -> None:
    with pytest.raises(type(error)) as raised, on_client(7, "here"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    "phase",
    [
        Probe(),
        Descend(lr_x=0.1, lr_y=1.0, lr_z=1e-3, damping=0.5, independent_batches=True, steps=3),
        LowerRound(lr_y=0.2, lower="sgd", steps="5 epochs", as_coded=True),
        HessianProduct(full=True),
        LocalHypergradientByDifferences(
            neumann_lr=0.5, neumann_steps=4, estimator="response", directions=2, width=1e-4
        ),
    ],
    ids=lambda phase: phase.name,
)
def test_a_phase_survives_the_wire(phase: Phase) -> None:
    loaded = Phase.load(json.loads(json.dumps(phase.plain())))
    assert type(loaded) is type(phase)
    assert loaded == phase
    assert loaded.structure == phase.structure
    assert loaded.numbers == phase.numbers


DESCEND = Descend(lr_x=0.1, lr_y=0.1, lr_z=0.1).plain()


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ("descend", "phase is 'descend'; it must be a name with its fields"),
        (None, "phase is None; it must be a name with its fields"),
        ({1: 2}, "phase is {1: 2}; it must be a name with its fields"),
        ({"lr_x": 0.1}, "phase is 'None', which is not registered here"),
        ({"phase": "os.system"}, "phase is 'os.system', which is not registered here"),
        ({"phase": "fedbilevel.algorithms.rounds.Once"}, "which is not registered here"),
        (
            {**DESCEND, "lr": 0.1},
            "Descend.lr'; allowed are steps, full, lr_x, lr_y, lr_z, damping, independent_batches",
        ),
        ({**DESCEND, "draws": 9}, "Descend.draws'; allowed are steps, full, lr_x"),
        ({"phase": DESCEND["phase"], "lr_x": 0.1, "lr_z": 0.1}, "Descend.lr_y is missing"),
        ({**DESCEND, "lr_x": "0.1"}, "lr_x is '0.1'; it must be a number"),
        ({**DESCEND, "lr_x": None}, "lr_x is None; it must be a number"),
        ({**DESCEND, "lr_x": float("nan")}, "lr_x is nan; it must be finite"),
        ({**DESCEND, "independent_batches": "no"}, "is 'no'; it must be true or false"),
        ({**DESCEND, "full": 1}, "full is 1; it must be true or false"),
        ({**DESCEND, "steps": 0}, "steps is 0; it must be at least 1"),
        ({**DESCEND, "steps": 1.5}, "steps is 1.5; it must be a whole number"),
        (
            {**DESCEND, "steps": "5 rounds"},
            "steps is '5 rounds'; it must be a whole number, 'local'",
        ),
        (
            {**LowerRound(lr_y=0.1).plain(), "lower": "adam"},
            "is 'adam'; it must be one of 'svrg', 'sgd'",
        ),
    ],
)
def test_a_phase_that_does_not_fit_is_refused_in_one_sentence(plain: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as error:
        Phase.load(plain)
    assert "\n" not in str(error.value)


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
def test_submodels_of_equal_shape_keep_their_places_and_replies_their_order(
    mode: str, posted: bool
) -> None:
    """Though such clients can be stacked."""
    x = fb.Tree(x=torch.ones(1, dtype=torch.float64))
    y = fb.Tree(y=torch.arange(1.0, 5.0, dtype=torch.float64))
    problem = fb.Problem(upper=loss, lower=loss, x=x, y=y, axes={"y": ("units",)})
    data = (torch.ones(3, 1, dtype=torch.float64),)
    environment = fb.Environment(capacity=[0.5], delay=Constant())
    clients = [fb.ClientData(train=data, val=data)] * 4
    fed = fb.simulated_federation(problem, clients, environment, mode=mode)
    parts = choose(problem.axes, x, y, segments, [(0.5, 0.5)] * 4, groups=[0, 1, 0, 1])
    if posted:
        fed.post(Held(), range(4), submodels=parts, x=x, y=y)
        replies = fed.collect(4)
    else:
        replies = fed.ask(Held(), range(4), submodels=parts, x=x, y=y)
    assert replies.coverage_mean("y")["y"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert replies.coverage() == {"min_coverage_y": 2.0, "covered_y": 1.0}
    assert [reply.client for reply in replies] == replies.idle == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"mean": "x"}, r"replied with \['evaluations', 'mean', 'own'\]; it declares \['mean'\]"),
        (
            {"mean": "scalar", "evaluations": "scalar", "own": "scalar"},
            "'mean' of another shape than 'scalar'",
        ),
        (
            {"mean": "y", "evaluations": "scalar", "own": "scalar"},
            "'mean' of another shape than 'y'",
        ),
    ],
)
def test_replies_must_be_what_the_phase_declares(
    reply: dict[str, str], message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Probe, "reply", reply)
    fed = federation()
    # As on a GPU: also where they are added up before anybody looks at them.
    for fed.transport.executor.on_gpu in (False, True):
        for phase in (Probe(), SummedProbe()):
            with pytest.raises(TypeError, match=message):
                ask(fed, [0, 1], phase)


class Coarse(Probe):
    def finish(self, carry: Any) -> dict[str, Any]:
        reply = super().finish(carry)
        return reply | {"mean": reply["mean"].map(Tensor.float)}


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_replies_must_have_the_dtype_of_the_problem(mode: str) -> None:
    with pytest.raises(
        TypeError, match=r"replied with 'mean' of another dtype than torch\.float64"
    ):
        ask(federation(mode=mode), [0, 1], Coarse())


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_clients_remember_in_the_order_of_their_tasks_and_across_a_restart(mode: str) -> None:
    def visit(fed: Federation, *clients: int, phase: Phase = VISITS) -> list[float]:
        replies = fed.ask(
            phase, clients, each=[{"own": 10.0**place} for place in range(len(clients))]
        )
        return [float(reply.values["visits"]) for reply in replies]

    fed = federation(mode=mode)
    assert visit(fed, 0, 1) == [1, 10]
    assert visit(fed, 2, 0, 0, 2) == [
        1,
        11,
        111,
        1001,
    ]  # those with and without a memory, and twice the same client
    assert fed.ledger.totals()["bytes_up"] == 6 * 8, "a memory is not sent"
    twin = federation(mode=mode)
    twin.restore(fed.snapshot())
    assert visit(fed, 2, 1, 0) == visit(twin, 2, 1, 0) == [1002, 20, 211]
    assert visit(fed, 1, phase=Forgets()) == [21]
    assert sorted(fed.transport.executor.memories) == [0, 2]
    assert visit(fed, 1) == [1]
    with pytest.raises(
        TypeError,
        match="phase 'absent' remembers; its finish must return a memory beside its reply",
    ):
        visit(fed, 0, phase=Absent())


def test_a_lost_reply_is_remembered_and_not_paid_for() -> None:
    fed = federation(sizes=[4] * 8, environment={"faults": Faults(drop=0.5)})
    replies = fed.ask(VISITS, range(8), each=[{"own": 1.0}] * 8)
    assert 0 < len(replies) < 8
    assert fed.ledger.totals()["bytes_up"] == 8 * len(replies)
    assert fed.ledger.lost_tasks == 8 - len(replies)
    assert sorted(fed.transport.executor.memories) == list(range(8))


def test_wrong_calls_are_refused_in_one_sentence() -> None:
    fed = federation()
    with pytest.raises(ValueError, match="client is 3; it must be 0 to 2"):
        ask(fed, [3])
    with pytest.raises(
        ValueError, match="each has 1 entries; it must have one for each of 2 clients"
    ):
        fed.ask(PROBE, [0, 1], each=[{"own": 1.0}])
    with pytest.raises(ValueError, match="clients is empty"):
        federation(clients=[], sizes=[])
    with pytest.raises(
        RuntimeError, match="nothing is in flight, so nothing can be collected; post a task first"
    ):
        fed.collect(1)
    with pytest.raises(ValueError, match="participation is 4; there are only 3 clients"):
        federation(environment={"participation": 4})
    with pytest.raises(ClientError, match="the message holds scale, steps, not 'own'"):
        fed.ask(PROBE, [0], scale=1.0)


def test_the_ledger_survives_a_round_trip() -> None:
    conditions = {"participation": 2, "delay": Constant(1.0)}
    fed = federation(environment=conditions)
    fed.iteration = 4
    ask(fed, fed.sample())
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
    assert twin.ledger == Ledger.load(saved["ledger"])
    assert twin.sample() == fed.sample()
    assert (
        twin.records()
        == fed.records()
        == {"residual": 2.0**23 + 0.5, "active": 0.5, "max_norm": 2.0**24}
    )
    assert twin.records() == {}
    for other in (fed, twin):
        other.restore(saved)
    fed.record(active=1.0)
    assert twin.records()["active"] == 0.5, "two that go on from one snapshot are apart"


def test_whole_number_replies_are_averaged_exactly() -> None:
    class Counting(Probe):
        reply: ClassVar = {"count": "scalar"}

        def finish(self, carry: Any) -> dict[str, Any]:
            return {"count": (carry[2] / 10).long()}

    fed = federation(sizes=[1, 2, 7], weights="samples")
    assert ask(fed, [0, 1, 2], Counting()).mean("count") == pytest.approx(
        0.1 * 0 + 0.2 * 1 + 0.7 * 2
    )


def test_numbers_sent_to_each_client_keep_their_digits() -> None:
    fed = federation()
    (reply,) = fed.ask(PROBE, [0], each=[{"own": 0.1}], scale=1.0)
    assert float(reply.values["own"]) == 0.1


def test_fewer_clients_than_min_replies_can_be_asked() -> None:
    assert len(ask(federation(environment={"min_replies": 2}), [1])) == 1
