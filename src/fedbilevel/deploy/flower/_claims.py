"""Claims: what clients say of themselves, and how far it is believed.

A client says how many samples it holds, what a task has cost it, and what its losses are. None of
it can be verified, so a number counts for at most a multiple of the median of what all clients say:
`conduct.claim_factor` for samples and costs, `LOSS_FACTOR` for losses, which differ more between
clients. Numbers of samples that the owner of the federation has registered (`conduct.samples`) are
not claims, and hold as they are.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedbilevel.core import checks
from fedbilevel.deploy.flower.wire import WireError
from fedbilevel.federation.phase import Phase, Side
from fedbilevel.federation.replies import log
from fedbilevel.federation.screening import RunningMedian
from fedbilevel.federation.task import Task, TaskCost
from fedbilevel.federation.transport import Arrived

MAX_SAMPLES = 2**40  # that a client may claim to hold
MAX_COST = 2**60  # of a task: what two clients may claim before there is a median to compare with
LOSS_FACTOR = 100.0
NOTHING = 1e-9  # for a cost of 0, which some phases have and which a median would leave out

Sizes = tuple[int, int]  # training and validation samples


class Claims:
    """Keeps what clients say of themselves, and bounds it.

    Args:
        factor: How many times the median of all clients a claim counts for at most.
        registered: The numbers of training samples that the owner has registered, one per client;
            None: there are none.
        batch_size: Samples per mini-batch; None is the full batch.

    Attributes:
        sizes: The numbers of samples that each client has claimed, as it has claimed them.

    Examples:
        >>> claims = Claims(4.0, None, None)
        >>> for client, samples in enumerate([10, 12, 9000]):
        ...     claims.enter(client, [samples, 1])
        >>> [claims.samples(client, "train") for client in range(3)]
        [10, 12, 48]
    """

    def __init__(
        self, factor: float, registered: Sequence[int] | None, batch_size: int | None
    ) -> None:
        self.factor = factor
        self.registered = registered
        self.batch_size = batch_size
        self.sizes: dict[int, Sizes] = {}
        self._warned: Counter[int] = Counter()
        self._medians: dict[str, RunningMedian] = {}

    def enter(self, client: int, sizes: object) -> None:
        """Take the numbers of samples that a client claims to hold.

        Raises:
            WireError: It claims something else than two numbers that are possible.
        """
        if not isinstance(sizes, (list, tuple)) or len(sizes) != 2:
            raise WireError("its samples are not two numbers")
        train = checks.integer("training samples", sizes[0], least=1, most=MAX_SAMPLES)
        val = checks.integer("validation samples", sizes[1], least=1, most=MAX_SAMPLES)
        before = self.sizes.get(client, (train, val))
        if before != (train, val):
            log.warning(
                "client %d now has %d training and %d validation samples, not %d and %d",
                client,
                train,
                val,
                *before,
            )
        self.sizes[client] = train, val
        if self.registered is not None and self.registered[client] != train:
            log.warning(
                "client %d claims %d training samples; %d are registered, and count",
                client,
                train,
                self.registered[client],
            )

    def samples(self, client: int, side: Side) -> int:
        """Return how many samples of a client count; the median for one that never joined."""
        if side == "train" and self.registered is not None:
            return self.registered[client]
        index = 0 if side == "train" else 1
        claimed = [sizes[index] for sizes in self.sizes.values()]
        if not claimed:
            return 1
        median = statistics.median_low(claimed)
        most = max(int(self.factor * median), 1)
        return min(self.sizes[client][index] if client in self.sizes else median, most)

    def warn_of_bounded_samples(self) -> None:
        """Log whose training samples do not count as claimed."""
        for client, (claimed, _) in sorted(self.sizes.items()):
            counted = self.samples(client, "train")
            if self.registered is None and counted < claimed:
                log.warning(
                    "client %d claims %d training samples and counts for %d, which is %g times the "
                    "median; conduct.samples can register them",
                    client,
                    claimed,
                    counted,
                    self.factor,
                )

    def bound_costs(self, arrived: Sequence[Arrived]) -> list[Arrived]:
        """Bound the costs that came with replies to tasks of one phase, one reply each."""
        bounded = [each.results.costs[0]._asdict() for each in arrived]
        for name in TaskCost._fields:
            rates = []
            for each, cost in zip(arrived, bounded, strict=True):
                rates.append(NOTHING + cost[name] / self._work(name, each.results.tasks[0]))
            if not rates:
                continue
            phase = arrived[0].results.tasks[0].broadcast.phase.name
            median = self._medians.setdefault(f"{phase}.{name}", RunningMedian())
            highest = median.bound(rates, self.factor)
            for each, cost, rate in zip(arrived, bounded, rates, strict=True):
                if rate > highest:
                    task = each.results.tasks[0]
                    self._warn_of_cost(task, name, cost[name])
                    cost[name] = int((highest - NOTHING) * self._work(name, task))
            median.enter([min(rate, highest) for rate in rates])
        results = []
        for each, cost in zip(arrived, bounded, strict=True):
            results.append(Arrived(each.results._replace(costs=[TaskCost(**cost)])))
        return results

    def bound_losses(
        self, reported: Mapping[int, tuple[float, float]]
    ) -> dict[int, tuple[float, float]]:
        """Bound the upper and the lower loss that clients report for one point."""
        bounded = {client: list(pair) for client, pair in reported.items()}
        for index, level in enumerate(("upper", "lower")):
            sizes = [abs(pair[index]) for pair in reported.values()]
            median = self._medians.setdefault(f"{level} loss", RunningMedian())
            highest = median.bound(sizes, LOSS_FACTOR)
            for client, size in zip(reported, sizes, strict=True):
                if size > highest:
                    bounded[client][index] *= highest / size
                    log.warning(
                        "the %s loss of client %d is %.3g and counts as %.3g, %g times the median",
                        level,
                        client,
                        reported[client][index],
                        bounded[client][index],
                        LOSS_FACTOR,
                    )
            median.enter([min(size, highest) for size in sizes])
        return {client: (upper, lower) for client, (upper, lower) in bounded.items()}

    def _work(self, name: str, task: Task) -> int:
        """Return what a cost is in proportion to: steps, and samples per step."""
        steps = task.steps
        samples = self._samples_per_step(task.broadcast.phase, task.client)
        if name == "peak_bytes":
            return samples
        if name == "gradients":
            return steps
        return steps * samples

    def _samples_per_step(self, phase: Phase, client: int) -> int:
        size = self.samples(client, "train") + self.samples(client, "val")
        if self.batch_size is None or phase.full:
            return size
        return min(size, 2 * self.batch_size)

    def _warn_of_cost(self, task: Task, name: str, claimed: int) -> None:
        self._warned[task.client] += 1
        if self._warned[task.client] == 1:
            log.warning(
                "%s: client %d claims %d %s, too many to be believed; the account has %g times the "
                "median of all clients",
                task.broadcast,
                task.client,
                claimed,
                name,
                self.factor,
            )

    def plain(self) -> dict[str, Any]:
        """The claims and their medians as plain values, for a checkpoint."""
        medians = {name: (each.highest, each.recent) for name, each in self._medians.items()}
        return {"sizes": dict(self.sizes), "medians": medians}

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Return to what `plain` returned."""
        self.sizes = dict(plain["sizes"])
        self._medians = {name: RunningMedian(*each) for name, each in plain["medians"].items()}
