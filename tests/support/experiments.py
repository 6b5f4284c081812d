"""Experiments as text."""

from pathlib import Path
from typing import Any

from fedbilevel.experiments import config as configs
from tests.support.tool import write


def resolve_text(text: str, folder: Path, *settings: str, **options: Any) -> configs.Config:
    """Write an experiment to a folder and resolve it, with settings as after `--set`."""
    source, table = configs.read(str(write(folder / "experiment.toml", text)))
    return configs.resolve(source, table, settings=settings, **options)
