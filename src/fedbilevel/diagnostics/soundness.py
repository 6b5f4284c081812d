"""Are two losses fit for bilevel optimization? What is wrong is told in sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.core.tree import Tree, dot, flatten, norm, unflatten, zeros_like


def random_unit(like: Tree, draw: int = 0) -> Tree:
    """A random vector of length 1."""
    v = normal(fold_in(root(0, "direction"), draw), (like.numel,), torch.float64)
    return unflatten((v / v.norm()).to(flatten(like)), like)


class BatchNorms(TorchFunctionMode):
    """Notes whether a batch is normalised by its own statistics."""

    met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.batch_norm, torch.batch_norm):
            self.met |= bool((kwargs or {}).get("training", len(args) > 5 and args[5]))
        return func(*args, **(kwargs or {}))


def batch_norms(oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> list[str]:
    warnings = []
    for name, loss in (("upper", oracle.upper), ("lower", oracle.lower)):
        with BatchNorms() as mode:
            loss(x, y, batch)
        if mode.met:
            warnings.append(
                f"the {name} loss normalises a batch by its own statistics (BatchNorm): it is no mean over samples and "
                "changes with the batch size; use GroupNorm or frozen statistics"
            )
    return warnings


def wrong_derivatives(oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> list[str]:
    """The fused oracle against differences of the losses and, for second derivatives, of the gradients they confirm."""
    try:
        for name, loss in (("upper", oracle.upper), ("lower", oracle.lower)):
            place = f"the {name} loss has no derivative"
            grad(loss, argnums=(0, 1))(x, y, batch)
        place = "the lower loss has no second derivative"
        w = random_unit(y, 1)
        here, there = (oracle.directions(x, y, z, batch) for z in (zeros_like(y), w))
        place = "the losses have no third derivative, from which the curvature of Phi is measured"
        vjp(lambda x, y, z: oracle.directions(x, y, z, batch), x, y, w)[1](here)
    except RuntimeError as error:
        return [f"{place}: {str(error).strip().splitlines()[0]}"]
    u, v, upper, lower = _balanced(x), _balanced(y), oracle.upper, oracle.lower

    def slope(x: Tree, y: Tree) -> Tensor:
        return dot(oracle.lower_gradient_y(x, y, batch), w)

    rows: list[tuple[str, Tree, Tree, Callable[[float], Tensor], Tree]] = [
        ("the upper loss's derivative in x", here.x, u, lambda h: upper(x + h * u, y, batch), x),
        ("the upper loss's derivative in y", -here.z, v, lambda h: upper(x, y + h * v, batch), y),
        ("the lower loss's derivative in y", here.y, v, lambda h: lower(x, y + h * v, batch), y),
        (
            "the lower loss's second derivative in y",
            there.z - here.z,
            v,
            lambda h: slope(x, y + h * v),
            y,
        ),
        (
            "the lower loss's mixed derivative",
            here.x - there.x,
            u,
            lambda h: slope(x + h * u, y),
            x,
        ),
    ]
    warnings = []
    for name, derivative, along, value, point in rows:
        given, (quotient, uncertain) = float(dot(derivative, along)), _difference(value, point)
        usual = float(
            norm(derivative.map(lambda d, a: d.norm() * a.norm() / max(1, d.numel()) ** 0.5, along))
        )
        if abs(given - quotient) > _rough(point) * max(abs(quotient), usual) + uncertain:
            warnings.append(
                f"{name} is wrong: in a random direction autograd gives {given:.4g}, differences give {quotient:.4g} "
                "(a detach, or a custom function with a wrong backward?)"
            )
    return warnings


def _balanced(like: Tree) -> Tree:
    """A random direction in which every tensor, however small, has the same share."""
    return random_unit(like).map(lambda t: t / (t.norm() * len(like) ** 0.5))


def _rough(point: Tree) -> float:
    """The relative accuracy that is asked of a difference."""
    return float(10 * torch.finfo(flatten(point).dtype).eps ** (1 / 3))


def _difference(value: Callable[[float], Tensor], point: Tree) -> tuple[float, float]:
    """A central difference, and how far it may be off: by rounding, and by what other steps disagree (kinks)."""
    precision = torch.finfo(flatten(point).dtype).eps
    h = precision ** (1 / 3) * (1 + float(norm(point)))
    quotients = [float(value(step) - value(-step)) / (2 * step) for step in (h, 2 * h, 4 * h)]
    rounding = precision * abs(float(value(h))) / h
    return quotients[0], 10 * rounding + 5 * (max(quotients) - min(quotients))


def missing_links(oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> tuple[list[str], bool]:
    """What does not depend on what, and whether there is a lower level all the same."""
    here, there = (oracle.directions(x, y, z, batch) for z in (zeros_like(y), random_unit(y, 1)))
    if not float(norm(here.y)):
        return ["the lower loss does not depend on y: there is no lower level to solve"], False
    if not float(norm(there.z - here.z)):
        return [
            "the Hessian of the lower loss in y is exactly zero (piecewise linear?): add a ridge on y"
        ], False
    warnings = []
    if not float(norm(here.x - there.x)):
        warnings.append(
            "the minimiser of the lower loss does not depend on x: the problem is not bilevel"
        )
    if not float(norm(here.z)):
        warnings.append("the upper loss does not depend on y: the problem is not bilevel")
    return warnings, True
