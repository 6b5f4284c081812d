"""Who the clients are and how messages reach them."""

from fedbilevel.federation.base import ClientError, Federation, QuorumError, Replies, Reply
from fedbilevel.federation.ledger import Cost, Ledger
from fedbilevel.federation.simulated import SimulatedFederation

__all__ = [
    "ClientError",
    "Cost",
    "Federation",
    "Ledger",
    "QuorumError",
    "Replies",
    "Reply",
    "SimulatedFederation",
]
