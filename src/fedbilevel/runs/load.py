"""Loads a recorded run: the variables that it learnt, its metrics and its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbilevel.core.tree import Tree, is_finite
from fedbilevel.runs import checkpoint, folder


@dataclass(frozen=True)
class LoadedRun:
    """A run that was read from its folder.

    Args:
        x: The upper variables at the end of the run, or at its last checkpoint; after a divergence,
            or if those are not finite, the variables at the last evaluation before.
        y: The lower variables, likewise.
        history: The metrics of each evaluation; `None` stands for a number that is not finite.
        config: The resolved experiment.
        status: "completed", "diverged", "interrupted", or "unfinished" if the run is still under
            way or was killed.
        reason: Why the run diverged, or when it was interrupted; else empty.

    Examples:
        >>> import tempfile
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = fb.solve(task.problem, task.clients, "simfbo", rounds=2, out=out)
        ...     run = fb.load_run(out)
        >>> sorted(run.state_dict()), len(run.history)
        (['x', 'y'], 3)
    """

    x: Tree
    y: Tree
    history: list[dict[str, Any]]
    config: dict[str, Any]
    status: str
    reason: str = ""

    def state_dict(self) -> dict[str, Tensor]:
        """Return x and y together, under the names of the module from which they were split.

        Returns:
            A dict for the `load_state_dict` of that module.
        """
        return {**self.x, **self.y}


def load_run(path: Path | str) -> LoadedRun:
    """Load a run from the folder in which it was recorded.

    Args:
        path: The folder: `out` of `fb.solve`, or `--out` of `fedbilevel run`.

    Returns:
        The run; of an unfinished one, the variables at its last checkpoint.

    Raises:
        OSError: If a file of the run cannot be read.
        ValueError: If a file is damaged, or was not written by this version of fedbilevel.

    Examples:
        >>> import tempfile
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     result = fb.solve(task.problem, task.clients, "simfbo", rounds=2, out=out)
        ...     run = fb.load_run(out)
        >>> run.status
        'completed'
        >>> bool((run.x["x"] == result.x["x"]).all())
        True
    """
    run_folder = folder.read(path)
    try:
        saved = checkpoint.load(Path(path) / folder.CHECKPOINT)
    except ValueError as error:
        if not (Path(path) / folder.PREVIOUS_CHECKPOINT).exists():
            raise
        raise ValueError(
            f"{error}; resuming the run repeats it from the checkpoint before"
        ) from error
    state = saved["state"]
    if saved["good"] and (saved["status"] == "diverged" or not is_finite(state)):
        state = saved["good"]
    return LoadedRun(
        state["x"],
        state["y"],
        run_folder.history,
        run_folder.config,
        run_folder.status,
        saved["reason"],
    )
