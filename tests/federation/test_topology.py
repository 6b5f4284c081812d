"""Topologies: mixing matrices that average, and those that are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.core.settings import build
from fedbilevel.experiments.parts import environment_table
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.topology import among, check_topology, links_of, mix, mixing_matrix

TOPOLOGIES = st.sampled_from(["ring", "grid", "complete", "erdos-renyi 0.6"])


@settings(deadline=None, max_examples=40)
@given(TOPOLOGIES, st.integers(1, 24), st.integers(0, 9))
def test_a_matrix_averages(topology: str, clients: int, seed: int) -> None:
    """It is symmetric and doubly stochastic, and its powers tend to the mean."""
    W = mixing_matrix(topology, clients, seed)
    assert (W >= 0).all()
    torch.testing.assert_close(W, W.T, rtol=0, atol=0)
    torch.testing.assert_close(W.sum(1), torch.ones(clients, dtype=torch.float64))
    eigenvalues = torch.linalg.eigvalsh(W).abs().sort().values
    assert clients == 1 or eigenvalues[-2] < 1 - 1e-6
    check_topology("topology", W.tolist())


@settings(deadline=None, max_examples=40)
@given(TOPOLOGIES, st.integers(2, 12), st.data())
def test_some_of_the_clients_average_among_themselves(
    topology: str, clients: int, data: st.DataObject
) -> None:
    W = mixing_matrix(topology, clients, 0)
    part = data.draw(st.lists(st.integers(0, clients - 1), min_size=1, unique=True))
    among_them = among(W, part)
    torch.testing.assert_close(among_them.sum(1), torch.ones(len(part), dtype=torch.float64))
    for row, i in enumerate(part):
        for column, j in enumerate(part):
            assert i == j or among_them[row, column] == W[i, j]


def test_links_of_the_graphs() -> None:
    def links(topology: str, clients: int) -> list[int]:
        return links_of(mixing_matrix(topology, clients, 0))

    assert links("ring", 5) == [2] * 5
    assert links("ring", 2) == [1, 1]
    assert links("ring", 1) == [0]
    assert links("complete", 4) == [3] * 4
    assert links("grid", 9) == [2, 3, 2, 3, 4, 3, 2, 3, 2]
    assert links("grid", 5) == [1, 2, 2, 2, 1]  # 5 is prime: a path
    assert links("erdos-renyi 1", 6) == links("complete", 6)


def test_a_random_graph_is_that_of_the_seed() -> None:
    first = mixing_matrix("erdos-renyi 0.4", 12, seed=1)
    assert torch.equal(first, mixing_matrix("erdos-renyi 0.4", 12, seed=1))
    assert not torch.equal(first, mixing_matrix("erdos-renyi 0.4", 12, seed=2))
    shares = [sum(links_of(mixing_matrix("erdos-renyi 0.4", 30, seed))) for seed in range(20)]
    assert abs(sum(shares) / (20 * 30 * 29) - 0.4) < 0.03


def test_mixing_is_the_matrix_on_the_rows() -> None:
    W = mixing_matrix("ring", 5, 0)
    v = torch.arange(10.0).reshape(5, 2)
    mixed = mix(W, {"v": fb.Tree(a=v), "w": v[:, 0]})
    torch.testing.assert_close(mixed["v"]["a"], W.float() @ v)
    torch.testing.assert_close(mixed["w"], W.float() @ v[:, 0])


HALVES = [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("star", "topology is 'star'; it must be 'ring', 'grid'"),
        ("erdos-renyi", "topology is 'erdos-renyi'; it must be"),
        ("erdos-renyi 1.5", "with P in"),
        ("erdos-renyi nan", "with P in"),
        (3, "topology is 3; it must be"),
        ([], "not square"),
        ([[1.0, 0.0]], "not square"),
        ([[1.0, 0.0], [0.0, 1.0]], "without a path of links from client 0 to client 1"),
        ([[0.0, 1.0], [1.0, 0.0]], "eigenvalue -1"),
        ([[0.5, 0.5], [0.4, 0.6]], "not doubly stochastic: column 1 sums to 1.1"),
        ([[0.5, 0.6], [0.5, 0.5]], "not doubly stochastic: row 0 sums to 1.1"),
        ([[1.5, -0.5], [-0.5, 1.5]], "weight -0.5; all must be at least 0"),
        ([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]], "not symmetric"),
        ([["a", 0.5], [0.5, 0.5]], "must be a number"),
    ],
)
def test_what_does_not_average_is_refused(value: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as error:
        fb.Environment(topology=value)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_matrix_for_another_number_of_clients_is_refused() -> None:
    with pytest.raises(ValueError, match="a matrix for 2 clients; there are 3 clients"):
        fb.Environment(topology=HALVES).check(3)


def test_a_graph_that_falls_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="none of 1000 draws with 50 clients was connected"):
        mixing_matrix("erdos-renyi 0.001", 50, 0)


@pytest.mark.parametrize("topology", ["ring", "erdos-renyi 0.3", HALVES])
def test_an_experiment_has_it_as_a_table(topology: object) -> None:
    environment = fb.Environment(topology=topology)  # type: ignore[arg-type]
    table = environment_table(environment)
    assert table["topology"] == topology
    assert build(Environment, "environment", table) == environment
