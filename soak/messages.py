"""Hostile messages: from clients to the server, and from a server to a client.

A message is either refused in one line, or it is one that its reader may take. The server goes on
without the sender; a client opens no file that it was told to open.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as EncodedRecordDict

from fedbilevel.core.tree import is_finite
from fedbilevel.deploy.flower.wire import bundle
from soak import junk
from soak.disturb import EventCounter
from soak.files import is_costly
from soak.trials import Trial
from tests.support.flower import (
    QUADRATIC,
    FakeGrid,
    Handler,
    Table,
    answer,
    clients_in_this_process,
    control_clock,
    real_federation,
    resolve_config,
)
from tests.support.tool import write

ROUNDS = 20
TO_THE_SERVER = 0.6  # the share of trials that send hostile messages to the server
LIARS = (1, 2)  # the clients whose messages are hostile
NODES = (101, 102)  # their nodes
REQUESTS_PER_TRIAL = 50
METHODS: dict[str, Table] = {
    "simfbo": {},
    "afbo": {"memory": "client"},
    "aggitd": {"lower_steps": 2},
    "fedbioacc": {},
    "unifbo": {},
    "fednest": {"inner_rounds": 2, "neumann_steps": 2},
}
PATHS = ["/etc/passwd", "../../secret", "file:///etc/passwd"]
SECRET = "the line that nobody may read"


def messages(trial: Trial) -> Counter[str]:
    """Send hostile messages, in some trials to the server and in some to a client."""
    if trial.draw.random() < TO_THE_SERVER:
        return replies(trial)
    return requests(trial)


# Changes of a message


def change_content(draw: random.Random, content: RecordDict) -> RecordDict:
    """Return content that its reader did not expect: in values, in the header, or in the bytes."""
    header = str(content.config_records["header"]["json"])
    arrays = {name: array.data for name, array in content.array_records["tensors"].items()}
    kind = draw.choice(["header", "header", "text", "arrays", "arrays", "names", "records", "wire"])
    if kind == "header":
        fields = json.loads(header)
        for _ in range(draw.choice([1, 1, 2])):
            _change_json(draw, fields)
        header = json.dumps(fields)
    elif kind == "text":
        header = junk.change_text(draw, header)
    elif kind == "arrays" and arrays:
        name = draw.choice([*arrays])
        arrays[name] = junk.change_bytes(draw, arrays[name])
    elif kind == "names":
        arrays[draw.choice(["float32", "int64", "bool", "object", "json", "../x"])] = bytes(8)
    elif kind == "records":
        return _other_records(draw, header)
    changed = RecordDict(
        {
            "tensors": ArrayRecord({n: Array(n, (), "raw", data) for n, data in arrays.items()}),
            "header": ConfigRecord({"json": header}),
        }
    )
    if kind == "wire":
        return _through_damaged_wire(draw, changed)
    return bundle(changed) if draw.random() < 0.3 else changed


def _other_records(draw: random.Random, header: str) -> RecordDict:
    """Records of a wrong kind or name."""
    text = ConfigRecord({"json": header})
    return draw.choice(
        [
            RecordDict(),
            RecordDict({"tensors": ArrayRecord()}),
            RecordDict({"bundle": text}),
            RecordDict({"bundle": ArrayRecord()}),
            RecordDict({"tensors": text, "header": text}),
            RecordDict({"tensors": ArrayRecord(), "header": text, "more": text}),
            RecordDict({"tensors": ArrayRecord(), "header": ConfigRecord({"json": b"{}"})}),
            RecordDict({"tensors": ArrayRecord(), "header": ConfigRecord({"json": [1, 2]})}),
        ]
    )


def _through_damaged_wire(draw: random.Random, content: RecordDict) -> RecordDict:
    """Damage the bytes of Flower's own encoding, until Flower does not notice."""
    encoded = recorddict_to_proto(content).SerializeToString()
    while True:
        try:
            return _decode(junk.change_bytes(draw, encoded))
        except Exception:  # Flower drops such a message
            continue


def _decode(encoded: bytes) -> RecordDict:
    return recorddict_from_proto(EncodedRecordDict.FromString(encoded))


def _change_json(draw: random.Random, fields: Any) -> None:
    """Change something in nested JSON, in place."""
    places = _places(fields)
    container, key = draw.choice(places)
    change = draw.choice(["number", "number", "value", "delete", "copy", "deep", "path"])
    if change == "delete":
        del container[key]
        return
    changed: Any = container[key]
    if change == "number" and isinstance(changed, (int, float)):
        changed = draw.choice([junk.number(draw), changed + 1, -changed])
    elif change == "value":
        changed = json.loads(json.dumps(junk.value(draw), default=str))
    elif change == "copy":
        other, name = draw.choice(places)
        changed = json.loads(json.dumps(other[name]))
    elif change == "deep":
        for _ in range(draw.choice([3, 50, 400])):
            changed = [changed]
    elif change == "path":
        changed = draw.choice(PATHS)
    # A dict is packed as a list of pairs [key, value].
    name = container[0] if isinstance(container, list) and key == 1 else key
    if not is_costly(str(name), changed):
        container[key] = changed


