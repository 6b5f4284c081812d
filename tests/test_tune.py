"""Tuning: what is scaled, what is drawn, what is left behind, and that neither kills nor failures change the end."""

import json
import math
import random
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.cli.tune import Scales, Trial, Tuning, _level, _member, _scales
from fedbilevel.experiments import config as configs
from tests.support.processes import evaluations_written, member_processes, wait_until
from tests.support.tool import (
    assert_refused,
    contents,
    invoke,
    invoke_ok,
    read_config,
    read_metrics,
    read_summary,
    start_forked,
    write,
)

EXPERIMENT = """
title = "A"
task = { name = "quadratic", clients = 4, samples = 3, noise = 0.3 }
compare = ["simfbo", "asfbo"]
rounds = 40
every = 3
seed = 3
stop = { test_accuracy = 0.9 }
environment = { participation = 3, local_steps = [1, 2], batch_size = 2 }
runtime = { threads = 1 }
[algorithms.simfbo]
lr_x = 1e-3
server_lr_x = 1e-3
[algorithms.fedavg]
lr_y = 0.01
[algorithms.asfbo.environment]
local_steps = 2
"""


class Here:
    """A member in this process: quick. `before` may do to it what happens to processes."""

    before: Callable[[str], None] = staticmethod(lambda name: None)

    def __init__(self, command: list[str], stderr: Any, **_: Any) -> None:
        try:
            type(self).before("/".join(Path(command[4]).parts[-3:-1]))
            self.returncode, _, err = invoke(*command[3:])
        except MemoryError:
            self.returncode, err = 1, "the member has died"
        stderr.write(err.encode())

    def poll(self) -> int:
        return self.returncode

    def communicate(self) -> None: ...

    def send_signal(self, number: int) -> None: ...


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Members run in this process."""
    monkeypatch.setattr(subprocess, "Popen", Here)
    monkeypatch.setattr(sys.modules["fedbilevel.cli.compare"], "POLL", 0)
    return monkeypatch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.toml", EXPERIMENT)


def tuned(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "tuned.toml").read_text("utf-8"))


def known(folder: Path) -> dict[str, Any]:
    """What a search has found, without what differs between equal ones."""
    trials = {str(path.relative_to(folder)): path for path in folder.glob("*/trial-*")}
    found = {
        name: (read_config(path), read_metrics(path), {**read_summary(path), "wall_s": 0})
        for name, path in trials.items()
    }
    return {**found, "tuned": (folder / "tuned.toml").read_bytes()}


# What is scaled


@pytest.mark.parametrize("name", fb.algorithms.names())
def test_each_step_size_has_the_scale_of_its_level_and_nothing_else_has(name: str) -> None:
    base = configs.resolve("here", {"task": {"name": "quadratic"}}, algorithm=name)
    own, scaled = base.table["algorithm"], _member(base, Scales(2.0, 0.5)).table["algorithm"]
    by_name = {"x": 2.0, "y": 0.5, "z": 0.5, "neumann": 0.5}
    for key, value in own.items():
        words = key.split("_")
        scale = next((by_name[word] for word in by_name if word in words and "lr" in words), 1.0)
        expected = (
            tuple(scale * v for v in value)
            if "bounds" in key
            else value
            if scale == 1
            else scale * value
        )
        assert scaled[key] == pytest.approx(expected), key
    assert {_level(key) for key in own} == {"x", None} | ({"y"} if "lr_y" in own else set())
    assert {**_member(base, Scales(2.0, 0.5)).table, "algorithm": own} == base.table


def test_scales_come_back_from_the_settings_also_from_bounds_and_schedules() -> None:
    draw = random.Random(0)
    settings = [
        'algorithm.lr_x={schedule="power", start=0.3}',
        "algorithm.server_lr_z_bounds=[0.07, 1]",
    ]
    settings += [
        'algorithm.lr_y={schedule="cosine", start=0.3, end=0.1, iterations=5}',
        "algorithm.server_lr_x=3",
    ]
    base = configs.resolve(
        "here", {"task": {"name": "quadratic"}}, algorithm="asfbo", settings=settings
    )
    for _ in range(40):
        scales = Scales(*(float(f"{10 ** draw.uniform(-1, 1):.3g}") for _ in range(2)))
        member = _member(base, scales)
        assert _scales(member.table["algorithm"], base.table["algorithm"]) == scales
        for step, scale in (("lr_x", scales.x), ("lr_y", scales.y)):
            for t in (0, 3, 9):  # the whole schedule is scaled
                own = getattr(base.algorithm, step)(t)
                assert getattr(member.algorithm, step)(t) == pytest.approx(scale * own, rel=1e-8)


# What is drawn


def trial(number: int, x: float, y: float, loss: float) -> Trial:
    return Trial(
        number, Scales(x, y), "completed" if math.isfinite(loss) else "diverged", loss, None, {}
    )


def test_a_draw_depends_on_seed_number_and_history_alone(file: Path, tmp_path: Path) -> None:
    place, table = configs.read(str(file))
    search = Tuning(tmp_path, {"simfbo": configs.resolve(place, table)}, 8, {}, None, False, 1)
    history = [
        trial(0, 1, 1, 1.0),
        trial(1, 3, 0.5, 0.7),
        trial(2, 9, 9, math.inf),
        trial(3, 2, 2, 0.4),
    ]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    first = search._draw(history, 5, 4)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # type: ignore[index]
    assert states[2] == random.getstate()
    torch.rand(3), np.random.rand(3), random.random()
    assert search._draw(history, 5, 4) == first
    keys = [(5, 1), (6, 1), (7, 1), (5, 2), (5, 3)]
    others = [search._draw(history[:1], seed, k) for seed, k in keys]
    assert others == [search._draw(history[:1], seed, k) for seed, k in keys]
    assert len(set(others)) > 1
    others.append(search._draw([*history[:3], trial(3, 2, 2, 4.0)], 5, 4))
    assert others[-1] != first
    nothing = search._draw(
        [trial(k, 1 + k, 1, math.inf) for k in range(6)], 5, 6
    )  # nothing but divergence
    assert all(0.1 <= scale <= 10 for scales in (first, *others, nothing) for scale in scales)


def test_no_trial_is_made_twice(file: Path, tmp_path: Path) -> None:
    """A run repeats to the bit; after these seven trials of la-asfbo the process asks for the best one again."""
    place, table = configs.read(str(file))
    search = Tuning(tmp_path, {"simfbo": configs.resolve(place, table)}, 8, {}, None, False, 1)
    losses = {
        (1, 1): 0.760,
        (0.1, 10): 0.521,
        (0.1, 3.46): 0.740,
        (3.21, 10): 0.764,
        (10, 0.1): 0.364,
    }
    losses |= {(1.86, 0.1): 0.757, (10, 0.239): 0.427}
    drawn = search._draw(
        [trial(k, *scales, loss) for k, (scales, loss) in enumerate(losses.items())], 0, 7
    )
    assert drawn not in losses


# What is left behind


def test_a_search_and_what_it_leaves(file: Path, tmp_path: Path, here: pytest.MonkeyPatch) -> None:
    out, options = (
        tmp_path / "out",
        ["--rounds", 12, "--trials", 5, "--set", "environment.batch_size=3"],
    )
    assert invoke("tune", file, "--algorithm", "simfbo", *options, "--out", out, "--quiet") == (
        0,
        "",
        "",
    )
    assert tuned(out)["compare"] == ["simfbo"]
    code, shown, err = invoke("tune", file, "--algorithm", "asfbo", *options, "--out", out)
    assert (code, err.splitlines()) == (0, [f"asfbo/trial-{k}: completed" for k in range(5)])

    best = {}
    for name in ("simfbo", "asfbo"):  # told again by hand
        runs = [out / name / f"trial-{k}" for k in range(5)]
        losses = [
            sum(line["upper_loss"] for line in read_metrics(run)[-2:]) / 2 for run in runs
        ]  # of 5 evaluations
        best[name] = read_config(runs[losses.index(min(losses))])
        assert f"{min(losses):.6g} *" in shown
        own = configs.resolve("here", configs.read(str(file))[1], algorithm=name).table["algorithm"]
        assert read_config(runs[0])["algorithm"] == {
            **own,
            **{k: list(v) for k, v in own.items() if isinstance(v, tuple)},
        }
        assert all(len(history) == 5 for history in map(read_metrics, runs))
        assert all(read_config(run)["stop"] == {} for run in runs)  # test data is not looked at
        if name == "simfbo":  # its steps were far too short
            assert min(losses) < 0.7 * losses[0]

    assert shown.splitlines()[-1] == f"tuned: {out / 'tuned.toml'}"
    written = tuned(out)
    assert (written["seed"], written["rounds"], written["compare"]) == (4, 40, ["simfbo", "asfbo"])
    assert written["algorithms"]["fedavg"] == {"lr_y": 0.01}
    for name, winner in best.items():  # as it was tuned, but for the seed and the budget
        run = configs.resolve(*configs.read(str(out / "tuned.toml")), algorithm=name).table
        expected = {
            **winner,
            "title": "A (step sizes tuned)",
            "seed": 4,
            "rounds": 40,
            "stop": {"test_accuracy": 0.9},
        }
        assert json.loads(json.dumps(run)) == expected
    text = (out / "tuned.toml").read_text()
    assert "# Step sizes tuned on seed 3, 12 rounds a trial" in text
    assert "of 5, x " in text

    before = contents(out)
    again = ["tune", file, *options, "--out", out]
    assert_refused(invoke(*again), "--resume")
    for change, mention in (
        (["--rounds", 13], "rounds = 12, not 13"),
        (["--set", "environment.batch_size=1"], "environment.batch_size = 3, not 1"),
        (
            ["--algorithm", "simfbo", "--set", "algorithm.lr_x=0.5"],
            "algorithm.lr_x = 0.001, not 0.5",
        ),
        (
            ["--algorithm", "fedavg", "--set", "seed=9"],
            "seed = 3, not 9",
        ),  # it would lie beside the others
    ):
        assert_refused(invoke(*again, "--resume", *change), "/trial-0 was run with", mention)
    code, told, err = invoke(*again, "--resume", "--json")
    assert (code, err) == (0, "")
    assert contents(out) == before
    rows = json.loads(told)["trials"]
    assert [(row["algorithm"], row["trial"]) for row in rows if row["best"]] == [
        (name, next(k for k in range(5) if read_config(out / name / f"trial-{k}") == best[name]))
        for name in sorted(best)
    ]
    assert list(rows[0].items())[:4] == [
        ("algorithm", "asfbo"),
        ("trial", 0),
        ("scale_x", 1.0),
        ("scale_y", 1.0),
    ]
    assert list(rows[0])[4:] == ["upper_loss", "test_accuracy", "status", "best"]


def test_variants_of_one_method_are_tuned_apart(tmp_path: Path, here: pytest.MonkeyPatch) -> None:
    slow = write(
        tmp_path / "b.toml", EXPERIMENT + '[algorithms.slow]\nalgorithm = "simfbo"\nlr_x = 1e-4\n'
    )
    invoke_ok(
        "tune",
        slow,
        "--algorithm",
        "simfbo,slow",
        "--trials",
        1,
        "--rounds",
        4,
        "--out",
        tmp_path / "out",
    )
    found = tuned(tmp_path / "out")
    assert found["compare"] == ["simfbo", "slow"]
    assert (found["algorithms"]["slow"]["algorithm"], found["algorithms"]["slow"]["lr_x"]) == (
        "simfbo",
        1e-4,
    )
    assert found["algorithms"]["simfbo"]["lr_x"] == 1e-3
    place, table = configs.read(str(tmp_path / "out" / "tuned.toml"))
    assert configs.resolve(place, table, algorithm="slow").label == "slow"


def test_divergence_is_the_worst_there_is(
    file: Path, tmp_path: Path, here: pytest.MonkeyPatch
) -> None:
    out, options = (
        tmp_path / "out",
        ["--algorithm", "simfbo", "--trials", 4, "--rounds", 8, "--set"],
    )
    lost = [*options, "algorithm.lr_y=1e9", "--set", "algorithm.server_lr_y=1e9"]
    code, shown, _ = invoke("tune", file, *lost, "--out", out)
    assert (code, shown.count("diverged"), "*" in shown.split("best", 1)[1]) == (3, 4, False)
    assert not (out / "tuned.toml").exists()
    some = [*options, "algorithm.server_lr_y=3.0", "--json", "--out", tmp_path / "some"]
    code, shown, _ = invoke("tune", file, *some)
    rows = json.loads(shown)["trials"]
    assert {row["status"] for row in rows} == {"completed", "diverged"}
    assert code == 0
    assert all((row["upper_loss"] is None) == (row["status"] == "diverged") for row in rows)


def test_a_failed_trial_loses_no_other_and_is_made_up_for(
    file: Path, tmp_path: Path, here: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        if name == "simfbo/trial-1":
            raise MemoryError

    here.setattr(Here, "before", staticmethod(fail))
    command = [
        "tune",
        file,
        "--algorithm",
        "simfbo",
        "--trials",
        4,
        "--rounds",
        4,
        "--out",
        tmp_path / "out",
    ]
    code, shown, err = invoke(*command)
    assert code == 2
    assert "simfbo/trial-1: failed: the member has died" in err.splitlines()
    assert shown.count("completed") == 3
    assert tuned(tmp_path / "out")["compare"] == ["simfbo"]
    here.setattr(Here, "before", staticmethod(lambda name: None))
    code, shown, err = invoke(*command, "--resume")
    assert (code, err, shown.count("completed")) == (0, "simfbo/trial-1: completed\n", 4)

    def fail_all(name: str) -> None:
        raise MemoryError

    here.setattr(Here, "before", staticmethod(fail_all))
    code, shown, err = invoke(
        *command[:-1], tmp_path / "none"
    )  # without its own settings a method is not gone on with
    assert (code, err.splitlines()) == (2, ["simfbo/trial-0: failed: the member has died"])


def test_wrong_calls(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(invoke("tune", file, "--algorithm", "adam", "--out", tmp_path / "out"), "'adam'")
    assert_refused(invoke("tune", file, "--trials", 0, "--out", tmp_path / "out"), "--trials")
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert_refused(
        invoke("tune", file, "--out", tmp_path / "out"), "optuna", "pip install fedbilevel[tune]"
    )
    assert list(tmp_path.iterdir()) == [file]


# Kills and interruptions


def test_interrupted_and_resumed_a_search_ends_the_same(
    file: Path, tmp_path: Path, here: pytest.MonkeyPatch
) -> None:
    """And so does one of more trials, begun with fewer."""
    command = ["tune", file, "--rounds", 6, "--quiet", "--resume", "--out"]
    assert invoke(*command, tmp_path / "whole", "--trials", 4) == (0, "", "")

    def interrupt(name: str) -> None:
        if name == "asfbo/trial-2":
            raise KeyboardInterrupt

    here.setattr(Here, "before", staticmethod(interrupt))
    assert invoke(*command, tmp_path / "out", "--trials", 4) == (130, "", "")
    assert not (tmp_path / "out" / "simfbo" / "trial-3").exists()  # nothing is begun any more
    assert not (tmp_path / "out" / "tuned.toml").exists()
    here.setattr(Here, "before", staticmethod(lambda name: None))
    assert invoke(*command, tmp_path / "out", "--trials", 3) == (0, "", "")
    assert invoke(*command, tmp_path / "out", "--trials", 4, "--jobs", 1) == (0, "", "")
    assert known(tmp_path / "out") == known(tmp_path / "whole")


@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="processes are looked for in /proc"
)
def test_a_search_killed_twice_ends_the_same(
    file: Path, tmp_path: Path, here: pytest.MonkeyPatch
) -> None:
    out, command = (
        tmp_path / "out",
        ["tune", file, "--algorithm", "simfbo", "--resume", "--quiet", "--out"],
    )
    assert invoke(*command, tmp_path / "whole", "--trials", 4) == (0, "", "")
    assert invoke(*command, out, "--trials", 2) == (0, "", "")
    here.undo()
    for evaluations in (0, 3):  # while trial 2 starts, and while it runs
        process = start_forked(*command, out, "--trials", 4, cwd=tmp_path)
        wait_until(lambda: member_processes(out), 30, "no member started")
        wait_until(
            lambda wanted=evaluations: evaluations_written(out / "simfbo" / "trial-2") >= wanted,
            60,
            "no progress",
        )
        process.kill()
        process.join()
        wait_until(lambda: not member_processes(out), 5, "a member outlives its search")
        assert not (out / "simfbo" / "trial-2" / "summary.json").exists()
    here.setattr(subprocess, "Popen", Here)
    assert invoke(*command, out, "--trials", 4) == (0, "", "")
    assert known(out) == known(tmp_path / "whole")
