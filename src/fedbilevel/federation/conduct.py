"""How a real federation is conducted: settings that a simulation has no use for."""

from __future__ import annotations

from dataclasses import dataclass

from fedbilevel.core import settings
from fedbilevel.core.settings import Count, Positive


@dataclass(frozen=True)
class Conduct:
    """How the server deals with real clients.

    deadline_s: a task that takes longer is lost. norm_bound: trees of a reply that are longer are clipped to
    it, as by `fedbilevel.stages.Clip`. strikes: a client
    with so many refused replies is put aside for the rest of the run. start_clients: how many must have joined before
    round 1 (None: all). wait_s: how long to wait for enough clients before giving up.
    """

    deadline_s: Positive = 600.0
    norm_bound: Positive | None = None
    strikes: Count = 3
    start_clients: Count | None = None
    wait_s: Positive = 3600.0

    def __post_init__(self) -> None:
        settings.check(self)
