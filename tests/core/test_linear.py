"""Solvers of H z = b against dense linear algebra."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad
from torch.linalg import matrix_power
from torch.utils._python_dispatch import TorchDispatchMode

from fedbilevel.core.linear import (
    CG,
    Descent,
    Neumann,
    RandomProduct,
    conjugate_gradients,
    descend,
    directional,
    neumann_sum,
    random_product,
)
from fedbilevel.core.rng import normal, root
from fedbilevel.core.tree import Tree, dot, flatten, norm, unflatten

# Vectors of 1, 1, 6 and 12 numbers.
SHAPES = {
    "scalar": [()],
    "d = 1": [(1,)],
    "one tensor": [(6,)],
    "four tensors": [(2, 3), (1,), (), (4, 1)],
}


class System:
    """A random system H z = b with given eigenvalues; calling it multiplies by H and counts."""

    def __init__(self, shapes, eigenvalues=None, condition=10.0, seed=0, top=2.0):
        like = Tree()
        for j, shape in enumerate(shapes):
            like[f"t{j}"] = torch.empty(shape, dtype=torch.float64)
        d = like.numel
        if eigenvalues is None:
            eigenvalues = top * condition ** -torch.linspace(0, 1, d, dtype=torch.float64)
        Q, _ = torch.linalg.qr(normal(root(seed, "Q"), (d, d), torch.float64))
        self.H = Q @ torch.diag(torch.as_tensor(eigenvalues, dtype=torch.float64)) @ Q.T
        self.b = unflatten(normal(root(seed, "b"), (d,), torch.float64), like)
        self.calls = 0

    def __call__(self, v):
        self.calls += 1
        return unflatten(self.H @ flatten(v), v)

    @property
    def solution(self):
        return torch.linalg.solve(self.H, flatten(self.b))

    def residual(self, z):
        return float((self.H @ flatten(z) - flatten(self.b)).norm() / flatten(self.b).norm())


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shapes(request):
    return request.param


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3, 1e5])
def test_cg_solves_the_system(shapes, condition):
    system = System(shapes, condition=condition)
    found = CG(tolerance=1e-13)(system, system.b)
    assert list(found.value) == list(system.b)
    torch.testing.assert_close(flatten(found.value), system.solution, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("condition", [1.0, 10.0, 50.0])
def test_neumann_solves_the_system(shapes, condition):
    system = System(shapes, condition=condition)
    found = Neumann(steps=2000, lr=0.45)(system, system.b)
    torch.testing.assert_close(flatten(found.value), system.solution, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "solver",
    [
        CG(),
        CG(tolerance=1e-2),
        CG(tolerance=0.0, steps=3),
        CG(steps=1),
        Neumann(),
        Neumann(steps=1),
        Neumann(3, 0.4),
        RandomProduct(),
        RandomProduct(steps=1),
        RandomProduct(7, 0.3, seed=5),
        Descent(),
        Descent(steps=1),
        Descent(7, 0.3),
    ],
    ids=repr,
)
def test_residual_and_products_are_the_true_ones(shapes, solver):
    system = System(shapes, condition=1e3)
    found = solver(system, system.b)
    assert found.products == system.calls
    assert found.residual == pytest.approx(system.residual(found.value), rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("solver", [CG(), Neumann(steps=3), RandomProduct(3), Descent(3)], ids=repr)
def test_a_zero_right_hand_side_has_the_solution_zero(solver):
    system = System([(2, 3), ()])
    found = solver(system, 0.0 * system.b)
    assert norm(found.value) == 0
    assert found.residual == 0
    assert found.products == system.calls


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(1, 1e4), st.sampled_from([1e-2, 1e-5, 1e-9]))
def test_cg_stops_at_the_first_step_that_reaches_the_tolerance(seed, condition, tolerance):
    system = System([(3, 3), (6,)], condition=condition, seed=seed)
    found = CG(tolerance=tolerance)(system, system.b)
    assert found.residual <= tolerance * (1 + 1e-3)
    steps = found.products - 1
    if steps > 1:
        shorter = CG(tolerance=tolerance, steps=steps - 1)(system, system.b)
        assert shorter.residual > tolerance * (1 - 1e-3)


@pytest.mark.parametrize("distinct", [1, 2, 3])
def test_cg_needs_a_step_for_each_distinct_eigenvalue(distinct):
    system = System([(3, 4)], eigenvalues=[1.0 + j % distinct for j in range(12)])
    found = CG(tolerance=1e-12)(system, system.b)
    assert found.products == distinct + 1


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_cg_is_optimal_on_its_krylov_space(steps):
    """z_k minimises 1/2 z'Hz - b'z over span(b, Hb, ..., H^(k-1) b)."""
    system = System([(4,), (2, 4)], condition=100.0)
    b = flatten(system.b)
    V, _ = torch.linalg.qr(
        torch.stack([matrix_power(system.H, j) @ b for j in range(steps)], dim=1)
    )
    best = V @ torch.linalg.solve(V.T @ system.H @ V, V.T @ b)
    found = CG(steps=steps)(system, system.b)
    torch.testing.assert_close(flatten(found.value), best, rtol=1e-9, atol=1e-9)
    assert found.residual > 1e-3


@pytest.mark.parametrize(
    "eigenvalues",
    [[-1.0], [0.0], [-1.0, -2.0, -0.5], [2.0, 1.0, -0.5]],
    ids=["d = 1", "zero", "concave", "indefinite"],
)
def test_cg_refuses_what_is_not_positive_definite(eigenvalues):
    system = System([(len(eigenvalues),)], eigenvalues=eigenvalues)
    with pytest.raises(
        ValueError, match=r"^CG met curvature \S+ at step \d+: the matrix is not positive definite"
    ):
        CG()(system, system.b)


def test_cg_refuses_nan():
    b = Tree(y=torch.ones(2))
    with pytest.raises(ValueError, match="CG met curvature nan at step 0"):
        CG()(lambda v: v * float("nan"), b)


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
@pytest.mark.parametrize("lr", [0.05, 0.4, 0.9])
def test_neumann_is_the_truncated_series(shapes, steps, lr):
    """The sum is lr sum_{j < steps} (I - lr H)^j b, the residual (I - lr H)^steps b."""
    system = System(shapes, condition=30.0)
    b = flatten(system.b)
    step = torch.eye(len(b), dtype=torch.float64) - lr * system.H
    found = Neumann(steps=steps, lr=lr)(system, system.b)
    expected = lr * sum(matrix_power(step, j) @ b for j in range(steps))
    torch.testing.assert_close(flatten(found.value), expected, rtol=1e-11, atol=1e-11)
    assert found.residual == pytest.approx(
        float((matrix_power(step, steps) @ b).norm() / b.norm()), abs=1e-12
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(1, 100), st.floats(0.05, 0.5), st.integers(1, 20))
def test_every_term_of_neumann_lowers_the_residual(seed, condition, lr, steps):
    system = System([(2, 3)], condition=condition, seed=seed)
    residual = Neumann(steps=steps, lr=lr)(system, system.b).residual
    smaller = Neumann(steps=steps + 1, lr=lr)(system, system.b).residual
    assert smaller < residual or residual < 1e-13


@pytest.mark.parametrize(("steps", "lr"), [(1, 0.4), (2, 0.9), (9, 0.05), (25, 0.4)])
def test_random_product_is_unbiased(shapes, steps, lr):
    """The mean over all possible lengths, by enumeration, is the Neumann sum."""
    system = System(shapes, condition=30.0)
    b = flatten(system.b)
    step = torch.eye(len(b), dtype=torch.float64) - lr * system.H
    every = [
        flatten(random_product(system, system.b, steps, lr, length)) for length in range(steps)
    ]
    for length, found in enumerate(every):
        torch.testing.assert_close(
            found, lr * steps * matrix_power(step, length) @ b, rtol=1e-11, atol=1e-11
        )
    expected = flatten(neumann_sum(system, system.b, steps, lr))
    torch.testing.assert_close(torch.stack(every).mean(0), expected, rtol=1e-11, atol=1e-11)


def test_random_product_draws_its_length_uniformly():
    """Over 600 seeds the mean is the Neumann sum within four standard errors."""
    system = System([(2,)], condition=3.0)
    found = [RandomProduct(4, 0.4, seed)(system, system.b) for seed in range(600)]
    values = torch.stack([flatten(solution.value) for solution in found])
    error = (values.mean(0) - flatten(neumann_sum(system, system.b, 4, 0.4))).abs()
    assert bool((error < 4 * values.std(0) / 600**0.5).all())
    assert {solution.products for solution in found} == {1, 2, 3, 4}


@pytest.mark.parametrize(("steps", "lr"), [(1, 0.4), (6, 0.9), (40, 0.05)])
def test_descent_from_zero_is_the_neumann_sum_and_continues_from_its_start(shapes, steps, lr):
    """In general, z_k - z* = (I - lr H)^k (z_0 - z*)."""
    system = System(shapes, condition=30.0)
    found = Descent(steps, lr)(system, system.b)
    expected = flatten(neumann_sum(system, system.b, steps, lr))
    torch.testing.assert_close(flatten(found.value), expected, rtol=1e-10, atol=1e-10)
    further = Descent(5, lr, start=found.value)(system, system.b)
    whole = descend(system, system.b, 0.0 * system.b, steps + 5, lr)
    torch.testing.assert_close(flatten(further.value), flatten(whole), rtol=1e-11, atol=1e-11)
    step = torch.eye(len(flatten(system.b)), dtype=torch.float64) - lr * system.H
    start = unflatten(torch.ones_like(flatten(system.b)), system.b)
    gap = flatten(descend(system, system.b, start, steps, lr)) - system.solution
    expected_gap = matrix_power(step, steps) @ (flatten(start) - system.solution)
    torch.testing.assert_close(gap, expected_gap, rtol=1e-9, atol=1e-9)


def test_descent_solves_the_system():
    system = System([(2, 3)], condition=20.0)
    assert Descent(steps=500, lr=0.45)(system, system.b).residual < 1e-9


@pytest.mark.parametrize("width", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("length", [1e-6, 1.0, 1e6])
def test_directional_products_err_by_the_square_of_the_width(width, length):
    """For g = sum cosh(y) x + (x . y)^2 / 2, and for short and long v."""
    x = Tree(x=torch.linspace(0.5, 1.5, 5, dtype=torch.float64))
    y = Tree(y=torch.linspace(-1, 1, 5, dtype=torch.float64))
    v = Tree(y=length * torch.cos(torch.arange(5, dtype=torch.float64)))

    def lower(x, y):
        return (torch.cosh(y["y"]) * x["x"]).sum() + 0.5 * (x["x"] * y["y"]).sum() ** 2

    def slope(x, y):
        return dot(grad(lower, argnums=1)(x, y), v)

    cross, hessian = grad(slope, argnums=(0, 1))(x, y)
    found = directional(lambda y: grad(lower, argnums=(0, 1))(x, y), y, width)(v)
    for estimate, truth in zip(found, (cross, hessian), strict=True):
        assert norm(estimate - truth) < width**2 * norm(truth) + 1e-9 * norm(truth)


def test_directional_products_are_exact_for_quadratics_and_zero_for_zero():
    y = Tree(y=torch.tensor([2.0], dtype=torch.float64))
    v = Tree(y=torch.tensor([3.0], dtype=torch.float64))
    product = directional(lambda y: 5.0 * y, y)
    assert float(product(v)["y"]) == pytest.approx(15.0, rel=1e-9)
    assert float(product(0.0 * v)["y"]) == 0
    solution = CG()(product, v).value
    assert float(solution["y"]) == pytest.approx(0.6, rel=1e-9)


@pytest.mark.parametrize(
    ("build", "kind", "sentence"),
    [
        (lambda: CG(tolerance=-1.0), ValueError, "tolerance is -1.0; it must not be negative"),
        (lambda: CG(steps=0), ValueError, "steps is 0; it must be at least 1"),
        (lambda: CG(steps=2.5), TypeError, "steps is 2.5; it must be a whole number"),
        (lambda: Neumann(steps=0), ValueError, "steps is 0; it must be at least 1"),
        (lambda: Neumann(lr=0.0), ValueError, "lr is 0.0; it must be above 0"),
        (lambda: RandomProduct(steps=0), ValueError, "steps is 0; it must be at least 1"),
        (lambda: RandomProduct(seed=-1), ValueError, "seed is -1; it must be at least 0"),
        (lambda: Descent(lr=-1.0), ValueError, "lr is -1.0; it must be above 0"),
    ],
)
def test_settings_are_checked(build, kind, sentence):
    with pytest.raises(kind, match=f"^{sentence}$"):
        build()


def longest_random_product(steps):
    """A `RandomProduct` with a seed that draws the largest length."""
    for seed in range(999):
        solver = RandomProduct(steps, 0.1, seed)
        length = solver(lambda v: v, Tree(y=torch.ones(1))).products - 1
        if length == steps - 1:
            return solver
    raise AssertionError("no seed draws the largest length")


class LiveTensors(TorchDispatchMode):
    """Counts the tensors created in its context that are alive at the same time."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.alive += 1
            self.peak = max(self.peak, self.alive)
            weakref.finalize(made, self.release)
        return made

    def release(self):
        self.alive -= 1


