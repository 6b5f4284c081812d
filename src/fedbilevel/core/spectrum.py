"""Extreme eigenvalues of a symmetric matrix that is known only through products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedbilevel.core import checks
from fedbilevel.core.linear import MatVec
from fedbilevel.core.tree import Tree, flatten, unflatten


class Spectrum(NamedTuple):
    """What `extreme_eigenvalues` returns.

    Attributes:
        smallest: An upper bound of the smallest eigenvalue, close to it.
        largest: A lower bound of the largest eigenvalue, close to it.
        products: How many products with the matrix it took.

    Examples:
        >>> import torch
        >>> from fedbilevel import Tree
        >>> from fedbilevel.core.spectrum import extreme_eigenvalues
        >>> extreme_eigenvalues(lambda v: 3.0 * v, Tree(y=torch.ones(1)))
        Spectrum(smallest=3.0, largest=3.0, products=1)
    """

    smallest: float
    largest: float
    products: int


def extreme_eigenvalues(
    matvec: MatVec, start: Tree, steps: int = 60, tolerance: float = 1e-3
) -> Spectrum:
    """Estimate the smallest and the largest eigenvalue by Lanczos' method.

    Let V_k be an orthonormal basis of span(v, H v, ..., H^(k-1) v) with v = `start`. The
    eigenvalues theta of V_k' H V_k lie between the smallest and the largest eigenvalue of H, and
    approach these two first. The method stops after `steps` products, when the residuals
    ||H u - theta u|| of both ends are at most `tolerance` times |theta|, or when the space is
    exhausted. The basis is fully reorthogonalised.

    Args:
        matvec: The product v -> H v with a symmetric matrix H.
        start: The first vector v, not 0; a random one has a share in every eigenvector.
        steps: The largest number of products.
        tolerance: The relative accuracy at which to stop.

    Returns:
        The two eigenvalues and the number of products.

    Raises:
        ValueError: `steps` is below 1.

    References:
        Lanczos, "An Iteration Method for the Solution of the Eigenvalue Problem", 1950.

    Examples:
        >>> import torch
        >>> from fedbilevel import Tree
        >>> from fedbilevel.core.spectrum import extreme_eigenvalues
        >>> diagonal = Tree(y=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
        >>> start = Tree(y=torch.ones(3, dtype=torch.float64))
        >>> found = extreme_eigenvalues(lambda v: v.map(torch.mul, diagonal), start)
        >>> round(found.smallest, 6), round(found.largest, 6), found.products
        (1.0, 5.0, 3)
    """
    checks.integer("steps", steps, least=1)
    v = flatten(start)
    basis = (v / v.norm()).unsqueeze(0)
    T = torch.zeros(steps, steps, dtype=torch.float64)  # V_k' H V_k, tridiagonal
    for k in range(1, min(steps, start.numel) + 1):
        w = flatten(matvec(unflatten(basis[-1], start)))
        T[k - 1, k - 1] = float(basis[-1] @ w)
        for _ in range(2):  # once leaves rounding errors, which the next products would amplify
            w = w - basis.T @ (basis @ w)
        remainder = float(w.norm())
        values, vectors = torch.linalg.eigh(T[:k, :k])
        ends = values[[0, -1]].abs()
        residuals = remainder * vectors[-1, [0, -1]].abs()
        rounding = 10 * torch.finfo(w.dtype).eps * ends.max()
        exhausted = remainder <= rounding
        converged = bool((residuals <= torch.maximum(tolerance * ends, rounding)).all())
        if exhausted or converged:
            break
        if k < steps:
            T[k, k - 1] = remainder
            T[k - 1, k] = remainder
            basis = torch.cat([basis, (w / remainder).unsqueeze(0)])
    return Spectrum(float(values[0]), float(values[-1]), k)
