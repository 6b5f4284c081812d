"""The description that package registries show: the README with links that lead somewhere there.

Everything else about the package is declared in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?://|#)([^)\s]+)\)")


def description(readme: str, source: str, version: str) -> str:
    """Return the README with absolute links, or without links to files if no address is known.

    Args:
        readme: The README, whose links are relative.
        source: The address of the repository, "" while it has none.
        version: The version, which is also the name of the tag.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if source:
            kind = "raw" if picture else "blob"
            return f"{picture}[{text}]({source}/{kind}/v{version}/{path})"
        if picture:
            return ""
        return text

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    package = (ROOT / "src" / "fedbilevel" / "__init__.py").read_text("utf-8")
    (released,) = re.findall(r'^__version__ = "(.*)"$', package, flags=re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    setup(
        long_description=description(
            (ROOT / "README.md").read_text("utf-8"),
            project.get("urls", {}).get("Source", ""),
            released,
        ),
        long_description_content_type="text/markdown",
    )
