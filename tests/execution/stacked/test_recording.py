"""A recorded graph computes what its function computes; values that it reads are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedbilevel.core.derivatives import grad
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.execution.stacked._recording import record

TWO = torch.tensor(2.0, dtype=torch.float64)


def draw(*shape: int, tag: str = "record") -> Tensor:
    return normal(root(0, tag), shape, torch.float64)


def gradients(a: Tensor, w: Tensor) -> list[Tensor]:
    return [vmap(grad(lambda w, a: (a @ w).tanh().sum()))(w, a)]


def constants(a: Tensor, w: Tensor) -> list[Tensor]:
    factor = torch.tensor(3.0).item() * TWO.item()
    return [a * TWO, a * factor, torch.tensor([1.0, 2.0]).double() + w.sum()]


def several_results(a: Tensor, w: Tensor) -> list[Tensor]:
    largest, index = a.max(1)
    first, second = w.unbind(2)
    return [largest, index, first, second, *a.split(2, 1)]


def keyed_draws(a: Tensor, w: Tensor) -> list[Tensor]:
    keys = (1e6 * a[:, 0, 0]).long()
    return [fold_in(keys, 3), normal(fold_in(root(0, "x"), keys), (2,))]


@pytest.mark.parametrize("fn", [gradients, constants, several_results, keyed_draws])
def test_a_graph_computes_what_its_function_computes(
    fn: Callable[..., list[Tensor]],
) -> None:
    graph = record(fn, (draw(2, 4, 3), draw(2, 3, 2, tag="w")))
    for other in ("a", "b"):
        args = draw(2, 4, 3, tag=other), draw(2, 3, 2, tag=f"w{other}")
        torch.testing.assert_close(graph(*args), fn(*args), rtol=0, atol=0)


def test_an_argument_is_overwritten_by_the_graph_and_not_while_it_is_recorded() -> None:
    def fn(a: Tensor) -> list[Tensor]:
        a.add_(1.0)
        return [2 * a]

    a = draw(3)
    before = a.clone()
    graph = record(fn, (a,))
    assert torch.equal(a, before)
    (result,) = graph(a)
    assert torch.equal(a, before + 1)
    assert torch.equal(result, 2 * a)


@pytest.mark.parametrize(
    "read",
    [
        lambda a: [a * a.sum().item()],
        lambda a: [a if a.sum() > 0 else -a],
        lambda a: [a[a > 0]],
        lambda a: [a * float(torch.tensor(2.0) * a[0])],
    ],
)
def test_a_function_that_depends_on_a_value_is_refused(
    read: Callable[[Tensor], list[Tensor]],
) -> None:
    with pytest.raises(ValueError, match="reads a value"):
        record(read, (draw(3),))


def test_recording_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
from fedbilevel.execution.stacked._recording import record
record(lambda a: [torch.func.vmap(torch.sin)(a)], (torch.ones(3),))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
