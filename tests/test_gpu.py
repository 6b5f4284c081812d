"""What is different on a GPU, seen on a CPU where that is possible and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.algorithms.shared import LowerGradient
from fedbilevel.core.oracle import Features, Oracle
from fedbilevel.core.problem import Batch
from fedbilevel.core.rng import uniform
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree, dot, flatten, norm
from fedbilevel.execution.stacked import _parts as parts
from fedbilevel.execution.stacked._graphs import Graphs
from fedbilevel.execution.stacked._pool import Apart, Pool, Pools
from fedbilevel.execution.stacked._trace import trace
from fedbilevel.federation import Federation, replies
from fedbilevel.federation.delays import Faults
from fedbilevel.federation.replies import Replies, Reply, add_up
from fedbilevel.federation.task import Sums
from fedbilevel.runs.run import Run
from fedbilevel.tasks.hyper_representation import hyper_representation
from fedbilevel.tasks.quadratic import quadratic

METHODS = [name for name in algorithms.names() if "shared" in algorithms.get(name).lower_levels]


def imitate_gpu(fed: Federation) -> None:
    """Stacks of one size, pooled samples, and replies that are added up where they are computed."""
    executor = fed.transport.executor
    executor.on_gpu = executor.storage.on_gpu = executor.inputs.on_gpu = True
    executor.parts.graphs = executor.graphs


class Far(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def unrecorded(monkeypatch: Any) -> None:
    """Tasks run as they are instead of being recorded."""

    def run(self: Graphs, _: str, __: Any, program: Any, leaves: Any, form: Any) -> Any:
        return program(tree_unflatten(leaves, form))

    monkeypatch.setattr(Graphs, "run", run)


@pytest.fixture
def late(unrecorded: None, monkeypatch: Any) -> None:
    """Replies that were added up are on a GPU: nobody waits to learn which of them are finite."""
    add_sums = Replies.add_sums

    def add(self: Replies, found: Any, sums: Sums, submodel: Submodel | None = None) -> None:
        add_sums(self, found, sums._replace(finite=sums.finite.as_subclass(Far)), submodel)

    monkeypatch.setattr(Replies, "add_sums", add)
    monkeypatch.setattr(replies, "fetched", lambda tensor: lambda: tensor)


def run(name: str, device: str = "cpu", iterations: int = 6, like_a_gpu: bool = False) -> Run:
    task = quadratic(clients=5, samples=6, noise=0.5, seed=1)
    clients = [
        fb.ClientData(c.train, tuple(t[:5] for t in c.val)) for c in task.clients
    ]  # sides are drawn by their size
    environment = fb.Environment(local_steps=(1, 4), batch_size=3, participation=4)
    fed = fb.simulated_federation(task.problem.to(device), clients, environment, device=device)
    if like_a_gpu:
        imitate_gpu(fed)
    found = Run(algorithms.get(name)(), fed, {"rounds": 10**6})
    for _ in range(iterations):
        found.advance()
    return found


def check_agree(one: Run, other: Run) -> None:
    for a, b in zip(*(tree_leaves(r.state) for r in (one, other)), strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.allclose(a.double().cpu(), b.double().cpu(), rtol=1e-10, atol=1e-12)
    assert one.fed.ledger.phases == other.fed.ledger.phases


@pytest.mark.parametrize(
    "name", ["simfbo", "asfbo", "fednest", "fedbioacc", "adafbio", "afbo", "rabo"]
)
@pytest.mark.usefixtures("unrecorded")
def test_clients_that_are_done_stay_where_they_are(name: str) -> None:
    """A stack of one size, as on a GPU, and one that shrinks, as on a CPU, give the same numbers and costs."""
    check_agree(run(name), run(name, like_a_gpu=True))


@pytest.mark.usefixtures("late")
def test_a_task_to_compile_draws_and_adds_up_the_same(monkeypatch: Any) -> None:
    """With a trace in place of the compiler."""

    def recorded(self: Graphs, _: str, __: Any, program: Any, leaves: Any, form: Any) -> Any:
        self.recording = True
        try:
            return program(tree_unflatten(leaves, form))
        finally:
            self.recording = False

    monkeypatch.setattr(Graphs, "run", recorded)
    monkeypatch.setattr(parts, "compiled", trace)
    found = run("simfbo", iterations=0, like_a_gpu=True)
    made = found.fed.transport.executor.parts
    made.compile = True
    for _ in range(6):
        found.advance()
    found.fed.settle()
    check_agree(run("simfbo"), found)
    assert len([traced for traced in made.traces.values() if traced and traced[2] == 0]) >= 3


@pytest.mark.parametrize("memory", [0, 1500, 10**6], ids=["none", "some", "all"])
def test_a_pool_has_what_the_clients_have(memory: int) -> None:
    data = {
        i: (torch.arange(10.0 * (i + 1)).view(-1, 2) + 1000 * i, torch.arange(5 * (i + 1)))
        for i in range(6)
    }
    pool = Pool(memory, "cpu")
    for cohort in ([0, 1], [1, 3], [5, 4, 2], [0, 5], [5, 0]):
        held = [data[i] for i in cohort]
        pool.bring({i: data[i] for i in cohort})
        indices = torch.tensor([[4, 0, 2]] * len(cohort))
        starts = torch.tensor([pool.starts[i] for i in cohort])
        for got, expected in zip(
            pool.take(indices, starts, 5), Apart(held).take(indices), strict=True
        ):
            assert torch.equal(got, expected)
        first = pool.take(None, starts, 5)
        assert torch.equal(first[1], torch.arange(5).expand(len(cohort), 5))
    assert sum(tensor.nbytes for tensor in pool.tensors) <= max(memory, 40 * 16 * 2), (
        "it does not grow without bound"
    )


WHOLE, LABELS, ARRAY = (
    torch.arange(57.0).view(19, 3),
    torch.arange(19),
    torch.arange(30.0).view(10, 3).numpy(),
)
LAYOUTS: dict[str, tuple[bool, list[tuple[torch.Tensor, ...]]]] = {
    "parts of one": (True, [(WHOLE[i : i + 3], LABELS[i : i + 3]) for i in (16, 0, 5)]),
    "not of one": (False, [(WHOLE[i : i + 3].clone(),) for i in (16, 0, 5)]),
    "from unequal places": (False, [(WHOLE[i : i + 3], LABELS[i // 2 :][:3]) for i in (16, 0, 5)]),
    "between samples": (False, [(WHOLE.view(-1)[i : i + 6].view(2, 3),) for i in (1, 4)]),
    "every second, a sample each": (False, [(WHOLE[::2][i : i + 1],) for i in range(10)]),
    "arrays that begin alike": (False, [(torch.from_numpy(ARRAY[:n]),) for n in (5, 9)]),
    "columns": (False, [(WHOLE.T[:, i : i + 3],) for i in (0, 3)]),
    "one number": (False, [(torch.zeros(1, 3).expand(4, 3),)] * 2),
    "no features": (False, [(torch.zeros(4, 0),)] * 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_without_copies_has_what_the_clients_have(layout: str) -> None:
    """Where there is one, all of a client's samples are found in it."""
    there, sides = LAYOUTS[layout]
    found = Pools(0, "cpu").together(
        "train", [fb.ClientData(train=side, val=side) for side in sides]
    )
    assert bool(found) == there
    if found:
        pool, starts = found
        last = torch.tensor([[len(side[0]) - 1, 0] for side in sides])
        for got, expected in zip(pool.take(last, starts, 2), Apart(sides).take(last), strict=True):
            assert torch.equal(got, expected)


