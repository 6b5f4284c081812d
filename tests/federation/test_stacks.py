"""Stacks of replies: weighted sums of those that are finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.core.rng import normal, root
from fedbilevel.core.tree import Tree, flatten
from fedbilevel.federation import stacks
from fedbilevel.federation.stacks import MANY_TENSORS, reply_at, sum_finite

SHAPES = [(2,), (), (3, 2), (1,), (2, 1, 2)]


def stack_of(clients: int, tensors: int, seed: int) -> dict[str, Any]:
    """Replies with two trees, a real number and a whole number."""

    def tree(tag: str) -> Tree:
        return Tree(
            {
                f"t{i}": normal(root(seed + i, tag), (clients, *SHAPES[i % 5]), torch.float64)
                for i in range(tensors)
            }
        )

    loss = normal(root(seed, "loss"), (clients,), torch.float64)
    return {"dx": tree("dx"), "loss": loss, "dy": tree("dy"), "count": (10 * loss).long()}


@pytest.mark.parametrize("tensors", [1, MANY_TENSORS, MANY_TENSORS + 1, 3 * MANY_TENSORS])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_sums_are_those_of_the_finite_replies(tensors: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 5))
    stack = stack_of(clients, tensors, data.draw(st.integers(0, 1000)))
    weights = data.draw(st.lists(st.floats(0, 4), min_size=clients, max_size=clients))
    steps = data.draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients))
    finite = {name: [True] * clients for name in stack}
    bad_entries = st.tuples(
        st.sampled_from(["dx", "dy", "loss"]),
        st.integers(0, clients - 1),
        st.integers(0, tensors - 1),
        st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    )
    for name, client, tensor, bad in data.draw(st.lists(bad_entries, max_size=3)):
        finite[name][client] = False
        values = stack[name] if name == "loss" else stack[name][f"t{tensor}"]
        values[client] = (
            values[client].flatten().index_fill(0, torch.tensor(-1), bad).view_as(values[client])
        )

    sums = sum_finite(stack, torch.tensor(weights, dtype=torch.float64), torch.tensor(steps))

    assert sums.finite.tolist() == list(finite.values())
    accepted = [all(checks) for checks in zip(*finite.values(), strict=True)]
    assert int(sums.accepted) == sum(accepted)
    kept = [i for i in range(clients) if accepted[i]]
    torch.testing.assert_close(float(sums.weight), float(sum(weights[i] for i in kept)))
    torch.testing.assert_close(float(sums.steps), float(sum(weights[i] * steps[i] for i in kept)))
    assert list(sums.totals) == list(stack)
    for name, total in sums.totals.items():
        expected = torch.zeros_like(total)
        for i in kept:
            value = reply_at(stack, i)[name]
            expected += weights[i] * (flatten(value) if isinstance(value, Tree) else value.double())
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_many_tensors_are_summed_as_few_are(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stack_of(clients=4, tensors=5, seed=0)
    for name in ("dx", "dy"):
        stack[name] = stack[name].map(lambda tensor: tensor.to(dtype))
    stack["dy"]["t2"][1, 0] = torch.inf
    weights = torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    steps = torch.tensor([1, 2, 3, 4])
    few = sum_finite(stack, weights, steps)
    monkeypatch.setattr(stacks, "MANY_TENSORS", 4)
    many = sum_finite(stack, weights, steps)
    torch.testing.assert_close(many._asdict(), few._asdict())
    assert many.totals["dx"].dtype == dtype
    assert many.finite.tolist() == [[True] * 4, [True] * 4, [True, False, True, True], [True] * 4]
