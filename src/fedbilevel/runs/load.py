"""Loads a recorded run: the variables that it learnt, its metrics and its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.tree import Tree, is_finite
from fedbilevel.execution.client_memory import Memory, personal_values
from fedbilevel.execution.memories import Memories
from fedbilevel.runs import checkpoint, folder

CACHE_BYTES = 2**26


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
        clients: How many clients the federation has.
        own: What each client keeps of the variables that it owns, as `personal` reads it.
        client_start: Where these variables start, for "x" and "y".

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
    clients: int = 0
    own: Mapping[int, Memory] | None = field(default=None, repr=False)
    client_start: Mapping[str, Tree] = field(default_factory=dict)

    def personal(self, client: int) -> tuple[Tree, Tree]:
        """Return the whole x and y of one client: those of `x` and `y`, and what the client owns.

        Of a method for personal models, such as `Ditto`, it is the client's own model.

        Args:
            client: The client.

        Returns:
            x and y. Where nothing belongs to the client they are those of the run.

        Raises:
            ValueError: There is no such client.
            LookupError: The clients were on other machines, which alone have their models.

        Examples:
            >>> import dataclasses
            >>> import tempfile
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> problem = dataclasses.replace(task.problem, owner={"y": "client"})
            >>> with tempfile.TemporaryDirectory() as out:
            ...     result = fb.solve(problem, task.clients, "simfbo", rounds=2, out=out)
            ...     x, y = fb.load_run(out).personal(3)
            >>> bool((y["y"] == result.personal(3)[1]["y"]).all())
            True
        """
        checks.integer("client", client, least=0, most=self.clients - 1)
        if self.own is None:
            raise LookupError(f"the own model of client {client} is with it, on its own machine")
        kept = personal_values(self.own.get(client, {}))
        own = {}
        for level, start in self.client_start.items():
            own[level] = {**start, **kept.get(level, {})}
        return Tree({**self.x, **own["x"]}), Tree({**self.y, **own["y"]})

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return x and y together, under the names of the module from which they were split.

        Args:
            client: The client whose variables are wanted; None for those of the server.

        Returns:
            A dict for the `load_state_dict` of that module.

        Raises:
            ValueError: There is no such client.
            LookupError: See `personal`.
        """
        x, y = (self.x, self.y) if client is None else self.personal(client)
        return {**x, **y}


def load_run(path: Path | str) -> LoadedRun:
    """Load a run from the folder in which it was recorded.

    Args:
        path: The folder: `out` of `fb.solve`, or `--out` of `fedbilevel run`.

    Returns:
        The run; of an unfinished one, the variables at its last checkpoint.

    Raises:
        OSError: If there is no run, or a file of it cannot be read.
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
    if not (Path(path) / folder.CONFIG).is_file():
        raise FileNotFoundError(f"{path} is no run folder: it holds no {folder.CONFIG}")
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
        saved["clients"]["number"],
        _own(Path(path) / folder.CHECKPOINT, saved["federation"]["transport"]),
        saved["clients"]["start"],
    )


def _own(checkpoint: Path, transport: Mapping[str, Any]) -> Memories | None:
    """Return what the clients of a simulation remember; None for clients on other machines."""
    if "executors" not in transport:
        return None
    memories = Memories("cpu", CACHE_BYTES)
    memories.folder = checkpoint.parent
    memories.restore([snapshot["memories"] for snapshot in transport["executors"]])
    return memories
