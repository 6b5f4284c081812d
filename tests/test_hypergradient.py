"""The judge agrees with closed forms and with finite differences of Phi, and says so when there is nothing to judge."""

import dataclasses
import re
import sys

import pytest
import torch
from torch.nn.functional import softplus

from fedbilevel import ClientData, Problem, finite_difference, hypergradient, solve_lower
from fedbilevel.core.hypergradient import phi
from fedbilevel.core.linear import CG, Neumann
from fedbilevel.core.rng import normal, root
from fedbilevel.core.tree import Tree, norm
from fedbilevel.tasks.quadratic import quadratic

SIZES = [1, 4, 2, 6]  # training samples of the unequal clients
WEIGHTS = {"uniform": "uniform", "samples": "samples", "explicit": [0.1, 0.5, 0.0, 0.4]}


def draw(name, *shape):
    return normal(root(5, name), shape, torch.float64)


def unequal_quadratic(**options):
    """A quadratic whose clients hold different numbers of different samples."""
    task = quadratic(clients=len(SIZES), samples=max(SIZES), noise=0.5, seed=3, **options)
    clients = [
        ClientData(
            train=tuple(t[:size] for t in client.train),
            val=tuple(t[: 7 - size] for t in client.val),
        )
        for client, size in zip(task.clients, SIZES, strict=True)
    ]
    return dataclasses.replace(task, clients=clients)


@pytest.fixture(params=WEIGHTS.values(), ids=WEIGHTS)
def weights(request):
    return request.param


@pytest.fixture(params=["exact", "cg"])
def method(request):
    """The third, "neumann", takes thousands of products: it has tests of its own."""
    return request.param


@pytest.fixture(scope="module")
def logistic():
    """Ridge-regularised logistic regression; the upper variable holds the logarithms of the ridge weights."""

    def lower(x, y, batch):
        inputs, labels = batch
        ridge = 0.5 * (x["log_ridge"].exp() * y["w"] ** 2).sum() + 0.05 * y["b"] ** 2
        return softplus(-labels * (inputs @ y["w"] + y["b"])).mean() + ridge

    def upper(x, y, batch):
        inputs, labels = batch
        return softplus(-labels * (inputs @ y["w"] + y["b"])).mean()

    def side(name, size, shift):
        inputs = draw(f"{name} inputs", size, 3) + shift
        return inputs, (inputs @ torch.tensor([1.5, -2.0, 1.0], dtype=torch.float64)).sign()

    clients = [
        ClientData(train=side(f"train {i}", size, 0.3 * i), val=side(f"val {i}", 5, 0.3 * i))
        for i, size in enumerate((3, 8, 5, 12))
    ]
    zeros = torch.zeros(3, dtype=torch.float64)
    start = {
        "x": {"log_ridge": zeros - 1},
        "y": {"w": zeros, "b": torch.zeros((), dtype=torch.float64)},
    }
    return Problem(upper=upper, lower=lower, **start), clients


DIMS = {"5, 4": (5, 4), "1, 3": (1, 3), "3, 1": (3, 1), "1, 1": (1, 1)}


@pytest.mark.parametrize("condition", [1.0, 10.0, 80.0])
@pytest.mark.parametrize(("dim_x", "dim_y"), DIMS.values(), ids=DIMS)
def test_closed_form(method, weights, dim_x, dim_y, condition):
    """All clients have the same Hessian, so that its condition number is the one asked for."""
    task = unequal_quadratic(dim_x=dim_x, dim_y=dim_y, condition=condition, heterogeneity=0.0)
    x = {"x": draw("x", dim_x)}
    got = hypergradient(task.problem, task.clients, x, method, weights)
    torch.testing.assert_close(got, task.gradient(x, weights), rtol=1e-8, atol=1e-8)


