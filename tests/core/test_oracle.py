"""Every derivative of the oracle agrees with dense Hessians and with finite differences."""

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import vmap
from torch.nn.functional import softplus
from torch.utils._pytree import tree_leaves, tree_map

from fedbilevel.core.client_data import Batch
from fedbilevel.core.modules import split_module
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, normal, root, uniform
from fedbilevel.core.tree import Tree, dot, flatten, norm, unflatten
from fedbilevel.nets import Dropout, randomness, seeded

CLIENTS = 3


def draw(name, *shape):
    """Random tensors of all clients, stacked."""
    return normal(root(1, name), (CLIENTS, *shape), torch.float64)


class Case(NamedTuple):
    """A problem, and a point, a vector and a batch for each client, stacked."""

    problem: Problem
    x: Tree
    y: Tree
    z: Tree
    batch: Batch

    def of(self, client):
        """oracle, x, y, z and batch of one client."""
        point = [tree.map(lambda t: t[client]) for tree in (self.x, self.y, self.z)]
        batch = tree_map(lambda t: t[client], self.batch)
        return Oracle(self.problem), *point, batch


def network(container):
    """A network of 2 tanh units: x is its hidden layer, y its output layer.

    container: whether batches are tuples or dicts.
    """

    def unpack(batch):
        if container is dict:
            return batch["inputs"], batch["targets"]
        return batch

    def outputs(x, y, inputs):
        return torch.tanh(inputs @ x["w"] + x["b"]) @ y["v"] + y["c"]

    def lower(x, y, batch):
        inputs, targets = unpack(batch)
        ridge = 0.1 * (y["v"] ** 2).sum() * x["b"].exp().sum()
        return softplus(-targets * outputs(x, y, inputs)).mean() + ridge

    def upper(x, y, batch):
        inputs, targets = unpack(batch)
        return ((outputs(x, y, inputs) - targets) ** 2).mean() + 0.1 * (x["w"] ** 4).sum()

    def side(name):
        inputs = draw(f"{name} inputs", 5, 3)
        targets = draw(f"{name} targets", 5).sign()
        if container is dict:
            return {"inputs": inputs, "targets": targets}
        return inputs, targets

    x = Tree(w=draw("w", 3, 2), b=draw("b", 2))
    y = Tree(v=draw("yv", 2), c=draw("yc"))
    z = Tree(v=draw("zv", 2), c=draw("zc"))
    return Case(_problem(upper, lower, x, y), x, y, z, Batch(side("train"), side("val")))


def one_dimension():
    def lower(x, y, batch):
        return (torch.exp(0.5 * x["x"] * y["y"]) * batch[0] ** 2).mean() + 0.5 * (y["y"] ** 2).sum()

    def upper(x, y, batch):
        return (torch.exp(-x["x"] + 0.1 * batch[0]) * y["y"] ** 2).mean()

    x = Tree(x=1 + 0.1 * draw("x", 1))
    y = Tree(y=2 + 0.1 * draw("y", 1))
    z = Tree(y=-1 + 0.1 * draw("z", 1))
    return Case(_problem(upper, lower, x, y), x, y, z, Batch((draw("t", 4),), (draw("v", 4),)))


def _problem(upper, lower, x, y):
    return Problem(upper=upper, lower=lower, x=x.map(lambda t: t[0]), y=y.map(lambda t: t[0]))


CASES = {"tuples": network(tuple), "dicts": network(dict), "one dimension": one_dimension()}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


class Dense(NamedTuple):
    """All derivatives at one point, as vectors and matrices."""

    f_x: torch.Tensor
    f_y: torch.Tensor
    g_y: torch.Tensor
    H: torch.Tensor  # d2yy g
    J: torch.Tensor  # d2xy g: rows like x, columns like y


