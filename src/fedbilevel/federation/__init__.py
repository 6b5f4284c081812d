"""Who the clients are and how messages reach them."""

from fedbilevel.federation.base import ClientError, Cost, Federation, Ledger, QuorumError, Replies, Reply
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
