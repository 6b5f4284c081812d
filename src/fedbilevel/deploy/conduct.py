"""How a real federation is conducted: settings that a simulation has no use for."""

from __future__ import annotations

from dataclasses import dataclass

from fedbilevel import checks


@dataclass(frozen=True)
class Conduct:
    """How the server deals with real clients.

    deadline_s: a task that takes longer is lost. norm_bound: no tensor tree of a reply may be longer. strikes: a client
    with so many refused replies is put aside for the rest of the run. start_clients: how many must have joined before
    round 1 (None: all). wait_s: how long to wait for enough clients before giving up.
    """

    deadline_s: float = 600.0
    norm_bound: float | None = None
    strikes: int = 3
    start_clients: int | None = None
    wait_s: float = 3600.0

    def __post_init__(self) -> None:
        checks.positive("deadline_s", self.deadline_s)
        checks.positive("wait_s", self.wait_s)
        checks.integer("strikes", self.strikes, least=1)
        if self.norm_bound is not None:
            checks.positive("norm_bound", self.norm_bound)
        if self.start_clients is not None:
            checks.integer("start_clients", self.start_clients, least=1)
