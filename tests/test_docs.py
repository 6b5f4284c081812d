"""The pages of the documentation: snippets run, links lead somewhere, lists are complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[str]:
    """Return the Python snippets of a page."""
    text = page.read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name
)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fb.algorithms.registry, "_registry", dict(fb.algorithms.registry._registry))
    if page.name == "README.md":
        rows = [f"{30 + row},{'ab'[row % 2]},{row % 3 == 0},{row > 20}\n" for row in range(40)]
        (tmp_path / "patients.csv").write_text("age,hospital,checked,ill\n" + "".join(rows))
    names: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets(page):
        exec(compile(snippet, str(page), "exec", dont_inherit=True), names)
    if page.name == "README.md":
        ridge = names["result"].x["log_ridge"]
        assert ridge[:3].max() < -1.5 < ridge[3:].min()
    if page.name == "CONTRIBUTING.md":
        task = fb.tasks.load("quadratic", clients=3, condition=3.0)
        method = names["SOBA"](lr_x=0.06, lr_y=0.4)
        result = fb.solve(
            task.problem, task.clients, method, rounds=300, evaluate=task.evaluate, every=300
        )
        assert result.history[-1]["hypergradient_norm"] < 1e-6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        message = f"{page.name} links to {target}, which does not exist"
        assert (page.parent / target).exists(), message


def test_the_readme_lists_every_algorithm() -> None:
    table = (ROOT / "README.md").read_text("utf-8")
    assert all(f"| `{name}` |" in table for name in fb.algorithms.names())


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
