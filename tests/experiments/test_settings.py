"""Constructors, experiment files and `--set` refuse a wrong setting with the same message."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.core import settings
from fedbilevel.experiments import config as configs
from fedbilevel.federation import delays
from fedbilevel.federation.conduct import Conduct
from tests.support.refusals import refusal


def resolve(text: str, *overrides: str) -> configs.Config:
    table = tomllib.loads(f'task.name = "quadratic"\n{text}')
    return configs.resolve("a.toml", table, settings=overrides)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (fb.Environment, "environment.participation", "3.5"),
        (fb.Environment, "environment.participation", "0"),
        (fb.Environment, "environment.min_replies", "0"),
        (fb.Environment, "environment.batch_size", "true"),
        (fb.Environment, "environment.local_steps", "2.5"),
        (fb.Environment, "environment.deadline", "-1.0"),
        (fb.Environment, "environment.capacity", "1.5"),
        (fb.Environment, "environment.capacity_y", "[0.5, 0.0]"),
        (delays.Faults, "environment.faults.leave", "1.5"),
        (Conduct, "conduct.deadline_s", "0"),
        (Conduct, "conduct.strikes", "0"),
        (Conduct, "conduct.norm_bound", "nan"),
        (algorithms.SimFBO, "algorithm.lr_x", "-0.1"),
        (algorithms.SimFBO, "algorithm.lr_x", "'fast'"),
    ],
)
def test_constructor_file_and_command_line_refuse_alike(kind: Any, key: str, value: str) -> None:
    section, _, name = key.rpartition(".")
    python_value = tomllib.loads(f"value = {value}")["value"]
    sentence = f"a.toml: {section}.{refusal(kind, **{name: python_value})}"
    assert refusal(resolve, f"{key} = {value}") == sentence
    assert refusal(resolve, "", f"{key}={value}") == sentence


def test_a_resolved_schedule_is_written_with_its_defaults() -> None:
    config = resolve('algorithm.lr_x = { schedule = "power", start = 1 }')
    written = config.table["algorithm"]["lr_x"]
    assert written == {"schedule": "power", "start": 1.0, "power": 0.5, "after": 1.0}


def test_a_rule_between_settings_names_the_table() -> None:
    faults = {"drop": 0.5, "corrupt": 0.5}
    message = refusal(settings.build, delays.Faults, "faults", faults)
    assert message == f"[faults] {refusal(delays.Faults, **faults)}"
