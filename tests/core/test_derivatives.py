"""`grad` and `vjp` give the derivatives of `torch.func`, and record only what they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedbilevel.core.derivatives import grad, is_differentiated, vjp
from fedbilevel.core.rng import normal, root
from fedbilevel.core.tree import Tree
from fedbilevel.execution._meter import Meter

FUSED = torch.ops.aten.native_group_norm_backward.default
SEEDS = st.integers(0, 10**6)


def draw(seed: int, *shape: int) -> Tensor:
    return normal(root(seed, "derivatives"), shape, torch.float64)


def check_close(actual: Any, expected: Any) -> None:
    leaves = map(pytree.tree_leaves, (actual, expected))
    for ours, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Polynomial:
    """<a, u^3> + v u^T M w, a function of x = (u, v) and of w, and its derivatives by hand."""

    def __init__(self, seed: int, size: int) -> None:
        self.a = draw(seed, size)
        self.M = draw(seed + 1, size, 2)
        self.x = Tree(u=draw(seed + 2, size), v=draw(seed + 3))
        self.w = draw(seed + 4, 2)

    def __call__(self, x: Tree, w: Tensor) -> Tensor:
        return self.a @ x["u"] ** 3 + x["v"] * (x["u"] @ self.M @ w)

    def gradients(self, x: Tree, w: Tensor) -> tuple[Tree, Tensor]:
        along_u = 3 * self.a * x["u"] ** 2 + x["v"] * (self.M @ w)
        return Tree(u=along_u, v=x["u"] @ self.M @ w), x["v"] * (x["u"] @ self.M)

    def of_u(self, u: Tensor) -> Tensor:
        return self(Tree(u=u, v=self.x["v"]), self.w)

    def hessian_in_u(self, u: Tensor) -> Tensor:
        return torch.diag_embed(6 * self.a * u)


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_gradients_are_those_by_hand_and_those_of_torch(seed: int, size: int) -> None:
    f = Polynomial(seed, size)
    by_x, by_w = f.gradients(f.x, f.w)
    expected: dict[Any, Any] = {
        0: by_x,
        1: by_w,
        -1: by_w,
        (0,): (by_x,),
        (0, 1): (by_x, by_w),
        (1, 0): (by_w, by_x),
    }
    for argnums, gradients in expected.items():
        actual = grad(f, argnums)(f.x, f.w)
        assert type(actual) is type(gradients)
        check_close(actual, gradients)
        check_close(actual, torch.func.grad(f, argnums)(f.x, f.w))


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_auxiliary_values_come_beside_the_gradient(argnums: Any) -> None:
    f = Polynomial(0, 3)

    def with_aux(x: Tree, w: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return f(x, w), {"twice": 2 * x["u"]}

    gradients, aux = grad(with_aux, argnums, has_aux=True)(f.x, f.w)
    check_close(gradients, grad(f, argnums)(f.x, f.w))
    check_close(aux, {"twice": 2 * f.x["u"]})
    assert not aux["twice"].requires_grad


@given(SEEDS, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_second_derivatives_are_those_by_hand(seed: int, size: int, clients: int) -> None:
    f = Polynomial(seed, size)
    u = draw(seed + 5, clients, size)
    hessians = f.hessian_in_u(u)
    direction = draw(seed + 6, size)

    def slope(u: Tensor) -> Tensor:
        return grad(f.of_u)(u) @ direction

    def nested_slope(u: Tensor) -> Tensor:
        return grad(slope)(u) @ direction

    check_close(jacrev(grad(f.of_u))(u[0]), hessians[0])
    check_close(vmap(jacrev(grad(f.of_u)))(u), hessians)
    check_close(grad(slope)(u[0]), hessians[0] @ direction)
    check_close(vmap(grad(slope))(u), hessians @ direction)
    check_close(torch.func.grad(slope)(u[0]), hessians[0] @ direction)
    check_close(vmap(grad(nested_slope))(u), (6 * f.a * direction**2).expand(clients, size))


@given(SEEDS, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_autograd_differentiates_the_gradient_again(seed: int, size: int, clients: int) -> None:
    f = Polynomial(seed, size)
    u = draw(seed + 5, clients, size).requires_grad_()
    direction = draw(seed + 6, size)
    hessians = f.hessian_in_u(u.detach())
    alone = grad(f.of_u)(u[0])
    (product,) = torch.autograd.grad(alone @ direction, u)
    check_close(product[0], hessians[0] @ direction)
    stacked = vmap(grad(f.of_u))(u)
    (products,) = torch.autograd.grad((stacked @ direction).sum(), u)
    check_close(products, hessians @ direction)


def test_autograd_differentiates_by_what_the_loss_only_reads() -> None:
    """The argument requires no gradient, but a tensor that the loss closes over does."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    u = draw(0, 3, 4)

    def loss(u: Tensor) -> Tensor:
        return scale**2 * (u**2).sum()

    for gradient in (grad(loss)(u[0]), vmap(grad(loss))(u)):
        (by_scale,) = torch.autograd.grad(gradient.sum(), scale)
        check_close(by_scale, 4 * scale.detach() * u[: gradient.numel() // 4].sum())


def test_without_an_outer_derivative_no_graph_is_kept() -> None:
    u = draw(0, 4, 1000)

    def loss(u: Tensor) -> Tensor:
        for _ in range(6):
            u = u.sin()
        return u.sum()

    def peak_bytes(gradient: Callable[[Tensor], Tensor], u: Tensor) -> int:
        with Meter() as meter:
            gradient(u)
        return meter.peak_bytes

    for ours, theirs, arg in (
        (grad(loss), torch.func.grad(loss), u[0]),
        (vmap(grad(loss)), vmap(torch.func.grad(loss)), u),
    ):
        result = ours(arg)
        assert not result.requires_grad
        check_close(result, theirs(arg))
        # A recorded pass holds the cosine of every layer until it ends.
        assert peak_bytes(ours, arg) <= peak_bytes(theirs, arg) - 3 * arg.nbytes
    tracked = u.clone().requires_grad_()
    with torch.no_grad():
        result = grad(loss)(tracked)
    assert not result.requires_grad
    check_close(result, grad(loss)(u))
    assert grad(loss)(tracked).requires_grad


class Calls(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def norm_net(weights: Tree, images: Tensor) -> Tensor:
    """The mean square of a convolution, a GroupNorm and a product."""
    hidden = F.conv2d(images, weights["conv"], padding=1)
    hidden = F.group_norm(hidden, 2, weights["scale"], weights["shift"]).tanh()
    return (hidden.flatten(1) @ weights["head"]).square().mean()


def test_group_norm_uses_its_fused_kernel_and_can_be_differentiated_again() -> None:
    weights = Tree(
        conv=draw(0, 4, 3, 3, 3), scale=draw(1, 4), shift=draw(2, 4), head=draw(3, 4 * 25, 2)
    )
    images = draw(4, 2, 3, 5, 5)

    with Calls() as calls:
        alone = grad(norm_net)(weights, images)
    assert FUSED in calls.seen
    check_close(alone, torch.func.grad(norm_net)(weights, images))

    def squared_norm(gradient: Callable[..., Callable[..., Tree]]) -> Callable[[Tree], Tensor]:
        def of_weights(weights: Tree) -> Tensor:
            by_weights = gradient(norm_net)(weights, images)
            return torch.stack([tensor.square().sum() for tensor in by_weights.values()]).sum()

        return of_weights

    check_close(
        grad(squared_norm(grad))(weights), torch.func.grad(squared_norm(torch.func.grad))(weights)
    )

    stacked = weights.map(lambda tensor: torch.stack([tensor, 2 * tensor, -tensor]))
    check_close(
        vmap(grad(norm_net), (0, None))(stacked, images),
        vmap(torch.func.grad(norm_net), (0, None))(stacked, images),
    )


def test_the_gradient_in_a_tensor_that_is_not_used_is_zeros_or_none() -> None:
    x = Tree(used=draw(0, 3), unused=draw(1, 2))

    def loss(x: Tree, y: Tensor) -> Tensor:
        return (x["used"] ** 2).sum()

    y = draw(2, 5, 4)
    by_x, by_y = vmap(grad(loss, (0, 1)), (None, 0))(x, y)
    check_close(by_x["used"], 2 * x["used"].expand(5, 3))
    check_close(by_x["unused"], torch.zeros(5, 2).double())
    check_close(by_y, torch.zeros_like(y))
    by_x, by_y = grad(loss, (0, 1), fill_unused=False)(x, y)
    check_close(by_x["used"], 2 * x["used"])
    assert by_x["unused"] is None
    assert by_y is None
    assert not grad(lambda x: torch.ones(()))(draw(0, 3)).any()


@pytest.mark.parametrize("gradient", [grad, lambda fn: vmap(grad(fn))])
def test_a_loss_that_is_not_a_single_number_is_refused(gradient: Any) -> None:
    sentence = r"^a loss returned .*\(3,\); it must return a 0-d tensor$"
    with pytest.raises(ValueError, match=sentence):
        gradient(lambda u: u.reshape(-1)[:3])(draw(0, 2, 3))
    with pytest.raises(ValueError, match=r"^a loss returned float; it must return a 0-d tensor$"):
        gradient(lambda u: 1.0)(draw(0, 2, 3))


def cubes(x: Tree) -> tuple[list[Tensor], dict[str, Tensor]]:
    """u^3 and v u with their auxiliary value; the derivatives are 3 u^2, v and u."""
    return [x["u"] ** 3, x["v"] * x["u"]], {"square": x["u"] ** 2}


def pulled_back(x: Tree, gradients: list[Tensor]) -> Tree:
    """The gradients p and q with respect to u^3 and v u, pulled back by hand."""
    p, q = gradients
    return Tree(u=3 * p * x["u"] ** 2 + q * x["v"], v=(q * x["u"]).sum(-1), w=0 * x["w"])


@given(SEEDS, st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_a_pullback_maps_gradients_of_values_to_those_of_the_argument(seed: int, size: int) -> None:
    x = Tree(u=draw(seed, size), v=draw(seed + 1), w=draw(seed + 2, 2))  # w is not used
    values, pullback, aux = vjp(cubes, x)
    check_close(values, cubes(x)[0])
    check_close(aux, cubes(x)[1])
    for number in (3, 4):  # it can be called twice
        gradients = [draw(seed + number, size), draw(seed + number + 2, size)]
        result = pullback(gradients)
        check_close(result, pulled_back(x, gradients))
        assert not any(tensor.requires_grad for tensor in result.values())

    def through(x: Tree, gradients: list[Tensor]) -> Tree:
        _, pullback, _ = vjp(cubes, x)
        return pullback(gradients)

    stacked = x.map(lambda tensor: torch.stack([tensor, -2 * tensor]))
    several = [torch.stack([tensor, 3 * tensor]) for tensor in gradients]
    expected = [
        pulled_back(stacked.map(lambda t, i=i: t[i]), [tensor[i] for tensor in several])
        for i in range(2)
    ]
    check_close(
        vmap(through)(stacked, several),
        Tree(u=0, v=0, w=0).map(lambda _, *trees: torch.stack(trees), *expected),
    )
    check_close(jacrev(through, (0, 1))(x, gradients), jacrev(pulled_back, (0, 1))(x, gradients))


def test_autograd_differentiates_a_pullback_by_the_point_and_by_the_gradient() -> None:
    u = draw(0, 3).requires_grad_()
    p = draw(1, 3).requires_grad_()
    _, pullback, _ = vjp(lambda u: (u**3, None), u)
    by_u, by_p = torch.autograd.grad(pullback(p).sum(), (u, p))
    check_close(by_u, (6 * u * p).detach())
    check_close(by_p, (3 * u**2).detach())
    # The point alone, and the gradient alone.
    (by_u,) = torch.autograd.grad(pullback(p.detach()).sum(), u)
    check_close(by_u, (6 * u * p).detach())
    _, pullback, _ = vjp(lambda u: (u**3, None), u.detach())
    (by_p,) = torch.autograd.grad(pullback(p).sum(), p)
    check_close(by_p, (3 * u**2).detach())


def test_a_value_is_differentiated_by_any_transform_or_by_autograd() -> None:
    found: dict[str, bool] = {}

    def note(name: str) -> Callable[[Tensor], Tensor]:
        def fn(u: Tensor) -> Tensor:
            found[name] = is_differentiated(u)
            return u.sum()

        return fn

    plain = draw(0, 2, 3)
    tracked = plain.clone().requires_grad_()
    note("plain")(plain)
    vmap(note("vmap"))(plain)
    vmap(vmap(note("vmap of vmap")))(plain)
    note("autograd")(tracked)
    note("detached")(tracked.detach())
    vmap(note("autograd through vmap"))(tracked)
    grad(note("grad"))(plain)
    vmap(grad(note("grad under vmap")))(plain)
    grad(lambda u: vmap(note("vmap under grad"))(u).sum())(plain)
    assert found == {
        "plain": False,
        "vmap": False,
        "vmap of vmap": False,
        "autograd": True,
        "detached": False,
        "autograd through vmap": True,
        "grad": True,
        "grad under vmap": True,
        "vmap under grad": True,
    }