def test_features_are_those_of_their_clients_though_the_pool_is_full() -> None:
    task = hyper_representation(clients=6, hidden=8, samples=240)
    (x, y), found = task.problem.start, []
    for memory in (None, 0):
        fed = fb.simulated_federation(task.problem, task.clients)
        if memory is not None:
            imitate_gpu(fed)
            fed.transport.executor.storage.pools = Pools(memory, "cpu")
        for cohort in ([0, 1, 2], [2, 3, 4]):
            found.append(flatten(fed.ask(LowerGradient(full=True), cohort, x=x, y=y).mean("q")))
    torch.testing.assert_close(found[2:], found[:2])


def unchecked(*groups: list[int]) -> Replies:
    """Replies that were added up elsewhere: 1 and 3 are not finite, 4 is of the first half of y."""
    problem: Any = SimpleNamespace(x={"x": torch.zeros(1)}, y={"y": torch.zeros(2)})
    phase: Any = SimpleNamespace(name="look", reply={"h": "y"}, summed=True)
    half = Submodel({"y": ("v",)}, {"v": 2}, {"v": torch.tensor([0])})
    found = Replies("a test", phase, problem)
    sent = {0: [1.0, 1.0], 1: [torch.nan, 0.0], 2: [3.0, 3.0], 3: [torch.inf, 0.0], 4: [5.0]}
    for group in groups:
        stack = {"h": Tree(y=torch.tensor([sent[i] for i in group]))}
        those = [Reply(i, i, i, 1.0, 0, {}) for i in group]
        sums = add_up(stack, torch.ones(len(group), dtype=torch.float64), torch.tensor(group))
        found.add_sums(those, sums, half if group == [4] else None)
    assert found.unchecked
    # What comes from a submodel is looked at when it comes, and so is all that came before it.
    assert found.refused == (["client 1: h is not finite"] if [4] in groups[1:] else [])
    return found


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (len, 3),
        (lambda r: [reply.client for reply in r], [0, 2, 4]),
        (lambda r: r.mean("steps"), 2.0),
        (lambda r: r.coverage_mean("h")["y"].tolist(), [3.0, 2.0]),
        (lambda r: r.coverage()["min_coverage_y"], 2.0),
    ],
    ids=["len", "iter", "mean", "coverage_mean", "coverage"],
)
@pytest.mark.usefixtures("late")
def test_replies_are_looked_at_late_and_before_they_are_read(
    read: Callable[[Replies], Any], expected: Any
) -> None:
    assert read(unchecked([4], [0, 1], [2, 3])) == expected
    assert read(unchecked([0, 1], [4], [2, 3])) == expected


