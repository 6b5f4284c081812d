"""Schedules have the values of their formulas and refuse wrong arguments."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.core.schedules import Cosine, Linear, Power, theory

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
        (Linear(2, increase=0.5), {0: 2.0, 1: 2.5, 100: 52.0}),
        (Linear(2.0, increase=0.5, end=4.0), {0: 2.0, 4: 4.0, 5: 4.0}),
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
        (lambda: Linear(0.0, 1.0), ValueError, "start is 0.0; it must be above 0"),
        (lambda: Linear(1.0, -1.0), ValueError, "increase is -1.0; it must not be negative"),
        (lambda: Linear(1.0, 1.0, end=0), ValueError, "end is 0; it must be above 0"),
        (lambda: Cosine(-0.1, 0.1, 5), ValueError, "start is -0.1; it must be above 0"),
        (lambda: Cosine(0.1, 0.0, 5), ValueError, "end is 0.0; it must be above 0"),
        (lambda: Cosine(0.1, 0.01, 0), ValueError, "iterations is 0; it must be at least 1"),
        (lambda: Cosine(0.1, 0.01, 2.5), TypeError, "iterations is 2.5; it must be a whole number"),
    ],
)
def test_a_wrong_argument_is_refused(build, kind, sentence):
    with pytest.raises(kind, match=f"^{sentence}$"):
        build()


# By hand, from the formulas of the theorems.
RECIPES = {
    # (38): gamma_x = sqrt(10 / (5 * 2000)) and eta = 1 / (5 sqrt 2000)
    "simfbo": (
        {"iterations": 2000, "cohort": 10, "steps": 5, "ratio_y": 3.0, "ratio_z": 2.0},
        {
            "server_lr_x": 0.0316227766017,
            "server_lr_y": 0.0948683298051,
            "server_lr_z": 0.0632455532034,
            "lr_x": 0.00447213595500,
            "lr_y": 0.00447213595500,
            "lr_z": 0.00447213595500,
        },
    ),
    # (160) to (163): gamma_x = sqrt(10 / (10 * 100)) is x's lower bound, gamma_y,max = 3 gamma_x;
    # eta = 1 / (10 * 10); with L_1 = 40 eta_x <= 1 / sqrt(2 * 10 * 1600), eta_y <= 1 / sqrt(4 ...)
    "asfbo": (
        {"iterations": 100, "cohort": 10, "steps": 10, "ratio_y": 3.0, "smoothness": 40.0},
        {
            "server_lr_x_bounds": (0.1, 1.0),
            "server_lr_y_bounds": (0.03, 0.3),
            "server_lr_z_bounds": (0.01, 0.1),
            "lr_x": 0.00559016994375,
            "lr_y": 0.00395284707521,
            "lr_z": 0.01,
        },
    ),
    # Theorem 1: lambda = 1 / 4, top = 1 / 24; alpha = min(2 / (24 * 2 * 2), .5 / 10) = 1 / 48,
    # beta = max(2 / 48 / 2, 1 / 40) = 1 / 40
    "aggitd": (
        {"iterations": 100, "inner_rounds": 2, "smoothness": 4.0, "scale": 0.5, "ratio_y": 2.0},
        {
            "lr_x": 0.0208333333333,
            "lr_y": 0.025,
            "neumann_lr": 0.25,
            "inner_rounds": 2,
            "step_scale": "per-client",
        },
    ),
    # Corollary 1: sqrt(4 / 100) and 1 / (20 * 5 * 100)
    "rabo": (
        {"iterations": 100, "clients": 20, "coverage": 4, "lower_steps": 5},
        {"lr_x": 0.2, "lr_y": 0.0001, "lower_steps": 5},
    ),
    # Corollary 4.1: sqrt(18 / 5000), 1 / sqrt(5 * 5000), log 5000 = 8.52
    "afbo": (
        {"iterations": 5000, "clients": 18, "inner_rounds": 5},
        {
            "server_lr_x": 0.06,
            "server_lr_y": 0.00632455532034,
            "inner_rounds": 5,
            "neumann_steps": 9,
        },
    ),
}
SAME_STEPS = {"shrofbo": "simfbo", "la-asfbo": "asfbo", "rafbo": "rabo"}


@pytest.mark.parametrize("method", [*RECIPES, *SAME_STEPS])
def test_the_steps_of_theorems_are_those_computed_by_hand_and_settings_of_the_method(method):
    constants, by_hand = RECIPES[SAME_STEPS.get(method, method)]
    steps = theory(method, **constants)
    assert steps.keys() == by_hand.keys()
    for name, value in by_hand.items():
        if isinstance(value, str):
            assert steps[name] == value
        else:
            assert steps[name] == pytest.approx(value, rel=1e-10)
    algorithm = fb.algorithms.get(method)(**steps)
    assert all(getattr(algorithm, name) == value for name, value in steps.items())


@pytest.mark.parametrize(
    ("method", "step", "factor"),
    [
        ("simfbo", "lr_x", 2),
        ("simfbo", "server_lr_x", 2),
        ("asfbo", "lr_z", 2),
        ("aggitd", "lr_x", 2),
        ("aggitd", "lr_y", 1),  # lambda / 10 holds it up, however long the run
        ("rabo", "lr_x", 2),
        ("rabo", "lr_y", 4),
        ("afbo", "server_lr_x", 2),
        ("afbo", "server_lr_y", 2),
    ],
)
def test_steps_of_theorems_shrink_at_their_rates(method, step, factor):
    """By this factor in a run of four times as many iterations."""
    constants, _ = RECIPES[method]
    short = theory(method, **constants | {"iterations": 1000})
    long = theory(method, **constants | {"iterations": 4000})
    assert short[step] == pytest.approx(factor * long[step])


def test_afbos_step_is_shorter_for_strongly_convex_problems():
    constants = {"iterations": 400, "clients": 16, "inner_rounds": 1}
    assert theory("afbo", **constants)["server_lr_x"] == pytest.approx(0.2)
    assert theory("afbo", **constants, strongly_convex=True)["server_lr_x"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("constants", "kind", "sentence"),
    [
        ({"method": "fednest"}, ValueError, "method is 'fednest'; it must be one of "),
        ({"method": "rabo", "iterations": 9}, ValueError, "rabo.clients is missing"),
        ({"method": "simfbo", "rounds": 9}, ValueError, "unknown key 'simfbo.rounds'; allowed are"),
        (
            {"method": "afbo", "iterations": 0, "clients": 1, "inner_rounds": 1},
            ValueError,
            "afbo.iterations is 0; it must be at least 2",
        ),
    ],
)
def test_theorems_refuse_constants_that_they_do_not_have(constants, kind, sentence):
    with pytest.raises(kind, match=f"^{sentence}"):
        theory(**constants)