def dense(problem, x, y, batch):
    def f(x_, y_):
        return problem.upper(unflatten(x_, x), unflatten(y_, y), batch.val, ())

    def g(x_, y_):
        return problem.lower(unflatten(x_, x), unflatten(y_, y), batch.train, ())

    point = (flatten(x), flatten(y))
    f_x, f_y = jacobian(f, point)
    (_, J), (_, H) = hessian(g, point)
    return Dense(f_x, f_y, jacobian(g, point)[1], H, J)


def close(tree, vector, rtol=1e-10):
    torch.testing.assert_close(flatten(tree), vector, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("call", ["hessian_product", "cross_product", "directions", "products"])
def test_differences_are_near_the_exact_products_and_cost_what_they_say(case, call):
    problem = dataclasses.replace(case.problem, derivatives="differences")
    exact = Oracle(case.problem)
    differences = Oracle(problem)
    expected, near = (
        flatten_all(vmap(getattr(oracle, call))(case.x, case.y, case.z, case.batch))
        for oracle in (exact, differences)
    )
    torch.testing.assert_close(near, expected, rtol=1e-6, atol=1e-7)
    assert differences.gradients == exact.gradients + (call == "directions")


def flatten_all(values):
    return torch.cat([leaf.flatten() for leaf in tree_leaves(values)])


@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_directions_are_their_five_terms(case, damping):
    oracle, x, y, z, batch = case.of(0)
    d = dense(case.problem, x, y, batch)
    v = flatten(z)
    directions = oracle.directions(x, y, z, batch, damping)
    close(directions.x, d.f_x - d.J @ v)
    close(directions.y, d.g_y)
    close(directions.z, d.H @ v + damping * v - d.f_y)


def test_a_hypergradient_is_its_two_terms(case):
    oracle, x, y, z, batch = case.of(0)
    d = dense(case.problem, x, y, batch)
    close(oracle.hypergradient(x, y, z, batch), d.f_x - d.J @ flatten(z))


def test_no_term_of_the_cases_is_small(case):
    """If one were, the other tests would not notice its absence."""
    for client in range(CLIENTS):
        _, x, y, z, batch = case.of(client)
        d = dense(case.problem, x, y, batch)
        v = flatten(z)
        assert min(float(term.norm()) for term in (d.f_x, d.f_y, d.g_y, d.H @ v, d.J @ v)) > 0.05


DERIVATIVES = {
    "lower_gradient_y": lambda d, v: d.g_y,
    "upper_gradient_x": lambda d, v: d.f_x,
    "upper_gradient_y": lambda d, v: d.f_y,
    "hessian_product": lambda d, v: d.H @ v,
    "cross_product": lambda d, v: d.J @ v,
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_each_derivative_is_the_dense_one(case, name):
    oracle, x, y, z, batch = case.of(1)
    arguments = [x, y, batch]
    if name in ("hessian_product", "cross_product"):
        arguments.insert(2, z)
    expected = DERIVATIVES[name](dense(case.problem, x, y, batch), flatten(z))
    close(getattr(oracle, name)(*arguments), expected)


def test_upper_gradients_are_both_gradients(case):
    oracle, x, y, _, batch = case.of(1)
    d = dense(case.problem, x, y, batch)
    f_x, f_y = oracle.upper_gradients(x, y, batch)
    close(f_x, d.f_x)
    close(f_y, d.f_y)


def test_products_are_both_products(case):
    oracle, x, y, z, batch = case.of(1)
    d = dense(case.problem, x, y, batch)
    cross, curvature = oracle.products(x, y, z, batch)
    close(cross, d.J @ flatten(z))
    close(curvature, d.H @ flatten(z))


def slope(fn, point, direction, h=1e-5):
    """The central difference of fn along a direction."""
    return (fn(point + h * direction) - fn(point - h * direction)) / (2 * h)


def test_gradients_are_finite_differences_of_the_losses(case):
    oracle, x, y, z, batch = case.of(2)
    u = x.map(torch.sin) + x.map(torch.ones_like)
    along = {
        "upper_gradient_x": (slope(lambda x: oracle.upper(x, y, batch), x, u), u),
        "upper_gradient_y": (slope(lambda y: oracle.upper(x, y, batch), y, z), z),
        "lower_gradient_y": (slope(lambda y: oracle.lower(x, y, batch), y, z), z),
    }
    for name, (expected, direction) in along.items():
        computed = dot(getattr(oracle, name)(x, y, batch), direction)
        torch.testing.assert_close(computed, expected, rtol=1e-7, atol=1e-9)


def test_products_are_finite_differences_of_the_gradient(case):
    """d2yy g z is the slope of grad_y g along z, <u, d2xy g z> that of <grad_y g, z> along u."""
    oracle, x, y, z, batch = case.of(2)
    u = x.map(torch.sin) + x.map(torch.ones_like)
    curvature = slope(lambda y: oracle.lower_gradient_y(x, y, batch), y, z)
    close(oracle.hessian_product(x, y, z, batch), flatten(curvature), rtol=1e-7)
    cross = slope(lambda x: dot(oracle.lower_gradient_y(x, y, batch), z), x, u)
    torch.testing.assert_close(
        dot(oracle.cross_product(x, y, z, batch), u), cross, rtol=1e-7, atol=1e-9
    )


CALLS = {
    "directions": (3, lambda oracle, x, y, z, batch: oracle.directions(x, y, z, batch, 0.3)),
    "penalty_directions": (
        3,
        lambda oracle, x, y, z, batch: oracle.penalty_directions(x, y, z, batch, 0.3),
    ),
    "lower_gradient_y": (1, lambda oracle, x, y, z, batch: oracle.lower_gradient_y(x, y, batch)),
    "upper_gradient_x": (1, lambda oracle, x, y, z, batch: oracle.upper_gradient_x(x, y, batch)),
    "upper_gradient_y": (1, lambda oracle, x, y, z, batch: oracle.upper_gradient_y(x, y, batch)),
    "upper_gradients": (1, lambda oracle, x, y, z, batch: oracle.upper_gradients(x, y, batch)),
    "hessian_product": (2, lambda oracle, x, y, z, batch: oracle.hessian_product(x, y, z, batch)),
    "cross_product": (2, lambda oracle, x, y, z, batch: oracle.cross_product(x, y, z, batch)),
    "products": (2, lambda oracle, x, y, z, batch: oracle.products(x, y, z, batch)),
    "upper": (0, lambda oracle, x, y, z, batch: oracle.upper(x, y, batch)),
    "lower": (0, lambda oracle, x, y, z, batch: oracle.lower(x, y, batch)),
}


@pytest.mark.parametrize(("cost", "call"), CALLS.values(), ids=CALLS)
def test_calls_count_the_gradients_they_cost(case, cost, call):
    oracle, *arguments = case.of(0)
    assert oracle.gradients == 0
    call(oracle, *arguments)
    call(oracle, *arguments)
    assert oracle.gradients == 2 * cost


@pytest.mark.parametrize("call", [call for _, call in CALLS.values()], ids=CALLS)
def test_a_stack_under_vmap_equals_one_client_after_another(case, call):
    oracle = Oracle(case.problem)
    stack = vmap(lambda x, y, z, batch: call(oracle, x, y, z, batch))(
        case.x, case.y, case.z, case.batch
    )
    for client in range(CLIENTS):
        alone = call(*case.of(client))
        row = tree_map(lambda t, client=client: t[client], stack)
        torch.testing.assert_close(row, alone, rtol=1e-12, atol=1e-12)


def test_project_x_is_that_of_the_problem():
    problem = CASES["one dimension"].problem
    clamped = Problem(
        upper=problem.upper,
        lower=problem.lower,
        x=problem.x,
        y=problem.y,
        project_x=lambda x: 0.5 * x,
    )
    x, _ = problem.start
    assert torch.equal(Oracle(clamped).project_x(x)["x"], 0.5 * x["x"])
    assert Oracle(problem).project_x(x) is x


# Losses that draw random numbers


@pytest.fixture(scope="module")
def dropping():
    """An oracle of a network with dropout, and x, y, z, batch; both sides hold the same data."""

    def build():
        hidden = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), Dropout(0.5))
        return nn.Sequential(OrderedDict(backbone=hidden, head=nn.Linear(8, 1))).double()

    net = split_module(seeded(build, 0), "head")

    def loss(x, y, batch, rng):
        with randomness(rng):
            return (softplus(net.apply(x, y, batch[0])) ** 2).mean()

    data = (draw("inputs", 6, 3)[0],)
    z = net.y.map(lambda t: torch.ones_like(t) / 2)
    oracle = Oracle(Problem(upper=loss, lower=loss, x=net.x, y=net.y))
    return oracle, net.x, net.y, z, Batch(data, data, root(0, "b"))


