"""`fedbilevel state`: what the nodes of this machine keep of federations, listed and removed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

import platformdirs
import typer

from fedbilevel.core import checks

DAY_S = 86400


def state(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Names of runs, as they are listed; by default all."),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove what is kept of these runs.")
    ] = False,
    older_than: Annotated[
        int | None, typer.Option(min=0, help="Only what no client has used for so many days.")
    ] = None,
) -> None:
    """List or remove what clients on this machine remember of runs.

    A client whose memory was removed starts without one if its run goes on.
    """
    kept = _kept_folders()
    if remove and not runs and older_than is None:
        raise ValueError("--remove needs the names of runs, or --older-than with a number of days")
    for name in runs or kept:
        folder = kept[checks.one_of("run", name, kept)]
        days = _days_since_use(folder)
        if older_than is not None and days < older_than:
            continue
        files = [file for file in folder.iterdir() if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        if remove:
            shutil.rmtree(folder)
        done = "removed, " if remove else ""
        print(f"{name}  {done}{len(files)} files, {size} bytes, used {days:.0f} days ago: {folder}")


def _kept_folders() -> dict[str, Path]:
    """The folder of each run that a client on this machine has a memory of, by the run's name."""
    root = platformdirs.user_state_path("fedbilevel")
    if not root.is_dir():
        return {}
    return {folder.name: folder for folder in sorted(root.iterdir()) if folder.is_dir()}


def _days_since_use(folder: Path) -> float:
    last = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return (time.time() - last) / DAY_S