@pytest.mark.usefixtures("late")
def test_an_exchange_ends_before_its_replies_are_looked_at() -> None:
    task = quadratic(clients=2)
    fed = fb.simulated_federation(task.problem, task.clients)
    assert fed._quorum(5, unchecked([0, 1], [2, 3])).unchecked
    assert fed.ledger.refused_replies == 0
    fed.settle()
    assert fed.ledger.refused_replies == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_gives_the_numbers_of_a_cpu(name: str) -> None:
    """Recorded from the third use on; `peak_bytes` aside, which differs with the kernels."""
    cpu, gpu = run(name, iterations=12), run(name, "cuda", iterations=12)
    for part in cpu.state._fields:
        a, b = getattr(cpu.state, part), getattr(gpu.state, part)
        if hasattr(a, "map"):
            assert torch.allclose(flatten(a), flatten(b).cpu(), rtol=1e-8, atol=1e-10), part
    for phase, cost in cpu.fed.ledger.phases.items():
        assert replace(gpu.fed.ledger.phases[phase], peak_bytes=0) == replace(cost, peak_bytes=0)
    recordings = gpu.fed.transport.executor.graphs.recordings.values()
    assert any(recording for recording in recordings), "nothing was recorded"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_compiled_task_with_dropout_gives_the_numbers_of_a_cpu(caplog: Any) -> None:
    caplog.set_level("INFO", "fedbilevel")
    task, states = hyper_representation(clients=4, hidden=16, samples=240, dropout=0.5), []
    for device in ("cpu", "cuda"):
        problem, environment = task.problem.to(device), fb.Environment(local_steps=3, batch_size=8)
        options: Any = {"device": device, "compile": device == "cuda"}
        fed = fb.simulated_federation(problem, task.clients, environment, **options)
        run = Run(algorithms.get("simfbo")(), fed, {"rounds": 10**6})
        for _ in range(6):
            run.advance()
        states.append(torch.cat([flatten(part).cpu() for part in run.state]))
    executor = fed.transport.executor
    assert executor.graphs.recordings
    assert all(executor.graphs.recordings.values())
    assert executor.parts.traces
    said = [record.getMessage() for record in caplog.records if record.name == "fedbilevel"]
    assert all(executor.parts.traces.values()), said
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)


def test_compiling_on_a_cpu_is_refused() -> None:
    task = quadratic(clients=2)
    with pytest.raises(ValueError, match="compile is True, but device is 'cpu'"):
        fb.simulated_federation(task.problem, task.clients, compile=True)


def test_bfloat16_rounds_the_backbone_and_nothing_else() -> None:
    """The head sees rounded features; what it makes of them, products with its Hessian above all, is exact."""
    task = hyper_representation(clients=2, hidden=16, samples=80)
    exact, coarse = task.problem, task.problem.rounded("bf16")
    client = task.clients[0]
    batch = Batch(client.train, client.val, torch.tensor(0))
    (x, y), z = exact.start, Tree(exact.y).map(torch.ones_like)
    features = coarse.embed(x, client.train, ())  # type: ignore[misc]
    assert features[0].dtype == torch.float32
    assert (
        1e-4
        < float((features[0] - exact.embed(x, client.train, ())[0]).norm() / features[0].norm())
        < 1e-2
    )  # type: ignore[misc]
    product = Oracle(coarse).hessian_product(x, y, z, batch)
    assert torch.equal(
        flatten(product),
        flatten(Oracle(exact).hessian_product(x, y, z, Features(features, (), batch.rng))),
    )
    for a, b in zip(
        Oracle(coarse).directions(x, y, z, batch),
        Oracle(exact).directions(x, y, z, batch),
        strict=True,
    ):
        assert 1e-6 < float(norm(a - b) / norm(b)) < 2e-2
    fed = fb.simulated_federation(exact, task.clients, precision="bf16")
    Run(algorithms.get("simfbo")(), fed, {"rounds": 2}).advance()
    with pytest.raises(ValueError, match="names no embed"):
        quadratic(clients=2).problem.rounded("bf16")


