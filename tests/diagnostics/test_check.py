"""`fb.check` measures what closed forms predict, on any runtime and on part of the data."""

import dataclasses

import pytest
import torch

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic
from tests.support.small_problem import check_losses, client, lower, problem

FOREVER = 10**12  # rounds: a run of this length sees even the flattest direction


def relative_spread(vectors, p):
    """sqrt(sum_i p_i ||v_i - v||^2 / sum_i p_i ||v_i||^2) with v the weighted mean."""
    mean = sum(w * v for w, v in zip(p, vectors, strict=True))
    variance = sum(w * (v - mean).norm() ** 2 for w, v in zip(p, vectors, strict=True))
    square = sum(w * v.norm() ** 2 for w, v in zip(p, vectors, strict=True))
    return float((variance / square) ** 0.5)


@pytest.mark.parametrize("weights", ["uniform", [0.1, 0.6, 0.3]], ids=str)
@pytest.mark.parametrize("heterogeneity", [1.0, 0.3])
def test_measures_of_a_quadratic_are_its_closed_forms(weights, heterogeneity):
    task = quadratic(clients=3, condition=20.0, heterogeneity=heterogeneity, seed=2)
    m = fb.check(task.problem, task.clients, weights=weights, rounds=FOREVER).measured
    A, B, _, e, _, D = task._means(weights)
    p = weights
    if weights == "uniform":
        p = [1 / 3] * 3
    parts = [[part.mean(0) for part in (*client.train, *client.val)] for client in task.clients]

    eigenvalues = torch.linalg.eigvalsh(A)
    assert [m.mu, m.L] == pytest.approx([float(eigenvalues[0]), float(eigenvalues[-1])])
    assert m.condition == pytest.approx(float(eigenvalues[-1] / eigenvalues[0]))
    L_client = max(float(torch.linalg.eigvalsh(A_i)[-1]) for A_i, *_ in parts)
    assert m.L_client == pytest.approx(L_client, rel=1e-3)

    x = torch.zeros(5, dtype=torch.float64)
    y = task.y_star({"x": x}, weights)["y"]
    z = torch.linalg.solve(A, y - e)
    h = task.gradient({"x": x}, weights)["x"]
    assert m.sizes == (5, len(y))
    assert m.y_way == pytest.approx(float(y.norm()))
    assert m.z_norm == pytest.approx(float(z.norm()))
    assert m.hypergradient_norm == pytest.approx(float(h.norm()))

    M = torch.linalg.solve(A, B)
    phi = torch.eye(5, dtype=torch.float64) + M.T @ M + D.T @ M + M.T @ D
    assert m.curvature == pytest.approx(float(torch.linalg.eigvalsh(phi)[-1]), rel=1e-5)
    lag = M.T @ torch.linalg.solve(A, M + D)
    assert m.lag == pytest.approx(float(torch.linalg.eigvalsh(lag + lag.T)[-1]), rel=1e-5)

    local = [-t + D.T @ y + B.T @ torch.linalg.solve(A, y - e) for A, B, c, e, t, D in parts]
    mean = sum(w * v for w, v in zip(p, local, strict=True))
    assert m.local_error == pytest.approx(float((mean - h).norm() / h.norm()), rel=1e-5)
    assert m.local_cosine == pytest.approx(float(mean @ h / mean.norm() / h.norm()), rel=1e-5)
    assert m.local_error > 0.01
    lower_gradients = [-c for _, _, c, *_ in parts]
    assert m.lower_spread == pytest.approx(relative_spread(lower_gradients, p))
    upper_directions = [-t + D.T @ y + B.T @ z for _, B, _, _, t, D in parts]
    assert m.upper_spread == pytest.approx(relative_spread(upper_directions, p), rel=1e-5)


def test_clients_that_are_alike():
    task = quadratic(clients=3, heterogeneity=0.0)
    m = fb.check(task.problem, task.clients).measured
    assert max(m.lower_spread, m.upper_spread, m.local_error) < 1e-6
    assert m.local_cosine == pytest.approx(1)


def test_a_run_sees_nothing_flatter_than_its_length_allows():
    """mu and L are the problem's; what depends on flat directions is damped by L / rounds."""
    task = quadratic(clients=2, condition=1000.0, heterogeneity=0.0)
    short = fb.check(task.problem, task.clients, rounds=10)
    long = fb.check(task.problem, task.clients, rounds=FOREVER)
    assert short.measured.mu == pytest.approx(long.measured.mu) == pytest.approx(1e-3)
    assert short.measured.ridge == pytest.approx(0.1)
    assert short.measured.lag < 1e-3 * long.measured.lag
    assert short.settings()["lr_x"] > 100 * long.settings()["lr_x"]


def comparable(measured):
    """The measures as one list, without what is left of the lower gradient, which is rounding."""
    return [*measured._replace(left=0, sizes=0), *measured.sizes]


