"""From an experiment to one run: precedence, sections of algorithms, `--set`, smoke tests."""

from pathlib import Path

import pytest
import tomli_w

from fedbilevel import algorithms
from fedbilevel.experiments import config as configs
from tests.support.experiments import resolve_text
from tests.support.tool import (
    QUADRATIC,
    assert_refused,
    invoke,
    invoke_ok,
    read_config,
    read_metrics,
    read_summary,
    write,
)

# Precedence


def test_settings_win_over_an_algorithms_section_which_wins_over_the_file(tmp_path: Path) -> None:
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
    config = resolve_text(text, tmp_path, "algorithm.lr_z=0.3", "environment.batch_size=4")
    asfbo = config.algorithm
    assert isinstance(asfbo, algorithms.ASFBO)
    assert (asfbo.lr_x, asfbo.lr_y, asfbo.lr_z) == (0.1, 0.2, 0.3)
    assert config.environment.participation == 2
    assert config.environment.local_steps == (2, 3)
    assert config.environment.batch_size == 4

    # The settings in [algorithm] are for its own algorithm only.
    other = resolve_text(text, tmp_path, algorithm="shrofbo")
    shrofbo = other.algorithm
    assert isinstance(shrofbo, algorithms.ShroFBO)
    assert (shrofbo.lr_x, shrofbo.lr_y) == (0.5, algorithms.ShroFBO().lr_y)
    assert other.environment.local_steps == 2
    assert other.environment.batch_size == 2
    assert resolve_text(text, tmp_path, "algorithm=shrofbo").table == other.table


