"""What a lying client can do to a solution: every lie against several methods, as a table.

python -m benchmarks.lies writes the table into docs/lies.md, in a few minutes.

One of six clients lies from its first message on; the others, the server and the task are those of
a real federation, with nodes in this process (`tests.support.flower.FakeGrid`).
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from flwr.app import Message, RecordDict

from fedbilevel.core.tree import Tree, flatten
from fedbilevel.deploy.flower import client
from fedbilevel.deploy.flower.wire import decode, encode
from fedbilevel.federation.conduct import Conduct
from fedbilevel.runs.run import Run
from tests.support.flower import (
    Behaviour,
    FakeGrid,
    Handler,
    Table,
    Values,
    change_reply,
    only_for,
    poll_without_pauses,
    real_federation,
    resolve_config,
)

PAGE = Path(__file__).parents[1] / "docs" / "lies.md"
CLIENTS = 6
LIAR = 2
ROUNDS = 10
MARK = "<!-- computed by python -m benchmarks.lies -->\n"
QUADRATIC: Table = {
    "task": {"name": "quadratic", "dim_x": 3, "dim_y": 2, "samples": 6, "noise": 0.5},
    "environment": {"local_steps": 1},
}
DIGITS: Table = {
    "task": {"name": "loss-tuning", "data": "digits", "samples": 120, "hidden": 4},
    "environment": {"local_steps": 1, "capacity": [1.0, 0.5]},
}
ADBO_STEPS = {"lr_x": 0.05, "server_lr_x": 0.05, "plane_every": 5}  # the default is slow here
# One method of each kind, as the parts of its experiment.
METHODS: dict[str, Table] = {
    "simfbo": {**QUADRATIC, "algorithm": {"name": "simfbo"}},
    "fedbioacc": {**QUADRATIC, "algorithm": {"name": "fedbioacc"}},
    "fednest": {**QUADRATIC, "algorithm": {"name": "fednest"}},
    "fedmbo": {**QUADRATIC, "algorithm": {"name": "fedmbo"}},
    "afbo": {**QUADRATIC, "algorithm": {"name": "afbo"}},
    "afbo, memory on clients": {**QUADRATIC, "algorithm": {"name": "afbo", "memory": "client"}},
    "adbo": {**QUADRATIC, "algorithm": {"name": "adbo", **ADBO_STEPS}},
    "rabo on submodels": {**DIGITS, "algorithm": {"name": "rabo"}},
}


def scaled(factor: float) -> Behaviour:
    """Replies that are a multiple of the honest ones."""

    def scale(reply: Values) -> Values:
        values = {}
        for name, value in reply["values"].items():
            is_ticket = name == "ticket"  # it numbers the reply
            values[name] = value if is_ticket else value * factor
        return {**reply, "values": values}

    return change_reply(scale)


def old_replies(sealed_anew: bool) -> Behaviour:
    """The client's first reply to a phase again and again, under the right task number."""
    first: dict[tuple[str, ...], RecordDict] = {}

    def replay(message: Message, handle: Handler) -> Message:
        reply = handle(message)
        honest = decode(reply.content)
        content = first.setdefault(tuple(honest["values"]), reply.content)
        if sealed_anew and content is not reply.content:
            content = encode(**{**honest, "values": decode(content)["values"]})
        return Message(content, reply_to=message)

    return only_for("train", replay)


def answering(message_type: str, **changed: object) -> Behaviour:
    """Answers to messages of one type in which some values are replaced."""

    def answer(message: Message, handle: Handler) -> Message:
        honest = decode(handle(message).content)
        return Message(encode(**{**honest, **changed}), reply_to=message)

    return only_for(message_type, answer)


def ticket(**numbers: int) -> Behaviour:
    """Replies of a client with memory that claim to answer, or to be a difference to, another."""

    def change(reply: Values) -> Values:
        values = reply["values"]
        replaced = {name: torch.full_like(values["ticket"][name], n) for name, n in numbers.items()}
        return {**reply, "values": {**values, "ticket": Tree({**values["ticket"], **replaced})}}

    return change_reply(change)


COST = {"samples": 2**59, "gradients": 2**59, "flops": 2**59, "peak_bytes": 2**59}
# What the bounds allow at most, and no lie may exceed: replies as long as the norm bound, at the
# capped share, all of them accepted.
CAPPED = Conduct(norm_factor=None, samples=[6, 6, 24, 6, 6, 6])
REFERENCES = (
    "reference: 10 times as long, at the capped share",
    "reference: 10 times, the other way, at the capped share",
)


class Lie(NamedTuple):
    """A lie: how the client behaves, and what the server allows."""

    behave: Callable[[], Behaviour]
    conduct: Conduct = Conduct(wait_s=5.0)


