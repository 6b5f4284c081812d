"""Hostile experiment files: each is refused in one line that names the place, or is valid."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import tomli_w

from soak import junk
from soak.experiments import METHODS, draw_experiment
from soak.trials import Trial
from tests.support.tool import assert_refused, invoke, read_summary

# A large value of these may be meant, and would take long; so would the default of some.
COSTLY = {
    *("rounds", "local_steps", "inner_rounds", "inner_steps", "lower_steps", "upper_steps"),
    *("plane_steps", "neumann_steps", "adapt_steps", "episode_steps", "threads", "name"),
    *("task", "data", "clients", "samples", "dim_x", "dim_y", "hidden", "episodes", "ways"),
}
CHECKS = 0.1  # the share of files that `fedbilevel check` reads


def is_costly(key: str, value: Any) -> bool:
    """Whether a run with this value would take too long; None stands for the default."""
    if value is None:
        return key in COSTLY
    candidates = [value]
    if isinstance(value, list):
        candidates += value
    if isinstance(value, dict):
        candidates += value.values()
    integers = [c for c in candidates if isinstance(c, int) and not isinstance(c, bool)]
    return key in COSTLY and any(3 < integer < 2**63 for integer in integers)


def hostile_experiment(draw: random.Random) -> tuple[str, set[str]]:
    """Return an experiment with one to three wrong places as text, and what it may be refused for.

    One in five is not even TOML.
    """
    table = draw_experiment(draw, draw.choice(METHODS), most_rounds=1)
    if draw.random() < 0.3:
        table["algorithms"] = {draw.choice(METHODS): {"environment": {"min_replies": 1}}}
        table["compare"] = [draw.choice(METHODS)]
    if draw.random() < 0.3:
        table["stop"] = {"bytes": 1e9, "test_accuracy": 0.9}
        table["title"] = "a title"
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        junk.change_table(draw, table, is_costly)
    places = {"lower_level", "simfbo"}  # the latter is the default algorithm
    places |= {*(key for path in junk.key_paths(table) for key in path)}
    places |= {str(inner.get("name")) for inner in table.values() if isinstance(inner, dict)}
    text = tomli_w.dumps(table)
    if draw.random() < 0.2:
        text = junk.change_text(draw, text)
    return text, places


def files(trial: Trial) -> Counter[str]:
    """Run or check one hostile experiment file."""
    text, places = hostile_experiment(trial.draw)
    file = trial.folder / "a.toml"
    run = trial.folder / "run"
    file.write_bytes(text.encode())
    if trial.draw.random() < CHECKS:
        outcome = invoke("check", file)
        assert outcome.code in (0, 2), outcome
        kind = "checked"
    else:
        outcome = invoke("run", file, "--out", run, "--quiet")
        kind = "run"
    if outcome.code == 2:
        assert_refused(outcome)
        named = [place for place in (str(file), *places) if place and place in outcome.err]
        assert named, f"neither the file nor a place in it is named: {outcome.err}"
        assert [file] == list(trial.folder.iterdir()), "something was written"
        return Counter(["refused"])
    if kind == "run":
        assert outcome in ((0, "", ""), (3, "", "")), outcome
        kind = str(read_summary(run)["status"])
        assert kind == {0: "completed", 3: "diverged"}[outcome.code]
    return Counter([kind])
