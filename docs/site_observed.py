"""What the site says of methods and tasks: what docstrings say, and what a small run exchanges."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import griffe

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm
from fedbilevel.core.settings import declared_settings
from fedbilevel.federation import Federation

COST = "Cost per iteration"
DEPARTURES = "Departures"


# What is read from a docstring


class Text(NamedTuple):
    """The parts of a docstring.

    Attributes:
        summary: Its first line.
        body: The paragraphs that follow, without those on costs and departures.
        cost: The paragraph on costs, without its first words.
        departures: The paragraph on departures from the paper.
        references: The papers.
        arguments: What each argument is, by name.
        returns: What a function returns.
        example: The example, as it would be typed at a prompt.
    """

    summary: str
    body: str
    cost: str
    departures: str
    references: str
    arguments: dict[str, str]
    returns: str
    example: str


def read_docstring(item: object) -> Text:
    """Read the docstring of a class or function.

    Args:
        item: The class or function.

    Returns:
        The parts of its docstring.
    """
    docstring = griffe.Docstring(inspect.getdoc(item) or "")
    parsed = docstring.parse(
        "google", warnings=False, returns_multiple_items=False, returns_named_value=False
    )
    first, *paragraphs = _values(parsed, "text")[0].split("\n\n")
    taken = dict.fromkeys((COST, DEPARTURES), "")
    body = []
    for paragraph in paragraphs:
        for start in taken:
            if paragraph.startswith(start):
                _, _, rest = paragraph.partition(":")
                taken[start] = capitalised(rest.strip())
                break
        else:
            body.append(paragraph)
    arguments = {}
    for parameter in next(iter(_values(parsed, "parameters")), []):
        arguments[parameter.name] = _one_line([parameter.description])
    notes = _values(parsed, "admonition")
    return Text(
        summary=first,
        body="\n\n".join(body),
        cost=taken[COST],
        departures=taken[DEPARTURES],
        references=_one_line(note.description for note in notes if note.kind == "references"),
        arguments=arguments,
        returns="".join(value.description for value in next(iter(_values(parsed, "returns")), [])),
        example=_example(next(iter(_values(parsed, "examples")), [])),
    )


def capitalised(text: str) -> str:
    """Return a text with a capital at its start, unless it starts with a symbol such as x."""
    if not text[1:2].isalpha():
        return text
    return text[0].upper() + text[1:]


def _one_line(texts: Iterable[str]) -> str:
    return " ".join(" ".join(texts).split())


def _values(parsed: Iterable[Any], kind: str) -> list[Any]:
    return [section.value for section in parsed if section.kind.value == kind]


def _example(parts: Iterable[tuple[Any, str]]) -> str:
    made = []
    for kind, text in parts:
        if kind.value == "examples":
            made.append(f"```pycon\n{text}\n```")
        else:
            made.append(text)
    return "\n\n".join(made)


# What is observed


class Exchange(NamedTuple):
    """One exchange of a method with its clients.

    Attributes:
        phase: What the clients do; None where they send each other values.
        sent: The names of the values that the server, or a neighbour, sends.
        returned: What a client returns, by name, with what each value is shaped like.
        summed: Whether the server reads only means of the replies.
        waits: Whether the method waits for the replies before it goes on.
    """

    phase: str | None
    sent: tuple[str, ...]
    returned: tuple[str, ...]
    summed: bool
    waits: bool


class Observed(NamedTuple):
    """What the second iteration of a method exchanged and cost.

    Attributes:
        exchanges: Its exchanges; those that repeat are there once.
        rounds: Its communication rounds.
        gradients: Gradients per client.
    """

    exchanges: tuple[Exchange, ...]
    rounds: int
    gradients: float


@functools.cache
def observe(name: str) -> Observed:
    """Run two iterations of a method with its default settings, and watch the second.

    Args:
        name: The registered name of the method.

    Returns:
        What it exchanged and cost, with one local step.
    """
    return _observe(fb.algorithms.get(name)(), before=1)


@functools.cache
def settings_with_single_replies(name: str) -> list[str]:
    """Find the settings under which the server of a method reads single replies.

    Args:
        name: The registered name of the method.

    Returns:
        Single changes of the default settings, such as "barrier=False".
    """
    found = []
    method = fb.algorithms.get(name)
    for setting in declared_settings(method):
        values: list[object] = re.findall("'([^']+)'", setting.rule.text)
        if isinstance(setting.default, bool):
            values = [not setting.default]
        for value in values:
            try:
                seen = _observe(method(**{setting.name: value}), before=0)
            except ValueError:
                continue  # it needs another setting, or another problem
            if not all(exchange.summed for exchange in seen.exchanges):
                found.append(f"{setting.name}={value!r}")
    return found


def _observe(method: Algorithm, before: int) -> Observed:
    fed = _small_federation(method)
    run = fb.Run(method, fed, {})
    for _ in range(before):
        run.advance()
    start = fed.ledger.totals()
    exchanges: list[Exchange] = []
    for kind in ("ask", "post", "mix", "local"):
        setattr(fed, kind, _watched(getattr(fed, kind), kind, exchanges))
    run.advance()
    end = fed.ledger.totals()
    return Observed(
        exchanges=tuple(dict.fromkeys(exchanges)),
        rounds=int(end["rounds"] - start["rounds"]),
        gradients=(end["gradients"] - start["gradients"]) / len(fed),
    )


def _small_federation(method: Algorithm) -> Federation:
    """Return four clients with a problem that the method takes."""
    full = fb.Environment()
    episodes = fb.Environment(batch_size=2)
    kinds = (("shared", full), ("private", full), ("own", full), ("few-shot", episodes))
    for kind, environment in kinds:
        task = _small_task(kind)
        try:
            method.check(task.problem, environment)
            method.init(task.problem)
        except ValueError:
            continue
        return fb.simulated_federation(task.problem, task.clients, environment, mode="loop")
    raise ValueError(f"{method.name} takes none of the small problems")


@functools.cache
def _small_task(kind: str) -> fb.tasks.Task:
    if kind == "few-shot":
        return fb.tasks.load("few-shot", clients=4, ways=2, hidden=4)
    task = fb.tasks.load("quadratic", clients=4, dim_x=3, dim_y=2)
    changes: dict[str, Any] = {"lower_level": kind}
    if kind == "own":
        changes = {"owner": {"y": "client"}}
    return dataclasses.replace(task, problem=dataclasses.replace(task.problem, **changes))


def _watched(call: Any, kind: str, exchanges: list[Exchange]) -> Callable[..., Any]:
    def watched(first: Any, *args: Any, **values: Any) -> Any:
        if kind == "mix":  # clients send each other these values
            exchanges.append(Exchange(None, tuple(sorted(values)), (), False, True))
        elif kind != "local":
            exchanges.append(_exchange(first, kind, values))
        return call(first, *args, **values)

    return watched


def _exchange(phase: Any, kind: str, values: dict[str, Any]) -> Exchange:
    first_client = next(iter(values.get("each") or []), {})
    names = sorted({*values, *first_client} - {"each", "submodels"})
    returned = []
    for name, shape in phase.reply.items():
        like = "a number" if shape == "scalar" else "own shapes"
        if shape in ("x", "y"):
            like = f"like {shape}"
        returned.append(f"{name} ({like})")
    return Exchange(phase.name, tuple(names), tuple(returned), phase.summed, kind == "ask")
