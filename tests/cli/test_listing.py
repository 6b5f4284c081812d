"""`fedbilevel list`: names one per line, on request with settings."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fedbilevel import algorithms, tasks
from fedbilevel.experiments import config as configs
from tests.support.tool import assert_refused, invoke


def test_algorithms_are_listed_with_their_settings() -> None:
    code, out, err = invoke("list", "algorithms", "--verbose")
    assert (code, err) == (0, "")
    sections = re.split(r"\n(?! )", out.rstrip("\n"))
    assert [section.split()[0] for section in sections] == algorithms.names()
    for name, section in zip(algorithms.names(), sections, strict=True):
        listed = [line.split()[0] for line in section.splitlines()[1:]]
        assert listed == [field.name for field in dataclasses.fields(algorithms.get(name))]
    simfbo = sections[algorithms.names().index("simfbo")]
    assert re.search(r"^    lr_x = 0\.05 +number above 0, or a schedule$", simfbo, re.MULTILINE)
    assert re.search(r"^    independent_batches = false +true or false$", simfbo, re.MULTILINE)
    fednest = sections[algorithms.names().index("fednest")]
    assert re.search(r"^    compat \(not set\) +'reference', or None$", fednest, re.MULTILINE)
    without_settings = invoke("list", "algorithms").out.splitlines()
    assert without_settings == [section.splitlines()[0] for section in sections]


def test_tasks_are_listed_with_their_settings() -> None:
    out = invoke("list", "tasks", "--verbose").out
    assert re.search(
        r"^quadratic +Quadratic losses, .*\n    clients = 8 +whole number$", out, re.MULTILINE
    )
    assert "seed" not in out


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("algorithms", algorithms.names()),
        ("tasks", tasks.names()),
        ("experiments", configs.names()),
        ("data", ["digits", "mnist"]),
    ],
)
def test_names_are_listed_one_per_line(what: str, expected: list[str]) -> None:
    code, out, err = invoke("list", what)
    assert (code, err) == (0, "")
    assert {line.split()[0] for line in out.splitlines()} >= set(expected)


def test_an_unknown_kind_is_refused() -> None:
    assert_refused(invoke("list", "task"), "'task'", "did you mean 'tasks'")
