"""Wrong experiments: each is refused with one line that names the key, and leaves no files."""

from pathlib import Path

import pytest

from tests.support.tool import assert_refused, invoke, write


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\ufeffrounds = 1",
        "a = " + 2000 * "[" + 2000 * "]",
        ".".join(["a"] * 2000) + " = 1",
        "rounds = 1" + 5000 * "0",
        '"\\n" = 1',
    ],
    ids=["empty", "byte order mark", "deep array", "deep key", "long number", "line break"],
)
def test_what_is_hardly_toml_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    """tests/soak draws many more hostile experiments."""
    file = write(tmp_path / "a.toml", text)
    assert_refused(invoke("run", file, "--out", tmp_path / "run", "--quiet"))
    assert list(tmp_path.iterdir()) == [file]
