"""The pages of the documentation: snippets run, links lead somewhere, lists are complete."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

import fedbilevel as fb
from fedbilevel.cli.app import app
from fedbilevel.core.settings import declared_settings
from fedbilevel.experiments import config as experiments
from fedbilevel.experiments.schema import expand_names, validate

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ON_ONE_WORKER = pytest.mark.xdist_group("site")  # where the generated pages are made
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@functools.cache
def of_the_site(module: str) -> ModuleType:
    """A module of the folder docs, which is not a package."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(DOCS))


@functools.cache
def generated() -> dict[str, str]:
    """The Markdown of the pages that are made from the code, by path."""
    return {page: make() for page, make in of_the_site("site_catalogue").pages().items()}


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(page: Path) -> list[str]:
    """Return the Python snippets of a page."""
    text = page.read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def listings(page: Path) -> list[str]:
    """Return the snippets that a reader of a page has read, those of CONTRIBUTING included."""
    if "generated: own-algorithm" in page.read_text("utf-8"):
        return snippets(ROOT / "CONTRIBUTING.md") + snippets(page)
    return snippets(page)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=relative)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fb.algorithms.registry, "_registry", dict(fb.algorithms.registry._registry))
    if page.name == "README.md":
        rows = [f"{30 + row},{'ab'[row % 2]},{row % 3 == 0},{row > 20}\n" for row in range(40)]
        (tmp_path / "patients.csv").write_text("age,hospital,checked,ill\n" + "".join(rows))
    names: dict[str, Any] = {"__name__": "__main__"}
    for snippet in listings(page):
        exec(compile(snippet, str(page), "exec", dont_inherit=True), names)
    if page.name == "README.md":
        ridge = names["result"].x["log_ridge"]
        assert ridge[:3].max() < -1.5 < ridge[3:].min()


def leads_somewhere(folder: Path, target: str) -> bool:
    path = (folder / target).resolve()
    made = of_the_site("site_catalogue").pages()
    return path.exists() or (path.is_relative_to(DOCS) and str(path.relative_to(DOCS)) in made)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        message = f"{page.name} links to {target}, which does not exist"
        assert leads_somewhere(page.parent, target), message


@ON_ONE_WORKER
def test_links_of_generated_pages_lead_somewhere() -> None:
    for page, text in generated().items():
        if not page.endswith("glossary.md"):  # its text is that of CONTRIBUTING
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
                assert leads_somewhere((DOCS / page).parent, target), f"{page}: {target}"


def commands(page: Path) -> list[list[str]]:
    """The command lines of the tool in the listings of a page."""
    found = []
    text = page.read_text("utf-8")
    for language, listing in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in listing.replace("\\\n", " ").splitlines():
            if language in ("", "sh") and line.startswith("fedbilevel "):
                found.append(shlex.split(line, comments=True)[1:])
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=relative)
def test_command_lines_are_understood(page: Path) -> None:
    tool: Any = typer.main.get_command(app)
    for command, *words in commands(page):
        params = tool.commands[command].make_context(command, list(words)).params
        experiment = params.get("experiment", "digits")
        assert experiment in experiments.names() or experiment.endswith(".toml"), words
        for name in (params.get("algorithms") or params.get("algorithm") or "simfbo").split(","):
            assert name in fb.algorithms.names(), words


@ON_ONE_WORKER
@pytest.mark.parametrize("name", of_the_site("site_catalogue").methods())
def test_the_page_of_a_method_has_its_settings_costs_and_replies(name: str) -> None:
    page = generated()[f"methods/{name}.md"]
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    for setting in declared_settings(fb.algorithms.get(name)):
        (row,) = re.findall(rf"^\| `{setting.name}` \|.*$", sections["Settings"], re.MULTILINE)
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert all(cell.strip() for cell in cells), row
    for heading in ("What it does", "What an iteration costs", "What leaves a client", "Results"):
        assert len(sections[heading]) > 40, heading


