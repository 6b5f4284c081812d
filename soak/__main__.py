"""Attacks with random, seeded trials; see soak/__init__.py.

Without --attack, all of them run: half of the time on the simulator, half on a federation of four
nodes on this machine. With --attack, one of them runs until there were --count kills, messages and
so on.
"""

from __future__ import annotations

import fedbilevel

fedbilevel.configure_process()  # as the command line does, before torch is imported

import argparse  # noqa: E402
import contextlib  # noqa: E402
import itertools  # noqa: E402
import math  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from soak.commands import commands, processes  # noqa: E402
from soak.damage import damage  # noqa: E402
from soak.federation import Federation, federation  # noqa: E402
from soak.files import files  # noqa: E402
from soak.kills import kills  # noqa: E402
from soak.messages import messages  # noqa: E402
from soak.resources import Monitor  # noqa: E402
from soak.trials import Attack, Tally, run_attack  # noqa: E402
from tests.support.tool import forkserver  # noqa: E402

SIMULATED = (kills, damage, files, messages, commands, processes)
ATTACKS: dict[str, Attack] = {attack.__name__: attack for attack in (*SIMULATED, federation)}
LONGEST_EXPERIMENT_S = 900


def main() -> None:
    """Run what the command line asks for; the exit code is 1 if anything was bad."""
    parser = argparse.ArgumentParser(
        prog="python -m soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, help="how long it takes; 10 without --attack")
    parser.add_argument("--on", choices=PLACES, help="all of the time on one of the two")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--attack", choices=ATTACKS)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the problems are small
    print(f"seed {given.seed}", flush=True)
    tallies: list[Tally] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends with the figures so far
        if given.attack:
            tallies.append(Tally(given.attack, given.seed))
            seconds = 60 * (given.minutes or math.inf)
            run_attack(tallies[0], ATTACKS[given.attack], given.count, given.first, seconds)
        else:
            places = (given.on,) if given.on else PLACES
            soak(60 * (given.minutes or 10.0) / len(places), given.seed, places, tallies)
    for tally in tallies:
        print(tally.report())
    sys.exit(any(tally.bad for tally in tallies))


def soak(seconds: float, seed: int, places: Iterable[str], tallies: list[Tally]) -> None:
    """Run all attacks, so many seconds in each place, and print what the processes held."""
    forkserver.Process(target=int).start()  # its files are not removed with the folder
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        tempfile.tempdir = folder
        for place in places:
            monitor = Monitor()
            try:
                PLACES[place](seconds, seed, monitor, tallies)
            finally:
                monitor.show(place)


def _on_simulator(seconds: float, seed: int, monitor: Monitor, tallies: list[Tally]) -> None:
    """Run the attacks on the simulator in turn, all in this process."""
    started = [Tally(attack.__name__, seed) for attack in SIMULATED]
    tallies += started
    give_up_at = time.monotonic() + seconds
    for number in itertools.count():
        for attack, tally in zip(SIMULATED, started, strict=True):
            tally.attempt(attack, number)
            if time.monotonic() > give_up_at:
                return
        monitor.sample("this process")
        monitor.count("temporary files", Path(tempfile.gettempdir()))


def _on_federation(seconds: float, seed: int, monitor: Monitor, tallies: list[Tally]) -> None:
    """Run one experiment after the other on the same port."""
    tally = Tally("federation", seed)
    tallies.append(tally)
    give_up_at = time.monotonic() + seconds
    with (
        tempfile.TemporaryDirectory(prefix="federation-") as folder,
        Federation(Path(folder), monitor) as nodes,
    ):
        for number in itertools.count():
            if time.monotonic() > give_up_at:
                return
            tally.attempt(
                lambda trial: nodes.run_experiment(trial.draw), number, LONGEST_EXPERIMENT_S
            )
            monitor.sample("this process")


PLACES = {"simulator": _on_simulator, "federation": _on_federation}

if __name__ == "__main__":
    main()