def test_closed_form_of_unrelated_clients(method, weights):
    task, x = unequal_quadratic(condition=100.0), {"x": draw("x", 5)}
    expected = task.gradient(x, weights)
    torch.testing.assert_close(
        solve_lower(task.problem, task.clients, x, method, weights), task.y_star(x, weights)
    )
    torch.testing.assert_close(
        phi(task.problem, task.clients, x, method, weights), task.phi(x, weights)
    )
    got = hypergradient(task.problem, task.clients, x, method, weights)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("condition", [1e3, 1e4])
def test_closed_form_of_ill_conditioned_lower_levels(method, condition):
    task, x = quadratic(condition=condition, heterogeneity=0.0, clients=3), {"x": draw("x", 5)}
    got = hypergradient(task.problem, task.clients, x, method)
    torch.testing.assert_close(got, task.gradient(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("dim_x", "dim_y", "condition"), [(5, 4, 80.0), (1, 1, 10.0)])
def test_closed_form_by_neumann(dim_x, dim_y, condition):
    task = quadratic(clients=2, dim_x=dim_x, dim_y=dim_y, condition=condition, heterogeneity=0.0)
    x, weights = {"x": draw("x", dim_x)}, [0.3, 0.7]
    got = hypergradient(task.problem, task.clients, x, "neumann", weights)
    torch.testing.assert_close(got, task.gradient(x, weights), rtol=1e-8, atol=1e-8)


def test_neumann_refuses_rather_than_being_wrong():
    """At condition 500 its sum of 2000 terms is off by two per cent."""
    task = quadratic(condition=500.0, heterogeneity=0.0, clients=1)
    with pytest.raises(ValueError, match="residual"):
        hypergradient(task.problem, task.clients, {"x": draw("x", 5)}, "neumann")


def test_the_weights_matter_and_the_hypergradient_is_not_small():
    """Neither is what would remain without the implicit term, or with the mean of local hypergradients."""
    task, x = unequal_quadratic(condition=10.0), {"x": draw("x", 5)}
    g = {name: task.gradient(x, weights) for name, weights in WEIGHTS.items()}
    assert all(norm(value) > 1 for value in g.values())
    assert all(
        norm(g[a] - g[b]) > 0.1 for a, b in [("uniform", "samples"), ("uniform", "explicit")]
    )
    *_, t, D = task._means("uniform")
    direct = x["x"] - t + D.T @ task.y_star(x)["y"]
    assert (direct - g["uniform"]["x"]).norm() > 0.1
    local = [hypergradient(task.problem, [client], x)["x"] for client in task.clients]
    assert (sum(local) / len(local) - g["uniform"]["x"]).norm() > 0.1


def test_finite_differences_of_a_quadratic(weights):
    task, x, v = unequal_quadratic(condition=20.0), {"x": draw("x", 5)}, {"x": draw("v", 5)}
    slope = finite_difference(task.problem, task.clients, x, v, weights=weights)
    got = hypergradient(task.problem, task.clients, x, weights=weights)
    assert abs(slope) > 0.1
    assert float(got["x"] @ v["x"]) == pytest.approx(slope, rel=1e-8)


def check_by_differences(problem, clients, method, weights):
    """Along each coordinate: all three together are the gradient."""
    x = {"log_ridge": torch.tensor([-1.0, -1.2, -0.8], dtype=torch.float64)}
    directions = [{"log_ridge": row} for row in torch.eye(3, dtype=torch.float64)]
    slopes = [finite_difference(problem, clients, x, v, weights=weights) for v in directions]
    got = hypergradient(problem, clients, x, method, weights)["log_ridge"].tolist()
    assert min(map(abs, slopes)) > 1e-3
    assert got == pytest.approx(slopes, rel=1e-6)


def test_finite_differences_of_logistic_regression(logistic, method, weights):
    check_by_differences(*logistic, method, weights)


def test_finite_differences_by_neumann(logistic):
    problem, clients = logistic
    check_by_differences(problem, clients[:2], "neumann", "samples")


def test_finite_difference_uses_its_step():
    """Phi = x^4 / 4: (Phi(x + h) - Phi(x - h)) / 2h = x^3 + x h^2."""
    problem = Problem(
        upper=lambda x, y, batch: 0.25 * (y["y"] ** 4).sum(),
        lower=lambda x, y, batch: 0.5 * ((y["y"] - x["x"]) ** 2).sum(),
        x={"x": torch.zeros(1, dtype=torch.float64)},
        y={"y": torch.ones(1, dtype=torch.float64)},
    )
    one = torch.ones(1, dtype=torch.float64)
    clients = [ClientData(train=(one,), val=(one,))]
    for h in (0.5, 0.1):
        slope = finite_difference(problem, clients, {"x": 2 * one}, {"x": one}, step=h)
        assert slope == pytest.approx(8 + 2 * h**2, rel=1e-10)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_solver_given_is_used(method, steps):
    """A few-term Neumann sum in place of the inverse: x - t + D'y + B' [lr sum_j (I - lr A)^j] (y - e + D x)."""
    task, x, lr = unequal_quadratic(condition=10.0), {"x": draw("x", 5)}, 0.3
    A, B, _, e, t, D = task._means("uniform")
    y, step = task.y_star(x)["y"], torch.eye(4, dtype=torch.float64) - lr * A
    inverse = lr * sum(torch.linalg.matrix_power(step, j) for j in range(steps))
    predicted = x["x"] - t + D.T @ y + B.T @ inverse @ (y - e + D @ x["x"])
    got = hypergradient(task.problem, task.clients, x, method, solver=Neumann(steps=steps, lr=lr))
    torch.testing.assert_close(got["x"], predicted, rtol=1e-9, atol=1e-9)
    assert norm(got - task.gradient(x)) > 0.1
    full = hypergradient(task.problem, task.clients, x, method, solver=CG(tolerance=1e-12))
    torch.testing.assert_close(full, task.gradient(x), rtol=1e-8, atol=1e-8)


def test_the_answer_has_the_form_of_x(logistic, method):
    problem, clients = logistic
    got = hypergradient(problem, clients, dict(problem.x), method)
    assert isinstance(got, Tree)
    assert got["log_ridge"].shape == (3,)
    assert got["log_ridge"].dtype == torch.float64


def test_an_x_that_requires_a_gradient(method):
    task = quadratic()
    x = {"x": draw("x", 5).requires_grad_()}
    got = hypergradient(task.problem, task.clients, x, method)
    assert not got["x"].requires_grad
    torch.testing.assert_close(got["x"], task.gradient({"x": x["x"].detach()})["x"])


def test_single_precision(method):
    task, x = quadratic(condition=10.0, dtype="float32"), {"x": draw("x", 5).float()}
    got = hypergradient(task.problem, task.clients, x, method)
    assert got["x"].dtype == torch.float32
    torch.testing.assert_close(got, task.gradient(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_start_at_the_solution_is_as_good_as_any(method, scale):
    """Least squares with features of size `scale`."""
    inputs, targets = scale * draw("inputs", 50, 5), scale * draw("targets", 50)

    def loss(x, y, batch):
        inputs, targets = batch
        return (
            0.5 * ((inputs @ y["y"] - targets) ** 2).mean()
            + 0.5 * x["x"].exp().sum() * (y["y"] ** 2).sum()
        )

    x = {"x": torch.zeros(1, dtype=torch.float64)}
    solution = torch.linalg.solve(
        inputs.T @ inputs / 50 + torch.eye(5, dtype=torch.float64), inputs.T @ targets / 50
    )
    clients = [ClientData(train=(inputs, targets), val=(inputs[:9], targets[:9]))]
    for start in (torch.zeros(5, dtype=torch.float64), solution):
        problem = Problem(upper=loss, lower=loss, x=x, y={"y": start})
        torch.testing.assert_close(
            solve_lower(problem, clients, x, method)["y"], solution, rtol=1e-9, atol=1e-9
        )


# What has no hypergradient


def stub(lower, y=(0.3, -0.2, 0.5)):
    """One client, three numbers in x and y; the upper loss pulls at every number of y."""
    problem = Problem(
        upper=lambda x, y, batch: ((y["y"] - torch.arange(1.0, 4)) ** 2).sum() + x["x"].sum(),
        lower=lower,
        x={"x": torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)},
        y={"y": torch.tensor(y, dtype=torch.float64)},
    )
    data = (draw("underdetermined", 2, 3),)
    return problem, [ClientData(train=data, val=data)]


NOT_CONVEX = {
    "concave": stub(lambda x, y, b: -0.5 * (y["y"] ** 2).sum() + (y["y"] * x["x"]).sum()),
    "concave, at its maximum": stub(
        lambda x, y, b: -0.5 * ((y["y"] - x["x"]) ** 2).sum(), y=(1.0, 0.5, -1.0)
    ),
    "saddle": stub(
        lambda x, y, b: 0.5 * (y["y"] ** 2).sum() - y["y"][0] ** 2 + (y["y"] * x["x"]).sum()
    ),
    "linear": stub(lambda x, y, b: (y["y"] * x["x"]).sum()),
    "constant": stub(lambda x, y, b: x["x"].sum() + 0.0 * y["y"].sum()),
    "flat in one direction": stub(lambda x, y, b: 0.5 * ((y["y"] - x["x"])[:2] ** 2).sum()),
    "without a minimum": stub(lambda x, y, b: torch.exp(x["x"] - y["y"]).sum()),
    "two samples, three unknowns": stub(
        lambda x, y, b: 0.5 * ((b[0] @ (y["y"] - x["x"])) ** 2).mean()
    ),
}


@pytest.mark.parametrize("method", ["exact", "cg", "neumann"])
@pytest.mark.parametrize(("problem", "clients"), NOT_CONVEX.values(), ids=NOT_CONVEX)
def test_a_lower_level_that_is_not_strongly_convex(method, problem, clients):
    with pytest.raises(ValueError, match="strongly convex") as error:
        hypergradient(problem, clients, problem.x, method)
    assert "\n" not in str(error.value)


def test_a_lower_level_with_a_kink():
    """Strongly convex, but its gradient vanishes nowhere."""
    problem, clients = stub(lambda x, y, b: ((y["y"] - x["x"]).abs() + 0.1 * y["y"] ** 2).sum())
    with pytest.raises(
        ValueError,
        match=r"^the lower level was not solved: \|\|grad_y G\|\| is \S+ and a Newton step has length ",
    ):
        solve_lower(problem, clients, problem.x)


@pytest.mark.parametrize("judge", [hypergradient, solve_lower, phi])
def test_private_lower_levels_are_refused(judge):
    task = quadratic()
    private = dataclasses.replace(task.problem, lower_level="private")
    sentence = "the pooled hypergradient needs lower_level='shared'; this problem's is 'private'"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        judge(private, task.clients, task.problem.x)


@pytest.mark.parametrize("judge", [hypergradient, solve_lower, phi])
def test_unknown_methods_are_refused(judge):
    task = quadratic()
    sentence = (
        "method is 'neuman'; it must be one of 'exact', 'cg', 'neumann'; did you mean 'neumann'?"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        judge(task.problem, task.clients, task.problem.x, "neuman")


def test_weights_are_checked():
    task = quadratic(clients=3)
    with pytest.raises(ValueError, match="weights has 2 entries; there are 3 clients"):
        hypergradient(task.problem, task.clients, task.problem.x, weights=[0.5, 0.5])


def test_a_dense_hessian_has_a_limit(monkeypatch):
    task, x = quadratic(dim_y=4), {"x": draw("x", 5)}
    monkeypatch.setattr(sys.modules["fedbilevel.core.hypergradient"], "DENSE_LIMIT", 3)
    with pytest.raises(
        ValueError,
        match="method 'exact' needs at most 3 numbers in y, this problem has 4; use 'cg'",
    ):
        hypergradient(task.problem, task.clients, x)
    torch.testing.assert_close(hypergradient(task.problem, task.clients, x, "cg"), task.gradient(x))
