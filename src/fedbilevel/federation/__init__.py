"""What an algorithm sees of its clients, the same in a simulation and in a real federation.

| module | what is in it |
| --- | --- |
| `federation` | `Federation`: draws cohorts, has clients run phases, books what it costs |
| `phase` | `Phase`: what one client does with a message, and what it remembers |
| `task` | `Task`, `Broadcast`, `Results`: what crosses the wire |
| `replies` | `Replies`: refuses wrong replies and averages the others |
| `kinds`, `stacks` | shapes of declared values; stacks of replies and their sums |
| `ledger` | `Ledger`: counts rounds, bytes, samples, gradients, FLOPs and memory |
| `environment`, `delays`, `stages`, `conduct` | the conditions under which clients take part |
| `transport` | `Transport`: what carries tasks must do, and how it reports late replies |
"""

from fedbilevel.federation.federation import Federation
from fedbilevel.federation.ledger import Cost, Ledger
from fedbilevel.federation.phase import Message, Number, Phase
from fedbilevel.federation.replies import QuorumError, Replies, Reply
from fedbilevel.federation.task import ClientError

__all__ = [
    "ClientError",
    "Cost",
    "Federation",
    "Ledger",
    "Message",
    "Number",
    "Phase",
    "QuorumError",
    "Replies",
    "Reply",
]
