"""A warm node that misbehaves: python -m tests.flower_node ADDRESS PARTITION BEHAVIOUR [FILE TO WAIT FOR]."""

import os
import signal
import sys
import time
from typing import Any

import torch
from flwr.app import Context, Message

from fedbilevel.federation.flower import client, warm
from fedbilevel.federation.flower.wire import decode, encode
from fedbilevel.tree import Tree

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
        time.sleep(6)
    reply = client.app(message, context)
    if behaviour == "lies":
        said: dict[str, Any] = decode(reply.content)
        said["values"]["qx"] = Tree(x=torch.full_like(said["values"]["qx"]["x"], torch.nan))
        return Message(encode(**said), reply_to=message)
    return reply


if __name__ == "__main__":
    while len(sys.argv) > 4 and not os.path.exists(sys.argv[4]):
        time.sleep(0.1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    warm.serve(warm.Link(address, plain=True), app, {"partition-id": partition})
