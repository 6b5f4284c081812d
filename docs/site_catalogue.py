"""Pages of the site that are made from the code: one per method and per task, and their tables.

Docstrings say what a method does; `site_observed` watches what it exchanges with its clients.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import griffe
from site_observed import (
    Observed,
    Text,
    capitalised,
    observe,
    read_docstring,
    settings_with_single_replies,
)

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm
from fedbilevel.core.settings import REQUIRED, declared_settings
from fedbilevel.experiments import config as experiments
from fedbilevel.experiments.parts import RUN_ARGUMENTS

DOCS = Path(__file__).parent
SOLVES = {
    "global": "the bilevel problem of all clients together",
    "local": "another problem where clients differ: its hypergradient is biased",
    "single": "a single-level problem: it is a baseline",
}


def pages() -> dict[str, Callable[[], str]]:
    """Return what makes the Markdown of each generated page, by its path on the site."""
    makers = {"methods/index.md": method_index, "tasks/index.md": task_index}
    for name in sorted(methods()):
        makers[f"methods/{name}.md"] = functools.partial(method_page, name)
    for name in tasks():
        makers[f"tasks/{name}.md"] = functools.partial(task_page, name)
    makers["reference/glossary.md"] = glossary
    return makers


def tables() -> dict[str, Callable[[], str]]:
    """Return what `<!-- generated: NAME -->` in a page stands for, by name."""
    return {"what-leaves": what_leaves_table, "own-algorithm": own_algorithm}


# Methods


def methods() -> list[str]:
    """Return the names of the package's methods; others may be registered, too."""
    ours = "fedbilevel."
    return [n for n in fb.algorithms.names() if fb.algorithms.get(n).__module__.startswith(ours)]


def title(name: str) -> str:
    """Return the name of a method as its paper writes it."""
    method = fb.algorithms.get(name)
    head = re.split(r"[:,(]", read_docstring(method).summary)[0].strip()
    plain = re.sub(r"\W", "", head).lower()
    if " " in head or not plain.endswith(method.__name__.lower()):
        return method.__name__
    return head


def method_page(name: str) -> str:
    """Return the page of a method."""
    method = fb.algorithms.get(name)
    text = read_docstring(method)
    seen = observe(name)
    facts = {
        "Solves": SOLVES[method.solves],
        "Waits for its cohort": _barrier(method, seen),
        "Derivatives": _derivatives(method),
        "Variables of clients": _owners(method),
        "Submodels": _yes(method.submodels),
        "Server": "yes" if method.has_server else "no: clients send values along links",
        "Reference": text.references,
    }
    cost = (
        f"Counted, with the default settings and one local step: {_times(seen.rounds, 'round')} "
        f"and {_times(seen.gradients, 'gradient')} per client."
    )
    parts = [
        f"# {title(name)}",
        capitalised(_linked(text.summary.removeprefix(f"{title(name)}: "))),
        _table(("Name", f"`{name}`"), facts.items()),
        "## What it does",
        _linked(text.body),
        "## What an iteration costs",
        _linked(text.cost),
        cost,
        "## What leaves a client",
        _exchange_table(seen),
        "[What is private and what is not](../howto/privacy.md) says what these values can tell.",
        "## Settings",
        _settings_table(method, text),
    ]
    if text.departures:
        parts += ["## Departures from the paper", _linked(text.departures)]
    parts += ["## Example", text.example, "## Results", _appearances(name, title(name))]
    parts.append(f"Source: `{_source(method)}`")
    return "\n\n".join(part for part in parts if part) + "\n"


def method_index() -> str:
    """Return the table of all methods by what they can do."""
    rows = []
    for name in methods():
        method = fb.algorithms.get(name)
        seen = observe(name)
        rows.append(
            (
                f"[`{name}`]({name}.md)",
                {"global": "yes", "local": "biased", "single": "single-level"}[method.solves],
                seen.rounds,
                f"{seen.gradients:g}",
                _barrier(method, seen),
                _yes(method.second_derivatives),
                ", ".join(method.client_levels) or "no",
                _yes(method.submodels),
            )
        )
    order = {"yes": 0, "biased": 1, "single-level": 2}
    rows.sort(key=lambda row: order[row[1]])
    head = (
        "method",
        "solves the bilevel problem",
        "rounds",
        "gradients",
        "waits",
        "second derivatives",
        "variables of clients",
        "submodels",
    )
    return _page(
        "# Methods",
        "What each method can do, read from the code. *Rounds* and *gradients* (per client) are "
        "those of one iteration with default settings and one local step, counted in a run. "
        "*Waits* says whether an iteration waits for every client of its cohort. *Variables of "
        "clients* are the levels of which a [client can own variables](../concepts/owners.md). "
        "*Biased* methods solve another problem where clients differ, most of them because they "
        "average [hypergradients of single clients](../concepts/local-hypergradients.md); `rabo` "
        'and `rafbo` do not with `hypergradient="global"`.',
        "Which one to take: [choose a method](../howto/choose.md). Words: "
        "[glossary](../reference/glossary.md).",
        _table(head, rows),
    )