@pytest.mark.parametrize(
    "solver",
    [
        lambda steps: CG(tolerance=0.0, steps=steps),
        lambda steps: Neumann(steps, 0.1),
        lambda steps: Descent(steps - 1, 0.1),
        longest_random_product,
    ],
    ids=["CG", "Neumann", "Descent", "RandomProduct"],
)
def test_memory_does_not_grow_with_steps(solver):
    """The products come from automatic differentiation, whose graphs must be released."""
    scale = torch.logspace(0, -3, 60, dtype=torch.float64).reshape(2, 30)
    y = Tree(
        a=torch.sin(torch.arange(30, dtype=torch.float64)), b=torch.tensor(0.5, dtype=torch.float64)
    )

    def slope(y, v):
        return dot(grad(lambda y: (scale * torch.cosh(y["a"] + y["b"])).sum() + y["b"] ** 2)(y), v)

    def peak_count(steps):
        built = solver(steps)
        with LiveTensors() as live:
            found = built(lambda v: grad(slope)(y, v), y)
        assert found.products in (steps, steps + 1)
        return live.peak

    assert peak_count(4) == peak_count(40) > 4


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_fixed_number_of_conjugate_gradient_steps_is_that_of_cg(shapes, steps):
    system = System(shapes)
    expected = CG(tolerance=0.0, steps=steps)(system, system.b).value
    found = conjugate_gradients(system, system.b, steps)
    torch.testing.assert_close(flatten(found), flatten(expected), rtol=1e-9, atol=1e-9)


