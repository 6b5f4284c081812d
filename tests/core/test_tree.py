"""A tree is a vector: its operations are those of the flat vector, and flattening is invertible."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from fedbilevel.core.rng import normal, root
from fedbilevel.core.tree import (
    Tree,
    dot,
    flatten,
    is_finite,
    nbytes,
    norm,
    project,
    unflatten,
    zeros_like,
)

SHAPES = [(), (1,), (3,), (2, 3), (2, 1, 2)]
PROPERTY = settings(deadline=None, max_examples=40)
number = st.integers(-1000, 1000).map(float)  # integers, so that sums and products are exact


@st.composite
def trees(draw, count):
    """`count` trees of the same names and shapes, with integers as entries."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))

    def fill(shape):
        size = math.prod(shape)
        entries = draw(st.lists(number, min_size=size, max_size=size))
        return torch.tensor(entries, dtype=torch.float64).reshape(shape)

    return [Tree({f"t{j}": fill(shape) for j, shape in enumerate(shapes)}) for _ in range(count)]


def same(a, b):
    return (
        isinstance(a, Tree)
        and list(a) == list(b)
        and all(torch.equal(a[name], b[name]) for name in a)
    )


@pytest.fixture
def tree():
    """Two tensors and a 0-d tensor, of norm 13."""
    return Tree(
        w=torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64),
        b=torch.tensor([0.0, 0.0, -12.0], dtype=torch.float64),
        s=torch.tensor(0.0, dtype=torch.float64),
    )


AXIOMS = {
    "addition commutes": lambda a, b, c, s, t: (a + b, b + a),
    "addition associates": lambda a, b, c, s, t: ((a + b) + c, a + (b + c)),
    "zero is neutral": lambda a, b, c, s, t: (a + zeros_like(a), a),
    "minus is the inverse": lambda a, b, c, s, t: (a + (-a), zeros_like(a)),
    "subtraction adds the inverse": lambda a, b, c, s, t: (a - b, a + (-b)),
    "one is neutral": lambda a, b, c, s, t: (1.0 * a, a),
    "scaling associates": lambda a, b, c, s, t: ((s * t) * a, s * (t * a)),
    "scaling distributes over trees": lambda a, b, c, s, t: (s * (a + b), s * a + s * b),
    "scaling distributes over numbers": lambda a, b, c, s, t: ((s + t) * a, s * a + t * a),
    "scaling commutes": lambda a, b, c, s, t: (a * s, s * a),
    "division undoes scaling": lambda a, b, c, s, t: ((4.0 * a) / 4.0, a),
}


@pytest.mark.parametrize("axiom", AXIOMS.values(), ids=AXIOMS)
@PROPERTY
@given(abc=trees(3), s=number, t=number)
def test_trees_form_a_vector_space(axiom, abc, s, t):
    left, right = axiom(*abc, s, t)
    assert same(left, right)


@PROPERTY
@given(ab=trees(2), s=number)
def test_flattening_is_linear_and_invertible(ab, s):
    a, b = ab
    assert torch.equal(flatten(s * a - b / 2), s * flatten(a) - flatten(b) / 2)
    assert flatten(a).shape == (a.numel,)
    assert same(unflatten(flatten(a), b), a)


@PROPERTY
@given(ab=trees(2))
def test_dot_and_norm_are_those_of_the_flat_vectors(ab):
    a, b = ab
    assert dot(a, b) == flatten(a) @ flatten(b)
    torch.testing.assert_close(norm(a), flatten(a).norm())


@pytest.mark.parametrize(
    "scale", [torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)], ids=["f32", "f64"]
)
def test_a_tensor_scales_from_either_side(tree, scale):
    for scaled in (scale * tree, tree * scale, tree / (1 / scale)):
        assert same(scaled, 0.25 * tree)


def test_operations_match_tensors_by_name_not_by_position(tree):
    reordered = Tree(reversed(tree.items()))
    assert same(tree + reordered, 2.0 * tree)
    assert same(tree - reordered, zeros_like(tree))
    assert dot(tree, reordered) == 169


def test_operations_leave_their_operands_unchanged(tree):
    copy = tree.map(torch.clone)
    _ = (tree + tree, tree * 3.0, -tree, tree / 2.0, project(tree, 1.0))
    assert same(tree, copy)


@pytest.mark.parametrize("radius", [14.0, 13.0], ids=["inside", "on the boundary"])
def test_projection_keeps_points_of_the_ball(tree, radius):
    assert same(project(tree, radius), tree)


def test_projection_of_zero_is_zero(tree):
    assert same(project(zeros_like(tree), 1.0), zeros_like(tree))


def test_projection_from_outside_the_ball(tree):
    assert same(project(tree, 6.5), tree / 2.0)
    one_dimensional = Tree(s=torch.tensor(-4.0))
    assert same(project(one_dimensional, 1.0), Tree(s=torch.tensor(-1.0)))


@PROPERTY
@given(zq=trees(2), radius=st.floats(0.5, 2000))
def test_projection_is_the_closest_point(zq, radius):
    """Pz is in the ball, and <z - Pz, q - Pz> <= 0 for every q of the ball."""
    z, q = zq
    q = q * min(1.0, radius / max(float(norm(q)), 1e-9))
    projected = project(z, radius)
    assert norm(projected) <= radius * (1 + 1e-12)
    assert dot(z - projected, q - projected) <= 1e-9 * (1 + dot(z, z) + radius**2)


def test_operations_work_under_vmap():
    stack = Tree(w=normal(root(0, "w"), (5, 2, 3)), b=normal(root(0, "b"), (5,)))
    moved = vmap(lambda t, s: project(2.0 * t - t / 4.0, 1.0) * s)(stack, torch.arange(5.0))
    assert isinstance(moved, Tree)
    for i in range(5):
        alone = stack.map(lambda t, i=i: t[i])
        torch.testing.assert_close(
            moved.map(lambda t, i=i: t[i]),
            float(i) * project(2.0 * alone - alone / 4.0, 1.0),
            rtol=1e-6,
            atol=1e-6,
        )


def test_operations_work_under_grad(tree):
    """The gradient of 1/2 ||t||^2 + <t, c> is t + c; that of ||t|| is t / ||t||."""
    c = tree.map(torch.ones_like)
    assert same(grad(lambda t: 0.5 * dot(t, t) + dot(t, c))(tree), tree + c)
    torch.testing.assert_close(grad(norm)(tree), tree / 13.0)


def test_nbytes_and_numel_count_all_tensors():
    tree = Tree(
        a=torch.zeros(3),
        b=torch.zeros(2, 2, dtype=torch.float64),
        c=torch.tensor(1, dtype=torch.int16),
    )
    assert tree.nbytes == 12 + 32 + 2
    assert tree.numel == 8
    assert nbytes({"x": tree, "more": (tree, [tree["a"]]), "steps": 7, "rate": 0.5}) == 2 * 46 + 12
    assert nbytes({}) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "wrap", [float, torch.tensor, lambda v: Tree(a=torch.ones(2), b=torch.tensor([[1.0, v]]))]
)
def test_is_finite_finds_every_value_that_is_not(bad, wrap):
    assert is_finite({"x": wrap(1.5), "y": (wrap(0.0), torch.tensor([3])), "z": 2})
    assert not is_finite({"x": wrap(1.5), "y": (wrap(bad), torch.tensor([3])), "z": 2})


def test_finite_values_whose_sum_overflows_are_finite():
    assert is_finite(Tree(a=torch.full((2,), 3e38)))
