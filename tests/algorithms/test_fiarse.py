"""FIARSE: its steps by hand, and the mean over the clients that moved a weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad

from fedbilevel.algorithms import FIARSE
from fedbilevel.algorithms.fiarse import gradient_factor
from fedbilevel.core.tree import Tree, flatten
from tests.support.small_net import advance, small_net_run, weights_of

# 1 + 2 * 0.3 * 0.9 / 1.2^2, 1 + 2 * 0.09 / 0.36, dropped, dropped, 1 + 2 * 0.18 / 0.81
FACTORS = {0.0: [1.0] * 5, 0.3: [1.375, 1.5, 0.0, 0.0, 1 + 4 / 9]}


@pytest.mark.parametrize("thr", FACTORS)
def test_gradients_are_multiplied_by_a_factor_of_the_weight(thr: float) -> None:
    w = torch.tensor([-0.9, -0.3, 0.29, 0.0, 0.6], dtype=torch.float64)
    factor = gradient_factor(w, torch.tensor(thr, dtype=torch.float64))
    torch.testing.assert_close(factor, torch.tensor(FACTORS[thr], dtype=torch.float64))


def test_fiarse_by_hand() -> None:
    """One client, two local steps on full batches: the mask is renewed, the threshold is not."""
    method = FIARSE(lr_x=0.3, lr_y=0.3, server_lr=0.7)
    run = small_net_run(method, 0.5, clients=1, environment={"batch_size": None})
    x, y = run.fed.problem.start
    data = run.fed.transport.executor.clients[0].train
    start = Tree({**x, **y})
    sizes = weights_of(run).abs()
    thr = sizes.sort(descending=True).values[len(sizes) // 4 - 1]
    w = start
    for _ in range(2):
        kept = w.map(lambda t: t.abs() >= thr)
        masked = w.map(torch.mul, kept)
        masked_x = Tree({name: masked[name] for name in x})
        masked_y = Tree({name: masked[name] for name in y})
        g_x, g_y = grad(run.fed.problem.lower, argnums=(0, 1))(masked_x, masked_y, data, ())
        factor = w.map(lambda t, k: k * (1 + 2 * thr * t.abs() / (t.abs() + thr) ** 2), kept)
        w = w - 0.3 * factor.map(torch.mul, {**g_x, **g_y})
    advance(run, 1)
    expected = flatten(start + 0.7 * (w - start))
    torch.testing.assert_close(weights_of(run), expected, rtol=0, atol=1e-12)


def test_a_weight_is_averaged_over_the_clients_that_moved_it() -> None:
    """Capacities 1 and 1/4, weights 1 and 3.

    What the small client keeps moves by the mean of both, the rest by the large client's alone.
    """

    def displacement(cohort: list[int]) -> tuple[Tensor, float]:
        run = small_net_run(
            FIARSE(lr_x=0.3, lr_y=0.3),
            [1.0, 0.25],
            clients=2,
            environment={"batch_size": None},
            weights=[1.0, 3.0],
        )
        run.fed.sample = lambda: cohort  # type: ignore[method-assign]
        before = weights_of(run)
        advance(run, 1)
        return weights_of(run) - before, run.fed.records()["covered_x"]

    large, _ = displacement([0])
    small, _ = displacement([1])
    both, covered = displacement([0, 1])
    counts = (large != 0).double() + 3 * (small != 0)
    assert set(counts.tolist()) == {1.0, 4.0}
    torch.testing.assert_close(both, (large + 3 * small) / counts, rtol=0, atol=1e-12)
    size_of_x = 64 * 8 + 8
    assert covered == pytest.approx(float((counts[:size_of_x] > 0).double().mean()))
