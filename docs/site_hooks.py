"""Pages of the site that are files of the repository's root, so that each is written once."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Linked, but not a page: shown as text.
PLAIN = re.compile(
    r"\[([^]]*)\]\((?:\.\./)*(?:LICENSE|CITATION\.cff|src/[^)]*|tests/[^)]*|benchmarks/[^)]*)\)"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the root as pages."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, page, content=_relative_to_docs(text)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the root to their pages."""
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = markdown.replace(f"({up}../{name}", f"({up}{target}")
    return PLAIN.sub(r"`\1`", markdown)


def _relative_to_docs(text: str) -> str:
    text = text.replace("](docs/", "](").replace('src="docs/', 'src="')
    for name, target in PAGES.items():
        text = text.replace(f"]({name}", f"]({target}")
    return text
