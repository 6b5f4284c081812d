"""Experiments: defaults, precedence, own tasks, budgets, and 200 wrong ones."""

import copy
import dataclasses
import datetime
import itertools
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedbilevel import algorithms
from fedbilevel.core import schedules
from fedbilevel.experiments import config as configs
from tests.support.tool import QUADRATIC, call, config, done, is_refusal, metrics, summary, write

OWN = """
from fedbilevel import algorithms, tasks

def plain():
    return tasks.load("quadratic", clients=3)

def tuned(*, clients: int, noise: float = 0.0, unhinted=1, seed: int = 0):
    return tasks.load("quadratic", clients=clients, noise=noise, seed=seed)

def broken(seed: int = 0):
    return {}["nothing"]

def foreign():
    return tasks.load("quadratic").problem

def unmeasurable():
    task = tasks.load("quadratic", clients=2)
    return tasks.Task(task.problem, task.clients, lambda x, y: {}["nothing"])

@algorithms.register("mine")
class Mine(algorithms.SimFBO):
    pass

number = 3
"""


def resolved(text: str, tmp_path: Path, *settings: str, **chosen: Any) -> configs.Config:
    place, table = configs.read(str(write(tmp_path / "experiment.toml", text)))
    return configs.resolve(place, table, settings=settings, **chosen)


# What a config says


def test_defaults_are_filled_in(tmp_path: Path) -> None:
    table = resolved('task = "quadratic"\nruntime.threads = 1', tmp_path).table
    expected = {
        "name": "quadratic",
        "clients": 8,
        "dim_x": 5,
        "dim_y": 4,
        "condition": 10.0,
        "heterogeneity": 1.0,
    }
    assert table["task"] == {**expected, "samples": 1, "noise": 0.0, "dtype": "float64"}
    assert table["algorithm"].keys() == {
        "name",
        *(f.name for f in dataclasses.fields(algorithms.SimFBO)),
    }
    assert table["environment"] == {
        "participation": 1.0,
        "local_steps": 1,
        "batch_size": "full",
        "min_replies": 1,
        "capacity": 1.0,
    }
    assert (table["rounds"], table["seed"], table["device"], table["checkpoint_every"]) == (
        100,
        0,
        "cpu",
        10,
    )
    assert table["runtime"] == {
        "mode": "stack",
        "memory": 2**31,
        "precision": "fp32",
        "compile": False,
        "threads": 1,
    }


