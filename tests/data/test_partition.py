"""Partitions: every sample belongs to one client, and the published splits are reproduced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.data import partition

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
NAMES = st.sampled_from(["iid", "shards", "dirichlet"])


@pytest.fixture(scope="module")
def mnist_labels() -> Any:
    """Return labels with the class counts of MNIST, in a random order."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(10), MNIST_COUNTS))


@st.composite
def cases(draw: Any) -> tuple[Any, int]:
    """Draw labels and a number of clients."""
    clients = draw(st.integers(1, 12))
    labels = draw(st.lists(st.integers(0, 4), min_size=2 * clients, max_size=2 * clients + 60))
    return np.array(labels), clients


@settings(deadline=None)
@given(NAMES, cases(), st.integers(0, 2**32))
def test_partitions_are_exhaustive_disjoint_and_deterministic(
    name: str, case: tuple[Any, int], seed: int
) -> None:
    labels, clients = case
    parts = partition.by_name(name, labels, clients, seed)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and part.ndim == 1 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    again = partition.by_name(name, torch.from_numpy(labels), clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", ["iid", "shards", "dirichlet"])
def test_another_seed_is_another_partition(name: str, mnist_labels: Any) -> None:
    first = partition.by_name(name, mnist_labels, 100, seed=0)
    second = partition.by_name(name, mnist_labels, 100, seed=1)
    assert not np.array_equal(first[0], second[0])


@pytest.mark.parametrize("name", ["iid", "shards", "dirichlet"])
def test_samples_are_shuffled_within_a_client(name: str, mnist_labels: Any) -> None:
    """The order of a client's samples correlates neither with their indices nor their labels."""
    for part in partition.by_name(name, mnist_labels, 100, 0):
        rank_by_label = np.lexsort((part, mnist_labels[part])).argsort()
        order = np.arange(len(part))
        assert np.abs(np.corrcoef([order, part, rank_by_label])[0, 1:]).max() < 0.2


@given(cases(), st.integers(0, 100))
def test_iid_sizes_differ_by_one_at_most(case: tuple[Any, int], seed: int) -> None:
    labels, clients = case
    sizes = [len(part) for part in partition.iid(labels, clients, seed)]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(cases(), st.integers(0, 100), st.floats(1e-6, 1e6))
def test_dirichlet_leaves_every_client_two_samples(
    case: tuple[Any, int], seed: int, alpha: float
) -> None:
    labels, clients = case
    parts = partition.dirichlet(labels, clients, seed, alpha)
    assert min(len(part) for part in parts) >= 2
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


def test_mnist_is_cut_into_200_shards_of_300_samples(mnist_labels: Any) -> None:
    parts = partition.shards(mnist_labels, 100, seed=3)
    assert {len(part) for part in parts} == {600}
    rank = np.empty(60000, dtype=np.int64)
    rank[np.argsort(mnist_labels, kind="stable")] = np.arange(60000)
    assigned: list[int] = []
    for part in parts:
        shards, counts = np.unique(rank[part] // 300, return_counts=True)
        assert counts.tolist() == [300, 300]
        assigned += shards.tolist()
    assert sorted(assigned) == list(range(200))


def test_shards_of_balanced_classes_give_a_client_two_labels_at_most() -> None:
    labels = np.tile(np.arange(10), 6000)
    parts = partition.shards(labels, 100, seed=0)
    assert max(len(np.unique(labels[part])) for part in parts) == 2


def test_more_shards_per_client_give_more_labels_per_client(mnist_labels: Any) -> None:
    mean_labels = []
    for per_client in (1, 2, 5):
        parts = partition.shards(mnist_labels, 100, 0, per_client)
        mean_labels.append(np.mean([len(np.unique(mnist_labels[part])) for part in parts]))
    assert mean_labels[0] < mean_labels[1] < mean_labels[2]


def test_dirichlet_proportions_have_the_concentration_alpha(mnist_labels: Any) -> None:
    """A component of Dirichlet(alpha) over K classes has variance (K - 1) / (K^2 (K alpha + 1))."""
    for alpha in (0.1, 0.5, 10.0):
        parts = partition.dirichlet(mnist_labels, 200, seed=0, alpha=alpha)
        shares = [np.bincount(mnist_labels[part], minlength=10) / len(part) for part in parts]
        assert np.array(shares).var() == pytest.approx(9 / (100 * (10 * alpha + 1)), rel=0.15)


@pytest.mark.parametrize(
    ("name", "validation", "sizes"),
    [
        ("iid", 0.5, (300, 300)),
        ("shards", 0.2, (480, 120)),
        ("iid", 0.25, (450, 150)),
        ("shards", 0.25, (450, 150)),
    ],
)
def test_published_splits(
    mnist_labels: Any, name: str, validation: float, sizes: tuple[int, int]
) -> None:
    for client, part in enumerate(partition.by_name(name, mnist_labels, 100, seed=0)):
        train, held_out = partition.split(part, validation, seed=0, client=client)
        assert (len(train), len(held_out)) == sizes


@given(
    st.sets(st.integers(0, 10**6), min_size=2, max_size=50),
    st.floats(0.001, 0.999),
    st.integers(0, 9),
)
def test_both_sides_of_a_split_are_disjoint_and_not_empty(
    indices: set[int], validation: float, client: int
) -> None:
    train, held_out = partition.split(np.array(sorted(indices)), validation, seed=5, client=client)
    assert len(train) >= 1
    assert len(held_out) >= 1
    assert abs(len(held_out) - validation * len(indices)) <= 1
    assert sorted([*train.tolist(), *held_out.tolist()]) == sorted(indices)


def test_a_split_is_keyed_by_seed_and_client() -> None:
    indices = np.arange(100)
    draws = {}
    for seed, client in ((0, 0), (0, 1), (1, 0), (1, 1)):
        train, _ = partition.split(indices, 0.5, seed, client)
        draws[seed, client] = tuple(train)
    assert len(set(draws.values())) == 4
    again, _ = partition.split(indices, 0.5, 0, 0)
    assert tuple(again) == draws[0, 0]


@pytest.mark.parametrize(
    ("name", "clients", "seed", "message"),
    [
        ("dirichelt", 2, 0, r"partition is 'dirichelt' \(did you mean 'dirichlet'\?\); "),
        ("iid", 11, 0, "clients is 11; it must be at most 10 for 10 samples"),
        ("iid", 0, 0, "clients is 0"),
        ("dirichlet", 6, 0, "clients is 6; it must be at most 5 for 10 samples"),
        ("iid", 2, -1, "seed is -1"),
    ],
)
def test_wrong_arguments_are_refused(name: str, clients: int, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition.by_name(name, np.arange(10), clients, seed)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shards", {"per_clients": 2}, r"'per_clients' \(did you mean 'per_client'\?\); "),
        ("iid", {"alpha": 1.0}, "option of partition 'iid' is 'alpha'; this partition has none"),
        ("shards", {"per_client": 6}, "per_client is 6; it must be 1 to 5"),
        ("dirichlet", {"alpha": 0.0}, "alpha is 0.0; it must be above 0"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition.by_name(name, np.arange(10), 2, 0, **options)


@pytest.mark.parametrize("validation", [0.0, 1.0, -0.1])
def test_a_validation_fraction_must_be_between_0_and_1(validation: float) -> None:
    message = f"validation is {validation}; it must be above 0 and below 1"
    with pytest.raises(ValueError, match=message):
        partition.split(np.arange(10), validation, 0, 0)


def test_a_split_of_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="indices of client 4 hold 1 samples"):
        partition.split(np.arange(1), 0.5, 0, 4)