def what_leaves_table() -> str:
    """Return what leaves a client, for every method."""
    rows = []
    for name in sorted(methods()):
        exchanges = observe(name).exchanges
        returned = [value for exchange in exchanges for value in exchange.returned]
        if not fb.algorithms.get(name).has_server:
            returned = [value for exchange in exchanges for value in exchange.sent]
            reads = "neighbours read single values"
        elif all(exchange.summed for exchange in exchanges):
            reads = "means only"
            changes = settings_with_single_replies(name)
            if changes:
                reads += f"; **single replies** with {' or '.join(f'`{c}`' for c in changes)}"
        else:
            single = [exchange.phase for exchange in exchanges if not exchange.summed]
            reads = f"**single replies** ({', '.join(f'`{phase}`' for phase in single)})"
        rows.append(
            (f"[`{name}`](../methods/{name}.md)", ", ".join(dict.fromkeys(returned)), reads)
        )
    return _table(("method", "a client returns", "the server reads"), rows)


def _exchange_table(seen: Observed) -> str:
    rows = []
    for exchange in seen.exchanges:
        reads = "their mean only" if exchange.summed else "single replies"
        if exchange.phase is None:
            rows.append(("to its neighbours", "", ", ".join(exchange.sent), "neighbours: each one"))
        else:
            sent = ", ".join(exchange.sent)
            rows.append((f"`{exchange.phase}`", sent, ", ".join(exchange.returned), reads))
    return _table(("phase", "sent to a client", "sent by a client", "who reads"), rows)


def _barrier(method: type[Algorithm], seen: Observed) -> str:
    settings = {setting.name for setting in declared_settings(method)}
    if any(not exchange.waits for exchange in seen.exchanges):
        return "no"
    if "barrier" in settings:
        return "yes, or not: `barrier=False`"
    return "yes"


def _derivatives(method: type[Algorithm]) -> str:
    if method.second_derivatives:
        return "also second derivatives of the lower loss (products with vectors)"
    return "first derivatives only"


def _owners(method: type[Algorithm]) -> str:
    levels = " and ".join(method.client_levels)
    return f"in {levels}" if levels else "none"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _times(count: float, noun: str) -> str:
    return f"{count:g} {noun}" if count == 1 else f"{count:g} {noun}s"


# Tasks


def tasks() -> list[str]:
    """Return the names of the package's tasks."""
    return [n for n in fb.tasks.names() if fb.tasks.get(n).__module__.startswith("fedbilevel.")]


def task_page(name: str) -> str:
    """Return the page of a task."""
    function = fb.tasks.get(name)
    text = read_docstring(function)
    module = griffe.Docstring(inspect.getdoc(sys.modules[function.__module__]) or "").value
    used = []
    for experiment in experiments.names():
        _, table = experiments.read(experiment)
        if table["task"]["name"] == name:
            used.append((f"`fedbilevel run {experiment}`", table.get("title", "")))
    parts = [
        f"# {name}",
        f'`fb.tasks.load("{name}")`: {_linked(text.summary.removeprefix("Build "))}',
        _linked(_blocks(module)),
        "## What it returns",
        _linked(" ".join([text.returns, text.body]).strip()),
        "## Settings",
        _settings_table(function, text),
        "## Example",
        text.example,
    ]
    if used:
        parts += ["## Experiments with it", _table(("command", ""), used)]
        parts += ["## Results", _appearances(name, name)]
    return _page(*parts, f"Source: `{_source(function)}`")


def task_index() -> str:
    """Return the list of tasks."""
    rows = []
    for name in tasks():
        summary = read_docstring(fb.tasks.get(name)).summary
        rows.append((f"[`{name}`]({name}.md)", re.sub(r"^Build the (task of )?", "", summary)))
    return _page(
        "# Tasks",
        "Ready-made problems with data, partition and metrics: `fb.tasks.load(name, **options)` in "
        "Python, `task = {name = ..., ...}` in an experiment. "
        "[Your own data](../howto/own-data.md) and [your own losses](../howto/own-loss.md) need no "
        "task.",
        _table(("task", ""), rows),
    )


