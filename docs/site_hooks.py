"""What the site adds to the pages in this folder.

Files of the repository's root are pages, so that each is written once. Pages on methods and tasks
are made from the code. Drawings are put into the page as they are, so that they take the colours of
its theme.
"""

from __future__ import annotations

import re
from pathlib import Path

import site_catalogue
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# Linked, but not a page: shown as text.
PLAIN = re.compile(
    r"\[([^]]*)\]\((?:\.\./)*(?:LICENSE|CITATION\.cff|src/[^)]*|tests/[^)]*|benchmarks/[^)]*|[\w.-]+\.py)\)"
)
# What a search shows first, and last.
GUIDES = ("start.md", "tutorial/", "howto/", "concepts/", "personal.md", "networks.md", "deploy.md")
RECORDS = ("decisions/", "changelog.md", "results/")
GENERATED = re.compile(r"<!-- generated: ([\w-]+) -->")
DRAWING = re.compile(r'<img alt="([^"]*)" src="([^"]*\.svg)"[^>]*>')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the generated pages in the navigation, behind the first page of their section.

    There is no page for a missing address: its links would have to begin at the root of a server,
    and the site is to work below any folder, and from a disk.
    """
    config.theme.static_templates.discard("404.html")
    for section in config.nav or []:
        for title, pages in section.items():
            if title in ("Methods", "Tasks"):
                folder = title.lower()
                made = [page for page in site_catalogue.pages() if page.startswith(f"{folder}/")]
                pages += made[1:]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the root, and the generated pages."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, page, content=_relative_to_docs(text)))
    for page, make in site_catalogue.pages().items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the root to their pages, fill in tables, and rank the page."""
    if page.file.src_uri.startswith(GUIDES):
        page.meta["search"] = {"boost": 4}
    elif page.file.src_uri.startswith(RECORDS):
        page.meta["search"] = {"boost": 0.5}
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = markdown.replace(f"({up}../{name}", f"({up}{target}")
    markdown = GENERATED.sub(lambda match: site_catalogue.tables()[match[1]](), markdown)
    return PLAIN.sub(r"`\1`", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page."""

    def drawing(match: re.Match[str]) -> str:
        alt, source = match.groups()
        path = (Path(config.docs_dir) / page.file.src_uri).parent / source
        if not path.exists():
            return match[0]  # mkdocs says so
        svg = path.read_text("utf-8")
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{alt}"', 1)
        return f'<span class="drawing">{svg}</span>'

    return DRAWING.sub(drawing, html)


def _relative_to_docs(text: str) -> str:
    text = text.replace("](docs/", "](").replace('src="docs/', 'src="')
    for name, target in PAGES.items():
        text = text.replace(f"]({name}", f"]({target}")
    return text
