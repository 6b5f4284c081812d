"""Warnings about losses that bilevel optimization cannot use, each one sentence.

The functions take an oracle, evaluate it at a point and compare: derivatives with finite
differences, and each level with what it should depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vjp
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.core.tree import Tree, dot, flatten, norm, unflatten, zeros_like


def random_unit(like: Tree, draw: int = 0) -> Tree:
    """A random vector of length 1.

    Args:
        like: A tree with the names, shapes and dtype of the result.
        draw: The number of the draw; the same number gives the same vector.

    Returns:
        The vector.
    """
    v = normal(fold_in(root(0, "direction"), draw), (like.numel,), torch.float64)
    unit = (v / v.norm()).to(flatten(like))  # the dtype and the device of `like`
    return unflatten(unit, like)


class BatchNormDetector(TorchFunctionMode):
    """A context that notes whether a batch is normalised by its own statistics.

    Attributes:
        detected: Whether that has happened since the context was entered.
    """

    detected = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm):
            training = kwargs.get("training", len(args) > 5 and args[5])
            self.detected |= bool(training)
        return func(*args, **kwargs)


def batch_norm_warnings(oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> list[str]:
    """Warn of losses in which a sample's value depends on the other samples of its batch.

    Args:
        oracle: The losses of one client.
        x: Upper variables.
        y: Lower variables.
        batch: A batch with both sides.

    Returns:
        One warning per loss that uses BatchNorm with the statistics of the batch.
    """
    warnings = []
    for name, loss in (("upper", oracle.upper), ("lower", oracle.lower)):
        with BatchNormDetector() as detector:
            loss(x, y, batch)
        if detector.detected:
            warnings.append(
                f"the {name} loss normalises a batch by its own statistics (BatchNorm): it is not "
                "a mean over samples and changes with the batch size; use GroupNorm or frozen "
                "statistics"
            )
    return warnings


class _Comparison(NamedTuple):
    """A derivative to compare with differences of the function that it belongs to.

    Attributes:
        name: What the derivative is, for messages.
        derivative: The gradient, by automatic differentiation.
        direction: The vector along which to compare.
        function: h -> the function at `point + h * direction`.
        point: The variable that moves.
    """

    name: str
    derivative: Tree
    direction: Tree
    function: Callable[[float], Tensor]
    point: Tree


def derivative_warnings(oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> list[str]:
    """Warn of derivatives that do not exist or are wrong.

    First derivatives of the losses are compared with differences of the losses. Second derivatives
    are compared with differences of the first ones, once these are confirmed. The derivatives are
    taken from `Oracle.directions`, which algorithms use.

    Args:
        oracle: The losses, of one client or pooled.
        x: Upper variables.
        y: Lower variables.
        batch: A batch with both sides.

    Returns:
        One warning per wrong derivative, or one about the first derivative that cannot be taken.
    """
    failure = ""
    w = random_unit(y, 1)
    try:
        for name, loss in (("upper", oracle.upper), ("lower", oracle.lower)):
            failure = f"the {name} loss has no derivative"
            grad(loss, argnums=(0, 1))(x, y, batch)
        failure = (
            "the lower loss has no second derivative (differences of gradients, or a first-order "
            "method such as 'memfbo', do without)"
        )
        at_z_zero = oracle.directions(x, y, zeros_like(y), batch)
        at_z_w = oracle.directions(x, y, w, batch)
        failure = "the losses have no third derivative, from which the curvature of Phi is measured"
        vjp(lambda x, y, z: oracle.directions(x, y, z, batch), x, y, w)[1](at_z_zero)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        return [f"{failure}: {reason}"]
    u = _balanced_direction(x)
    v = _balanced_direction(y)

    def slope(x: Tree, y: Tree) -> Tensor:
        return dot(oracle.lower_gradient_y(x, y, batch), w)

    comparisons = [
        _Comparison(
            "the upper loss's derivative in x",
            at_z_zero.x,
            u,
            lambda h: oracle.upper(x + h * u, y, batch),
            x,
        ),
        _Comparison(
            "the upper loss's derivative in y",
            -at_z_zero.z,
            v,
            lambda h: oracle.upper(x, y + h * v, batch),
            y,
        ),
        _Comparison(
            "the lower loss's derivative in y",
            at_z_zero.y,
            v,
            lambda h: oracle.lower(x, y + h * v, batch),
            y,
        ),
        _Comparison(
            "the lower loss's second derivative in y",
            at_z_w.z - at_z_zero.z,
            v,
            lambda h: slope(x, y + h * v),
            y,
        ),
        _Comparison(
            "the lower loss's mixed derivative",
            at_z_zero.x - at_z_w.x,
            u,
            lambda h: slope(x + h * u, y),
            x,
        ),
    ]
    return [warning for warning in map(_compare, comparisons) if warning]


def _compare(comparison: _Comparison) -> str:
    """A warning if a derivative disagrees with differences, else an empty string."""
    name, derivative, direction, function, point = comparison
    by_autograd = float(dot(derivative, direction))
    by_difference, uncertainty = _difference(function, point)
    # The size of this derivative in a typical direction: the direction at hand may be nearly
    # orthogonal to it, and then rounding decides the relative error.
    typical = norm(
        derivative.map(lambda d, a: d.norm() * a.norm() / max(1, d.numel()) ** 0.5, direction)
    )
    relative = 10 * torch.finfo(flatten(point).dtype).eps ** (1 / 3)
    allowed = relative * max(abs(by_difference), float(typical)) + uncertainty
    if abs(by_autograd - by_difference) > allowed:
        return (
            f"{name} is wrong: in a random direction autograd gives {by_autograd:.4g}, differences "
            f"give {by_difference:.4g} (a detach, or a custom function with a wrong backward?)"
        )
    return ""


def _balanced_direction(like: Tree) -> Tree:
    """A random direction in which every tensor, however small, has the same share."""
    return random_unit(like).map(lambda t: t / (t.norm() * len(like) ** 0.5))


def _difference(function: Callable[[float], Tensor], point: Tree) -> tuple[float, float]:
    """The central difference of a function at 0, and its uncertainty.

    The uncertainty allows for rounding, and for kinks: those make differences of several widths
    disagree.
    """
    precision = torch.finfo(flatten(point).dtype).eps
    h = precision ** (1 / 3) * (1 + float(norm(point)))
    quotients = []
    for width in (h, 2 * h, 4 * h):
        quotients.append(float(function(width) - function(-width)) / (2 * width))
    rounding = precision * abs(float(function(h))) / h
    return quotients[0], 10 * rounding + 5 * (max(quotients) - min(quotients))


def dependence_warnings(oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> tuple[list[str], bool]:
    """Warn of levels that do not depend on what they should depend on.

    Args:
        oracle: The losses, of one client or pooled.
        x: Upper variables.
        y: Lower variables.
        batch: A batch with both sides.

    Returns:
        The warnings, and whether there is a lower level that can be solved.
    """
    at_z_zero = oracle.directions(x, y, zeros_like(y), batch)
    at_z_w = oracle.directions(x, y, random_unit(y, 1), batch)
    if not float(norm(at_z_zero.y)):
        return ["the lower loss does not depend on y: there is no lower level to solve"], False
    if not float(norm(at_z_w.z - at_z_zero.z)):
        return [
            "the Hessian of the lower loss in y is exactly zero (piecewise linear?): "
            "add a ridge on y"
        ], False
    warnings = []
    if not float(norm(at_z_zero.x - at_z_w.x)):
        warnings.append(
            "the minimiser of the lower loss does not depend on x: the problem is not bilevel"
        )
    if not float(norm(at_z_zero.z)):
        warnings.append("the upper loss does not depend on y: the problem is not bilevel")
    return warnings, True
