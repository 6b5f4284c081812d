"""Schedules have the values of their formulas and refuse wrong arguments."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
def test_a_schedule_has_the_values_of_its_formula(schedule, values):
    assert {t: schedule(t) for t in values} == pytest.approx(values, rel=1e-12)
    assert all(isinstance(schedule(t), float) for t in values)


@settings(deadline=None, max_examples=50)
@given(size, st.floats(0, 3), st.floats(0.1, 1000), st.integers(0, 10**6))
def test_power_decays_and_stays_positive(start, power, after, t):
    schedule = Power(start, power, after)
    assert 0 < schedule(t + 1) <= schedule(t) <= schedule(0) == start


@settings(deadline=None, max_examples=50)
@given(size, size, st.integers(1, 1000), st.integers(0, 2000))
def test_cosine_is_monotone_from_start_to_end(start, end, iterations, t):
    schedule = Cosine(start, end, iterations)
    rounding = 1e-12 * (start + end)
    assert schedule(0) == pytest.approx(start)
    assert schedule(iterations + t) == pytest.approx(end)
    change = schedule(t + 1) - schedule(t)
    assert change * math.copysign(1, end - start) >= -rounding
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
def test_a_wrong_argument_is_refused(build, kind, sentence):
    with pytest.raises(kind, match=f"^{sentence}$"):
        build()
