"""A traced step is the step: same numbers, fewer operations, and only where nothing it froze can change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.federation import simulated
from fedbilevel.rng import normal, root
from fedbilevel.solve import Run
from fedbilevel.trace import trace


def draw(*shape: int, tag: str = "trace") -> Tensor:
    return normal(root(0, tag), shape, torch.float64)


def operations(module: Any) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_gradients_of_a_shared_weight_are_accumulated_not_added() -> None:
    def loss(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(F.linear(a, w)).sum() + torch.sin(F.linear(b, w)).sum()

    def step(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [w - 0.3 * vmap(grad(loss))(w, a, b)]

    args = draw(2, 4, 3), draw(2, 5, 3, tag="a"), draw(2, 5, 3, tag="b")
    fast = trace(step, args)
    torch.testing.assert_close(fast(*args), step(*args), rtol=0, atol=1e-14)
    other = tuple(-2 * a for a in args)
    torch.testing.assert_close(fast(*other), step(*other), rtol=0, atol=1e-14)
    names = operations(fast)
    assert names.count("aten.bmm.default") == 3  # two forward, one of the gradients; the other one is added in place:
    assert names.count("aten.baddbmm_.default") == 1
    assert [n.kwargs for n in fast.graph.nodes if str(n.target) == "aten.sub.Tensor"] == [{"alpha": 0.3}]  # type: ignore[attr-defined]


def test_a_product_used_twice_is_not_overwritten() -> None:
    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        first, second = torch.bmm(a, b), torch.bmm(b, a)
        return [first + second, first, second + second, first + 0.5 * second]

    args = draw(2, 3, 3), draw(2, 3, 3, tag="b")
    for ours, theirs in zip(trace(fn, args)(*args), fn(*args), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_views_that_change_something_stay() -> None:
    def fn(a: Tensor) -> list[Tensor]:
        return [
            a.transpose(0, 1).transpose(1, 2),
            a.view(6, 2).expand(6, 2) * 1,
            a.view(2, 3, 2),
            a[:1].expand(4, 3, 2),
        ]

    args = (draw(2, 3, 2),)
    for ours, theirs in zip(trace(fn, args)(*args), fn(*args), strict=True):
        assert torch.equal(ours, theirs)


def run(monkeypatch: Any, start: int, algorithm: Any) -> Run:
    monkeypatch.setattr(simulated, "TRACE_FROM", start)
    task = fb.tasks.load("hyper-representation", data="digits", clients=6, hidden=8)
    environment = fb.Environment(participation=4, local_steps=(1, 3), batch_size=8)
    problem = fb.Problem(
        upper=lambda x, y, b: task.problem.upper(x, y, (b[0].double(), b[1]), ()),
        lower=lambda x, y, b: task.problem.lower(x, y, (b[0].double(), b[1]), ()),
        x={name: value.double() for name, value in task.problem.x.items()},
        y={name: value.double() for name, value in task.problem.y.items()},
    )
    here = Run(fb.SimulatedFederation(problem, task.clients, algorithm, environment), {"rounds": 6})
    list(here)
    return here


@pytest.mark.parametrize("name", ["simfbo", "la-asfbo"])
def test_a_traced_run_is_the_run(monkeypatch: Any, name: str) -> None:
    algorithm = fb.algorithms.get(name)()
    eager, traced = run(monkeypatch, 10**9, algorithm), run(monkeypatch, 0, algorithm)
    assert not eager.fed._traces
    assert traced.fed._traces
    assert traced.fed.ledger.phases == eager.fed.ledger.phases
    for key, value in eager.state.x.items():
        assert not torch.equal(value, eager.fed.problem.x[key])
        torch.testing.assert_close(traced.state.x[key], value, rtol=0, atol=1e-12)


def test_steps_with_a_schedule_are_never_traced(monkeypatch: Any) -> None:
    moving = fb.algorithms.SimFBO(lr_x=fb.schedules.Power(0.1))
    assert not run(monkeypatch, 0, moving).fed._traces
