"""Wrong experiments: each is refused with one line that names the key, and leaves no files."""

import copy
import datetime
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.tool import assert_refused, invoke, read_summary, write


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("ronds = 3", ["'ronds'", "did you mean 'rounds'"]),
        ("task.clints = 3", ["'task.clints'", "did you mean 'clients'"]),
        ("task.seed = 3", ["task.seed", "seed"]),
        ("data.clints = 3", ["'data.clints'", "did you mean 'clients'"]),
        ("data.clients = 3\ntask.nois = 3", ["'task.nois'", "did you mean 'noise'"]),
        ("data.clients = 3\ntask.noise = 'x'", ["task.noise is 'x'"]),
        ("data.clients = 3\ntask.clients = 4", ["clients is given in [task] and in [data]"]),
        ("algorithm.lr_xx = 3", ["'algorithm.lr_xx'", "did you mean 'lr_x'"]),
        (
            "algorithm.lr_x = { schedule = 'power', strt = 3 }",
            ["'algorithm.lr_x.strt'", "did you mean 'start'"],
        ),
        ("algorithm.lr_x = { schedule = 'power' }", ["algorithm.lr_x.start is missing"]),
        (
            "algorithm.lr_x = { schedule = 'powr', start = 1 }",
            ["algorithm.lr_x", "'powr'", "'power'"],
        ),
        ("algorithm.lr_x = { schedule = ['power'] }", ["algorithm.lr_x", "'power'"]),
        (
            "algorithm.lr_x = { schedule = 'power', start = -1 }",
            ["algorithm.lr_x", "start is -1", "above 0"],
        ),
        ("algorithm.name = 'simfb'", ["'simfb'", "did you mean 'simfbo'"]),
        (
            "environment.participatoin = 3",
            ["'environment.participatoin'", "did you mean 'participation'"],
        ),
        ("environment.local_steps = { client = [1] }", ["local_steps", "clients"]),
        ("environment.local_steps = [1, 2, 3]", ["local_steps", "[low, high]"]),
        ("environment.batch_size = 'ful'", ["batch_size is 'ful'"]),
        ("stop.byts = 3", ["'stop.byts'", "did you mean 'bytes'"]),
        ("every.byts = 3", ["'every.byts'", "did you mean 'bytes'"]),
        ("every.bytes = 0", ["every.bytes is 0", "greater than 0"]),
        ("every = {}", ["every", "rounds, bytes"]),
        ("every = { rounds = 1, bytes = 3 }", ["every", "rounds, bytes"]),
        ("every = 0", ["every", "0", "greater than or equal to 1"]),
        ("runtime.mod = 'loop'", ["'runtime.mod'", "did you mean 'mode'"]),
        ("runtime.mode = 'lop'", ["runtime.mode is 'lop'"]),
        ("algorithms.simfb.lr_x = 3", ["algorithms", "'simfb'", "did you mean 'simfbo'"]),
        ("algorithms.asfbo.lr_xx = 3", ["'algorithms.asfbo.lr_xx'", "did you mean 'lr_x'"]),
        (
            "algorithms.asfbo.environment.bach_size = 3",
            ["algorithms.asfbo.environment", "did you mean 'batch_size'"],
        ),
        ("algorithms.asfbo = 3", ["algorithms.asfbo is 3"]),
        (
            "algorithm = 'asfbo'\ncompare = ['simfb']",
            ["compare", "'simfb'", "did you mean 'simfbo'"],
        ),
        ("compare = 3", ["compare is 3"]),
        ("algorithm = 3", ["algorithm is 3"]),
        ("data = 3", ["data is 3"]),
        ("environment = 3", ["environment is 3"]),
        ("seed = 99999999999999999999", ["seed", "99999999999999999999", "64 bits"]),
        (
            "algorithm.lr_x = 99999999999999999999",
            ["algorithm.lr_x", "99999999999999999999", "64 bits"],
        ),
        ("algorithm.lr_x = nan", ["lr_x is nan", "finite"]),
        ("environment.participation = 5", ["participation is 5", "4 clients"]),
        ("device = 'cuda:99'", ["device is 'cuda:99'"]),
        ("task.dim_x = 1_000_000_000_000_000", ["task", "quadratic", "memory"]),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, text: str, mentions: list[str]) -> None:
    start = 'task.name = "quadratic"\n'
    if "clients" not in text:
        start += "task.clients = 4\n"
    file = write(tmp_path / "a.toml", start + text)
    assert_refused(invoke("run", file, "--out", tmp_path / "run", "--rounds", 1), *mentions)
    assert not (tmp_path / "run").exists()


# Hostile experiments: a good one, in which some keys or values are replaced at random

