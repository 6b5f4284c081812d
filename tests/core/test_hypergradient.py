"""The true hypergradient against closed forms and finite differences, and where there is none."""

import dataclasses
import re

import pytest
import torch
from torch.nn.functional import softplus

from fedbilevel import ClientData, Problem, finite_difference, hypergradient, solve_lower
from fedbilevel.core.hypergradient import PooledProblem, phi
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
    clients = []
    for client, size in zip(task.clients, SIZES, strict=True):
        train = tuple(tensor[:size] for tensor in client.train)
        val = tuple(tensor[: 7 - size] for tensor in client.val)
        clients.append(ClientData(train=train, val=val))
    return dataclasses.replace(task, clients=clients)


@pytest.fixture(params=WEIGHTS.values(), ids=WEIGHTS)
def weights(request):
    return request.param


@pytest.fixture(params=["exact", "cg"])
def method(request):
    """Not "neumann", which takes hundreds of products and is tested separately."""
    return request.param


@pytest.fixture(scope="module")
def logistic():
    """Logistic regression; x holds the logarithms of its ridge weights."""

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

    clients = []
    for i, size in enumerate((3, 8, 5, 12)):
        train = side(f"train {i}", size, 0.3 * i)
        val = side(f"val {i}", 5, 0.3 * i)
        clients.append(ClientData(train=train, val=val))
    zeros = torch.zeros(3, dtype=torch.float64)
    x = {"log_ridge": zeros - 1}
    y = {"w": zeros, "b": torch.zeros((), dtype=torch.float64)}
    return Problem(upper=upper, lower=lower, x=x, y=y), clients


DIMENSIONS = {"5, 4": (5, 4), "1, 3": (1, 3), "3, 1": (3, 1), "1, 1": (1, 1)}


@pytest.mark.parametrize("condition", [1.0, 10.0, 80.0])
@pytest.mark.parametrize(("dim_x", "dim_y"), DIMENSIONS.values(), ids=DIMENSIONS)
def test_closed_form(method, weights, dim_x, dim_y, condition):
    """All clients have the same Hessian, so that its condition number is `condition`."""
    task = unequal_quadratic(dim_x=dim_x, dim_y=dim_y, condition=condition, heterogeneity=0.0)
    x = {"x": draw("x", dim_x)}
    computed = hypergradient(task.problem, task.clients, x, method, weights)
    torch.testing.assert_close(computed, task.gradient(x, weights), rtol=1e-8, atol=1e-8)


