"""Who takes part and how long each works: counts by hand, draws within bounds, uniform and keyed."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel import Environment
from fedbilevel.core.rng import fold_in, root

KEYS = fold_in(root(2, "test"), torch.arange(6000))


@pytest.mark.parametrize(
    ("participation", "clients", "cohort"),
    [
        (1.0, 7, 7),
        (1, 7, 1),
        (7, 7, 7),
        (0.1, 100, 10),
        (0.3, 10, 3),
        (0.26, 10, 3),
        (0.24, 10, 2),
        (0.01, 10, 1),  # never nobody
        (1e-9, 1, 1),
    ],
)
def test_cohort(participation, clients, cohort):
    environment = Environment(participation=participation)
    environment.check(clients)
    assert environment.cohort(clients) == cohort


@settings(deadline=None, max_examples=100)
@given(st.floats(0, 1, exclude_min=True), st.integers(1, 10**6))
def test_a_fraction_is_met_to_within_half_a_client(participation, clients):
    cohort = Environment(participation=participation).cohort(clients)
    assert 1 <= cohort <= clients
    assert abs(cohort - participation * clients) <= 0.5 or cohort == 1


def test_steps_of_one_number():
    assert Environment(local_steps=4).steps(KEYS[:3], [5, 0, 2]) == [4, 4, 4]


def test_steps_of_a_list_go_by_client():
    assert Environment(local_steps=[7, 8, 9, 10]).steps(KEYS[:3], [3, 0, 3]) == [10, 7, 10]


@pytest.mark.parametrize(("low", "high"), [(5, 15), (1, 2), (3, 3)])
def test_drawn_steps_are_uniform_within_bounds(low, high):
    """Each count is within 5 standard deviations of its expectation."""
    steps = Environment(local_steps=(low, high)).steps(KEYS, range(len(KEYS)))
    p = 1 / (high - low + 1)
    assert set(steps) == set(range(low, high + 1))
    for value in range(low, high + 1):
        assert abs(steps.count(value) - p * len(KEYS)) <= 5 * (p * (1 - p) * len(KEYS)) ** 0.5


def test_drawn_steps_belong_to_the_key():
    environment = Environment(local_steps=(1, 1000))
    steps = environment.steps(KEYS[:20], range(20))
    assert environment.steps(KEYS[:20], range(20, 40)) == steps
    assert environment.steps(KEYS[:20].flip(0), range(20)) == steps[::-1]
    assert environment.steps(fold_in(KEYS[:20], 1), range(20)) != steps
    assert all(type(step) is int for step in steps)


@pytest.mark.parametrize(
    ("given", "kind", "sentence"),
    [
        ({"participation": 0}, ValueError, "participation is 0; it must be at least 1"),
        ({"participation": 0.0}, ValueError, "participation is 0.0; it must be in (0, 1]"),
        ({"participation": 1.5}, ValueError, "participation is 1.5; it must be in (0, 1]"),
        ({"participation": math.nan}, ValueError, "participation is nan; it must be finite"),
        ({"participation": True}, TypeError, "participation is True; it must be a whole number"),
        ({"local_steps": 0}, ValueError, "local_steps is 0; it must be at least 1"),
        ({"local_steps": 2.0}, TypeError, "local_steps is 2.0; it must be a whole number"),
        ({"local_steps": [3, 0]}, ValueError, "local_steps is 0; it must be at least 1"),
        (
            {"local_steps": (5, 2)},
            ValueError,
            "local_steps is (5, 2); a tuple must be (low, high) with low <= high",
        ),
        (
            {"local_steps": (1, 2, 3)},
            ValueError,
            "local_steps is (1, 2, 3); a tuple must be (low, high) with low <= high",
        ),
        (
            {"local_steps": ()},
            ValueError,
            "local_steps is (); a tuple must be (low, high) with low <= high",
        ),
        ({"batch_size": 0}, ValueError, "batch_size is 0; it must be at least 1"),
        ({"batch_size": 16.0}, TypeError, "batch_size is 16.0; it must be a whole number"),
        ({"min_replies": 0}, ValueError, "min_replies is 0; it must be at least 1"),
    ],
)
def test_refusals(given, kind, sentence):
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        Environment(**given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"participation": 6}, "participation is 6; there are only 5 clients"),
        (
            {"participation": 2, "min_replies": 3},
            "min_replies is 3; only 2 clients are asked a round",
        ),
        (
            {"participation": 0.4, "min_replies": 3},
            "min_replies is 3; only 2 clients are asked a round",
        ),
        ({"local_steps": [1, 2]}, "local_steps is a list of 2 entries; there are 5 clients"),
    ],
)
def test_refusals_with_the_clients_at_hand(given, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Environment(**given).check(5)
