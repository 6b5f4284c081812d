"""`Conduct`: settings of a real federation that a simulation has no use for."""

from __future__ import annotations

from dataclasses import dataclass

from fedbilevel.core import settings
from fedbilevel.core.settings import Count, Factor, Positive


@dataclass(frozen=True)
class Conduct:
    """How a server treats real clients: deadlines, bounds on replies, exclusion and waiting.

    Args:
        deadline_s: Seconds that a client has for a task. A task that takes longer is lost, and a
            later reply is ignored.
        norm_bound: The largest Euclidean norm of a tree in a reply; a longer one is clipped to it,
            as by `fedbilevel.stages.Clip`. None: replies are not clipped.
        norm_factor: A reply is refused if a value in it is this many times longer than the median
            of what clients have replied so far, so that a lie has to be about as long as honest
            replies are. None: no reply is too long.
        claim_factor: What a client says of itself (its samples for `weights = "samples"` and for
            epochs, the costs of its tasks) counts for at most this many times the median of what
            all clients say.
        samples: The numbers of training samples that clients hold, one per client, where the owner
            of the federation knows them; they count instead of what clients claim. None: unknown.
        strikes: How many replies of a client are refused before it is given no more tasks for the
            rest of the run.
        start_clients: How many clients must have joined before round 1. None: all of them.
        wait_s: Seconds to wait for enough clients before the run is given up.

    Raises:
        ValueError: A value is out of its range.
        TypeError: A value has a wrong type.

    Examples:
        >>> from fedbilevel.federation.conduct import Conduct
        >>> Conduct(deadline_s=30.0, strikes=1).wait_s
        3600.0
        >>> Conduct(deadline_s=0)
        Traceback (most recent call last):
        ValueError: deadline_s is 0; it must be above 0
    """

    deadline_s: Positive = 600.0
    norm_bound: Positive | None = None
    norm_factor: Factor | None = 10.0
    claim_factor: Factor = 4.0
    samples: list[Count] | None = None
    strikes: Count = 3
    start_clients: Count | None = None
    wait_s: Positive = 3600.0

    def __post_init__(self) -> None:
        settings.check(self)
