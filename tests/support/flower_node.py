"""Warm nodes that may misbehave, forked from one process, which takes seconds to start.

python -m tests.support.flower_node ADDRESS FILE BEHAVIOUR ...

Client i has the i-th behaviour. When all nodes have ended, their exit codes are printed.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.proto.node_pb2 import Node
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedbilevel.core.tree import Tree
from fedbilevel.deploy.flower import client, warm_node
from fedbilevel.deploy.flower.wire import decode, encode, seal, token_of
from tests.support.flower import QUADRATIC, resolve_config, simulated_run

push_reply = warm_node._push_reply


class MisbehavingClient:
    """Answers messages like a client, and misbehaves in one of these ways.

    "dies" kills its process in the second task, "slow" sleeps in the fifth, "lies" changes every
    reply to a task, each time in another way. Any other behaviour is none.
    """

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour
        self.tasks = 0

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type != "train":
            return client.app(message, context)
        self.tasks += 1
        if self.behaviour == "dies" and self.tasks == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.behaviour == "slow" and self.tasks == 5:
            time.sleep(9)
        reply = client.app(message, context)
        if self.behaviour == "lies":
            return self._lie(message, reply)
        return reply

    def _lie(self, message: Message, reply: Message) -> Message:
        honest = decode(reply.content)
        values = honest["values"]
        lies = [
            {"values": {**values, "qx": values["qx"] * torch.nan}},
            {"values": {**values, "qx": Tree(x=torch.zeros(1000, dtype=torch.float64))}},
            {"values": {**values, "../../qx": values["qx"]}},
            {"number": honest["number"] + 1000},
        ]
        if self.tasks > len(lies):
            return Message(RecordDict({"tensors": ArrayRecord()}), reply_to=message)
        lie = encode(**{**honest, **lies[self.tasks - 1]})
        return Message(seal(lie, token_of(message.content)), reply_to=message)


def push_forged_reply_first(
    connection: FleetHttpClient, node: Node, run_id: int, reply: Message, seconds: float
) -> None:
    """Push the reply twice: first as the answer to a message that never was.

    The SuperLink must drop the first one.
    """
    message_id = reply.metadata.reply_to_message_id
    reply.metadata.__dict__["_reply_to_message_id"] = "f" * 64
    push_reply(connection, node, run_id, reply, seconds)
    reply.metadata.__dict__["_reply_to_message_id"] = message_id
    push_reply(connection, node, run_id, reply, seconds)


def main() -> None:
    address, file, *behaviours = sys.argv[1:]
    # A first task imports modules, which takes seconds on a busy machine; they must not count
    # against a deadline.
    simulated_run(resolve_config(QUADRATIC)).advance()
    nodes = []
    for partition, behaviour in enumerate(behaviours):
        pid = os.fork()
        if not pid:
            run_node(address, partition, behaviour, Path(file))
        nodes.append(pid)

    def stop(*_: object) -> None:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.kill(node, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    print([os.waitstatus_to_exitcode(os.waitpid(node, 0)[1]) for node in nodes])


def run_node(address: str, partition: int, behaviour: str, file: Path) -> NoReturn:
    """Run a node until the study ends; one that comes late waits for a file."""
    if behaviour == "lies":
        warm_node._push_reply = push_forged_reply_first
    while behaviour == "late" and not file.exists():
        time.sleep(0.1)
    settings = warm_node.ConnectionSettings(address, plain=True)
    try:
        warm_node.run_node(settings, MisbehavingClient(behaviour), {"partition-id": partition})
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
