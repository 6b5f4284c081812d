"""The walk from the server's iteration to a client's step: our own frames, hop by hop.

`python -m benchmarks.walk` prints them for the reference executor, for the stacked one, and for a node on Flower.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fedbilevel as fb
from fedbilevel.algorithms.simfbo import Descend
from fedbilevel.runs.run import Run

PACKAGE = Path(fb.__file__).parent


def walk(call: Callable[[], Any], begins: str) -> list[str]:
    """Our own frames between a function (its qualified name) and the first call of a client's step, both included."""
    hops: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or hops or frame.f_code is not Descend.step.__code__:
            return
        here: FrameType | None = frame
        while here is not None:
            path = Path(here.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                hops.append(f"{path.relative_to(PACKAGE)}: {here.f_code.co_qualname}")
            if here.f_code.co_qualname == begins:
                break
            here = here.f_back
        hops.reverse()

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return hops


def simulated(mode: str) -> list[str]:
    """From `Run.advance`, on the virtual clock."""
    task = fb.tasks.load("quadratic", clients=4)
    fed = fb.simulated_federation(task.problem, task.clients, mode=mode)  # type: ignore[arg-type]
    run = Run(fb.algorithms.SimFBO(), fed, {})
    run.advance()  # costs of each kind of step are measured the first time, by another way
    return walk(run.advance, "Run.advance")


def on_a_node() -> list[str]:
    """From the worker of a node; above it are two frames that take Flower's call and decode its message."""
    from fedbilevel.deploy.flower.client import Node, Worker
    from fedbilevel.experiments import config as configs

    config = configs.resolve(
        *configs.read("digits"), overrides={"task.name": "quadratic"}, smoke=True
    )
    worker = Worker(Node(partition=0), "0", config.table)
    x, y = worker.problem.start
    message = {
        "phase": fb.algorithms.SimFBO().descend().plain(),
        "number": 0,
        "steps": 1,
        "key": 1,
        "round": 1,
        "iteration": 0,
        "kept": None,
        "shared": {"x": x, "y": y, "z": y},
        "kinds": {},
        "each": {},
    }
    worker.run(message)
    return walk(lambda: worker.run(message), "Worker.run")


def main() -> None:
    walks = {
        "reference": simulated("loop"),
        "stacked": simulated("stack"),
        "a node on Flower": on_a_node(),
    }
    for name, hops in walks.items():
        print(f"{name}: {len(hops)} frames")
        for hop in hops:
            print(f"  {hop}")


if __name__ == "__main__":
    main()
