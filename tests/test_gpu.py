"""What is different on a GPU, seen on a CPU where that is possible and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.delays import Faults
from fedbilevel.federation.graphs import Graphs
from fedbilevel.federation.pool import Apart, Pool
from fedbilevel.oracle import Features, Oracle
from fedbilevel.problem import Batch
from fedbilevel.solve import Run
from fedbilevel.tasks.hyper_representation import hyper_representation
from fedbilevel.tasks.quadratic import quadratic
from fedbilevel.tree import Tree, flatten, norm

METHODS = [name for name in algorithms.names() if "shared" in algorithms.get(name).lower_levels]


def run(name: str, device: str = "cpu", iterations: int = 6, like_a_gpu: bool = False) -> Run:
    task = quadratic(clients=5, samples=6, noise=0.5, seed=1)
    environment = fb.Environment(local_steps=(1, 4), batch_size=3, participation=4)
    fed = fb.SimulatedFederation(
        task.problem.to(device), task.clients, algorithms.get(name)(), environment, device=device
    )
    if like_a_gpu:
        fed.engine.on_gpu, fed.engine.steps.graphs = True, fed.engine.graphs
    found = Run(fed, {"rounds": 10**6})
    for _ in range(iterations):
        found.advance()
    return found


def check_agree(one: Run, other: Run) -> None:
    for a, b in zip(*(tree_leaves(r.state) for r in (one, other)), strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.allclose(a.double().cpu(), b.double().cpu(), rtol=1e-10, atol=1e-12)
    assert one.fed.ledger.phases == other.fed.ledger.phases


@pytest.mark.parametrize("name", ["simfbo", "asfbo", "fednest", "fedbioacc", "adafbio", "afbo", "rabo"])
def test_clients_that_are_done_stay_where_they_are(name: str, monkeypatch: Any) -> None:
    """A stack of one size, as on a GPU, and one that shrinks, as on a CPU, give the same numbers and costs."""
    monkeypatch.setattr(Graphs, "run", lambda self, _, __, program, leaves, form: program(tree_unflatten(leaves, form)))
    check_agree(run(name), run(name, like_a_gpu=True))


@pytest.mark.parametrize("memory", [0, 1500, 10**6], ids=["none", "some", "all"])
def test_a_pool_has_what_the_clients_have(memory: int) -> None:
    data = {i: (torch.arange(10.0 * (i + 1)).view(-1, 2) + 1000 * i, torch.arange(5 * (i + 1))) for i in range(6)}
    pool = Pool(memory, "cpu")
    for cohort in ([0, 1], [1, 3], [5, 4, 2], [0, 5], [5, 0]):
        held = [data[i] for i in cohort]
        pool.bring({i: data[i] for i in cohort})
        indices = torch.tensor([[4, 0, 2]] * len(cohort))
        starts = torch.tensor([pool.starts[i] for i in cohort])
        for got, expected in zip(pool.take(indices, starts, 5), Apart(held).take(indices), strict=True):
            assert torch.equal(got, expected)
        first = pool.take(None, starts, 5)
        assert torch.equal(first[1], torch.arange(5).expand(len(cohort), 5))
    assert sum(tensor.nbytes for tensor in pool.tensors) <= max(memory, 40 * 16 * 2), "it does not grow without bound"


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
    assert any(recording for recording in gpu.fed.engine.graphs.recordings.values()), "nothing was recorded"


def test_bfloat16_rounds_the_backbone_and_nothing_else() -> None:
    """The head sees rounded features; what it makes of them, products with its Hessian above all, is exact."""
    task = hyper_representation(clients=2, hidden=16, samples=80)
    exact, coarse = task.problem, task.problem.rounded("bf16")
    client = task.clients[0]
    batch = Batch(client.train, client.val, torch.tensor(0))
    (x, y), z = exact.start, Tree(exact.y).map(torch.ones_like)
    features = coarse.embed(x, client.train, ())  # type: ignore[misc]
    assert features[0].dtype == torch.float32
    assert 1e-4 < float((features[0] - exact.embed(x, client.train, ())[0]).norm() / features[0].norm()) < 1e-2  # type: ignore[misc]
    product = Oracle(coarse).hessian_product(x, y, z, batch)
    assert torch.equal(
        flatten(product), flatten(Oracle(exact).hessian_product(x, y, z, Features(features, (), batch.rng)))
    )
    for a, b in zip(Oracle(coarse).directions(x, y, z, batch), Oracle(exact).directions(x, y, z, batch), strict=True):
        assert 1e-6 < float(norm(a - b) / norm(b)) < 2e-2
    fed = fb.SimulatedFederation(exact, task.clients, algorithms.get("simfbo")(), precision="bf16")
    Run(fed, {"rounds": 2}).advance()
    with pytest.raises(ValueError, match="names no embed"):
        quadratic(clients=2).problem.rounded("bf16")


def doubtful(name: str, corrupt: float, trusting: bool, every: int = 10) -> Run:
    """A run in which some replies are not finite, judged at once or when the next ones are there."""
    task = quadratic(clients=5, samples=6, noise=0.5, seed=1)
    environment = fb.Environment(local_steps=(1, 3), participation=4, faults=Faults(corrupt=corrupt))
    fed = fb.SimulatedFederation(task.problem, task.clients, algorithms.get(name)(), environment)
    fed.trusting = trusting
    return Run(fed, {"rounds": 30}, every={"rounds": every})


@pytest.mark.parametrize("name", ["simfbo", "shrofbo", "asfbo", "fednest", "aggitd", "unifbo", "fedavg"])
def test_replies_taken_on_trust_count_as_if_they_had_been_looked_at(name: str) -> None:
    one, other = (doubtful(name, 0.1, trusting) for trusting in (False, True))
    assert list(one)
    assert list(other)
    check_agree(one, other)
    assert one.fed.ledger.refused_replies == other.fed.ledger.refused_replies > 5
    assert [m["upper_loss"] for m in one.history] == pytest.approx([m["upper_loss"] for m in other.history])


def test_a_quorum_missed_on_trust_ends_the_run_one_round_later_and_is_not_forgotten() -> None:
    at_once, later = (doubtful("simfbo", 0.999, trusting) for trusting in (False, True))
    assert list(at_once)
    assert list(later)
    assert later.status == at_once.status == "diverged"
    assert later.reason == at_once.reason
    assert "round 1: 0 of 4 replies were accepted" in later.reason
    assert (at_once.fed.ledger.rounds, later.fed.ledger.rounds) == (1, 2)
    looked = doubtful("simfbo", 0.999, trusting=True, every=1)
    assert list(looked)
    assert (looked.reason, looked.fed.ledger.rounds) == (at_once.reason, 1)
    saved = doubtful("simfbo", 0.999, trusting=True)
    saved.advance()
    resumed = doubtful("simfbo", 0.999, trusting=True)
    resumed.fed.restore(saved.fed.snapshot())
    with pytest.raises(fb.federation.QuorumError, match="round 1: 0 of 4"):
        resumed.advance()


def test_going_back_neither_loses_nor_doubles_what_was_taken_on_trust() -> None:
    run = doubtful("simfbo", 0.5, trusting=True)
    run.advance()
    before, state = run.fed.mark(), run.state
    for _ in range(2):
        run.fed.back(before)
        run.state = state
        run.advance()
    run.fed.settle()
    straight = doubtful("simfbo", 0.5, trusting=False)
    for _ in range(2):
        straight.advance()
    check_agree(straight, run)
    assert run.fed.ledger.refused_replies == straight.fed.ledger.refused_replies > 0
