"""A traced step is the step: same numbers, fewer operations, and only where nothing it froze can change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core.rng import fold_in, normal, root, uniform
from fedbilevel.execution.stacked import _parts as parts
from fedbilevel.execution.stacked import executor as stacked
from fedbilevel.execution.stacked._trace import compiled, trace
from fedbilevel.runs.run import Run


def draw(*shape: int, tag: str = "trace") -> Tensor:
    return normal(root(0, tag), shape, torch.float64)


def nodes(fast: Any) -> list[Any]:
    return [node for node in fast.__self__.graph.nodes if node.op == "call_function"]


def operations(fast: Any) -> list[str]:
    return [str(node.target) for node in nodes(fast)]


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
    assert (
        names.count("aten.bmm.default") == 3
    )  # two forward, one of the gradients; the other one is added in place:
    assert names.count("aten.baddbmm_.default") == 1
    assert [n.kwargs for n in nodes(fast) if str(n.target) == "aten.sub.Tensor"] == [{"alpha": 0.3}]


def test_what_depends_on_shapes_alone_is_computed_once_and_not_handed_out() -> None:
    def fn(a: Tensor) -> list[Tensor]:
        slope = (
            torch.ones_like(a.exp().sum()) * 0.5
        )  # as autograd begins: the sum itself is never needed
        zeros = torch.zeros_like(a)
        return [a * slope, zeros, a + zeros, (a * 2).sin() + (a * 2).cos(), zeros[:1]]

    args = (draw(3, 4),)
    fast = trace(fn, args)
    for _ in range(2):
        found = fast(*args)
        torch.testing.assert_close(found, fn(*args), rtol=0, atol=0)
        for constant in (found[1], found[4]):
            constant.add_(1.0)
    names = operations(fast)
    assert "aten.exp.default" not in names
    assert names.count("aten.mul.Tensor") == 2  # by the slope, and by 2 once


def test_nothing_is_added_to_zeros() -> None:
    def fn(a: Tensor) -> list[Tensor]:
        return [
            torch.zeros(3, 4, dtype=a.dtype) + a * a,
            a.exp() + torch.zeros_like(a),
            torch.zeros(2, 3, 4).to(a) + a,
        ]

    args = (draw(3, 4),)
    fast = trace(fn, args)
    torch.testing.assert_close(fast(*args), fn(*args), rtol=0, atol=0)
    sums = [name for name in operations(fast) if name.startswith("aten.add")]
    assert len(sums) == 1, "one that is larger than what is added stays"


def test_sums_begin_without_zeros_to_add_to_and_other_zeros_stay(monkeypatch: Any) -> None:
    """z is 0 at first, and so a trace that has it so must not serve later."""
    monkeypatch.setattr(parts, "TRACE_FROM", 0)
    task = fb.tasks.load("quadratic", clients=3, samples=4, noise=0.5)
    runs = []
    for mode in ("stack", "loop"):
        environment = fb.Environment(local_steps=2, batch_size=2)
        fed = fb.simulated_federation(task.problem, task.clients, environment, mode=mode)
        runs.append(Run(fb.algorithms.SimFBO(), fed, {}))
        for _ in range(3):
            runs[-1].advance()
    for a, b in zip(*(run.state for run in runs), strict=True):
        torch.testing.assert_close(dict(a), dict(b), rtol=0, atol=1e-12)
    blank = {kind.partition("[")[2] for kind in runs[0].fed.transport.executor.parts.traces}
    assert {"0, 1, 2, 3, 4, 5]", "3, 4, 5]", ""} <= blank, (
        "first steps from 0 and from elsewhere, and later steps"
    )


def test_what_draws_are_made_of_is_a_constant(monkeypatch: Any) -> None:
    """PyTorch's compiler would count it in 32 bits on a GPU and let it overflow on a CPU, where anything may follow."""

    def fn(keys: Tensor) -> list[Tensor]:
        return [uniform(keys, (7, 3)), fold_in(keys, torch.arange(2).unsqueeze(-1))]

    args = (torch.tensor([5, -(7**20), 2**62 + 11, -1]),)
    monkeypatch.setattr(torch._inductor, "compile", lambda module, _: module.forward)
    for fast in (trace(fn, args), compiled(fn, args)):
        torch.testing.assert_close(fast(*args), fn(*args), rtol=0, atol=0)
        assert not any("arange" in name for name in operations(fast))