def test_a_batch_has_one_dropout_mask(dropping):
    oracle, x, y, z, batch = dropping
    again = batch._replace(rng=root(0, "b"))
    other = batch._replace(rng=root(1, "b"))
    for level in (oracle.upper, oracle.lower):
        assert level(x, y, batch) == level(x, y, again)
        assert level(x, y, batch) != level(x, y, other)
    first = oracle.directions(x, y, z, batch)
    same = oracle.directions(x, y, z, again)
    different = oracle.directions(x, y, z, other)
    for direction in range(3):
        assert torch.equal(flatten(first[direction]), flatten(same[direction]))
        assert norm(first[direction] - different[direction]) > 1e-3


def test_derivatives_of_both_orders_see_the_same_mask(dropping):
    oracle, x, y, z, batch = dropping
    gradient = slope(lambda y: oracle.lower(x, y, batch), y, z)
    torch.testing.assert_close(
        dot(oracle.lower_gradient_y(x, y, batch), z), gradient, rtol=1e-7, atol=1e-9
    )
    curvature = slope(lambda y: oracle.lower_gradient_y(x, y, batch), y, z)
    close(oracle.hessian_product(x, y, z, batch), flatten(curvature), rtol=1e-7)
    d = oracle.directions(x, y, z, batch)
    close(d.y, flatten(oracle.lower_gradient_y(x, y, batch)))
    d_x = oracle.upper_gradient_x(x, y, batch) - oracle.cross_product(x, y, z, batch)
    close(d.x, flatten(d_x))
    d_z = oracle.hessian_product(x, y, z, batch) - oracle.upper_gradient_y(x, y, batch)
    close(d.z, flatten(d_z))


