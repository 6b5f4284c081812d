"""A pool holds the samples that its clients hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.execution.stacked._pools import Pool, Pools, SeparateSamples


@pytest.mark.parametrize("memory", [0, 1500, 10**6], ids=["none", "some", "all"])
def test_a_pool_selects_what_the_clients_hold(memory: int) -> None:
    data = {}
    for client in range(6):
        features = torch.arange(10.0 * (client + 1)).view(-1, 2) + 1000 * client
        data[client] = (features, torch.arange(5 * (client + 1)))
    pool = Pool(memory, "cpu")
    for cohort in ([0, 1], [1, 3], [5, 4, 2], [0, 5], [5, 0]):
        pool.load({client: data[client] for client in cohort})
        indices = torch.tensor([[4, 0, 2]] * len(cohort))
        starts = torch.tensor([pool.starts[client] for client in cohort])
        selected = pool.select(indices, starts, 5)
        expected = SeparateSamples([data[client] for client in cohort]).select(indices)
        assert isinstance(selected, tuple)
        assert isinstance(expected, tuple)
        for actual, tensor in zip(selected, expected, strict=True):
            assert torch.equal(actual, tensor)
        first_five = pool.select(None, starts, 5)
        assert torch.equal(first_five[1], torch.arange(5).expand(len(cohort), 5))
    largest_cohort = 40 * 16 * 2
    used = sum(tensor.nbytes for tensor in pool.tensors)
    assert used <= max(memory, largest_cohort), "it does not grow without bound"


FEATURES = torch.arange(57.0).view(19, 3)
LABELS = torch.arange(19)
ARRAY = torch.arange(30.0).view(10, 3).numpy()

# Whether the sides of some clients are slices of the same tensors, and those sides.
LAYOUTS: dict[str, tuple[bool, list[tuple[Tensor, ...]]]] = {
    "slices": (True, [(FEATURES[i : i + 3], LABELS[i : i + 3]) for i in (16, 0, 5)]),
    "copies": (False, [(FEATURES[i : i + 3].clone(),) for i in (16, 0, 5)]),
    "from unequal rows": (
        False,
        [(FEATURES[i : i + 3], LABELS[i // 2 :][:3]) for i in (16, 0, 5)],
    ),
    "from within a row": (False, [(FEATURES.view(-1)[i : i + 6].view(2, 3),) for i in (1, 4)]),
    "every second row": (False, [(FEATURES[::2][i : i + 1],) for i in range(10)]),
    "arrays of one address": (False, [(torch.from_numpy(ARRAY[:n]),) for n in (5, 9)]),
    "columns": (False, [(FEATURES.T[:, i : i + 3],) for i in (0, 3)]),
    "an expanded row": (False, [(torch.zeros(1, 3).expand(4, 3),)] * 2),
    "no features": (False, [(torch.zeros(4, 0),)] * 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_the_same_tensors_are_pooled_without_copies(layout: str) -> None:
    are_slices, sides = LAYOUTS[layout]
    clients = [fb.ClientData(train=side, val=side) for side in sides]
    shared = Pools(0, "cpu").view_shared_storage("train", clients)
    assert (shared is not None) == are_slices
    if shared is None:
        return
    pool, starts = shared
    last_and_first = torch.tensor([[len(side[0]) - 1, 0] for side in sides])
    selected = pool.select(last_and_first, starts, 2)
    expected = SeparateSamples(sides).select(last_and_first)
    assert isinstance(selected, tuple)
    assert isinstance(expected, tuple)
    for actual, tensor in zip(selected, expected, strict=True):
        assert torch.equal(actual, tensor)
        assert actual.dtype == tensor.dtype
