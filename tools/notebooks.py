"""Executes the notebooks of docs/notebooks: `python tools/notebooks.py [NAME...]`.

Sources are committed without outputs. Executed notebooks go to build/notebooks, where `make docs`
takes them from; one that is as old as its source, or older, is executed again.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "docs/notebooks"
EXECUTED = ROOT / "build/notebooks"
LIMIT_S = 600  # per cell, on a slow machine


def execute(source: Path, target: Path) -> float:
    """Execute a notebook where it is, and write it with its outputs; return the seconds it took."""
    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count):
            raise ValueError(f"{source.name} has outputs; clear them before you commit it")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        settings = Config()
        settings.KernelManager.transport = "ipc"  # no open ports, and no warning of them
        settings.KernelManager.ip = f"{folder}/kernel"
        client = NotebookClient(
            notebook,
            timeout=LIMIT_S,
            startup_timeout=LIMIT_S,
            resources={"metadata": {"path": str(source.parent)}},
            config=settings,
        )
        client.execute()
    _refuse_warnings(source, notebook)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return time.monotonic() - began


def _refuse_warnings(source: Path, notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr" and "Warning" in output.text:
                raise ValueError(f"{source.name} warns: {output.text.strip()!s:.300}")


def main(names: list[str]) -> None:
    """Execute the named notebooks, or all that are not up to date."""
    sources = sorted(SOURCES.glob("*.ipynb"))
    unknown = set(names) - {source.stem for source in sources}
    if unknown:
        raise SystemExit(f"no notebook {sorted(unknown)[0]!r} in {SOURCES.relative_to(ROOT)}")
    for source in sources:
        target = EXECUTED / source.name
        stale = not target.exists() or target.stat().st_mtime <= source.stat().st_mtime
        if source.stem in names or (not names and stale):
            print(f"{source.stem}: {execute(source, target):.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
