"""Extreme eigenvalues against dense linear algebra."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.core.rng import normal, root
from fedbilevel.core.spectrum import extreme_eigenvalues
from fedbilevel.core.tree import Tree, flatten, unflatten


def vector(size, seed=0, dtype=torch.float64):
    """A random vector in two tensors, where there is something for two."""
    v = normal(root(seed, "start"), (size,), dtype)
    return Tree(a=v[:1], b=v[1:].reshape(-1, 1)) if size > 1 else Tree(a=v.reshape(()))


def matrix(eigenvalues, seed=0, dtype=torch.float64):
    size = len(eigenvalues)
    Q, _ = torch.linalg.qr(normal(root(seed, "Q"), (size, size), torch.float64))
    return (Q @ torch.diag(torch.as_tensor(eigenvalues, dtype=torch.float64)) @ Q.T).to(dtype)


def found(H, start, **options):
    return extreme_eigenvalues(lambda v: unflatten(H @ flatten(v), v), start, **options)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 30), st.booleans())
def test_of_a_random_symmetric_matrix(seed, size, definite):
    """Indefinite as it is drawn; positive definite as a square."""
    H = normal(root(seed, "H"), (size, size), torch.float64)
    H = H @ H.T if definite else H + H.T
    values = torch.linalg.eigvalsh(H)
    got = found(H, vector(size, seed), tolerance=0.0)
    assert got.smallest == pytest.approx(
        float(values[0]), rel=1e-8, abs=1e-10 * float(values.abs().max())
    )
    assert got.largest == pytest.approx(
        float(values[-1]), rel=1e-8, abs=1e-10 * float(values.abs().max())
    )
    assert got.products <= size


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
def test_repeated_eigenvalues_take_a_product_each(eigenvalues, products):
    got = found(matrix(eigenvalues), vector(len(eigenvalues)))
    assert got.smallest == pytest.approx(min(eigenvalues), abs=1e-12)
    assert got.largest == pytest.approx(max(eigenvalues), abs=1e-12)
    assert got.products == products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_few_products_find_the_ends_of_many_eigenvalues(dtype):
    """From within: the smallest from above, the largest from below."""
    eigenvalues = torch.linspace(0.1, 10, 400, dtype=torch.float64)
    got = found(matrix(eigenvalues, dtype=dtype), vector(400, dtype=dtype), steps=60)
    rounding = 100 * torch.finfo(dtype).eps
    assert 0.1 - rounding <= got.smallest <= 0.15
    assert 10 * (1 - 1e-3) <= got.largest <= 10 + rounding
    assert got.products <= 60


def test_orthogonality_is_kept():
    """Without reorthogonalisation, converged ends come back as ghosts and the small end is not found."""
    eigenvalues = torch.cat(
        [torch.logspace(-6, -3, 30, dtype=torch.float64), torch.tensor([1.0, 100.0])]
    )
    got = found(matrix(eigenvalues), vector(32), tolerance=0.0)
    assert got.smallest == pytest.approx(1e-6, rel=1e-3)
    assert got.largest == pytest.approx(100, rel=1e-12)


def test_it_stops_when_it_knows_enough():
    eigenvalues = [*torch.linspace(4.9, 5.1, 98).tolist(), 1.0, 9.0]
    rough, fine = (
        found(matrix(eigenvalues), vector(100), tolerance=tolerance) for tolerance in (1e-1, 1e-6)
    )
    assert rough.products < fine.products < 60
    assert (fine.smallest, fine.largest) == (pytest.approx(1), pytest.approx(9))
    with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
        found(matrix([1.0]), vector(1), steps=0)
