"""Damage to the files of a killed run.

Two outcomes are good: the run ends equal to the bit to one that was never disturbed, or it is
refused in one sentence and nothing is touched.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from soak.disturb import Disturbance, EventCounter
from soak.experiments import METHODS, write_valid
from soak.trials import Trial
from tests.support.processes import assert_same_run
from tests.support.tool import assert_refused, contents, invoke, run_forked

MOST_ROUNDS = 20
KINDS = ("flipped byte", "cut", "emptied", "removed")


def damage(trial: Trial) -> Counter[str]:
    """Kill a run, damage one of its files, and resume it; the methods take turns."""
    draw = trial.draw
    folder = trial.folder
    name = METHODS[trial.number % len(METHODS)]
    run = folder / "run"
    with EventCounter(folder / "whole") as counter:
        file, undisturbed = write_valid(draw, name, folder, MOST_ROUNDS)
    command = ["run", file, "--out", run, "--resume", "--quiet"]
    kill = Disturbance("kill", run, draw.randint(counter.events // 2, counter.events))
    run_forked(*command, cwd=folder, prepare=kill)
    if not contents(run):
        return Counter(["killed before there was a file"])
    damaged = draw.choice(sorted(contents(run)))
    kind = draw.choice(KINDS)
    _damage_file(draw, run / damaged, kind)
    before = contents(run)
    outcome = invoke(*command)
    try:
        if outcome.code == 2:
            assert_refused(outcome, str(run))
            assert contents(run) == before, "something was touched"
            return Counter([f"{damaged} {kind}: refused"])
        assert outcome == undisturbed, (outcome, undisturbed)
        assert_same_run(run, folder / "whole")
    except AssertionError as error:
        raise AssertionError(f"{damaged} {kind}: {error}") from error
    return Counter([f"{damaged} {kind}: resumed"])


def _damage_file(draw: random.Random, path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "removed":
        path.unlink()
    elif kind == "emptied" or not data:
        path.write_bytes(b"")
    elif kind == "cut":
        path.write_bytes(data[: draw.randrange(len(data))])
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
