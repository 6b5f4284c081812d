"""What an algorithm sees of its clients: phases, tasks, replies, and the `Federation` that books them."""

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
