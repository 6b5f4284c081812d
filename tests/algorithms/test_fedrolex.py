"""FedRolex: where its windows get, compared with HeteroFL's."""

from __future__ import annotations

import torch

from fedbilevel.algorithms import FedRolex, HeteroFL
from tests.support.small_net import advance, small_net_run, weights_of


def share_moved(method: HeteroFL) -> float:
    """The share of the weights that moved within 8 iterations, as many as there are units."""
    run = small_net_run(method, 0.25)
    before = weights_of(run)
    advance(run, 8)
    return float((weights_of(run) != before).double().mean())


def test_a_rolling_window_gets_everywhere_and_a_static_one_does_not() -> None:
    assert share_moved(FedRolex(lr_x=0.3, lr_y=0.3)) == 1.0
    assert share_moved(HeteroFL(lr_x=0.3, lr_y=0.3)) < 0.3


def test_windows_of_one_width_move_in_step() -> None:
    """Weights between units of two layers that are further apart than a window never train."""
    method = FedRolex(lr_x=0.3, lr_y=0.3)
    run = small_net_run(method, 0.5, "conv4", environment={"local_steps": 1})
    name = "backbone.4.weight"  # from 2 groups of 4 channels to 2 groups of 4
    before = run.state.x[name]
    advance(run, 6)
    changed = (run.state.x[name] != before).any(-1).any(-1)
    expected = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
    assert torch.equal(changed, expected)
