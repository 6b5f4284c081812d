"""Reading a run back: what it learnt, how it went, what it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbilevel.core.tree import Tree
from fedbilevel.runs import checkpoint, folder


@dataclass(frozen=True)
class LoadedRun:
    x: Tree
    y: Tree
    history: list[dict[str, Any]]
    config: dict[str, Any]
    status: str

    def state_dict(self) -> dict[str, Tensor]:
        """x and y together, under the names of the module they were split from."""
        return {**self.x, **self.y}


def load_run(path: Path | str) -> LoadedRun:
    """The run in a folder; of an unfinished one, its last checkpoint."""
    found = folder.read(path)
    saved = checkpoint.load(Path(path) / folder.CHECKPOINT)
    state = saved["good"] or saved["state"]
    return LoadedRun(state["x"], state["y"], found.history, found.config, found.status)
