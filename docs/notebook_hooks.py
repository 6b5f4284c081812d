"""Pages of the site from executed notebooks, with the notebook itself to download.

`make notebooks` executes them into build/notebooks; `make docs` does that first.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

SOURCES = Path(__file__).parent / "notebooks"
EXECUTED = Path(__file__).parent.parent / "build/notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page, its pictures and the executed notebook for every notebook."""
    for source in sorted(SOURCES.glob("*.ipynb")):
        executed = EXECUTED / source.name
        if not executed.exists() or executed.stat().st_mtime <= source.stat().st_mtime:
            raise PluginError(f"{source.name} was not executed yet; run `make notebooks` first")
        _replace(files, config, f"notebooks/{source.name}", executed.read_bytes())
        exporter = MarkdownExporter()
        text, resources = exporter.from_filename(
            str(executed), {"unique_key": source.stem, "output_files_dir": source.stem}
        )
        heading, rest = text.lstrip().split("\n", 1)
        download = f'[Download this notebook]({source.name}){{ download="{source.name}" }}'
        page = f"{heading}\n\n{download}\n{rest}"
        _replace(files, config, f"notebooks/{source.stem}.md", page)
        for name, content in resources["outputs"].items():
            _replace(files, config, f"notebooks/{Path(name).as_posix()}", content)
    return files


def _replace(files: Files, config: MkDocsConfig, uri: str, content: str | bytes) -> None:
    existing = files.get_file_from_path(uri)
    if existing is not None:
        files.remove(existing)
    files.append(File.generated(config, uri, content=content))