def test_the_two_levels_draw_different_masks(dropping):
    oracle, x, y, _, batch = dropping
    assert oracle.upper(x, y, batch) != oracle.lower(x, y, batch)


def test_masks_differ_over_a_stack(dropping):
    oracle, x, y, _, batch = dropping
    keys = fold_in(root(0, "stack"), torch.arange(4))
    losses = vmap(lambda key: oracle.lower(x, y, batch._replace(rng=key)))(keys)
    alone = torch.stack([oracle.lower(x, y, batch._replace(rng=key)) for key in keys])
    torch.testing.assert_close(losses, alone)
    assert len(losses.unique()) == 4


def test_the_two_levels_share_no_draw():
    """Normals of the lower level are uncorrelated with the uniforms of the upper level."""
    problem = Problem(
        upper=lambda x, y, batch, rng: uniform(rng, (1000,), torch.float64),
        lower=lambda x, y, batch, rng: normal(rng, (1000,), torch.float64),
        x={"x": torch.ones(1)},
        y={"y": torch.ones(1)},
    )
    oracle = Oracle(problem)
    batch = Batch(rng=root(0, "b"))
    angle = 2 * torch.pi * oracle.upper(*problem.start, batch)
    correlation = (oracle.lower(*problem.start, batch) * torch.cos(angle)).mean() * 2**0.5
    assert abs(correlation) <= 5 / 1000**0.5
