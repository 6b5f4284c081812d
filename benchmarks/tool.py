"""What `fedbilevel run` adds to the loop that it runs: metrics, checkpoints, progress."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, describe, seconds
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import prepare_run
from fedbilevel.runs.progress import Progress
from fedbilevel.runs.recorder import Recorder

ROUNDS = 10  # per measurement; a checkpoint is written in each

Metrics = dict[str, Any]


def advance(metrics: Iterator[Metrics], show: Callable[[Metrics], None]) -> Callable[[], None]:
    """Return a function that advances a run by some rounds."""

    def advance_rounds() -> None:
        for _ in range(ROUNDS):
            show(next(metrics))

    return advance_rounds


def rows() -> list[Row]:
    """Compare the command line with the loop alone, on MNIST."""
    if not Path(os.environ.get("FEDBILEVEL_DATA", ""), "mnist").is_dir():
        print("left out: what the tool adds, because MNIST is not in $FEDBILEVEL_DATA")
        return []
    config = configs.resolve(*configs.read("mnist"), overrides={"rounds": 1000})
    with tempfile.TemporaryDirectory() as folder, Progress("bench", 1000, quiet=False) as progress:
        recorder = Recorder(prepare_run(config), Path(folder, "run"), config.table)
        with closing(iter(recorder)) as recorded:  # type: ignore[type-var]
            functions = {
                "tool": advance(recorded, progress.show),
                "loop": advance(iter(prepare_run(config)), lambda metrics: None),
            }
            times = seconds(functions, repeats=30, warm_up=6)
    name = (
        "fedbilevel run / the same loop alone, 10 rounds of simfbo on MNIST, evaluated every round"
    )
    return [Row(name, times["tool"] / times["loop"], "at most 1.05", describe(times))]
