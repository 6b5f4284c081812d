"""What is released: the description, the contents of wheel and sdist, one version."""

from __future__ import annotations

import io
import re
import runpy
import tarfile
import zipfile
from pathlib import Path

import fedbilevel as fb
from tools import package

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
description = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["description"]
RELATIVE = re.compile(r"\]\((?!https?://|#)")


def test_the_description_has_no_relative_link_with_and_without_an_address() -> None:
    assert RELATIVE.search(README)
    plain = description(README, "", "1.2")
    assert not RELATIVE.search(plain)
    assert "[" + "tutorial](" not in plain
    assert "tutorial" in plain
    linked = description(README, "https://example.org/fedbilevel", "1.2")
    assert not RELATIVE.search(linked)
    assert "](https://example.org/fedbilevel/raw/v1.2/docs/images/sites.png)" in linked
    assert "](https://example.org/fedbilevel/blob/v1.2/CONTRIBUTING.md)" in linked


def test_absolute_links_and_links_within_the_page_stay() -> None:
    text = "[a](https://a.org/b) [c](#c) ![d](https://e.org/f.png) [g](h.md)"
    assert description(text, "", "1").startswith(
        "[a](https://a.org/b) [c](#c) ![d](https://e.org/f.png) g"
    )


def test_the_version_is_written_once() -> None:
    for name in ("pyproject.toml", "CITATION.cff", "Containerfile"):
        assert fb.__version__ not in (ROOT / name).read_text("utf-8").replace(">=", "")
    assert f"## {fb.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def wheel_with(folder: Path, names: tuple[str, ...], payload: str) -> Path:
    path = folder / "fedbilevel-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
        metadata = (
            f"Metadata-Version: 2.4\nName: fedbilevel\nVersion: {fb.__version__}\n\n{payload}"
        )
        archive.writestr("fedbilevel-0.dist-info/METADATA", metadata)
    return path


def test_a_wheel_is_checked(tmp_path: Path) -> None:
    assert package.problems_of_wheel(wheel_with(tmp_path, package.IN_WHEEL, "[a](http://b)")) == []
    names = (*package.IN_WHEEL[1:], "tests/conftest.py")
    assert package.problems_of_wheel(wheel_with(tmp_path, names, "[a](docs/b.md)")) == [
        "the wheel lacks fedbilevel/py.typed",
        "the wheel installs fedbilevel, tests",
        "the description links to docs/b.md, which is no address",
    ]


def test_an_sdist_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in package.IN_SDIST[1:]:
            archive.addfile(tarfile.TarInfo(f"fedbilevel-0/{name}"), io.BytesIO())
    assert package.problems_of_sdist(path) == ["the sdist lacks CHANGELOG.md"]


def test_the_container_runs_commands_that_there_are() -> None:
    text = (ROOT / "Containerfile").read_text("utf-8")
    assert 'ENTRYPOINT ["fedbilevel"]' in text
    assert "COPY build/package/dist/*.whl constraints.txt" in text
    extras = re.findall(r"\[([a-z,]+)\]\"", text)[0].split(",")
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert all(re.search(rf"^{extra} = \[", project, flags=re.MULTILINE) for extra in extras)
