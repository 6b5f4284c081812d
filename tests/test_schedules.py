"""Schedules have the values of their formulas and stand wherever a step size does."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.algorithms import SimFBO
from fedbilevel.core.schedules import Cosine, Power

size = st.floats(1e-6, 10)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Power(0.3), {0: 0.3, 3: 0.15, 8: 0.1, 99: 0.03}),
        (Power(0.3, power=1.0), {0: 0.3, 2: 0.1, 9: 0.03}),
        (Power(0.3, power=2.0, after=5.0), {0: 0.3, 5: 0.075, 45: 0.003}),
        (Power(0.3, power=0.0), {0: 0.3, 1000: 0.3}),
        (
            Cosine(1.0, 0.2, 12),
            {0: 1.0, 3: 0.6 + 0.4 / 2**0.5, 4: 0.8, 6: 0.6, 8: 0.4, 12: 0.2, 13: 0.2, 10**6: 0.2},
        ),
        (Cosine(0.1, 0.5, 2), {0: 0.1, 1: 0.3, 2: 0.5, 3: 0.5}),
        (Cosine(1.0, 0.5, 1), {0: 1.0, 1: 0.5}),
    ],
)
def test_values(schedule, values):
    assert {t: schedule(t) for t in values} == pytest.approx(values, rel=1e-12)
    assert all(isinstance(schedule(t), float) for t in values)


@settings(deadline=None, max_examples=50)
@given(size, st.floats(0, 3), st.floats(0.1, 1000), st.integers(0, 10**6))
def test_power_decays_and_stays_positive(start, power, after, t):
    schedule = Power(start, power, after)
    assert 0 < schedule(t + 1) <= schedule(t) <= schedule(0) == start


@settings(deadline=None, max_examples=50)
@given(size, size, st.integers(1, 1000), st.integers(0, 2000))
def test_cosine_goes_from_start_to_end_without_turning(start, end, iterations, t):
    schedule, rounding = Cosine(start, end, iterations), 1e-12 * (start + end)
    assert schedule(0) == pytest.approx(start)
    assert schedule(iterations + t) == pytest.approx(end)
    assert (schedule(t + 1) - schedule(t)) * (1 if end >= start else -1) >= -rounding
    assert min(start, end) - rounding <= schedule(t) <= max(start, end) + rounding


@pytest.mark.parametrize(
    ("build", "kind", "sentence"),
    [
        (lambda: Power(0.0), ValueError, "start is 0.0; it must be above 0"),
        (lambda: Power("0.1"), TypeError, "start is '0.1'; it must be a number"),
        (lambda: Power(math.inf), ValueError, "start is inf; it must be finite"),
        (lambda: Power(0.1, power=-1.0), ValueError, "power is -1.0; it must not be negative"),
        (lambda: Power(0.1, after=0), ValueError, "after is 0; it must be above 0"),
        (lambda: Cosine(-0.1, 0.1, 5), ValueError, "start is -0.1; it must be above 0"),
        (lambda: Cosine(0.1, 0.0, 5), ValueError, "end is 0.0; it must be above 0"),
        (lambda: Cosine(0.1, 0.01, 0), ValueError, "iterations is 0; it must be at least 1"),
        (lambda: Cosine(0.1, 0.01, 2.5), TypeError, "iterations is 2.5; it must be a whole number"),
    ],
)
def test_refusals(build, kind, sentence):
    with pytest.raises(kind, match=f"^{sentence}$"):
        build()


def test_an_algorithm_takes_schedules_for_its_steps():
    algorithm = SimFBO(lr_x=Power(0.3), server_lr_y=lambda t: 0.5 / (t + 1), lr_y=0.7)
    now = algorithm.at(3)
    assert (now.lr_x, now.server_lr_y, now.lr_y) == pytest.approx((0.15, 0.125, 0.7))
    assert algorithm.at(0).lr_x == pytest.approx(0.3)
    assert now.at(8) is now


def test_a_schedule_that_is_no_step_size_is_refused():
    with pytest.raises(ValueError, match=r"^lr_x is -1; it must be above 0$"):
        SimFBO(lr_x=lambda t: 1 - t).at(2)