def test_options_win_over_the_file_and_settings_over_options(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", 'seed = 5\nalgorithm = "asfbo"' + QUADRATIC)
    options = ["--seed", 7, "--rounds", 1, "--algorithm", "la-asfbo"]
    for setting in ("seed=8", "title=a word", "stop.bytes=1e9"):
        options += ["--set", setting]
    invoke_ok("run", file, *options, "--out", tmp_path / "run")
    config = read_config(tmp_path / "run")
    assert (config["seed"], config["rounds"], config["title"]) == (8, 1, "a word")
    assert (config["algorithm"]["name"], config["stop"]) == ("la-asfbo", {"bytes": 1e9})


def test_a_name_alone_stands_for_a_table_with_that_name(tmp_path: Path) -> None:
    short = 'task = "hyper-representation"\ndata = "digits"\nalgorithm = "asfbo"'
    long = 'task.name = "hyper-representation"\ndata.name = "digits"\nalgorithm.name = "asfbo"'
    table = resolve_text(short, tmp_path).table
    assert resolve_text(long, tmp_path).table == table
    settings = ("task=hyper-representation", "data=digits", "algorithm=asfbo")
    assert resolve_text("", tmp_path, *settings).table == table
    quadratic = resolve_text("", tmp_path, "task=quadratic", "task.clients=3")
    assert quadratic.table["task"]["clients"] == 3


def test_another_task_drops_the_task_and_data_settings_of_the_file() -> None:
    source, table = configs.read("digits")
    config = configs.resolve(source, table, overrides={"task.name": "quadratic"})
    assert config.table["task"]["name"] == "quadratic"
    assert "data" not in config.table
    same = configs.resolve(source, table, overrides={"task.name": "hyper-representation"})
    assert same.table == configs.resolve(source, table).table


# Sections under a label

LABELLED = """
    task = { name = "quadratic", clients = 4 }
    compare = ["simfbo", "slow"]
    [algorithms.slow]
    algorithm = "simfbo"
    lr_x = 0.001
    task = { noise = 0.5 }
    environment = { participation = 2 }
"""


def test_a_labelled_section_names_its_algorithm_task_and_conditions(tmp_path: Path) -> None:
    slow = resolve_text(LABELLED, tmp_path, algorithm="slow")
    assert slow.label == "slow"
    assert slow.algorithm == algorithms.SimFBO(lr_x=0.001)
    assert slow.table["task"]["noise"] == 0.5
    assert slow.environment.participation == 2
    plain = resolve_text(LABELLED, tmp_path)
    assert plain.label == "simfbo"
    assert plain.table["task"]["noise"] == 0.0
    assert "label" not in plain.table


def test_a_label_is_kept_in_the_resolved_config_of_its_algorithm(tmp_path: Path) -> None:
    slow = resolve_text(LABELLED, tmp_path, algorithm="slow")
    again = resolve_text(tomli_w.dumps(slow.table), tmp_path)
    assert again.table == slow.table
    assert again.label == "slow"
    other = resolve_text(tomli_w.dumps(slow.table), tmp_path, algorithm="asfbo")
    assert other.label == "asfbo"
    for name in ("simfbo", "slow"):
        labelled = resolve_text(f'label = "x"\n{LABELLED}', tmp_path, algorithm=name)
        assert labelled.label == name


def test_the_task_of_a_labelled_section_can_be_changed(tmp_path: Path) -> None:
    setting = "algorithms.slow.task.noise=0.25"
    changed = resolve_text(LABELLED, tmp_path, setting, algorithm="slow")
    assert changed.table["task"]["noise"] == 0.25
    same_task = resolve_text(LABELLED, tmp_path, "task=quadratic", algorithm="slow")
    assert same_task.table["task"]["noise"] == 0.5
    text = f'{LABELLED}\n[algorithms.asfbo]\ntask = {{ name = "regularization" }}'
    other_task = resolve_text(text, tmp_path, algorithm="asfbo")
    assert other_task.table["task"]["name"] == "regularization"
    assert "noise" not in other_task.table["task"]


def test_a_label_that_would_name_another_folder_is_refused(tmp_path: Path) -> None:
    text = LABELLED.replace("algorithms.slow", 'algorithms."../x"')
    message = r"the label '[.][.]/x' would name a folder elsewhere"
    with pytest.raises(configs.ConfigError, match=message):
        resolve_text(text, tmp_path, algorithm="../x")


# --set


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
def test_a_wrong_setting_is_named(tmp_path: Path, setting: str, mentions: list[str]) -> None:
    file = write(tmp_path / "a.toml")
    outcome = invoke("run", file, "--set", setting, "--out", tmp_path / "run")
    assert_refused(outcome, *mentions)
    assert not (tmp_path / "run").exists()


# Smoke tests


def test_smoke_keeps_the_task_of_a_file(tmp_path: Path) -> None:
    text = """
        task = { name = "quadratic", clients = 3, noise = 0.5 }
        stop = { samples = 1 }
        environment.local_steps = { clients = [1, 2, 3] }
        environment.min_replies = 3
    """
    invoke_ok("run", write(tmp_path / "a.toml", text), "--smoke", "--out", tmp_path / "run")
    config = read_config(tmp_path / "run")
    assert config["task"]["clients"] == 2
    assert config["task"]["noise"] == 0.5
    assert config["rounds"] == 2
    assert read_summary(tmp_path / "run")["rounds"] == 2


@pytest.mark.parametrize("option", [("--rounds", 3), ("--set", "rounds=3")])
def test_smoke_keeps_a_number_of_rounds_that_is_given(
    tmp_path: Path, option: tuple[str, object]
) -> None:
    file = write(tmp_path / "a.toml")
    invoke_ok("run", file, "--smoke", *option, "--out", tmp_path / "run")
    assert read_summary(tmp_path / "run")["rounds"] == 3


def test_smoke_with_another_task_makes_that_one_small(tmp_path: Path) -> None:
    invoke_ok("run", "digits", "--task", "quadratic", "--smoke", "--out", tmp_path / "run")
    assert read_config(tmp_path / "run")["task"]["clients"] == 2


FEW_SHOT = """
    task = { name = "few-shot", ways = 20, shots = 5, model = "resnet12" }
    data = "omniglot"
    environment.batch_size = 20
    algorithm = { name = "rabo", lower_steps = 2 }
"""
LOSS_TUNING = """
    task = { name = "loss-tuning", model = "resnet18" }
    data = "cifar10"
"""


@pytest.mark.parametrize(
    ("text", "metric"),
    [(FEW_SHOT, "test_accuracy_ci95"), (LOSS_TUNING, "balanced_accuracy")],
    ids=["few-shot", "loss-tuning"],
)
def test_smoke_of_large_tasks_needs_no_data(tmp_path: Path, text: str, metric: str) -> None:
    invoke_ok("run", write(tmp_path / "a.toml", text), "--smoke", "--out", tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics) == 3
    assert metric in metrics[-1]


def test_a_number_beyond_64_bits_is_refused_also_in_a_table_from_elsewhere() -> None:
    """The table of a node comes from its server, not from a file."""
    table = {"task": "quadratic", "rounds": 2**64}
    with pytest.raises(configs.ConfigError, match="rounds is 18446744073709551616; a whole number"):
        configs.resolve("message", table)
