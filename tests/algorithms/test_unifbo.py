"""UniFBO beyond the conformance suite: its steps, and where they end, against closed forms."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import UniFBO
from fedbilevel.algorithms.unifbo import wide_matrix
from fedbilevel.core import ranks
from fedbilevel.core.tree import flatten
from fedbilevel.execution.ranked import RankedExecutor
from fedbilevel.federation import Reply
from fedbilevel.federation.delays import Constant, Faults, LogNormal, Stragglers
from fedbilevel.runs.run import Run

STEPS: dict[str, Any] = {"lr_x": 0.3, "lr_y": 0.5, "lr_z": 0.5}
WITHOUT_DATA = fb.ClientData(train=(torch.zeros(1),), val=(torch.zeros(1),))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def client_of(value: Tensor) -> fb.ClientData:
    """A client whose one sample, on both sides, is this value."""
    return fb.ClientData(train=(value,), val=(value,))


class Matrices:
    """min f = |x - t|^2_Q / 2 + <y, x> over a matrix x, with y* = x^T + c; x is 2 x 3, y is 3 x 2.

    Attributes:
        problem: The problem, with both losses scaled.
        hessian: The Hessian of x -> f(x, y*(x)), x as a vector.
        slope: Minus its gradient at 0.
    """

    def __init__(self, lower_scale: float = 1.0, upper_scale: float = 1.0, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        t = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        half = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        eye = torch.eye(6, dtype=torch.float64)
        c = torch.ones(3, 2, dtype=torch.float64)
        Q = half @ half.T / 6 + 2 * eye

        def upper(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
            away = (x["x"] - t).reshape(-1)
            return upper_scale * (away @ Q @ away / 2 + (y["y"].T * x["x"]).sum())

        def lower(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
            return lower_scale * ((y["y"] - x["x"].T - c) ** 2).sum() / 2

        self.problem = fb.Problem(
            upper, lower, x={"x": zeros(2, 3)}, y={"y": zeros(3, 2)}, **options
        )
        self.hessian = Q + 2 * eye
        self.slope = Q @ t.reshape(-1) - c.T.reshape(-1)

    def solve(self, method: UniFBO, rounds: int) -> fb.Result:
        return fb.solve(self.problem, [WITHOUT_DATA], method, rounds=rounds, every=rounds)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (4, 3), (4, 2, 3, 3), (20, 2, 3)], ids=str)
def test_the_first_step_is_the_polar_factor_of_the_gradient(shape: tuple[int, ...]) -> None:
    """U V^T of h = U s V^T, times sqrt(columns); for a vector it is h / ||h||."""
    target = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    problem = fb.Problem(
        lambda x, y, batch: (x["x"] * target).sum() + 0 * y["y"].sum(),
        lambda x, y, batch: (y["y"] ** 2).sum(),
        x={"x": zeros(*shape)},
        y={"y": zeros(1)},
    )
    method = UniFBO(lr_x=0.5, momentum_weight=0.4)
    moved = -fb.solve(problem, [WITHOUT_DATA], method, rounds=1).x["x"]
    U, _, Vh = torch.linalg.svd(wide_matrix(target), full_matrices=False)
    expected = 0.4 * 0.5 * Vh.shape[1] ** 0.5 * (U @ Vh)
    # The tolerance allows for EIGENVALUE_FLOOR.
    torch.testing.assert_close(wide_matrix(moved), expected, rtol=0, atol=1e-4)
    assert moved.square().mean().sqrt() == pytest.approx(0.4 * 0.5, rel=1e-4)


def test_unequal_local_steps_on_unequal_clients_lead_to_the_true_solution() -> None:
    task = fb.tasks.load("quadratic", clients=4, condition=3.0, seed=5)
    steps = [1, 1, 1, 3]
    x = task.x_star()["x"]
    assert (x - task.x_star(weights=steps)["x"]).norm() > 0.1, "unequal steps would not show"
    environment = fb.Environment(local_steps=steps)
    method = UniFBO(**STEPS)
    result = fb.solve(
        task.problem, task.clients, method, rounds=48, environment=environment, every=48
    )
    torch.testing.assert_close(result.x["x"], x, rtol=0, atol=1e-2)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_matrices_go_to_the_solution(damping: float) -> None:
    """If damped, to that with the linear system (1 + damping) z = x^T."""
    task = Matrices()
    hessian = task.hessian - damping / (1 + damping) * torch.eye(6, dtype=torch.float64)
    x = task.solve(UniFBO(**STEPS, damping=damping), rounds=80).x["x"].reshape(-1)
    torch.testing.assert_close(x, torch.linalg.solve(hessian, task.slope), rtol=0, atol=1e-6)


def test_projected_matrices_go_to_the_constrained_solution() -> None:
    """The gradient is 0 inside the bounds and points outwards on them; whitened steps would leave.

    It is slow: on the bounds the gradient does not vanish, so that squares add up for ever.
    """
    task = Matrices(project_x=lambda x: {"x": x["x"].clamp(-0.2, 0.2)})
    x = task.solve(UniFBO(**STEPS), rounds=60).x["x"].reshape(-1)
    outwards = task.slope - task.hessian @ x
    at_bound = x.abs() == 0.2
    assert 0 < at_bound.sum() < 6
    assert (outwards * x.sign())[at_bound].min() > 1e-3
    assert outwards[~at_bound].abs().max() < 1e-2


def test_a_single_number_keeps_its_dtype_with_constraints() -> None:
    """Steps are scaled in float64; the first direction of x is 0."""
    problem = fb.Problem(
        upper=lambda x, y, batch: (y["y"] ** 2).sum(),
        lower=lambda x, y, batch: ((y["y"] - x["x"]) ** 2).sum(),
        x={"x": torch.tensor(1.0)},
        y={"y": torch.ones(2)},
        project_x=lambda x: x,
    )
    data = (torch.zeros(1),)
    result = fb.solve(problem, [fb.ClientData(data, data)], UniFBO(), rounds=5)
    assert result.x["x"].dtype == torch.float32
    assert result.x["x"] != 1


def test_the_scale_of_both_losses_does_not_matter() -> None:
    """Only their ratio does, and to z alone."""
    one = Matrices().solve(UniFBO(), rounds=20)
    other = Matrices(1e4, 1e4).solve(UniFBO(), rounds=20)
    torch.testing.assert_close(one.x["x"], other.x["x"], rtol=0, atol=1e-9)
    torch.testing.assert_close(one.y["y"], other.y["y"], rtol=0, atol=1e-9)


def test_a_tensor_without_gradient_stays() -> None:
    problem = fb.Problem(
        lambda x, y, batch: (x["x"] * y["y"]).sum() + 0 * x["idle"].sum(),
        lambda x, y, batch: ((y["y"] - 1) ** 2).sum(),
        x={"x": torch.ones(2), "idle": torch.ones(2, 300)},
        y={"y": torch.zeros(2)},
    )
    result = fb.solve(problem, [WITHOUT_DATA], "unifbo", rounds=3)
    assert result.status == "completed"
    assert torch.equal(result.x["idle"], torch.ones(2, 300))
    assert not torch.equal(result.x["x"], torch.ones(2))


def test_h_weighs_clients_by_the_number_of_all_over_that_of_those_asked() -> None:
    problem = fb.Problem(
        lambda x, y, batch: batch[0].mean() * x["x"].sum() + 0 * y["y"].sum(),
        lambda x, y, batch: (y["y"] ** 2).sum() + 0 * x["x"].sum(),
        x={"x": zeros(3)},
        y={"y": zeros(1)},
    )
    clients = [client_of(value) for value in torch.tensor([[1.0], [7.0]], dtype=torch.float64)]
    environment = fb.Environment(participation=1)
    fed = fb.simulated_federation(problem, clients, environment, weights=[0.75, 0.25])
    run = Run(UniFBO(), fed, {"rounds": 9})
    run.advance()
    # (2 p_i h_i)^2 in each of three coordinates, for either client.
    assert float(run.state.s[0]["x"]) in (3 * 1.5**2, 3 * 3.5**2)


# Without a barrier


def solve_quadratic(method: UniFBO, rounds: int, **environment: Any) -> tuple[fb.Result, Any]:
    task = fb.tasks.load("quadratic", clients=4, condition=3.0, seed=5)
    result = fb.solve(
        task.problem,
        task.clients,
        method,
        rounds=rounds,
        environment=fb.Environment(**environment),
        every=rounds,
    )
    return result, task


def test_with_equal_speeds_it_is_the_method_with_a_barrier() -> None:
    environment = {"delay": Constant(), "local_steps": 2}
    with_barrier, _ = solve_quadratic(UniFBO(**STEPS), 12, **environment)
    without, _ = solve_quadratic(UniFBO(**STEPS, barrier=False), 12, **environment)
    torch.testing.assert_close(without.x["x"], with_barrier.x["x"], rtol=0, atol=1e-10)
    torch.testing.assert_close(without.y["y"], with_barrier.y["y"], rtol=0, atol=1e-10)


def test_an_iteration_without_a_barrier_is_the_one_by_hand() -> None:
    """One client replied 1 six iterations ago, another replies 3 now.

    So h is 2 and the mean age is 3, which halves the steps. The first step of a number is
    -w lr sign(h), here -.4 lr / 2.
    """
    x = fb.Tree(x=zeros(1))
    y = fb.Tree(y=zeros(1))
    problem = fb.Problem(
        lambda x, y, batch: x["x"] @ y["y"], lambda x, y, batch: (y["y"] ** 2).sum(), x, y
    )

    def reply(value: float) -> dict[str, fb.Tree]:
        shapes = {"hx": x, "hy": y, "hz": y}
        return {name: tree.map(lambda t: t + value) for name, tree in shapes.items()}

    class Collected(list[Reply]):
        idle = (1,)

    posted: list[int] = []
    fed: Any = SimpleNamespace(
        problem=problem,
        iteration=8,
        excluded=(),
        post=lambda phase, clients, **point: posted.extend(clients),
        collect=lambda: Collected([Reply(0, 1, 1, 1.0, 0, reply(3.0))]),
        record=lambda **values: None,
    )
    method = UniFBO(lr_x=0.1, lr_y=0.2, lr_z=0.3, momentum_weight=0.4, barrier=False)
    latest = (reply(1.0), 1.0, {0: (2, reply(1.0))})
    after = method.iterate(method.init(problem)._replace(latest=latest, idle=(1,)), fed)
    for value, lr in zip((after.x, after.y, after.z), (0.1, 0.2, 0.3), strict=True):
        assert float(flatten(value)) == pytest.approx(-0.4 * lr / 2, rel=1e-5)
    assert posted == [1]


def test_slow_clients_count_as_much_as_fast_ones() -> None:
    """A mean over what arrives would solve the problem of the fast ones."""
    method = UniFBO(lr_x=0.3, lr_y=0.3, lr_z=0.3, barrier=False)
    result, task = solve_quadratic(
        method,
        700,
        delay=LogNormal(),
        stragglers=Stragglers(clients=2, slowdown=8.0),
        participation=1,
    )
    torch.testing.assert_close(result.x["x"], task.x_star()["x"], rtol=0, atol=1e-2)


def test_lost_tasks_and_refused_replies_do_not_change_the_solution() -> None:
    result, task = solve_quadratic(
        UniFBO(**STEPS, barrier=False),
        400,
        delay=Constant(),
        faults=Faults(drop=0.3, corrupt=0.3),
        participation=1,
    )
    torch.testing.assert_close(result.x["x"], task.x_star()["x"], rtol=0, atol=2e-2)


def test_idle_clients_get_a_task_also_before_any_reply_has_arrived() -> None:
    task = fb.tasks.load("quadratic", clients=3, seed=5)
    environment = fb.Environment(delay=Constant(), faults=Faults(drop=0.8), participation=1)
    fed = fb.simulated_federation(task.problem, task.clients, environment)
    run = Run(UniFBO(barrier=False), fed, {"rounds": 99})
    weights = []
    for _ in range(12):
        run.advance()
        _, weight, _ = run.state.latest
        weights.append(weight)
        assert sorted([*run.state.idle, *run.fed.in_flight]) == [0, 1, 2]
    assert weights[0] == 0 < weights[-1]


def test_without_a_barrier_it_resumes_with_tasks_in_flight(tmp_path: Path) -> None:
    task = fb.tasks.load("quadratic", clients=5, seed=5)
    environment = fb.Environment(delay=LogNormal(), participation=2)
    method = UniFBO(barrier=False)

    def solve(rounds: int, **options: Any) -> fb.Result:
        return fb.solve(
            task.problem, task.clients, method, rounds=rounds, environment=environment, **options
        )

    solve(7, out=tmp_path / "run")
    resumed = solve(15, out=tmp_path / "run", resume=True)
    assert torch.equal(resumed.x["x"], solve(15).x["x"])


# Submodels


def units_problem(upper: Any, w: Tensor, axes: Any = None) -> fb.Problem:
    """A problem whose x is `w`, of which each row is a unit."""
    return fb.Problem(
        upper,
        lambda x, y, batch: (y["b"] ** 2).sum() + 0 * x["w"].sum(),
        x={"w": w},
        y={"b": torch.zeros(2, dtype=w.dtype)},
        axes={"w": ("units", None)} if axes is None else axes,
    )


def sum_of_weights(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
    return x["w"].sum() + 0 * y["b"].sum()


@pytest.mark.parametrize("ranked", [False, True])
def test_h_is_the_mean_over_those_who_hold_a_coordinate(
    ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step of x, units that nobody holds stay.

    Also where replies are summed where they were computed, as with several ranks (here one).
    """

    def upper(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
        return (batch[0].mean() * x["w"]).sum() + 0 * y["b"].sum()

    problem = units_problem(upper, zeros(4, 3))
    clients = [client_of(torch.full((1,), h, dtype=torch.float64)) for h in (1.0, 3.0)]
    fed = fb.simulated_federation(problem, clients, fb.Environment(capacity=[0.75, 0.5]))
    if ranked:
        monkeypatch.setattr(ranks, "all_reduce_sum", lambda values: values)
        transport: Any = fed.transport
        transport.executor = RankedExecutor(transport.executor, "cpu")
    result = fb.solve(problem, clients, UniFBO(policy="static"), rounds=1, federation=fed)
    h = torch.tensor([2.0, 2.0, 1.0, 0.0], dtype=torch.float64).unsqueeze(1).expand(4, 3)
    U, _, Vh = torch.linalg.svd(wide_matrix(h), full_matrices=False)
    # The wide matrix of h is 3 x 4 and has rank one; sqrt(columns) is 2.
    step = 0.5 * 0.02 * 2 * torch.outer(U[:, 0], Vh[0])
    torch.testing.assert_close(-result.x["w"], step.T, rtol=0, atol=1e-5)
    assert torch.equal(result.x["w"][3], zeros(3))


@pytest.mark.parametrize(
    ("policy", "moved"), [("static", [0, 1]), ("rolling", [0, 1, 2]), ("importance", [1, 3])]
)
def test_clients_hold_the_units_of_the_policy(policy: Any, moved: list[int]) -> None:
    """Two of four units in two iterations: the first, those from unit t on, the largest."""
    start = torch.tensor([[1.0], [5.0], [2.0], [4.0]], dtype=torch.float64)
    problem = units_problem(sum_of_weights, start)
    environment = fb.Environment(capacity=0.5)
    method = UniFBO(policy=policy)
    result = fb.solve(problem, [WITHOUT_DATA], method, rounds=2, environment=environment)
    change = (result.x["w"] - start).squeeze()
    assert change.nonzero().squeeze().tolist() == moved


def test_the_policy_has_no_effect_on_whole_models() -> None:
    task = fb.tasks.load("hyper-representation", clients=4, hidden=8, samples=200)
    environment = fb.Environment(batch_size=8)

    def solve(policy: Any) -> Tensor:
        method = UniFBO(policy=policy)
        result = fb.solve(task.problem, task.clients, method, rounds=3, environment=environment)
        return flatten(result.x)

    assert torch.equal(solve("static"), solve("rolling"))


@pytest.mark.parametrize("axes", [{}, {"w": ("units", None)}], ids=["no axes", "axes"])
@pytest.mark.parametrize("capacity", [0.5, [1.0, 0.5]], ids=str)
def test_submodels_without_a_barrier_are_refused(axes: Any, capacity: Any) -> None:
    problem = units_problem(sum_of_weights, torch.ones(4, 1), axes)
    clients = [WITHOUT_DATA] * 2
    environment = fb.Environment(capacity=capacity)
    message = re.escape(
        f"barrier is False and capacity is {capacity}; without a barrier models are whole: "
        "barrier must be True, or capacity 1"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        fb.solve(problem, clients, UniFBO(barrier=False), rounds=1, environment=environment)
    assert fb.solve(problem, clients, UniFBO(barrier=False), rounds=1).status == "completed"
    if axes:
        result = fb.solve(problem, clients, UniFBO(), rounds=1, environment=environment)
        assert result.status == "completed"


@pytest.mark.parametrize("policy", ["all", "segments"])
def test_other_policies_are_refused(policy: Any) -> None:
    allowed = "'static', 'rolling', 'importance'"
    with pytest.raises(ValueError, match=f"policy is '{policy}'; it must be one of {allowed}"):
        UniFBO(policy=policy)