def _places(fields: Any) -> list[tuple[Any, Any]]:
    """Return every place in nested JSON as its container and its key or index."""
    found: list[tuple[Any, Any]] = []
    keys: Any = range(len(fields)) if isinstance(fields, list) else fields
    for key in keys:
        found.append((fields, key))
        if isinstance(fields[key], (dict, list)):
            found += _places(fields[key])
    return found


# From a client to the server


def replies(trial: Trial) -> Counter[str]:
    """Run a federation in which the messages of half of the clients are hostile."""
    draw = trial.draw
    name = draw.choice([*METHODS])
    table = {
        **QUADRATIC,
        "algorithm": {"name": name, **METHODS[name]},
        "environment": {"local_steps": 1, "batch_size": 2},  # most time is honest work
        "rounds": ROUNDS,
        "every": 2,
        "conduct": {"start_clients": 2, "strikes": 1000, "deadline_s": 0.3, "wait_s": 5.0},
    }
    sent: Counter[str] = Counter()

    def lie(message: Message, handle: Handler) -> Message:
        honest = handle(message)
        # A node whose greeting is refused is not heard again.
        honesty = 0.7 if message.metadata.message_type == "query" else 0.1
        if honest.has_error() or draw.random() < honesty:
            return honest
        sent[message.metadata.message_type] += 1
        if draw.random() < 0.05:
            return Message(
                Error(code=draw.randint(-1, 9), reason=junk.text(draw)), reply_to=message
            )
        return Message(change_content(draw, honest.content), reply_to=message)

    with (
        clients_in_this_process(trial.folder),
        pytest.MonkeyPatch.context() as patch,
        _logged() as log,
    ):
        control_clock(patch)  # deadlines do not depend on how busy the machine is
        grid = FakeGrid(4)
        grid.behaviours.update(dict.fromkeys(NODES, lie))
        # Keys are registered: without them a node may say that it is any client.
        grid.key_names = {100 + j: f"client-{j}" for j in range(4)}
        _, run = real_federation(grid, resolve_config(table))
        for _ in run:
            pass
    assert is_finite((run.result.x, run.result.y))
    refused = 0
    for line in log:
        assert line.isprintable(), f"not one line of plain text: {line!r}"
        if "refused" in line or "did not" in line:
            places = [f"client {liar}" for liar in LIARS] + [f"node {node}" for node in NODES]
            assert any(place in line for place in places), line
            refused += 1
    return Counter(
        {
            "refused by the server": min(refused, sent.total()),
            "taken by the server": max(sent.total() - refused, 0),
        }
    )


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what is logged, and show none of it."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("fedbilevel")
    collector = Collector()
    logger.addHandler(collector)
    propagate = logger.propagate
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate


# From a server to a client


@functools.cache
def _honest_messages() -> list[tuple[str, RecordDict]]:
    """Return messages of every type that an honest server sends, of every method."""
    found = []
    with tempfile.TemporaryDirectory() as folder, clients_in_this_process(Path(folder)):
        for name, settings in METHODS.items():
            table = {**QUADRATIC, "algorithm": {"name": name, **settings}, "rounds": 2}
            grid = FakeGrid(4)
            _, run = real_federation(grid, resolve_config(table))
            for _ in run:
                pass
            found += [(each.metadata.message_type, each.content) for each in grid.sent]
    return found


def requests(trial: Trial) -> Counter[str]:
    """Send hostile messages of a server to a client that has a file nobody may read."""
    draw = trial.draw
    private = trial.folder / "private"
    private.mkdir()
    secret = write(private / "secret", SECRET)
    outcomes: Counter[str] = Counter()
    with clients_in_this_process(trial.folder), _logged(), EventCounter(private) as opened:
        for _ in range(REQUESTS_PER_TRIAL):
            kind, content = draw.choice(_honest_messages())
            if draw.random() < 0.3:
                content = _with_path(draw, content, secret)
            else:
                content = change_content(draw, content)
            reply = answer(
                Message(content, NODES[0], kind), "1", NODES[0], {"partition-id": LIARS[0]}
            )
            if reply.has_error():
                outcomes["refused by the client"] += 1
                reason = reply.error.reason
                assert reason.isprintable(), f"not one line of plain text: {reason!r}"
                assert SECRET not in reason
            else:
                outcomes["answered by the client"] += 1
    assert not opened.events, "the client opened a file that it was sent"
    return outcomes


def _with_path(draw: random.Random, content: RecordDict, path: Path) -> RecordDict:
    """Put a path where an experiment may have one, or in the place of any other value."""
    fields = json.loads(str(content.config_records["header"]["json"]))
    trace = {"dict": [["model", "trace"], ["path", str(path)]]}
    entry = draw.choice([["delay", trace], ["data_dir", str(path)], ["path", str(path)]])
    for container, key in _places(fields):
        if key == "dict" and draw.random() < 0.1:
            container[key].append(entry)
    header = ConfigRecord({"json": json.dumps(fields)})
    return RecordDict({"tensors": content["tensors"], "header": header})
