"""The quadratic task: closed forms that agree with each other, and its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedbilevel as fb


def test_closed_forms_agree() -> None:
    task: Any = fb.tasks.load("quadratic", clients=3, condition=20.0, samples=4, noise=0.5, seed=1)
    weights = [0.2, 0.5, 0.3]
    assert task.gradient(task.x_star(weights), weights)["x"].norm() < 1e-10
    x = fb.Tree(x=torch.linspace(-1, 1, 5, dtype=torch.float64)).map(lambda t: t.requires_grad_())
    (gradient,) = torch.autograd.grad(task.phi(x, weights), x["x"])
    torch.testing.assert_close(task.gradient(x, weights)["x"], gradient)


def test_eigenvalues_range_from_one_over_the_condition_to_one() -> None:
    task: Any = fb.tasks.load("quadratic", clients=3, condition=20.0, samples=4, noise=0.5, seed=1)
    hessians = [client.train[0][0] for client in task.clients]
    eigenvalues = torch.linalg.eigvalsh(torch.stack(hessians))
    assert float(eigenvalues.min()) == pytest.approx(1 / 20)
    assert float(eigenvalues.max()) == pytest.approx(1.0)


def test_heterogeneity_0_makes_clients_equal_and_1_independent() -> None:
    equal: Any = fb.tasks.load("quadratic", clients=3, heterogeneity=0.0)
    first = equal.clients[0].train[0]
    assert all(torch.equal(first, client.train[0]) for client in equal.clients)
    independent: Any = fb.tasks.load("quadratic", clients=3, heterogeneity=1.0)
    first = independent.clients[0].train[0]
    assert not torch.allclose(first, independent.clients[1].train[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heterogeneity": 1.5}, "heterogeneity is 1.5; it must be in"),
        ({"condition": 0.5}, "condition is 0.5; it must be at least 1"),
        ({"clients": 0}, "clients is 0; it must be at least 1"),
        ({"noise": -1.0}, "noise is -1.0; it must not be negative"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("quadratic", **options)
