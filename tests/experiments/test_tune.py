"""The search for step sizes: which settings are scaled, and which scales are drawn."""

import math
import random

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.config import Config
from fedbilevel.experiments.tune import (
    Scales,
    Trial,
    check_tunable,
    draw_scales,
    edge_warnings,
    scale_step_sizes,
    scales_between,
    step_size_level,
)


def resolve(algorithm: str, *settings: str) -> Config:
    table = {"task": {"name": "quadratic"}}
    return configs.resolve("test", table, algorithm=algorithm, settings=settings)


def trial(number: int, x: float, y: float, loss: float) -> Trial:
    status = "completed"
    if not math.isfinite(loss):
        status = "diverged"
    return Trial(number, Scales(x, y), status, loss, "", None, {})


# What is scaled.


@pytest.mark.parametrize("name", fb.algorithms.names())
def test_each_step_size_is_multiplied_by_the_scale_of_its_level_and_nothing_else_is(
    name: str,
) -> None:
    config = resolve(name)
    scaled = scale_step_sizes(config, Scales(2.0, 0.5)).table
    factors = {"x": 2.0, "y": 0.5, "z": 0.5, "u": 0.5, "neumann": 0.5}
    settings = config.table["algorithm"]
    for key, value in settings.items():
        words = key.split("_")
        expected = value
        for word, factor in factors.items():
            if word in words and "lr" in words:
                if "bounds" in key:
                    expected = tuple(factor * bound for bound in value)
                else:
                    expected = factor * value
        assert scaled["algorithm"][key] == pytest.approx(expected), key
    levels = {"x", None}
    if "lr_y" in settings:
        levels.add("y")
    assert {step_size_level(key) for key in settings} == levels
    assert {**scaled, "algorithm": settings} == config.table


def test_scales_are_recovered_from_step_sizes_bounds_and_schedules() -> None:
    draws = random.Random(0)
    config = resolve(
        "asfbo",
        'algorithm.lr_x={schedule="power", start=0.3}',
        "algorithm.server_lr_z_bounds=[0.07, 1]",
        'algorithm.lr_y={schedule="cosine", start=0.3, end=0.1, iterations=5}',
        "algorithm.server_lr_x=3",
    )
    for _ in range(40):
        scales = Scales(*(float(f"{10 ** draws.uniform(-1, 1):.3g}") for _ in range(2)))
        scaled = scale_step_sizes(config, scales)
        assert scales_between(scaled.table["algorithm"], config.table["algorithm"]) == scales
        for setting, scale in (("lr_x", scales.x), ("lr_y", scales.y)):
            before = getattr(config.algorithm, setting)
            after = getattr(scaled.algorithm, setting)
            for iteration in (0, 3, 9):  # the whole schedule is scaled
                expected = pytest.approx(scale * before(iteration), rel=1e-8)
                assert after(iteration) == expected


def test_an_algorithm_without_a_step_size_for_each_level_is_refused() -> None:
    check_tunable("simfbo", resolve("simfbo"))
    for name in fb.algorithms.names():
        config = resolve(name)
        if "lr_y" not in config.table["algorithm"]:
            with pytest.raises(ValueError, match="does not have a step size for each level"):
                check_tunable(name, config)


# What is drawn.


def test_a_draw_depends_on_seed_number_and_earlier_trials_only() -> None:
    history = [
        trial(0, 1, 1, 1.0),
        trial(1, 3, 0.5, 0.7),
        trial(2, 9, 9, math.inf),
        trial(3, 2, 2, 0.4),
    ]
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # type: ignore[index]
    python_state = random.getstate()
    first = draw_scales(history, 5, 4)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # type: ignore[index]
    assert python_state == random.getstate()

    torch.rand(3)
    np.random.rand(3)
    random.random()
    assert draw_scales(history, 5, 4) == first
    keys = [(5, 1), (6, 1), (7, 1), (5, 2), (5, 3)]
    others = [draw_scales(history[:1], seed, number) for seed, number in keys]
    assert others == [draw_scales(history[:1], seed, number) for seed, number in keys]
    assert len(set(others)) > 1
    after_another_loss = draw_scales([*history[:3], trial(3, 2, 2, 4.0)], 5, 4)
    assert after_another_loss != first
    after_divergence = draw_scales([trial(k, 1 + k, 1, math.inf) for k in range(6)], 5, 6)
    for scales in (first, *others, after_another_loss, after_divergence):
        assert all(0.1 <= scale <= 10 for scale in scales)


def test_no_trial_is_repeated() -> None:
    """After these trials of la-asfbo the Gaussian process proposes the best one again."""
    losses = {
        (1, 1): 0.760,
        (0.1, 10): 0.521,
        (0.1, 3.46): 0.740,
        (3.21, 10): 0.764,
        (10, 0.1): 0.364,
        (1.86, 0.1): 0.757,
        (10, 0.239): 0.427,
    }
    trials = [trial(k, *scales, loss) for k, (scales, loss) in enumerate(losses.items())]
    assert draw_scales(trials, 0, 7) not in losses


def test_a_best_trial_on_the_edge_of_the_box_is_warned_of() -> None:
    best = {"inside": trial(1, 2.0, 9.0, 0.5), "edge": trial(2, 0.1, 9.8, 0.5)}
    warnings = edge_warnings(best)
    assert [warning.split(",")[0] for warning in warnings] == [
        "edge: the best scale of x is 0.1",
        "edge: the best scale of y is 9.8",
    ]
    assert "(0.1 to 10)" in warnings[0]