def test_stack_loop_and_single_precision_agree():
    """The clients have different numbers of samples, so that they form two stacks."""
    task = quadratic(clients=5, samples=4, noise=0.5)
    clients = []
    for i, data in enumerate(task.clients):
        train = tuple(tensor[: 1 + i % 2] for tensor in data.train)
        clients.append(fb.ClientData(train=train, val=data.val))
    expected = comparable(fb.check(task.problem, clients, weights="samples").measured)
    loop = fb.check(task.problem, clients, weights="samples", mode="loop")
    assert comparable(loop.measured) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    rounded_clients = []
    for data in clients:
        train = tuple(tensor.float() for tensor in data.train)
        val = tuple(tensor.float() for tensor in data.val)
        rounded_clients.append(fb.ClientData(train=train, val=val))
    x, y = (tree.map(torch.Tensor.float) for tree in task.problem.start)
    rounded = fb.Problem(task.problem.upper, task.problem.lower, x, y)
    report = fb.check(rounded, rounded_clients, weights="samples")
    assert report.warnings == []
    assert comparable(report.measured) == pytest.approx(expected, rel=1e-2, abs=1e-3)


class LazyClients:
    """A million clients, made when they are read."""

    def __init__(self):
        self.read = set()

    def __len__(self):
        return 10**6

    def __getitem__(self, i):
        self.read.add(i)
        return client(i % 5, samples=1000)


def test_a_large_federation_is_read_in_part():
    clients = LazyClients()
    report = fb.check(problem(), clients)
    assert len(clients.read) <= 21
    assert report.where.startswith("measured on 20 of 1000000 clients")
    assert report.warnings == []


@pytest.mark.parametrize("curvature", [0.0, -0.7], ids=["flat", "concave"])
def test_the_recommended_ridge_makes_the_lower_level_strongly_convex(curvature):
    def quadratic_lower(x, y, ridge):
        curvatures = torch.tensor([2.0, 1.0, curvature], dtype=torch.float64)
        return 0.5 * ((curvatures + ridge) * y["y"] ** 2).sum() - y["y"] @ x["x"]

    report = check_losses(lower=lambda x, y, batch: quadratic_lower(x, y, 0.0))
    (warning,) = report.warnings
    assert warning.startswith(
        "the lower level is not strongly convex in y (its smallest curvature is "
    )
    assert report.measured.mu == pytest.approx(curvature, abs=1e-6)
    assert report.settings()["damping"] > -curvature
    ridge = float(warning.split("at least ")[1])
    repaired = check_losses(lower=lambda x, y, batch: quadratic_lower(x, y, ridge))
    assert repaired.warnings == []
    assert 100 < repaired.measured.condition < 1001


def test_rounds_are_checked():
    task = quadratic(clients=2)
    with pytest.raises(ValueError, match=r"^rounds is 0; it must be at least 1$"):
        fb.check(task.problem, task.clients, rounds=0)


def test_a_loss_that_draws_from_the_global_generator_is_refused():
    with pytest.raises(ValueError, match="global generator"):
        check_losses(lower=lambda x, y, batch: lower(x, y, batch) + torch.rand(()))


def test_a_private_lower_level_is_refused():
    task = quadratic(clients=2)
    private = dataclasses.replace(task.problem, lower_level="private")
    sentence = "check needs lower_level='shared'; this problem's is 'private'"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        fb.check(private, task.clients)


def test_every_figure_says_where_it_was_measured() -> None:
    """The curvature falls from 3 at the start to 1 at y*; a single client has 1.4 there."""

    def lower(x: fb.Tree, y: fb.Tree, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        offset = y["y"] - 3 * x["x"]
        return (batch[0].mean() * 0.5 * offset**2 + 0.1 * offset**4).sum()

    def upper(x: fb.Tree, y: fb.Tree, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return ((y["y"] - 1) ** 2).sum() + 0 * batch[0].sum()

    one = torch.ones(2, dtype=torch.float64)
    clients = [fb.ClientData((scale * one,), (one,)) for scale in (0.6, 1.4)]
    problem = fb.Problem(upper, lower, {"x": one.clone()}, {"y": 0 * one})
    report = fb.check(problem, clients)
    rows = {quantity: (value, place, verdict) for quantity, value, place, verdict in report.rows}
    assert rows["L, largest curvature of the lower level"][:2] == ("11.8", "initial y")
    single = rows["largest curvature on a single client"]
    assert single == ("1.4", "y*", "1 for all clients together")
    assert rows["clients' lower gradients apart"][1] == "initial y"
    assert "largest curvature on a single client: 1.4 at y* (1 for all clients together)" in str(
        report
    )
    assert "L, largest curvature of the lower level: 11.8 at the initial y" in str(report)
