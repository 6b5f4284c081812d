"""The environment: cohort sizes and local steps, wrong conditions, and conditions in TOML."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedbilevel import Environment
from fedbilevel.core.rng import fold_in, root
from fedbilevel.core.settings import build
from fedbilevel.experiments import config as configs
from fedbilevel.federation.delays import Constant, Faults, Stragglers
from tests.support.refusals import refusal
from tests.support.tool import write

KEYS = fold_in(root(2, "test"), torch.arange(6000)).tolist()

# Cohorts and local steps


@pytest.mark.parametrize(
    ("participation", "clients", "size"),
    [
        (1.0, 7, 7),
        (1, 7, 1),
        (7, 7, 7),
        (0.1, 100, 10),
        (0.3, 10, 3),
        (0.26, 10, 3),
        (0.24, 10, 2),
        (0.01, 10, 1),  # a cohort is never empty
        (1e-9, 1, 1),
    ],
)
def test_cohort_size(participation: float, clients: int, size: int) -> None:
    environment = Environment(participation=participation)
    environment.check(clients)
    assert environment.cohort_size(clients) == size


@settings(deadline=None, max_examples=100)
@given(st.floats(0, 1, exclude_min=True), st.integers(1, 10**6))
def test_a_fraction_is_met_to_within_half_a_client(participation: float, clients: int) -> None:
    size = Environment(participation=participation).cohort_size(clients)
    assert 1 <= size <= clients
    assert abs(size - participation * clients) <= 0.5 or size == 1


def test_one_number_of_local_steps_is_for_everyone() -> None:
    assert Environment(local_steps=4).draw_local_steps(KEYS[:3], [5, 0, 2]) == [4, 4, 4]


def test_a_list_of_local_steps_goes_by_client() -> None:
    environment = Environment(local_steps=[7, 8, 9, 10])
    assert environment.draw_local_steps(KEYS[:3], [3, 0, 3]) == [10, 7, 10]


@pytest.mark.parametrize(("low", "high"), [(5, 15), (1, 2), (3, 3)])
def test_drawn_local_steps_are_uniform_within_bounds(low: int, high: int) -> None:
    """Each count is within 5 standard deviations of its expectation."""
    steps = Environment(local_steps=(low, high)).draw_local_steps(KEYS, range(len(KEYS)))
    p = 1 / (high - low + 1)
    assert set(steps) == set(range(low, high + 1))
    for value in range(low, high + 1):
        assert abs(steps.count(value) - p * len(KEYS)) <= 5 * (p * (1 - p) * len(KEYS)) ** 0.5


def test_drawn_local_steps_belong_to_the_key() -> None:
    environment = Environment(local_steps=(1, 1000))
    steps = environment.draw_local_steps(KEYS[:20], range(20))
    assert environment.draw_local_steps(KEYS[:20], range(20, 40)) == steps
    assert environment.draw_local_steps(KEYS[19::-1], range(20)) == steps[::-1]
    assert environment.draw_local_steps(KEYS[20:40], range(20)) != steps
    assert all(type(step) is int for step in steps)


# Wrong conditions


@pytest.mark.parametrize(
    ("fields", "kind", "sentence"),
    [
        ({"participation": 0}, ValueError, "participation is 0; it must be at least 1"),
        ({"participation": 0.0}, ValueError, "participation is 0.0; it must be in (0, 1]"),
        ({"participation": 1.5}, ValueError, "participation is 1.5; it must be in (0, 1]"),
        ({"participation": math.nan}, ValueError, "participation is nan; it must be finite"),
        ({"participation": True}, TypeError, "participation is True; it must be a whole number"),
        (
            {"capacity": (1.0, 0.5)},
            TypeError,
            "capacity is (1.0, 0.5); it must be a number in (0, 1], or a list of such numbers",
        ),
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
        (
            {"delay": 2.0},
            TypeError,
            "delay is 2.0; it must be one of fedbilevel.delays, or None",
        ),
        ({"faults": 0.1}, TypeError, "faults is 0.1; it must be a delays.Faults"),
        (
            {"deadline": 2.0},
            ValueError,
            "deadline is 2.0 but delay is None; without delays there are none",
        ),
        (
            {"delay": Constant(), "deadline": -1.0},
            ValueError,
            "deadline is -1.0; it must be above 0",
        ),
        (
            {"faults": Faults(leave=0.5)},
            ValueError,
            "faults.leave is 0.5 but delay is None; without delays no time passes",
        ),
    ],
)
def test_wrong_conditions_are_refused_in_one_sentence(
    fields: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        Environment(**fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"participation": 6}, "participation is 6; there are only 5 clients"),
        (
            {"participation": 2, "min_replies": 3},
            "min_replies is 3; only 2 clients are asked per round",
        ),
        (
            {"participation": 0.4, "min_replies": 3},
            "min_replies is 3; only 2 clients are asked per round",
        ),
        ({"local_steps": [1, 2]}, "local_steps is a list of 2 entries; there are 5 clients"),
        (
            {"delay": Constant(), "stragglers": Stragglers(6)},
            "stragglers.clients is 6; there are only 5 clients",
        ),
    ],
)
def test_conditions_that_do_not_fit_the_number_of_clients_are_refused(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Environment(**fields).check(5)


# Conditions in TOML


def resolve(text: str, **options: Any) -> configs.Config:
    return configs.resolve("a.toml", tomllib.loads(text), **options)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "delay = 2.0",
            "environment.delay is 2.0; a table must have "
            "model = 'constant' or 'lognormal' or 'pareto'",
        ),
        (
            'delay = { model = "gamma" }',
            "a table must have model = 'constant' or 'lognormal' or 'pareto' or 'trace'",
        ),
        (
            'delay = { model = "pareto", sigma = 1.0 }',
            "unknown key 'environment.delay.sigma'; allowed are mean, shape",
        ),
        ('delay = { model = "constant", mean = "long" }', "environment.delay.mean is 'long'; "),
        (
            'delay = { model = "constant", mean = -1 }',
            "environment.delay.mean is -1; it must be above 0",
        ),
        ('delay = { model = "trace" }', "environment.delay.path is missing"),
        ('delay = { model = "trace", path = "no.csv" }', "no.csv"),
        ("stragglers = 3", "environment.stragglers is 3; it must be a table"),
        ("stragglers = { slowdown = 2 }", "environment.stragglers.clients is missing"),
        (
            "inner_delay = { model = 'constant' }",
            "[environment] inner_delay is Constant(mean=1.0) but delay is None; without delays",
        ),
        (
            "stragglers = { clients = 1 }",
            "[environment] stragglers is Stragglers(clients=1, slowdown=5.0) but delay",
        ),
        (
            "deadline = 3.0",
            "[environment] deadline is 3.0 but delay is None; without delays there are none",
        ),
        (
            'deadline = "soon"\ndelay = { model = "constant" }',
            "environment.deadline is 'soon'; it must be a number",
        ),
        ("faults = { dorp = 0.1 }", "unknown key 'environment.faults.dorp' (did you mean 'drop'?)"),
        ("faults = { drop = 2.0 }", "environment.faults.drop is 2.0; it must be in [0, 1]"),
    ],
)
def test_wrong_tables_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(configs.ConfigError) as error:
        resolve(f'task.name = "quadratic"\n[environment]\n{text}')
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_conditions_survive_being_written_down(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.csv", "1.0\n2.0\n")
    delays = st.sampled_from(
        [
            'delay = { model = "constant", mean = 3 }',
            'delay = { model = "lognormal", sigma = 0.25 }',
            'delay = { model = "pareto", shape = 1.5 }',
            f'delay = {{ model = "trace", path = "{trace}" }}',
        ]
    )
    others = st.lists(
        st.sampled_from(
            [
                "stragglers = { clients = 2, slowdown = 3 }",
                "deadline = 9",
                "faults = { drop = 0.1, leave = 1 }",
            ]
        ),
        unique=True,
    )

    @settings(max_examples=25, deadline=None)
    @given(delays, others)
    def check(delay: str, others: list[str]) -> None:
        first = resolve("\n".join(['task.name = "quadratic"', "[environment]", delay, *others]))
        again = resolve(tomli_w.dumps(first.table))
        assert again.table == first.table
        assert again.environment == first.environment

    check()


def test_a_section_adds_to_the_conditions_of_all() -> None:
    text = """
    task.name = "quadratic"
    environment = { delay = { model = "constant" } }
    algorithms.fedbio.environment = { stragglers = { clients = 2 } }
    """
    assert resolve(text).environment.stragglers is None
    assert resolve(text, algorithm="fedbio").environment.stragglers == Stragglers(2)


def test_a_smoke_test_has_enough_clients_for_its_stragglers() -> None:
    text = """
    task.name = "quadratic"
    environment = { delay = { model = "constant" }, stragglers = { clients = 5 } }
    """
    config = resolve(text, smoke=True)
    config.environment.check(len(config.load_task(None).clients))


@settings(deadline=None, max_examples=200)
@given(
    st.one_of(
        st.integers(-1, 5),
        st.floats(-1, 3),
        st.lists(st.integers(0, 5), max_size=3),
        st.tuples(st.integers(0, 5), st.integers(0, 5)),
        st.none() | st.text(max_size=2),
    )
)
@example([2, 1])
@example((2, 1))
@example(())
def test_local_steps_are_a_count_a_range_or_a_list_in_python_and_in_toml(value: Any) -> None:
    entries = [value]
    if isinstance(value, (tuple, list)):
        entries = list(value)
    allowed = all(type(entry) is int and entry >= 1 for entry in entries)
    if isinstance(value, tuple):
        allowed = allowed and len(value) == 2 and value[0] <= value[1]
    if not allowed:
        refusal(Environment, local_steps=value)
        return
    assert Environment(local_steps=value).local_steps == value
    in_toml = {list: {"clients": value}, tuple: entries, int: value}[type(value)]
    environment = build(Environment, "environment", {"local_steps": in_toml})
    assert environment.local_steps == value
