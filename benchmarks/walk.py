"""The path from the server's iteration to a client's step, as the frames of this package.

`python -m benchmarks.walk` prints it for the reference executor, for the stacked one, and for a
node on Flower.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Literal

import fedbilevel as fb
from fedbilevel.algorithms.simfbo import Descend
from fedbilevel.runs.run import Run

PACKAGE = Path(fb.__file__).parent


def frames_to_step(call: Callable[[], object], first: str) -> list[str]:
    """Return the frames from a function to the first call of a client's step, both included.

    Args:
        call: what to run.
        first: the qualified name of the function to start from.
    """
    frames: list[str] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frames or frame.f_code is not Descend.step.__code__:
            return
        caller: FrameType | None = frame
        while caller is not None:
            path = Path(caller.f_code.co_filename)
            name = caller.f_code.co_qualname
            if path.is_relative_to(PACKAGE):
                frames.append(f"{path.relative_to(PACKAGE)}: {name}")
            if name == first:
                break
            caller = caller.f_back
        frames.reverse()

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames


def simulated(mode: Literal["stack", "loop"]) -> list[str]:
    """Return the frames from `Run.advance`, on the virtual clock."""
    task = fb.tasks.load("quadratic", clients=4)
    fed = fb.simulated_federation(task.problem, task.clients, mode=mode)
    run = Run(fb.algorithms.SimFBO(), fed, {})
    run.advance()  # the first time, costs are measured, which takes another path
    return frames_to_step(run.advance, "Run.advance")


def on_a_node() -> list[str]:
    """Return the frames from the worker of a node.

    Two frames above it take Flower's call and decode its message.
    """
    from fedbilevel.deploy.flower.client import Node, Worker
    from fedbilevel.experiments import config as configs

    config = configs.resolve(
        *configs.read("digits"), overrides={"task.name": "quadratic"}, smoke=True
    )
    worker = Worker(Node(partition=0), "0", config.table)
    x, y = worker.problem.start
    message = {
        "phase": fb.algorithms.SimFBO().descend().to_dict(),
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
    return frames_to_step(lambda: worker.run(message), "Worker.run")


def main() -> None:
    """Print all three paths."""
    paths = {
        "reference": simulated("loop"),
        "stacked": simulated("stack"),
        "a node on Flower": on_a_node(),
    }
    for name, frames in paths.items():
        print(f"{name}: {len(frames)} frames")
        for frame in frames:
            print(f"  {frame}")


if __name__ == "__main__":
    main()