@pytest.mark.parametrize(
    "extra",
    [
        "",
        'algorithm = { name = "asfbo", lr_x = { schedule = "power", start = 0.02, after = 5 } }',
        "every = { bytes = 700 }",
        "stop = { samples = 20 }",
        'weights = "samples"\nalgorithm = "shrofbo"\ncheckpoint_every = 1\nseed = 3',
    ],
)
def test_a_resolved_config_gives_the_same_run_again(tmp_path: Path, extra: str) -> None:
    done("run", write(tmp_path / "a.toml", extra + QUADRATIC), "--out", tmp_path / "a")
    done("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "b")
    assert (tmp_path / "a" / "config.toml").read_bytes() == (
        tmp_path / "b" / "config.toml"
    ).read_bytes()
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_a_resolved_digits_run_gives_the_same_run_again(tmp_path: Path) -> None:
    done("run", "digits", "--set", "data.clients=10", "--rounds", 2, "--out", tmp_path / "a")
    data = {"name": "digits", "partition": "shards", "clients": 10, "validation": 0.25}
    assert config(tmp_path / "a")["data"] == data
    done("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "b")
    assert (tmp_path / "a" / "config.toml").read_bytes() == (
        tmp_path / "b" / "config.toml"
    ).read_bytes()
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_settings_win_over_a_methods_section_which_wins_over_the_file(tmp_path: Path) -> None:
    text = """
        task = "quadratic"
        algorithm = { name = "asfbo", lr_x = 0.1, lr_y = 0.1, lr_z = 0.1 }
        environment = { participation = 2, local_steps = 2, batch_size = 2 }
        [algorithms.asfbo]
        lr_y = 0.2
        lr_z = 0.2
        environment = { local_steps = [2, 3], batch_size = 3 }
        [algorithms.shrofbo]
        lr_x = 0.5
    """
    made = resolved(text, tmp_path, "algorithm.lr_z=0.3", "environment.batch_size=4")
    assert (made.algorithm.lr_x, made.algorithm.lr_y, made.algorithm.lr_z) == (0.1, 0.2, 0.3)  # type: ignore[attr-defined]
    conditions = made.environment
    assert (conditions.participation, conditions.local_steps, conditions.batch_size) == (
        2,
        (2, 3),
        4,
    )
    other = resolved(
        text, tmp_path, algorithm="shrofbo"
    )  # the file's settings are those of its own method
    assert (other.algorithm.lr_x, other.algorithm.lr_y) == (0.5, algorithms.ShroFBO().lr_y)  # type: ignore[attr-defined]
    assert (other.environment.local_steps, other.environment.batch_size) == (2, 2)
    assert resolved(text, tmp_path, "algorithm=shrofbo").table == other.table


def test_a_section_under_a_label_of_its_own_names_its_method_task_and_data(tmp_path: Path) -> None:
    text = """
        task = { name = "quadratic", clients = 4 }
        compare = ["simfbo", "slow"]
        [algorithms.slow]
        algorithm = "simfbo"
        lr_x = 0.001
        task = { noise = 0.5 }
        environment = { participation = 2 }
    """
    slow = resolved(text, tmp_path, algorithm="slow")
    assert (slow.label, slow.algorithm.name, slow.algorithm.lr_x) == ("slow", "simfbo", 0.001)  # type: ignore[attr-defined]
    assert slow.table["task"]["noise"] == 0.5
    assert slow.environment.participation == 2
    again = resolved(tomli_w.dumps(slow.table), tmp_path)
    assert (again.table, again.label) == (slow.table, "slow")
    assert resolved(tomli_w.dumps(slow.table), tmp_path, algorithm="asfbo").label == "asfbo"
    other = resolved(text, tmp_path, "algorithms.slow.task.noise=0.25", algorithm="slow")
    assert other.table["task"]["noise"] == 0.25
    plain = resolved(text, tmp_path)
    assert (plain.label, plain.table["task"]["noise"], "label" in plain.table) == (
        "simfbo",
        0.0,
        False,
    )
    assert (
        resolved(text, tmp_path, "task=quadratic", algorithm="slow").table["task"]["noise"] == 0.5
    )
    other = resolved(
        f'{text}\n[algorithms.asfbo]\ntask = {{ name = "regularization" }}',
        tmp_path,
        algorithm="asfbo",
    )
    assert other.table["task"]["name"] == "regularization"
    assert "noise" not in other.table["task"]
    chosen = [
        resolved(f'label = "x"\n{text}', tmp_path, algorithm=name).label
        for name in ("simfbo", "slow")
    ]
    assert chosen == ["simfbo", "slow"]
    with pytest.raises(
        configs.ConfigError, match=r"the label '[.][.]/x' would name a folder elsewhere"
    ):
        resolved(text.replace("algorithms.slow", 'algorithms."../x"'), tmp_path, algorithm="../x")


def test_options_win_over_the_file_and_settings_over_options(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", 'seed = 5\nalgorithm = "asfbo"' + QUADRATIC)
    options = [
        "--seed",
        7,
        "--rounds",
        1,
        "--set",
        "seed=8",
        "--set",
        "title=a word",
        "--set",
        "stop.bytes=1e9",
    ]
    done("run", file, *options, "--algorithm", "la-asfbo", "--out", tmp_path / "run")
    written = config(tmp_path / "run")
    assert (written["seed"], written["rounds"], written["title"]) == (8, 1, "a word")
    assert (written["algorithm"]["name"], written["stop"]) == ("la-asfbo", {"bytes": 1e9})


def test_names_stand_for_tables(tmp_path: Path) -> None:
    short = 'task = "hyper-representation"\ndata = "digits"\nalgorithm = "asfbo"'
    long = 'task.name = "hyper-representation"\ndata.name = "digits"\nalgorithm.name = "asfbo"'
    assert resolved(short, tmp_path).table == resolved(long, tmp_path).table
    by_settings = resolved(
        "", tmp_path, "task=hyper-representation", "data=digits", "algorithm=asfbo"
    )
    assert by_settings.table == resolved(short, tmp_path).table
    assert resolved("", tmp_path, "task=quadratic", "task.clients=3").table["task"]["clients"] == 3


def test_another_task_leaves_the_files_task_and_data_behind() -> None:
    made = configs.resolve(*configs.read("digits"), overrides={"task.name": "quadratic"})
    assert made.table["task"]["name"] == "quadratic"
    assert "data" not in made.table
    kept = configs.resolve(*configs.read("digits"), overrides={"task.name": "hyper-representation"})
    assert kept.table == configs.resolve(*configs.read("digits")).table


def test_schedules_are_tables(tmp_path: Path) -> None:
    power = '{ schedule = "power", start = 0.1, power = 1.0 }'
    cosine = '{ schedule = "cosine", start = 0.1, end = 0.01, iterations = 10 }'
    text = f'task = "quadratic"\nalgorithm = {{ name = "simfbo", lr_x = {power}, lr_y = {cosine} }}'
    made = resolved(text, tmp_path, "algorithm.lr_x.start=0.2")
    assert made.algorithm.lr_x == schedules.Power(0.2, power=1.0)  # type: ignore[attr-defined]
    assert made.algorithm.lr_y == schedules.Cosine(0.1, 0.01, 10)  # type: ignore[attr-defined]
    replaced = resolved(
        text, tmp_path, f"algorithm.lr_x={cosine}"
    )  # a table replaces a table, whatever was in it
    assert replaced.algorithm.lr_x == made.algorithm.lr_y  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "meant", "written"),
    [
        ("3", 3, 3),
        ("[2, 5]", (2, 5), [2, 5]),
        ("{ clients = [1, 2] }", [1, 2], {"clients": [1, 2]}),
        ("{ clients = [1, 2, 3] }", [1, 2, 3], {"clients": [1, 2, 3]}),
    ],
)
def test_local_steps(tmp_path: Path, value: str, meant: object, written: object) -> None:
    made = resolved(f'task = "quadratic"\nenvironment.local_steps = {value}', tmp_path)
    assert made.environment.local_steps == meant
    again = resolved(tomli_w.dumps(made.table), tmp_path)
    assert again.environment == made.environment
    assert again.table["environment"]["local_steps"] in (written, meant)
    over = resolved(
        'task = "quadratic"\nenvironment.local_steps = {clients = [7]}',
        tmp_path,
        f"environment.local_steps={value}",
    )
    assert over.environment == made.environment


def test_as_coded(tmp_path: Path) -> None:
    made = resolved(
        'task = "quadratic"\nenvironment.batch_size = 5', tmp_path, "environment.batch_size=full"
    )
    assert made.environment.batch_size is None
    assert made.table["environment"]["batch_size"] == "full"


def test_evaluation_by_bytes_and_stops_by_samples_bytes_and_accuracy(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml")
    done("run", file, "--rounds", 6, "--out", tmp_path / "all")
    whole = metrics(tmp_path / "all")
    sent = [line["bytes_up"] + line["bytes_down"] for line in whole]

    done(
        "run",
        file,
        "--rounds",
        6,
        "--set",
        f"every.bytes={sent[1] + 1}",
        "--out",
        tmp_path / "bytes",
    )
    step = sent[1] + 1
    due = [k for k in range(1, 7) if k == 6 or sent[k] // step > sent[k - 1] // step]
    assert 2 < len(due) < 6
    assert metrics(tmp_path / "bytes")[1:] == [{**whole[k], "projection_active": 0.0} for k in due]

    for unit, spent in (("samples", [line["samples"] for line in whole]), ("bytes", sent)):
        done(
            "run",
            file,
            "--rounds",
            6,
            "--set",
            f"stop.{unit}={spent[3]}",
            "--out",
            tmp_path / unit / "stop",
        )
        assert metrics(tmp_path / unit / "stop") == whole[:4]
        assert summary(tmp_path / unit / "stop")["status"] == "completed"

    accurate = [
        "run",
        "digits",
        "--rounds",
        30,
        "--set",
        "stop.test_accuracy=0.5",
        "--out",
        tmp_path / "accuracy",
    ]
    done(*accurate, "--set", "data.partition=iid")
    reached = [line["test_accuracy"] for line in metrics(tmp_path / "accuracy")]
    assert reached[-1] >= 0.5 > max(reached[:-1])
    assert len(reached) < 31


@pytest.mark.parametrize("name", configs.names())
def test_every_shipped_experiment_runs_with_smoke(tmp_path: Path, name: str) -> None:
    done("run", name, "--smoke", "--out", tmp_path / "run")
    written = config(tmp_path / "run")
    assert summary(tmp_path / "run")["status"] in ("completed", "diverged")
    assert written["rounds"] == 2
    place, table = configs.read(name)
    for algorithm in table.get("compare", []):
        configs.resolve(place, table, algorithm=algorithm)
        assert configs.resolve(place, table, algorithm=algorithm, smoke=True).label == algorithm


def test_smoke_of_a_file_keeps_its_task(tmp_path: Path) -> None:
    text = "stop = { samples = 1 }\nenvironment.local_steps = { clients = [1, 2, 3] }\nenvironment.min_replies = 3"
    file = write(
        tmp_path / "a.toml", 'task = { name = "quadratic", clients = 3, noise = 0.5 }\n' + text
    )
    done("run", file, "--smoke", "--out", tmp_path / "run")
    written = config(tmp_path / "run")
    assert (written["task"]["clients"], written["task"]["noise"], written["rounds"]) == (2, 0.5, 2)
    assert summary(tmp_path / "run")["rounds"] == 2
    done("run", "digits", "--task", "quadratic", "--smoke", "--out", tmp_path / "other")
    assert config(tmp_path / "other")["task"]["clients"] == 2


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        (
            'task = { name = "few-shot", ways = 20, shots = 5, model = "resnet12" }\ndata = "omniglot"\n'
            "environment.batch_size = 20\nalgorithm = { name = 'rabo', lower_steps = 2 }",
            "test_accuracy_ci95",
        ),
        (
            'task = { name = "loss-tuning", model = "resnet18" }\ndata = "cifar10"',
            "balanced_accuracy",
        ),
    ],
    ids=["few-shot", "loss-tuning"],
)
def test_smoke_of_large_tasks_needs_no_data(tmp_path: Path, text: str, metric: str) -> None:
    done("run", write(tmp_path / "a.toml", text), "--smoke", "--out", tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 3
    assert metric in metrics(tmp_path / "run")[-1]


# Own tasks


numbers = itertools.count()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the reader's own in the working folder; what it registers goes with the test."""
    name = f"own_{next(numbers)}"
    write(tmp_path / f"{name}.py", OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(algorithms, "_registry", dict(algorithms._registry))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_own_tasks_with_and_without_options_and_seed(tmp_path: Path, own: str) -> None:
    write(tmp_path / "plain.toml", f'task = "{own}:plain"')
    done("run", "plain.toml", "--rounds", 1, "--out", "plain")
    assert config(tmp_path / "plain")["task"] == {"name": f"{own}:plain"}
    write(
        tmp_path / "tuned.toml",
        f'task = {{ name = "{own}:tuned", clients = 3, noise = 0.5 }}\nseed = 4\nrounds = 1',
    )
    done("run", "tuned.toml", "--out", "tuned")
    assert config(tmp_path / "tuned")["task"] == {
        "name": f"{own}:tuned",
        "clients": 3,
        "noise": 0.5,
        "unhinted": 1,
    }
    done("run", "tuned/config.toml", "--out", "again")
    assert metrics(tmp_path / "tuned") == metrics(tmp_path / "again")
    done("run", "tuned/config.toml", "--seed", 5, "--out", "other")
    assert metrics(tmp_path / "tuned") != metrics(tmp_path / "other")
    assert summary(tmp_path / "tuned")["task"] == f"{own}:tuned"
    assert summary(tmp_path / "tuned")["data"] is None
    done(
        "run",
        "plain.toml",
        "--task",
        f"{own}:tuned",
        "--set",
        "task.clients=2",
        "--rounds",
        1,
        "--out",
        "chosen",
    )


def test_an_own_algorithm_may_come_with_the_task(tmp_path: Path, own: str) -> None:
    write(tmp_path / "a.toml", f'task = "{own}:plain"\nalgorithm = "mine"\nrounds = 1')
    done("run", "a.toml", "--out", "run")
    assert summary(tmp_path / "run")["algorithm"] == "mine"


@pytest.mark.parametrize(
    ("task", "mentions"),
    [
        ("{own}:missing", ["{own}:missing", "cannot be imported"]),
        ("no_such_module:f", ["no_such_module", "cannot be imported"]),
        ("{own}:number", ["{own}:number", "not a function"]),
        ("{own}:tuned", ["task.clients is missing"]),
        ("{own}:broken", ["{own}:broken", "KeyError", "nothing"]),
        ("{own}:foreign", ["{own}:foreign", "Problem", "Task"]),
        ("{own}:unmeasurable", ["KeyError", "nothing"]),
        ("syntax_error:f", ["syntax_error:f", "cannot be imported"]),
        (":", ["cannot be imported"]),
        ("..a:f", ["cannot be imported"]),
    ],
)
def test_what_is_wrong_with_an_own_task_is_said(
    tmp_path: Path, own: str, task: str, mentions: list[str]
) -> None:
    write(tmp_path / "syntax_error.py", "def f(:\n")
    write(tmp_path / "a.toml", f"task = '{task.replace('{own}', own)}'")
    outcome = call("run", "a.toml", "--rounds", 1, "--out", "run")
    is_refusal(outcome, *(mention.replace("{own}", own) for mention in mentions))
    assert not (tmp_path / "run").exists()


# Wrong keys and values


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
def test_wrong_keys_and_values_are_named(tmp_path: Path, text: str, mentions: list[str]) -> None:
    file = write(
        tmp_path / "a.toml",
        'task.name = "quadratic"\n' + ("" if "clients" in text else "task.clients = 4\n") + text,
    )
    is_refusal(call("run", file, "--out", tmp_path / "run", "--rounds", 1), *mentions)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "mentions"),
    [
        ("rounds", ["'rounds'", "key=value"]),
        ("=3", ["key=value"]),
        ("ronds=3", ["did you mean 'rounds'"]),
        ("rounds=many", ["rounds is 'many'"]),
        ("rounds.x=1", ["rounds"]),
        ("a..b=1", ["'a'"]),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, setting: str, mentions: list[str]) -> None:
    outcome = call("run", write(tmp_path / "a.toml"), "--set", setting, "--out", tmp_path / "run")
    is_refusal(outcome, *mentions)
    assert not (tmp_path / "run").exists()


# 200 hostile experiments

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
        "compile": False,
        "threads": 1,
    },
}
COSTLY = (
    "rounds",
    "clients",
    "samples",
    "dim_x",
    "dim_y",
    "local_steps",
    "threads",
)  # a large one may be meant