def _blocks(text: str) -> str:
    """Set the lines of a module's docstring that state losses as code, so that they stay lines."""
    made = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        formula = re.compile(r"(lower|upper|    |[gf]_i\(|x |min)[^.]*[:=]")
        if all(formula.match(line) or line.startswith("    ") for line in lines):
            paragraph = textwrap.indent(paragraph, "    ")
        made.append(paragraph)
    return "\n\n".join(made)


# Parts of both


def _settings_table(declaration: Callable[..., object], text: Text) -> str:
    rows = []
    for setting in declared_settings(declaration, without=RUN_ARGUMENTS):
        default = "required"
        if setting.default is not REQUIRED:
            default = f"`{json.dumps(setting.default, default=repr)}`".replace("null", "None")
        meaning = _linked(text.arguments.get(setting.name, ""))
        rows.append((f"`{setting.name}`", default, setting.rule.text, meaning))
    if not rows:
        return "It has none."
    return _table(("setting", "default", "allowed", "meaning"), rows)


def _appearances(name: str, called: str) -> str:
    """Return the verdicts and the sections of the results that a method or task appears in."""
    word = re.compile(rf"(?<![\w-])({re.escape(name)}|{re.escape(called)})(?![\w-])")
    papers = tuple(f"{paper}, " for paper in _of_the_same_paper(name))
    parts = []
    rows = []
    for line in (DOCS / "results" / "verdicts.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        is_claim = len(cells) == 5 and cells[0] not in ("paper", "---")
        if is_claim and (cells[0].startswith(papers) or word.search(f"{cells[1]} {cells[3]}")):
            rows.append(tuple(cells[:4]))
    if rows:
        head = ("paper", "claim", "verdict", "measured")
        parts.append("Claims of the papers ([all verdicts](../results/verdicts.md)):")
        parts.append(_table(head, rows))
    sections = []
    for page, heading, body in _sections():
        listed = re.compile(rf"^\| *`?{re.escape(name)}`?[ ,:|(]|[=` ,]{re.escape(name)}[`, \"']")
        if any(listed.search(line) for line in body.splitlines() if line[:1] in "|f"):
            sections.append(f"- [{heading}](../{page}#{_slug(heading)})")
    if sections:
        parts.append("Tables in which it appears:")
        parts.append("\n".join(sections))
    return "\n\n".join(parts) or "It appears in none of the [results](../results/README.md) yet."


def _of_the_same_paper(name: str) -> list[str]:
    """Return the titles of the methods in the file of a method, none for a task."""
    if name not in methods():
        return []
    module = fb.algorithms.get(name).__module__
    return [title(n) for n in methods() if fb.algorithms.get(n).__module__ == module]


@functools.cache
def _sections() -> list[tuple[str, str, str]]:
    """Return the sections that have tables: page, heading and text."""
    found = []
    for page in ("results/README.md", "personal.md", "unifbo.md"):
        text = (DOCS / page).read_text("utf-8")
        for heading, body in re.findall(r"^##+ (.*)\n((?:(?!^##).*\n)*)", text, re.MULTILINE):
            if "| --- |" in body:
                found.append((page, heading, body))
    return found


def _slug(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _source(item: Any) -> str:
    return f"src/{item.__module__.replace('.', '/')}.py"


@functools.cache
def _pages_by_class() -> dict[str, str]:
    return {fb.algorithms.get(name).__name__: name for name in methods()}


def _linked(text: str) -> str:
    """Turn names of methods and of pages into links, and stars into stars; formulas stay."""
    lines = []
    for line in text.splitlines():
        if line.startswith("    "):
            lines.append(line.replace("`", ""))
            continue
        parts = line.split("`")
        parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
        lines.append(re.sub(r"`(\w+)`", _link, "`".join(parts)))
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", "\n".join(lines))


def _link(match: re.Match[str]) -> str:
    page = _pages_by_class().get(match[1])
    return f"[{match[0]}](../methods/{page}.md)" if page else match[0]


def _table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = tuple(head)
    lines = [_row(head), _row("---" for _ in head), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: Iterable[object]) -> str:
    escaped = [re.sub(r"(?<!\\)\|", r"\\|", str(cell)) for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _page(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def glossary() -> str:
    """Return the glossary of CONTRIBUTING as a page."""
    return f"# Glossary\n{_of_contributing('Glossary')}"


def own_algorithm() -> str:
    """Return what CONTRIBUTING says of adding an algorithm."""
    return _of_contributing("Add an algorithm in one file").strip()


def _of_contributing(heading: str) -> str:
    text = (DOCS.parent / "CONTRIBUTING.md").read_text("utf-8")
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    return str(section)