def test_conjugate_gradients_stay_where_the_system_is_solved_or_not_positive():
    """Stacked systems: one is solved in a step, one has b = 0, one has negative curvature."""
    eigenvalues = torch.tensor([[2.0, 2.0], [1.0, 3.0], [-1.0, 1.0]], dtype=torch.float64)
    b = torch.tensor([[1.0, 4.0], [0.0, 0.0], [2.0, 1.0]], dtype=torch.float64)

    def solve(h, b):
        return conjugate_gradients(lambda v: v.map(lambda t: h * t), Tree(y=b), steps=6)["y"]

    found = torch.func.vmap(solve)(eigenvalues, b)
    expected = torch.tensor([[0.5, 2.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_conjugate_gradients_end_at_the_first_direction_without_positive_curvature():
    """The residual that is left then has positive curvature, but the method has ended."""
    eigenvalues = torch.tensor([4.0, 2.0, -1.0], dtype=torch.float64)
    b = Tree(y=torch.tensor([0.01, 0.03, 0.01], dtype=torch.float64))

    def matvec(v):
        return v.map(lambda t: eigenvalues * t)

    two, six = (conjugate_gradients(matvec, b, steps)["y"] for steps in (2, 6))
    assert torch.equal(two, six)
    assert float(two.norm()) > 0
