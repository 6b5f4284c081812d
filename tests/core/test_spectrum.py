"""Extreme eigenvalues against dense linear algebra."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.core.rng import normal, root
from fedbilevel.core.spectrum import extreme_eigenvalues
from fedbilevel.core.tree import Tree, flatten, unflatten


def vector(size, seed=0, dtype=torch.float64):
    """A random vector of this size; of two tensors unless the size is 1."""
    v = normal(root(seed, "start"), (size,), dtype)
    if size == 1:
        return Tree(a=v.reshape(()))
    return Tree(a=v[:1], b=v[1:].reshape(-1, 1))


def matrix(eigenvalues, seed=0, dtype=torch.float64):
    """A random symmetric matrix with these eigenvalues."""
    size = len(eigenvalues)
    Q, _ = torch.linalg.qr(normal(root(seed, "Q"), (size, size), torch.float64))
    return (Q @ torch.diag(torch.as_tensor(eigenvalues, dtype=torch.float64)) @ Q.T).to(dtype)


def estimate(H, start, **options):
    return extreme_eigenvalues(lambda v: unflatten(H @ flatten(v), v), start, **options)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 30), st.booleans())
def test_a_random_symmetric_matrix(seed, size, definite):
    H = normal(root(seed, "H"), (size, size), torch.float64)
    if definite:
        H = H @ H.T
    else:
        H = H + H.T
    values = torch.linalg.eigvalsh(H)
    rounding = 1e-10 * float(values.abs().max())
    spectrum = estimate(H, vector(size, seed), tolerance=0.0)
    assert spectrum.smallest == pytest.approx(float(values[0]), rel=1e-8, abs=rounding)
    assert spectrum.largest == pytest.approx(float(values[-1]), rel=1e-8, abs=rounding)
    assert spectrum.products <= size


@pytest.mark.parametrize(
    ("eigenvalues", "products"),
    [
        ([3.0], 1),
        ([-2.0], 1),
        ([0.0] * 5, 1),
        ([1.0] * 6, 1),
        ([-1.0, 4.0, 4.0, 4.0, -1.0], 2),
        ([0.0, 0.0, 1.0, 2.0, 2.0, 2.0], 3),
        ([-5.0, -5.0, -3.0], 2),
    ],
    ids=str,
)
def test_every_distinct_eigenvalue_takes_one_product(eigenvalues, products):
    spectrum = estimate(matrix(eigenvalues), vector(len(eigenvalues)))
    assert spectrum.smallest == pytest.approx(min(eigenvalues), abs=1e-12)
    assert spectrum.largest == pytest.approx(max(eigenvalues), abs=1e-12)
    assert spectrum.products == products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_few_products_find_the_extremes_of_many_eigenvalues(dtype):
    """The smallest is approached from above, the largest from below."""
    eigenvalues = torch.linspace(0.1, 10, 400, dtype=torch.float64)
    spectrum = estimate(matrix(eigenvalues, dtype=dtype), vector(400, dtype=dtype), steps=60)
    rounding = 100 * torch.finfo(dtype).eps
    assert 0.1 - rounding <= spectrum.smallest <= 0.15
    assert 10 * (1 - 1e-3) <= spectrum.largest <= 10 + rounding
    assert spectrum.products <= 60


def test_the_basis_stays_orthogonal():
    """Otherwise copies of converged eigenvalues appear and the smallest one is not found."""
    small = torch.logspace(-6, -3, 30, dtype=torch.float64)
    eigenvalues = torch.cat([small, torch.tensor([1.0, 100.0])])
    spectrum = estimate(matrix(eigenvalues), vector(32), tolerance=0.0)
    assert spectrum.smallest == pytest.approx(1e-6, rel=1e-3)
    assert spectrum.largest == pytest.approx(100, rel=1e-12)


def test_a_larger_tolerance_takes_fewer_products():
    eigenvalues = [*torch.linspace(4.9, 5.1, 98).tolist(), 1.0, 9.0]
    rough = estimate(matrix(eigenvalues), vector(100), tolerance=1e-1)
    fine = estimate(matrix(eigenvalues), vector(100), tolerance=1e-6)
    assert rough.products < fine.products < 60
    assert fine.smallest == pytest.approx(1)
    assert fine.largest == pytest.approx(9)


def test_the_number_of_steps_is_checked():
    with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
        estimate(matrix([1.0]), vector(1), steps=0)