GOOD: dict[str, Any] = {
    "title": "",
    "task": {
        "name": "quadratic",
        "clients": 2,
        "samples": 2,
        "noise": 0.1,
        "dim_x": 2,
        "dim_y": 2,
        "dtype": "float64",
    },
    "data": {},
    "algorithm": {
        "name": "simfbo",
        "lr_x": 0.1,
        "lr_y": {"schedule": "power", "start": 0.1},
        "radius": 10.0,
    },
    "algorithms": {"simfbo": {"lr_z": 0.1, "environment": {"min_replies": 1}}},
    "compare": ["simfbo"],
    "environment": {"participation": 1.0, "local_steps": [1, 2], "batch_size": 1},
    "rounds": 1,
    "every": {"samples": 10},
    "stop": {"bytes": 1e9, "test_accuracy": 0.9},
    "seed": 0,
    "weights": "uniform",
    "device": "cpu",
    "checkpoint_every": 10,
    "runtime": {
        "mode": "stack",
        "memory": 2**31,
        "precision": "fp32",
        "compile": "auto",
        "threads": 1,
    },
}
# A large value of these may be meant, and would take long.
COSTLY = ("rounds", "clients", "samples", "dim_x", "dim_y", "local_steps", "threads")


def key_paths(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every key in a nested table."""
    paths = [(*prefix, key) for key in table]
    for key, value in table.items():
        if isinstance(value, dict):
            paths += key_paths(value, (*prefix, key))
    return paths


LARGE_NUMBERS = [2**31, 2**62, 2**63, -(2**63) - 1, 10**30, 10**400]
EXTREME_FLOATS = [math.nan, math.inf, -math.inf, 1e308, 5e-324, -0.0]
WORDS = [
    "full",
    "uniform",
    "a:b",
    "simfbo",
    "../..",
    "\n",
    "\x1b[31m",
    "[/red]",
    "\u2028",
    "é" * 200,
]
numbers = st.one_of(
    st.integers(-5, 3),
    st.floats(),
    st.floats(1e10, 1e200),
    st.sampled_from([*LARGE_NUMBERS, *EXTREME_FLOATS]),
)
scalars = st.one_of(
    st.none().map(lambda _: {}),
    st.booleans(),
    numbers,
    st.text(max_size=8),
    st.sampled_from(WORDS),
    st.just(datetime.date(2024, 2, 29)),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)


junk = st.recursive(scalars, containers, max_leaves=5)
CHANGES = ["junk", "junk", "number", "number", "misspell", "add", "empty", "remove"]


def is_costly(key: str, value: Any) -> bool:
    """Whether a run with this value would take too long for a test."""
    candidates = [value]
    if isinstance(value, list):
        candidates += value
    if isinstance(value, dict):
        candidates += value.values()
    integers = [c for c in candidates if isinstance(c, int) and not isinstance(c, bool)]
    return key in COSTLY and any(3 < integer < 2**63 for integer in integers)


@st.composite
def hostile_experiments(draw: st.DrawFn) -> str:
    """A good experiment with one to three changes; one in five is not even TOML."""
    table = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        *parents, key = draw(st.sampled_from(key_paths(table)))
        inner = table
        for parent in parents:
            inner = inner[parent]
        change = draw(st.sampled_from(CHANGES))
        if change == "number":
            value = draw(numbers)
            if type(inner[key]) is int and isinstance(value, float) and math.isfinite(value):
                value = int(value)
        else:
            value = draw(junk)
        if change in ("junk", "number") and not is_costly(key, value):
            inner[key] = value
        elif change == "misspell":
            position = draw(st.integers(0, len(key) - 1))
            inner[key[:position] + key[position + 1 :]] = inner.pop(key)
        elif change == "add":
            inner.setdefault(draw(st.text(max_size=6)), value)
        elif change == "empty":
            inner[key] = {}
        elif change == "remove" and key != "rounds":
            del inner[key]
    text = tomli_w.dumps(table)
    if draw(st.integers(0, 4)) == 0:
        position = draw(st.integers(0, len(text)))
        end = position + draw(st.integers(0, 3))
        text = text[:position] + draw(st.text(max_size=4)) + text[end:]
    return text


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@example("")
@example("\ufeffrounds = 1")
@example("a = " + 2000 * "[" + 2000 * "]")
@example(".".join(["a"] * 2000) + " = 1")
@example("rounds = 1" + 5000 * "0")
@example('"\\n" = 1')
@given(hostile_experiments())
def test_a_hostile_experiment_runs_or_is_refused_in_one_line(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.toml")
        out = Path(folder, "out")
        file.write_bytes(text.encode())
        outcome = invoke("run", file, "--out", out, "--quiet")
        if outcome.code == 2:
            assert_refused(outcome)
            assert [file] == list(Path(folder).iterdir())
        else:
            assert outcome in ((0, "", ""), (3, "", "")), outcome
            assert read_summary(out)["status"] == {0: "completed", 3: "diverged"}[outcome.code]


dotted_keys = [".".join(path) for path in key_paths(GOOD)]
plausible = st.builds("{}={}".format, st.sampled_from(dotted_keys), st.text(max_size=6))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text(max_size=12) | plausible)
def test_a_hostile_setting_runs_or_is_refused_in_one_line(setting: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.toml")
        out = Path(folder, "out")
        file.write_text(tomli_w.dumps(GOOD), encoding="utf-8")
        outcome = invoke("run", file, "--out", out, "--quiet", "--set", setting)
        assert outcome.code in (0, 2, 3)
        if outcome.code == 2:
            assert_refused(outcome)
            assert [file] == list(Path(folder).iterdir())
