"""Settings of algorithms: defaults that are allowed, and schedules for step sizes."""

import pytest

from fedbilevel import algorithms
from fedbilevel.algorithms import SimFBO
from fedbilevel.core.schedules import Power
from fedbilevel.core.settings import declared_settings


@pytest.mark.parametrize("name", algorithms.names())
def test_every_default_is_allowed(name):
    for setting in declared_settings(algorithms.get(name)):
        setting.rule.check(setting.name, setting.default)


def test_an_algorithm_takes_schedules_for_its_step_sizes():
    algorithm = SimFBO(lr_x=Power(0.3), server_lr_y=lambda t: 0.5 / (t + 1), lr_y=0.7)
    now = algorithm.at(3)
    assert (now.lr_x, now.server_lr_y, now.lr_y) == pytest.approx((0.15, 0.125, 0.7))
    assert algorithm.at(0).lr_x == pytest.approx(0.3)
    assert now.at(8) is now


def test_a_schedule_with_a_value_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match=r"^lr_x is -1; it must be above 0$"):
        SimFBO(lr_x=lambda t: 1 - t).at(2)
