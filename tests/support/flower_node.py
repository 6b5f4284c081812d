"""A warm node that misbehaves: python -m tests.support.flower_node ADDRESS PARTITION BEHAVIOUR [FILE TO WAIT FOR]."""

import os
import signal
import sys
import time
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedbilevel.core.tree import Tree
from fedbilevel.deploy.flower import client, warm
from fedbilevel.deploy.flower.wire import decode, encode
from tests.support.flower import config, simulated

address, partition, behaviour = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tasks = 0


def app(message: Message, context: Context) -> Message:
    global tasks
    if message.metadata.message_type != "train":
        return client.app(message, context)
    tasks += 1
    if behaviour == "dies" and tasks == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "slow" and tasks == 5:
        time.sleep(9)
    reply = client.app(message, context)
    if behaviour != "lies":
        return reply
    said: dict[str, Any] = decode(reply.content)
    values = said["values"]
    lies = [
        {"values": {**values, "qx": values["qx"] * torch.nan}},
        {"values": {**values, "qx": Tree(x=torch.zeros(1000, dtype=torch.float64))}},
        {"values": {**values, "../../qx": values["qx"]}},
        {"number": said["number"] + 1000},
    ]
    if tasks <= len(lies):
        return Message(encode(**said | lies[tasks - 1]), reply_to=message)
    return Message(RecordDict({"tensors": ArrayRecord()}), reply_to=message)


def push(connection: Any, node: Any, run: int, reply: Message, seconds: float) -> None:
    """The reply; before it, of one that lies, an answer to a message that never was (the SuperLink drops it)."""
    if behaviour == "lies":
        true, reply.metadata.__dict__["_reply_to_message_id"] = (
            reply.metadata.reply_to_message_id,
            "f" * 64,
        )
        honest(connection, node, run, reply, seconds)
        reply.metadata.__dict__["_reply_to_message_id"] = true
    honest(connection, node, run, reply, seconds)


honest, warm._push = warm._push, push

if __name__ == "__main__":
    # What a first task imports takes seconds on a busy machine; they must not count against a deadline.
    table = {
        "task": {"name": "quadratic", "clients": 1},
        "algorithm": {"name": "simfbo"},
        "rounds": 1,
        "every": 1,
    }
    simulated(config(table)).advance()
    while len(sys.argv) > 4 and not os.path.exists(sys.argv[4]):
        time.sleep(0.1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    warm.serve(warm.Link(address, plain=True), app, {"partition-id": partition})