def test_closed_form_of_unrelated_clients(method, weights):
    task = unequal_quadratic(condition=100.0)
    x = {"x": draw("x", 5)}
    y = solve_lower(task.problem, task.clients, x, method, weights)
    torch.testing.assert_close(y, task.y_star(x, weights))
    value = phi(task.problem, task.clients, x, method, weights)
    torch.testing.assert_close(value, task.phi(x, weights))
    computed = hypergradient(task.problem, task.clients, x, method, weights)
    torch.testing.assert_close(computed, task.gradient(x, weights), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("condition", [1e3, 1e4])
def test_closed_form_of_ill_conditioned_lower_levels(method, condition):
    task = quadratic(condition=condition, heterogeneity=0.0, clients=3)
    x = {"x": draw("x", 5)}
    computed = hypergradient(task.problem, task.clients, x, method)
    torch.testing.assert_close(computed, task.gradient(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("dim_x", "dim_y", "condition"), [(5, 4, 80.0), (1, 1, 10.0)])
def test_closed_form_by_neumann(dim_x, dim_y, condition):
    task = quadratic(clients=2, dim_x=dim_x, dim_y=dim_y, condition=condition, heterogeneity=0.0)
    x = {"x": draw("x", dim_x)}
    weights = [0.3, 0.7]
    computed = hypergradient(task.problem, task.clients, x, "neumann", weights)
    torch.testing.assert_close(computed, task.gradient(x, weights), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("condition", "least", "most"), [(1.0, 1, 20), (10.0, 200, 260)])
def test_neumann_takes_as_many_products_as_its_tolerance_needs(monkeypatch, condition, least, most):
    """(1 - 1 / (1.05 condition))^n <= 1e-10 needs n = 8 and 231 products.

    The others are those of the lower level (by CG) and of the largest eigenvalue.
    """
    products = 0
    hessian = PooledProblem.hessian

    def counted(self, x, y):
        product = hessian(self, x, y)

        def count(v):
            nonlocal products
            products += 1
            return product(v)

        return count

    monkeypatch.setattr(PooledProblem, "hessian", counted)
    task = quadratic(clients=2, condition=condition, heterogeneity=0.0)
    x = {"x": draw("x", 5)}
    computed = hypergradient(task.problem, task.clients, x, "neumann")
    assert least <= products <= most
    torch.testing.assert_close(computed, task.gradient(x), rtol=1e-8, atol=1e-8)


def test_neumann_refuses_where_its_series_is_too_short():
    """At condition number 500 the sum of 2000 terms is off by two per cent."""
    task = quadratic(condition=500.0, heterogeneity=0.0, clients=1)
    with pytest.raises(ValueError, match="residual"):
        hypergradient(task.problem, task.clients, {"x": draw("x", 5)}, "neumann")


def test_wrong_hypergradients_would_differ():
    """With other weights, without the implicit term, or as the mean of local hypergradients."""
    task = unequal_quadratic(condition=10.0)
    x = {"x": draw("x", 5)}
    g = {name: task.gradient(x, weights) for name, weights in WEIGHTS.items()}
    assert all(norm(value) > 1 for value in g.values())
    assert norm(g["uniform"] - g["samples"]) > 0.1
    assert norm(g["uniform"] - g["explicit"]) > 0.1
    *_, t, D = task._means("uniform")
    direct = x["x"] - t + D.T @ task.y_star(x)["y"]
    assert (direct - g["uniform"]["x"]).norm() > 0.1
    local = [hypergradient(task.problem, [client], x)["x"] for client in task.clients]
    assert (sum(local) / len(local) - g["uniform"]["x"]).norm() > 0.1


def test_finite_differences_of_a_quadratic(weights):
    task = unequal_quadratic(condition=20.0)
    x = {"x": draw("x", 5)}
    v = {"x": draw("v", 5)}
    slope = finite_difference(task.problem, task.clients, x, v, weights=weights)
    computed = hypergradient(task.problem, task.clients, x, weights=weights)
    assert abs(slope) > 0.1
    assert float(computed["x"] @ v["x"]) == pytest.approx(slope, rel=1e-8)


def check_by_differences(problem, clients, method, weights):
    """Compare the hypergradient with finite differences along each coordinate."""
    x = {"log_ridge": torch.tensor([-1.0, -1.2, -0.8], dtype=torch.float64)}
    directions = [{"log_ridge": row} for row in torch.eye(3, dtype=torch.float64)]
    slopes = [finite_difference(problem, clients, x, v, weights=weights) for v in directions]
    computed = hypergradient(problem, clients, x, method, weights)["log_ridge"].tolist()
    assert min(map(abs, slopes)) > 1e-3
    assert computed == pytest.approx(slopes, rel=1e-6)


def test_finite_differences_of_logistic_regression(logistic, method, weights):
    check_by_differences(*logistic, method, weights)


def test_finite_differences_by_neumann(logistic):
    problem, clients = logistic
    check_by_differences(problem, clients[:2], "neumann", "samples")


def test_finite_difference_uses_its_step():
    """For Phi = x^4 / 4, (Phi(x + h) - Phi(x - h)) / 2h = x^3 + x h^2."""
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
def test_a_solver_replaces_that_of_the_method(method, steps):
    """With a few terms of the Neumann series in place of the inverse, the result is

    x - t + D'y + B' [lr sum_j (I - lr A)^j] (y - e + D x).
    """
    task = unequal_quadratic(condition=10.0)
    x = {"x": draw("x", 5)}
    lr = 0.3
    A, B, _, e, t, D = task._means("uniform")
    y = task.y_star(x)["y"]
    step = torch.eye(4, dtype=torch.float64) - lr * A
    inverse = lr * sum(torch.linalg.matrix_power(step, j) for j in range(steps))
    predicted = x["x"] - t + D.T @ y + B.T @ inverse @ (y - e + D @ x["x"])
    few_terms = Neumann(steps=steps, lr=lr)
    computed = hypergradient(task.problem, task.clients, x, method, solver=few_terms)
    torch.testing.assert_close(computed["x"], predicted, rtol=1e-9, atol=1e-9)
    assert norm(computed - task.gradient(x)) > 0.1
    full = hypergradient(task.problem, task.clients, x, method, solver=CG(tolerance=1e-12))
    torch.testing.assert_close(full, task.gradient(x), rtol=1e-8, atol=1e-8)


def test_the_hypergradient_is_a_tree_like_x(logistic, method):
    problem, clients = logistic
    computed = hypergradient(problem, clients, dict(problem.x), method)
    assert isinstance(computed, Tree)
    assert computed["log_ridge"].shape == (3,)
    assert computed["log_ridge"].dtype == torch.float64


def test_x_may_require_a_gradient(method):
    task = quadratic()
    x = {"x": draw("x", 5).requires_grad_()}
    computed = hypergradient(task.problem, task.clients, x, method)
    assert not computed["x"].requires_grad
    torch.testing.assert_close(computed["x"], task.gradient({"x": x["x"].detach()})["x"])


def test_single_precision(method):
    task = quadratic(condition=10.0, dtype="float32")
    x = {"x": draw("x", 5).float()}
    computed = hypergradient(task.problem, task.clients, x, method)
    assert computed["x"].dtype == torch.float32
    torch.testing.assert_close(computed, task.gradient(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_the_lower_level_is_solved_also_from_its_solution(method, scale):
    """Least squares with features of size `scale`."""
    inputs = scale * draw("inputs", 50, 5)
    targets = scale * draw("targets", 50)

    def loss(x, y, batch):
        inputs, targets = batch
        ridge = 0.5 * x["x"].exp().sum() * (y["y"] ** 2).sum()
        return 0.5 * ((inputs @ y["y"] - targets) ** 2).mean() + ridge

    x = {"x": torch.zeros(1, dtype=torch.float64)}
    H = inputs.T @ inputs / 50 + torch.eye(5, dtype=torch.float64)
    solution = torch.linalg.solve(H, inputs.T @ targets / 50)
    clients = [ClientData(train=(inputs, targets), val=(inputs[:9], targets[:9]))]
    for start in (torch.zeros(5, dtype=torch.float64), solution):
        problem = Problem(upper=loss, lower=loss, x=x, y={"y": start})
        y = solve_lower(problem, clients, x, method)["y"]
        torch.testing.assert_close(y, solution, rtol=1e-9, atol=1e-9)


# Problems without a hypergradient


def with_lower(lower, y=(0.3, -0.2, 0.5)):
    """A problem of one client, with three entries in x and y, all of which the upper loss uses."""
    problem = Problem(
        upper=lambda x, y, batch: ((y["y"] - torch.arange(1.0, 4)) ** 2).sum() + x["x"].sum(),
        lower=lower,
        x={"x": torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)},
        y={"y": torch.tensor(y, dtype=torch.float64)},
    )
    data = (draw("underdetermined", 2, 3),)
    return problem, [ClientData(train=data, val=data)]


NOT_CONVEX = {
    "concave": with_lower(lambda x, y, b: -0.5 * (y["y"] ** 2).sum() + (y["y"] * x["x"]).sum()),
    "concave, at its maximum": with_lower(
        lambda x, y, b: -0.5 * ((y["y"] - x["x"]) ** 2).sum(), y=(1.0, 0.5, -1.0)
    ),
    "saddle": with_lower(
        lambda x, y, b: 0.5 * (y["y"] ** 2).sum() - y["y"][0] ** 2 + (y["y"] * x["x"]).sum()
    ),
    "linear": with_lower(lambda x, y, b: (y["y"] * x["x"]).sum()),
    "constant": with_lower(lambda x, y, b: x["x"].sum() + 0.0 * y["y"].sum()),
    "flat in one direction": with_lower(lambda x, y, b: 0.5 * ((y["y"] - x["x"])[:2] ** 2).sum()),
    "without a minimum": with_lower(lambda x, y, b: torch.exp(x["x"] - y["y"]).sum()),
    "two samples, three unknowns": with_lower(
        lambda x, y, b: 0.5 * ((b[0] @ (y["y"] - x["x"])) ** 2).mean()
    ),
}


@pytest.mark.parametrize("method", ["exact", "cg", "neumann"])
@pytest.mark.parametrize(("problem", "clients"), NOT_CONVEX.values(), ids=NOT_CONVEX)
def test_a_lower_level_that_is_not_strongly_convex_is_refused(method, problem, clients):
    with pytest.raises(ValueError, match="strongly convex") as error:
        hypergradient(problem, clients, problem.x, method)
    assert "\n" not in str(error.value)


def test_a_lower_level_with_a_kink_is_refused():
    """It is strongly convex, but its gradient vanishes nowhere."""

    def lower(x, y, batch):
        return ((y["y"] - x["x"]).abs() + 0.1 * y["y"] ** 2).sum()

    problem, clients = with_lower(lower)
    size = r"^the lower level was not solved: \|\|grad_y G\|\| is \S+ and a Newton step has length "
    with pytest.raises(ValueError, match=size):
        solve_lower(problem, clients, problem.x)


@pytest.mark.parametrize("function", [hypergradient, solve_lower, phi])
def test_private_lower_levels_are_refused(function):
    task = quadratic()
    private = dataclasses.replace(task.problem, lower_level="private")
    sentence = "the pooled hypergradient needs lower_level='shared'; this problem's is 'private'"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        function(private, task.clients, task.problem.x)


@pytest.mark.parametrize("function", [hypergradient, solve_lower, phi])
def test_arguments_of_another_kind_are_refused(function):
    task = quadratic()
    with pytest.raises(TypeError, match="x is Tensor; it must be a dict of tensors"):
        function(task.problem, task.clients, torch.zeros(3))
    with pytest.raises(TypeError, match="problem is list; it must be an object of Problem"):
        function(task.clients, task.problem, task.problem.x)
    with pytest.raises(TypeError, match="clients is ClientData; it must be a sequence"):
        function(task.problem, task.clients[0], task.problem.x)


@pytest.mark.parametrize("function", [hypergradient, solve_lower, phi])
def test_unknown_methods_are_refused(function):
    task = quadratic()
    sentence = (
        "method is 'neuman' (did you mean 'neumann'?); it must be one of 'exact', 'cg', 'neumann'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        function(task.problem, task.clients, task.problem.x, "neuman")


def test_weights_are_checked():
    task = quadratic(clients=3)
    with pytest.raises(ValueError, match="weights has 2 entries; there are 3 clients"):
        hypergradient(task.problem, task.clients, task.problem.x, weights=[0.5, 0.5])


def test_a_dense_hessian_has_a_limit():
    """For Phi(x) = mean_j (x + j / 10^4)^2 / 2 the gradient is the mean of x + j / 10^4."""
    offsets = torch.arange(5001, dtype=torch.float64) / 1e4
    problem = Problem(
        upper=lambda x, y, batch: 0.5 * (y["y"] ** 2).mean(),
        lower=lambda x, y, batch: 0.5 * ((y["y"] - x["x"] - offsets) ** 2).sum(),
        x={"x": torch.ones(1, dtype=torch.float64)},
        y={"y": torch.zeros(5001, dtype=torch.float64)},
    )
    data = (torch.ones(1, 1),)
    clients = [ClientData(train=data, val=data)]
    sentence = "method 'exact' needs at most 5000 numbers in y, this problem has 5001; use 'cg'"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        hypergradient(problem, clients, problem.x)
    computed = hypergradient(problem, clients, problem.x, "cg")
    assert float(computed["x"]) == pytest.approx(1 + float(offsets.mean()))


def test_in_float32_an_upper_loss_without_y_has_the_gradient_in_x_alone() -> None:
    """The right-hand side of the linear system is then 0, and so is its residual."""
    problem = Problem(
        upper=lambda x, y, batch: (x["x"] ** 2).sum(),
        lower=lambda x, y, batch: ((y["y"] - x["x"]) ** 2).sum(),
        x={"x": torch.ones(2)},
        y={"y": torch.zeros(2)},
    )
    clients = [ClientData(train=(torch.zeros(1),), val=(torch.zeros(1),))]
    gradient = hypergradient(problem, clients, problem.x, method="exact")
    torch.testing.assert_close(gradient["x"], torch.full((2,), 2.0))