def doubtful(name: str, corrupt: float, like_a_gpu: bool, every: int = 10) -> Run:
    """Some replies are not finite, judged at once or, as on a GPU, when the next ones are there."""
    task = quadratic(clients=5, samples=6, noise=0.5, seed=1)

    def lower(x: Tree, y: Tree, batch: Any, rng: torch.Tensor) -> torch.Tensor:
        good = (uniform(rng, (), torch.float64) >= corrupt).double()
        return (
            task.problem.lower(x, y, batch, rng) + (good + 0 * dot(y, y)).sqrt()
        )  # at 0 only the gradient is NaN

    problem = fb.Problem(upper=task.problem.upper, lower=lower, x=task.problem.x, y=task.problem.y)
    environment = fb.Environment(local_steps=(1, 3), participation=4)
    fed = fb.simulated_federation(problem, task.clients, environment)
    if like_a_gpu:
        imitate_gpu(fed)
    return Run(algorithms.get(name)(), fed, {"rounds": 30}, every={"rounds": every})


@pytest.mark.parametrize(
    "name", ["simfbo", "shrofbo", "asfbo", "fednest", "aggitd", "unifbo", "fedavg"]
)
@pytest.mark.usefixtures("late")
def test_replies_taken_unchecked_count_as_if_they_had_been_looked_at(name: str) -> None:
    one, other = (doubtful(name, 0.04, like_a_gpu) for like_a_gpu in (False, True))
    assert list(one)
    assert list(other)
    check_agree(one, other)
    assert one.fed.ledger.refused_replies == other.fed.ledger.refused_replies > 5
    assert [m["upper_loss"] for m in one.history] == pytest.approx(
        [m["upper_loss"] for m in other.history]
    )


@pytest.mark.parametrize(
    ("name", "conditions"),
    [
        ("simfbo", {"faults": Faults(drop=0.3)}),
        ("simfbo", {"faults": Faults(corrupt=0.3)}),
        ("fedbioacc", {}),
    ],
    ids=["lost", "spoilt", "remembers"],
)
@pytest.mark.usefixtures("late")
def test_a_gpu_changes_nothing_where_replies_are_lost_or_must_be_looked_at(
    name: str, conditions: dict[str, Any]
) -> None:
    task, runs = hyper_representation(clients=5, hidden=8, samples=200), []
    for like_a_gpu in (False, True):
        environment = fb.Environment(batch_size=4, participation=4, **conditions)
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        if like_a_gpu:
            imitate_gpu(fed)
        runs.append(Run(algorithms.get(name)(), fed, {"rounds": 4}))
        assert list(runs[-1])
    check_agree(*runs)
    assert runs[0].fed.ledger.refused_replies == runs[1].fed.ledger.refused_replies


@pytest.mark.usefixtures("late")
def test_a_quorum_missed_unchecked_ends_the_run_one_round_later_and_is_not_forgotten() -> None:
    at_once, later = (doubtful("simfbo", 0.999, like_a_gpu) for like_a_gpu in (False, True))
    assert list(at_once)
    assert list(later)
    assert later.status == at_once.status == "diverged"
    assert later.reason == at_once.reason
    assert "round 1: 0 of 4 replies were accepted" in later.reason
    assert (at_once.fed.ledger.rounds, later.fed.ledger.rounds) == (1, 2)
    looked = doubtful("simfbo", 0.999, like_a_gpu=True, every=1)
    assert list(looked)
    assert (looked.reason, looked.fed.ledger.rounds) == (at_once.reason, 1)
    saved = doubtful("simfbo", 0.999, like_a_gpu=True)
    saved.advance()
    resumed = doubtful("simfbo", 0.999, like_a_gpu=True)
    resumed.fed.restore(saved.fed.snapshot())
    with pytest.raises(fb.federation.QuorumError, match="round 1: 0 of 4"):
        resumed.advance()


@pytest.mark.usefixtures("late")
def test_going_back_neither_loses_nor_doubles_what_was_taken_unchecked() -> None:
    run = doubtful("simfbo", 0.5, like_a_gpu=True)
    run.advance()
    before, state = run.fed.mark(), run.state
    for _ in range(2):
        run.fed.back(before)
        run.state = state
        run.advance()
    run.fed.settle()
    straight = doubtful("simfbo", 0.5, like_a_gpu=False)
    for _ in range(2):
        straight.advance()
    check_agree(straight, run)
    assert run.fed.ledger.refused_replies == straight.fed.ledger.refused_replies > 0


@pytest.mark.usefixtures("late")
def test_what_was_taken_unchecked_is_counted_before_an_uncharged_exchange() -> None:
    run = doubtful("simfbo", 0.5, like_a_gpu=True)
    run.advance()
    before = run.fed.ledger.refused_replies
    with run.fed.uncharged():
        run.fed.settle()
    assert run.fed.ledger.refused_replies > before