def places(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = [
        place
        for key, value in table.items()
        if isinstance(value, dict)
        for place in places(value, (*prefix, key))
    ]
    return [(*prefix, key) for key in table] + below


extremes = [
    2**31,
    2**62,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    5e-324,
    -0.0,
]
amounts = st.integers(-5, 3) | st.floats() | st.floats(1e10, 1e200) | st.sampled_from(extremes)
scalars = st.one_of(
    st.none().map(lambda _: {}),
    st.booleans(),
    amounts,
    st.text(max_size=8),
    st.sampled_from(
        [
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
    ),
    st.just(datetime.date(2024, 2, 29)),
)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


def is_costly(place: tuple[str, ...], value: Any) -> bool:
    numbers = [
        value,
        *(value if isinstance(value, list) else []),
        *(value.values() if isinstance(value, dict) else []),
    ]
    large = any(isinstance(v, int) and not isinstance(v, bool) and 3 < v < 2**63 for v in numbers)
    return large and place[-1] in COSTLY


@st.composite
def hostile(draw: st.DrawFn) -> str:
    """A good experiment in which one to three things were changed."""
    table = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = place = draw(st.sampled_from(places(table)))
        inside = table
        for parent in parents:
            inside = inside[parent]
        change = draw(
            st.sampled_from(
                ["junk", "junk", "number", "number", "misspell", "add", "empty", "remove"]
            )
        )
        value = draw(amounts if change == "number" else junk)
        if (
            change == "number"
            and type(inside[last]) is int
            and isinstance(value, float)
            and math.isfinite(value)
        ):
            value = int(value)
        if change in ("junk", "number") and not is_costly(tuple(place), value):
            inside[last] = value
        elif change == "misspell":
            at = draw(st.integers(0, len(last) - 1))
            inside[last[:at] + last[at + 1 :]] = inside.pop(last)
        elif change == "add":
            inside.setdefault(draw(st.text(max_size=6)), value)
        elif change == "empty":
            inside[last] = {}
        elif change == "remove" and last != "rounds":
            del inside[last]
    text = tomli_w.dumps(table)
    if draw(st.integers(0, 4)) == 0:  # no TOML at all
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(max_size=4)) + text[at + draw(st.integers(0, 3)) :]
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
@given(hostile())
def test_200_hostile_experiments(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "a.toml"), Path(folder, "out")
        file.write_bytes(text.encode())
        outcome = call("run", file, "--out", out, "--quiet")
        if outcome.code == 2:
            is_refusal(outcome)
            assert [file] == list(Path(folder).iterdir())
        else:
            assert outcome in ((0, "", ""), (3, "", "")), outcome
            assert summary(out)["status"] == {0: "completed", 3: "diverged"}[outcome.code]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.text(max_size=12),
        st.builds(
            "{}={}".format,
            st.sampled_from([".".join(p) for p in places(GOOD)]),
            st.text(max_size=6),
        ),
    )
)
def test_hostile_settings(setting: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "a.toml"), Path(folder, "out")
        file.write_text(tomli_w.dumps(GOOD), encoding="utf-8")
        outcome = call("run", file, "--out", out, "--quiet", "--set", setting)
        assert outcome.code in (0, 2, 3)
        if outcome.code == 2:
            is_refusal(outcome)
            assert [file] == list(Path(folder).iterdir())
