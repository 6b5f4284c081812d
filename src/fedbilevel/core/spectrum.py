"""Extreme eigenvalues of a symmetric matrix that is seen only through products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedbilevel.core import checks
from fedbilevel.core.linear import MatVec
from fedbilevel.core.tree import Tree, flatten, unflatten


class Spectrum(NamedTuple):
    """The smallest and the largest eigenvalue, and the products it took to find them."""

    smallest: float
    largest: float
    products: int


def extreme_eigenvalues(
    matvec: MatVec, start: Tree, steps: int = 60, tolerance: float = 1e-3
) -> Spectrum:
    """Lanczos (1950) with full reorthogonalisation.

    With V_k an orthonormal basis of span(v, Hv, ..., H^(k-1) v), v = `start`, the eigenvalues of V_k' H V_k lie within
    those of H and reach its ends first: `smallest` comes from above, `largest` from below. It ends after `steps`
    products, once both residuals ||H u - theta u|| are at most `tolerance` times |theta|, or with the space exhausted.
    """
    checks.integer("steps", steps, least=1)
    v = flatten(start)
    basis = (v / v.norm()).unsqueeze(0)
    T = torch.zeros(steps, steps, dtype=torch.float64)
    for k in range(1, min(steps, start.numel) + 1):
        w = flatten(matvec(unflatten(basis[-1], start)))
        T[k - 1, k - 1] = float(basis[-1] @ w)
        for _ in range(2):  # once leaves rounding that the next products blow up
            w = w - basis.T @ (basis @ w)
        beyond = float(w.norm())
        values, vectors = torch.linalg.eigh(T[:k, :k])
        ends, residuals = values[[0, -1]].abs(), beyond * vectors[-1, [0, -1]].abs()
        rounding = 10 * torch.finfo(w.dtype).eps * ends.max()
        if beyond <= rounding or bool(
            (residuals <= torch.maximum(tolerance * ends, rounding)).all()
        ):
            break
        if k < steps:
            T[k, k - 1] = T[k - 1, k] = beyond
            basis = torch.cat([basis, (w / beyond).unsqueeze(0)])
    return Spectrum(float(values[0]), float(values[-1]), k)