def test_a_sum_takes_the_place_of_what_nothing_needs_any_more() -> None:
    def fn(x: Tensor, q: Tensor, a: Tensor) -> list[Tensor]:
        d, e, f = a.exp(), a.sin(), a.cos()
        kept = e.view(-1)
        return [x - 0.5 * d, q + d, x + e, kept, f + a, f, a.tan() + a[:1]]

    args = draw(3, 4), draw(3, 4, tag="q"), draw(3, 4, tag="a")
    before = [arg.clone() for arg in args]
    fast = trace(fn, args)
    torch.testing.assert_close(fast(*args), fn(*args), rtol=0, atol=1e-15)
    torch.testing.assert_close(list(args), before, rtol=0, atol=0)
    assert (
        operations(fast).count("aten.add_.Tensor") == 2
    )  # d and the tangent; e and f are handed out


def test_a_bias_is_added_by_the_product() -> None:
    args = draw(2, 3, 4), draw(2, 4, 5, tag="a"), draw(2, 5, tag="b")

    def fn(a: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [
            b.unsqueeze(1) + torch.bmm(a, w),
            torch.bmm(a, w).sum((1, 2), keepdim=True) + torch.bmm(a, w),
        ]

    fast = trace(fn, args)
    torch.testing.assert_close(fast(*args), fn(*args), rtol=0, atol=1e-14)
    assert operations(trace(lambda *args: fn(*args)[:1], args)).count("aten.baddbmm.default") == 1


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


def in_place(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    h = torch.bmm(a, w)
    skip = 0.5 * h
    h = F.leaky_relu(h, 0.1, inplace=True)
    return [h + skip, h]


def overwritten_operand(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    c = b.clone()
    first, second = torch.bmm(a, w), torch.bmm(c, w)
    c.zero_()
    return [first + second, c]


def broadcast_product(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [
        torch.bmm(a, w) + torch.bmm(b[:, :1], w),
        torch.bmm(b[:, :1], w) + 2.0 * torch.bmm(a, w),
    ]


def whole_numbers(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    n = (10 * a).long()
    return [n * 1.0, n + 2 * n, a.float() + 0.5 * n, n.double() + 0.5 * n]


def two_shapes_of_one_copy(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    turned = a.transpose(1, 2)  # whose reshape copies it, once for both
    early = turned.reshape(5, 6)
    return [turned.reshape(30) + b.reshape(30), early * 2, turned.reshape(10, 3).sin()]


@pytest.mark.parametrize(
    "fn", [in_place, overwritten_operand, broadcast_product, whole_numbers, two_shapes_of_one_copy]
)
def test_rewrites_change_nothing(fn: Any) -> None:
    args = draw(2, 3, 4), draw(2, 5, 3, tag="a"), draw(2, 5, 3, tag="b")
    expected = fn(*(a.clone() for a in args))
    for ours, theirs in zip(trace(fn, args)(*(a.clone() for a in args)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_a_convolutional_net_under_variance_reduction_and_unequal_steps(monkeypatch: Any) -> None:
    """The first step's shared x has stride 0, later ones have their own: two traces, not one that fails."""
    net = fb.nets.lenet(1, 28, 10)
    apply, x, y = fb.split_module(net.double(), lower="head.")

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(apply(x, y, batch[0]), batch[1])

    side = (draw(6, 1, 28, 28), torch.arange(6))
    clients = [fb.ClientData(train=side, val=side)] * 3
    problem, states = fb.Problem(upper=loss, lower=loss, x=x, y=y), []
    for start in (0, 10**9):
        monkeypatch.setattr(parts, "TRACE_FROM", start)
        environment = fb.Environment(local_steps=[1, 3, 2], batch_size=4)
        fed = fb.simulated_federation(problem, clients, environment)
        here = Run(fb.algorithms.LAASFBO(), fed, {"rounds": 2})
        list(here)
        states.append(here.state.x)
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, rtol=0, atol=1e-12)


def run(monkeypatch: Any, start: int, algorithm: Any) -> Run:
    monkeypatch.setattr(parts, "TRACE_FROM", start)
    task = fb.tasks.load("hyper-representation", data="digits", clients=6, hidden=8)
    environment = fb.Environment(participation=4, local_steps=(1, 3), batch_size=8)
    problem = fb.Problem(
        upper=task.problem.upper,
        lower=task.problem.lower,
        embed=lambda x, b: task.problem.embed(x, (b[0].double(), b[1]), ()),  # type: ignore[misc]
        x={name: value.double() for name, value in task.problem.x.items()},
        y={name: value.double() for name, value in task.problem.y.items()},
    )
    fed = fb.simulated_federation(problem, task.clients, environment)
    here = Run(algorithm, fed, {"rounds": 6})
    list(here)
    return here


def traces(run: Run) -> dict[str, Any]:
    return run.fed.transport.executor.parts.traces


def check_same(traced: Run, eager: Run) -> None:
    assert traced.fed.ledger.phases == eager.fed.ledger.phases
    for key, value in eager.state.x.items():
        assert not torch.equal(value, eager.fed.problem.x[key])
        torch.testing.assert_close(traced.state.x[key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["simfbo", "la-asfbo"])
def test_a_traced_run_is_the_run(monkeypatch: Any, name: str) -> None:
    algorithm = fb.algorithms.get(name)()
    eager, traced = run(monkeypatch, 10**9, algorithm), run(monkeypatch, 0, algorithm)
    assert not traces(eager)
    assert traces(traced)
    check_same(traced, eager)


@pytest.mark.parametrize("name", ["simfbo", "fedbio"])
def test_steps_with_a_schedule_are_traced_like_any_other(monkeypatch: Any, name: str) -> None:
    """A step size is an input of the trace: the trace of the first iteration serves the others."""
    method = fb.algorithms.get(name)
    cosine = fb.schedules.Cosine
    moving = method(lr_x=cosine(0.5, 0.01, 6), lr_y=cosine(0.02, 0.4, 6))
    still = run(monkeypatch, 0, method())
    eager, traced = run(monkeypatch, 10**9, moving), run(monkeypatch, 0, moving)
    assert traces(traced).keys() == traces(still).keys()
    assert all(traces(traced).values())
    check_same(traced, eager)
    for key, value in traced.state.x.items():
        assert not torch.allclose(value, still.state.x[key])


def test_steps_of_many_operations_are_never_traced(monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "TRACE_BELOW", 0)
    assert not traces(run(monkeypatch, 0, fb.algorithms.SimFBO()))


def test_a_step_that_cannot_be_traced_runs_as_it_is(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("data-dependent")

    eager = run(monkeypatch, 10**9, fb.algorithms.SimFBO())
    monkeypatch.setattr(parts, "trace", refuse)
    refused = run(monkeypatch, 0, fb.algorithms.SimFBO())
    assert set(traces(refused).values()) == {None}
    assert refused.fed.ledger.phases == eager.fed.ledger.phases
    assert all(torch.equal(refused.state.x[key], value) for key, value in eager.state.x.items())


def test_large_convolutions_are_not_stacked_on_a_cpu(monkeypatch: Any) -> None:
    """By a rule that a resumed run keeps, though its machine or its limits may have changed."""
    _, x, y = fb.split_module(fb.nets.lenet(1, 28, 10).double(), lower="head.")
    below, above = fb.nets.stem(fb.nets.lenet(1, 28, 10))

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(above({**x, **y}, below(x, batch[0])), batch[1])

    side = (draw(6, 1, 28, 28), torch.arange(6))
    clients = [fb.ClientData(train=side, val=side)] * 3
    problem, sizes, states = fb.Problem(upper=loss, lower=loss, x=x, y=y), [], []
    run_stack = stacked.StackedExecutor._run_stack

    def noted(self: Any, tasks: Any, *rest: Any) -> Any:
        sizes.append(len(tasks))
        return run_stack(self, tasks, *rest)

    monkeypatch.setattr(stacked.StackedExecutor, "_run_stack", noted)
    operations_of_one = (
        4 * 10 * 10 * 16 * (6 * 25) * 2
    )  # batch, image, channels, and what each is a sum of
    kept: Any = None
    for below_this in (operations_of_one, operations_of_one - 1):
        monkeypatch.setattr(stacked, "STACK_BELOW", below_this)
        sizes.clear()
        environment = fb.Environment(batch_size=4)
        fed = fb.simulated_federation(problem, clients, environment)
        here = Run(fb.algorithms.SimFBO(), fed, {"rounds": 1})
        here.advance()
        states.append(here.state.x)
        assert sizes[1:] == (
            [3] if below_this == operations_of_one else [1, 1, 1]
        )  # the first is to measure
        kept = kept or fed.snapshot()
    resumed = fb.simulated_federation(problem, clients, fb.Environment(batch_size=4))
    resumed.restore(kept)
    sizes.clear()
    Run(fb.algorithms.SimFBO(), resumed, {"rounds": 1}).advance()
    assert sizes == [3]
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, rtol=0, atol=1e-12)
