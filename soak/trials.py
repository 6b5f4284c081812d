"""Trials: what an attack is given, how its outcomes are counted, and how a bad one is repeated."""

from __future__ import annotations

import math
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from soak import resources

LONGEST_TRIAL_S = 900  # long, because the machine may be busy
REPORTED_EVERY_S = 60
MOST_MEGABYTES = 400  # that a trial may take on top of what this process holds


@dataclass(frozen=True)
class Trial:
    """One trial of an attack.

    Attributes:
        number: Counts the trials of an attack, from 0.
        draw: The source of everything random.
        folder: An empty folder, which is removed after the trial.
    """

    number: int
    draw: random.Random
    folder: Path


class TooLongError(BaseException):
    """A trial takes too long; code under attack must not take it for an error of its own."""


# Returns how often each good outcome was seen, and raises at a bad one. A kill, a message or a
# command line counts as one; a trial may be made of several.
Attack = Callable[[Trial], Counter[str]]


@dataclass
class Tally:
    """The outcomes of an attack.

    Attributes:
        name: The name of the attack.
        seed: The seed of all its trials.
        outcomes: How often each good outcome was seen.
        bad: The traceback of each bad trial, by its number.
        trials: How many trials there were.
        seconds: How long they took.
    """

    name: str
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    bad: dict[int, str] = field(default_factory=dict)
    trials: int = 0
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """How many kills, messages and so on there were, those with bad outcomes included."""
        return self.outcomes.total() + len(self.bad)

    def attempt(self, attack: Attack, number: int, longest_s: int = LONGEST_TRIAL_S) -> None:
        """Make one trial, and count what comes out; what is bad is printed at once."""
        started = time.monotonic()
        draw = random.Random(f"{self.seed} {self.name} {number}")
        try:
            with tempfile.TemporaryDirectory(prefix="soak-") as folder, _bounded(longest_s):
                self.outcomes += attack(Trial(number, draw, Path(folder)))
        except (Exception, TooLongError):
            self.bad[number] = traceback.format_exc()
            print(self._bad_outcome(number), flush=True)
        self.trials += 1
        self.seconds += time.monotonic() - started

    def repeat_command(self, number: int) -> str:
        """Return the command that makes a trial again."""
        return f"python -m soak --attack {self.name} --seed {self.seed} --first {number} --count 1"

    def headline(self) -> str:
        """Return the counts in one line."""
        return (
            f"{self.name}: {self.count} in {self.trials} trials, {len(self.bad)} bad, "
            f"seed {self.seed}, {self.seconds:.0f} s"
        )

    def report(self) -> str:
        """Return the figures as text: counts, and every bad outcome with its command."""
        lines = [self.headline()]
        for outcome, count in self.outcomes.most_common():
            lines.append(f"  {count:6} {outcome}")
        lines += [self._bad_outcome(number) for number in self.bad]
        return "\n".join(lines)

    def _bad_outcome(self, number: int) -> str:
        return f"  bad: {self.repeat_command(number)}\n{self.bad[number]}"


@contextmanager
def _bounded(longest_s: int) -> Iterator[None]:
    """Fail if a block takes too long, or too much memory at its peak."""

    def too_long(*_: object) -> None:
        raise TooLongError(f"the trial took more than {longest_s} s")

    held = resources.reset_peak()
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(longest_s)
    try:
        yield
    finally:
        signal.alarm(0)
    grown = resources.peak_megabytes() - held
    assert grown < MOST_MEGABYTES, f"the trial took {grown:.0f} MB"


def run_attack(
    tally: Tally, attack: Attack, count: int, first: int = 0, seconds: float = math.inf
) -> None:
    """Make trials, from the first number on, until there were `count` kills, messages and so on.

    No trial starts after so many seconds. Once a minute, a line says how many there were.
    """
    number = first
    give_up_at = time.monotonic() + seconds
    reported_at = time.monotonic()
    while tally.count < count and time.monotonic() < give_up_at:
        tally.attempt(attack, number)
        number += 1
        if time.monotonic() > reported_at + REPORTED_EVERY_S:
            print(f"{tally.headline()}, next trial {number}", flush=True)
            reported_at = time.monotonic()