LIES: dict[str, Lie] = {
    REFERENCES[0]: Lie(lambda: scaled(10.0), conduct=CAPPED),
    REFERENCES[1]: Lie(lambda: scaled(-10.0), conduct=CAPPED),
    "replies 1e12 times as long": Lie(lambda: scaled(1e12)),
    "replies 1,000 times as long, the other way": Lie(lambda: scaled(-1e3)),
    "replies of NaN": Lie(lambda: scaled(math.nan)),
    "replies the other way": Lie(lambda: scaled(-1.0)),
    "its first reply again, as it was": Lie(lambda: old_replies(False)),
    "its first values again, sealed anew": Lie(lambda: old_replies(True)),
    "ticket with number -7": Lie(lambda: ticket(number=-7)),
    "ticket with number 4.6e18": Lie(lambda: ticket(number=2**62)),
    "says each time that it lost its memory": Lie(lambda: ticket(base=-1)),
    "claims 100 times its samples": Lie(lambda: answering("query", samples=[600, 6])),
    "claims 2^40 samples": Lie(lambda: answering("query", samples=[2**40, 2**40])),
    "claims -5 samples": Lie(lambda: answering("query", samples=[-5, 6])),
    "claims costs of 2^59": Lie(lambda: change_reply(lambda reply: {**reply, "cost": COST})),
    "claims losses of 1e300": Lie(lambda: answering("evaluate", upper=1e300, lower=1e300)),
}
# Lies of clients that keep their last reply themselves.
ABOUT_TICKETS = (
    "ticket with number -7",
    "ticket with number 4.6e18",
    "says each time that it lost its memory",
)


class Outcome(NamedTuple):
    """What a lie has led to.

    Attributes:
        verdict: "caught": its replies were refused, or its node; "bounded": a claim counts for
            less; "accepted" otherwise.
        effect: The distance of x from that of honest clients, relative to how far theirs has come.
        status: How the run ended.
    """

    verdict: str
    effect: float
    status: str

    def __str__(self) -> str:
        moved = f"{self.effect:.2g}"
        if self.status != "completed":
            moved = self.status
        return f"{self.verdict}, {moved}"


def run_method(parts: Table, lie: Lie | None, rounds: int) -> tuple[Run, Outcome]:
    """Run a method, with a liar if a lie is given."""
    table = {
        **parts,
        "task": {**parts["task"], "clients": CLIENTS},
        "weights": "samples",
        "rounds": rounds,
        "every": 10,
        "stop": {"flops": 2**55},
    }
    grid = FakeGrid(CLIENTS)
    conduct = Conduct()
    if lie is not None:
        grid.behaviours[100 + LIAR] = lie.behave()
        conduct = lie.conduct
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedbilevel")
    logger.addHandler(handler)
    try:
        fed, run = real_federation(grid, resolve_config(table), conduct)
        for _ in run:
            pass
    finally:
        logger.removeHandler(handler)
    verdict = "accepted"
    if any(" counts " in line or "believed" in line for line in warnings):
        verdict = "bounded"
    if fed.ledger.refused_replies or any("refused" in line for line in warnings):
        verdict = "caught"
    return run, Outcome(verdict, 0.0, run.status)


def compute_table(
    methods: Mapping[str, Table], lies: Mapping[str, Lie], rounds: int
) -> dict[str, dict[str, Outcome]]:
    """Return what each lie leads to with each method that it can be told to."""
    table: dict[str, dict[str, Outcome]] = {name: {} for name in lies}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as state:
        poll_without_pauses(patch)
        for method, parts in methods.items():
            patch.setenv("XDG_STATE_HOME", str(Path(state, method)))
            patch.setattr(client, "_workers", {})
            honest, _ = run_method(parts, None, rounds)
            way = _distance(honest.result.x, Tree(honest.fed.problem.x))
            for name, lie in lies.items():
                if name in ABOUT_TICKETS and parts["algorithm"].get("memory") != "client":
                    continue
                run, outcome = run_method(parts, lie, rounds)
                distance = _distance(run.result.x, honest.result.x)
                table[name][method] = outcome._replace(effect=distance / way)
    return table


def _distance(x: Tree, other: Tree) -> float:
    return float((flatten(x) - flatten(other)).norm())


def to_markdown(table: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Format the table, with a row per lie and a column per method."""
    methods = list(METHODS)
    lines = ["| one of six clients | " + " | ".join(methods) + " |"]
    lines.append("| --- |" + " --- |" * len(methods))
    for lie, outcomes in table.items():
        cells = [str(outcomes.get(method, "–")) for method in methods]
        lines.append(f"| {lie} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compute the table, and write it into the page."""
    torch.set_num_threads(1)
    logging.getLogger("fedbilevel").propagate = False
    text = to_markdown(compute_table(METHODS, LIES, ROUNDS))
    before, _, after = PAGE.read_text("utf-8").partition(MARK)
    _, _, after = after.partition("\n\n")
    PAGE.write_text(f"{before}{MARK}{text}\n{after}", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
