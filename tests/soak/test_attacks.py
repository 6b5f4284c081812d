"""The attacks of `make soak`, each for a few seconds; what they find bad is printed."""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from soak.__main__ import ATTACKS
from soak.experiments import METHODS, method
from soak.trials import Tally, Trial, run_attack

SEED = 0
FIRST = 1  # the first trial would disturb a comparison, which tests/runs/test_kill.py does
# The attack "federation" takes minutes; tests/deploy/flower has tests with real processes.
COUNTS = {"kills": 4, "damage": 3, "files": 40, "messages": 40, "commands": 40, "processes": 1}


@pytest.mark.parametrize("name", COUNTS)
def test_an_attack_finds_nothing_bad(name: str) -> None:
    tally = Tally(name, SEED)
    run_attack(tally, ATTACKS[name], COUNTS[name], FIRST)
    assert not tally.bad, tally.report()
    assert tally.count >= COUNTS[name]


def test_every_registered_method_solves_a_task_of_the_kit() -> None:
    assert all(method(name).tasks for name in METHODS)


def test_a_bad_outcome_is_counted_and_can_be_repeated() -> None:
    drawn: dict[int, list[float]] = {}

    def attack(trial: Trial) -> Counter[str]:
        drawn.setdefault(trial.number, []).append(trial.draw.random())
        Path(trial.folder, "file").touch()
        if trial.number == 2:
            raise AssertionError("the third one")
        return Counter(["good"])

    tally = Tally("example", 7)
    run_attack(tally, attack, 4)
    assert tally.outcomes == Counter(good=3)
    assert list(tally.bad) == [2]
    assert "python -m soak --attack example --seed 7 --first 2 --count 1" in tally.report()
    assert "the third one" in tally.report()
    run_attack(Tally("example", 7), attack, 1, first=2)
    assert len(set(drawn[2])) == 1, "a trial is not repeated by its seed and number"


def test_a_trial_that_takes_too_long_or_too_much_memory_is_bad() -> None:
    def catch_errors(_: Trial) -> Counter[str]:
        with suppress(Exception):
            time.sleep(5)
        return Counter(["good"])

    tally = Tally("example", 0)
    tally.attempt(catch_errors, 0, longest_s=1)
    earlier = len(b"x" * 900_000_000)  # the peak of an earlier trial hides nothing
    tally.attempt(lambda trial: Counter([str(len(b"x" * 600_000_000))]), 1)
    assert earlier
    assert "more than 1 s" in tally.bad[0]
    assert "MB" in tally.bad[1]
