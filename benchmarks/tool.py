"""What the tool adds to the loop it runs: config, metrics, checkpoints every 10 rounds, progress."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, describe, seconds
from fedbilevel.cli.progress import Progress
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import prepare
from fedbilevel.runs.recorder import Recorder

ROUNDS = 10


def advance(
    metrics: Iterator[dict[str, Any]], show: Callable[[dict[str, Any]], None]
) -> Callable[[], None]:
    def ten_rounds() -> None:
        for _ in range(ROUNDS):
            show(next(metrics))

    return ten_rounds


def rows() -> list[Row]:
    data = Path(os.environ.get("FEDBILEVEL_DATA", ""), "mnist")
    if not data.is_dir():
        print(
            "the tool's overhead is measured on MNIST, which is not in $FEDBILEVEL_DATA: left out"
        )
        return []
    with tempfile.TemporaryDirectory() as folder, Progress("bench", 1000, quiet=False) as progress:
        config = configs.resolve(*configs.read("mnist"), overrides={"rounds": 1000})
        with closing(
            iter(Recorder(prepare(config), Path(folder, "run"), config.table))
        ) as recorder:  # type: ignore[type-var]
            tool = advance(recorder, progress.show)
            loop = advance(iter(prepare(config)), lambda metrics: None)
            times = seconds({"tool": tool, "loop": loop}, repeats=30, warm_up=6)
    title = (
        "fedbilevel run / the same loop alone, 10 rounds of simfbo on MNIST, evaluated every round"
    )
    return [Row(title, times["tool"] / times["loop"], "at most 1.05", describe(times))]