@ON_ONE_WORKER
def test_the_pages_say_whose_replies_are_read_singly() -> None:
    rows = {}
    for row in of_the_site("site_catalogue").what_leaves_table().splitlines()[2:]:
        method, _, reads = row.strip("| ").split(" | ")
        rows[re.findall(r"`(.*?)`", method)[0]] = reads
    assert rows.keys() == set(of_the_site("site_catalogue").methods())
    assert rows["simfbo"] == "means only"
    assert rows["unifbo"] == "means only; **single replies** with `barrier=False`"
    assert rows["afbo"].startswith("**single replies**")
    assert rows["fedmbo"].startswith("**single replies**")
    assert rows["dsbo"] == "neighbours read single values"


@ON_ONE_WORKER
@pytest.mark.parametrize(("name", "paper"), [("rafbo", "RABO"), ("aggitd", "FBO-AggITD")])
def test_the_page_of_a_method_has_all_claims_of_its_paper(name: str, paper: str) -> None:
    claims = re.findall(rf"^\| {paper}, .*$", (DOCS / "results/verdicts.md").read_text(), re.M)
    assert len(claims) > 5
    for claim in claims:
        assert claim.split(" | ")[1] in generated()[f"methods/{name}.md"]


def test_every_drawing_is_drawn_by_the_script_and_shown_with_a_text() -> None:
    drawn = set(of_the_site("pictures").PICTURES)
    assert {file.stem for file in (DOCS / "images").glob("*.svg")} == drawn
    shown = set()
    for page in PAGES:
        for text, name in re.findall(r"!\[([^]]*)\]\([\w./]*?([\w-]+)\.svg\)", page.read_text()):
            assert len(text) > 20, f"{page.name}: the text of {name}"
            shown.add(name)
    assert shown == drawn


def test_the_readme_lists_every_algorithm() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    table = text.split("## Methods")[1].split("\n## ")[0]
    assert [name for name in fb.algorithms.names() if f"`{name}`" not in table] == []


def test_contributing_adds_an_algorithm_in_forty_lines() -> None:
    (snippet,) = snippets(ROOT / "CONTRIBUTING.md")
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 40


def test_the_pages_on_papers_and_other_code_name_tests_that_exist() -> None:
    defined = "\n".join(file.read_text("utf-8") for file in (ROOT / "tests").rglob("*.py"))
    page = (ROOT / "docs" / "errata.md").read_text("utf-8")
    other_code = (ROOT / "docs" / "other-code.md").read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)", page + other_code))
    assert named
    assert [name for name in named if f"def {name}(" not in defined] == []
    rows = []
    for line in page.splitlines():
        if line.startswith("|"):
            rows.append(re.split(r"(?<!\\)\|", line)[1:-1])
    claims = [row for row in rows if len(row) == 4 and row[0].strip() not in ("where", "---")]
    assert len(claims) > 50
    assert [row[0] for row in claims if not re.search(r"`test_|^ reading", row[2])] == []
    assert {len(row) for row in rows} == {2, 4}, "a bar within a cell must be written \\|"


def test_every_decision_has_a_number_of_its_own_and_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    numbers: list[int] = []
    for page in sorted(folder.glob("*.md")):
        headings = [int(n) for n in re.findall(r"^## (\d+)\.", page.read_text(), re.MULTILINE)]
        numbers += headings
        row = re.search(
            rf"^\| \[[^|]*\]\({page.name}\) \|[^|]*\| ([\d, ]+) \|$", index, re.MULTILINE
        )
        listed = [] if row is None else [int(n) for n in row[1].split(", ")]
        assert sorted(listed) == sorted(headings), page.name
    assert len(set(numbers)) == len(numbers), "two decisions share a number"
    assert f"The next free number is {max(numbers) + 1}." in index


def toml_listings(page: Path) -> list[str]:
    text = page.read_text("utf-8")
    return re.findall(r"^```toml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if toml_listings(page)], ids=relative)
def test_experiments_in_listings_fit_the_schema(page: Path) -> None:
    for listing in toml_listings(page):
        table = tomllib.loads(listing)
        expand_names(page.name, table)
        validate(page.name, table)
        name = table.get("task", {}).get("name", "quadratic")
        if ":" not in name:
            options = {setting.name for setting in declared_settings(fb.tasks.get(name))}
            assert {*table.get("task", {})} <= options | {"name"}
