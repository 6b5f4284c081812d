"""What methods without a barrier share: the last reply of every client, and a bound on delays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel.core.tree import Tree, zeros_like
from fedbilevel.federation import Federation, Reply

Trees = Mapping[str, Tree]
# `LatestReplies` as a plain tuple, which is what a state may hold.
LatestTuple = tuple[Trees, float, Mapping[int, tuple[int, Trees]]]
NO_REPLIES: LatestTuple = ({}, 0.0, {})
MAX_LOSSES = 3  # how often a client may lose its memory, which makes the sums start again


class LatestReplies(NamedTuple):
    """The server's memory: the last reply of every client, and their weighted sums.

    The sums are float64, because they change only by differences: in float32 the rounding of one
    large reply would stay in them for good.

    Attributes:
        sums: For each value of a reply, the sum of n p_i times the last value of client i, over the
            clients heard so far.
        weight: The sum of n p_i over these clients.
        replies: For each of these clients, the iteration in which its last reply was asked for, and
            the reply, which is empty if the client keeps it itself.
    """

    sums: Trees
    weight: float
    replies: Mapping[int, tuple[int, Trees]]

    @staticmethod
    def recall(latest: LatestTuple, fed: Federation) -> LatestReplies:
        """Return the memory in a state, without clients that were put aside in the meantime.

        Their last replies would stay in it for good. Where clients keep their replies themselves,
        the sums start again.
        """
        memory = LatestReplies(*latest)
        kept = {}
        for client, last in memory.replies.items():
            if client not in fed.excluded:
                kept[client] = last
        if len(kept) == len(memory.replies):
            return memory
        sums: dict[str, Tree] = {}
        weight = 0.0
        for client, (_, trees) in kept.items():
            if not trees:
                return LatestReplies(*NO_REPLIES)
            n_p = len(fed) * fed.weights()[client]
            _add_scaled(sums, n_p, to_double(trees))
            weight += n_p
        return LatestReplies(sums, weight, kept)

    def as_tuple(self) -> LatestTuple:
        """Return the fields as a plain tuple, for a state."""
        return self.sums, self.weight, self.replies

    def mean(self, name: str, like: Tree) -> Tree:
        """Return the mean of a value over the clients heard so far, in the dtype of `like`."""
        mean = self.sums[name] / self.weight
        return mean.map(lambda value, other: value.to(other.dtype), like)

    def mean_age(self, iteration: int) -> float:
        """Return how old the replies in the sums are on average, in iterations."""
        ages = [iteration - asked for asked, _ in self.replies.values()]
        return sum(ages) / len(ages)

    def scaled_means(self, likes: Mapping[str, Tree], t: int) -> tuple[Trees, float]:
        """Return the means of values over all clients, and the scale of steps along them.

        Args:
            likes: For the name of each value, a tree of its shape and dtype.
            t: The iteration.

        Returns:
            The means, and 1 / sqrt(1 + the mean age); zeros and 0 before the first reply.
        """
        if not self.weight:
            return {name: zeros_like(like) for name, like in likes.items()}, 0.0
        means = {name: self.mean(name, like) for name, like in likes.items()}
        return means, (1 + self.mean_age(t)) ** -0.5

    def with_replies(self, replies: Iterable[Reply], iteration: int) -> LatestReplies:
        """Return the memory with each of these replies in place of its client's last one."""
        sums = dict(self.sums)
        weight = self.weight
        latest = dict(self.replies)
        for reply in replies:
            new = _trees(reply.values)
            _, old = latest.get(reply.client, (0, {}))
            change = to_double(new)
            if old:
                change = {name: change[name] - old[name].map(Tensor.double) for name in change}
            else:
                weight += reply.weight
            _add_scaled(sums, reply.weight, change)
            latest[reply.client] = (iteration - reply.staleness, new)
        return LatestReplies(sums, weight, latest)

    def with_differences(
        self, replies: Iterable[Reply], losses: Mapping[int, int]
    ) -> tuple[LatestReplies, dict[int, int]]:
        """Return the memory after replies that are differences, and the losses of each client.

        The sums restart when a client has lost its memory: its part of them is unknown to everyone.
        A client that loses it more than `MAX_LOSSES` times is not heard.
        """
        sums = dict(self.sums)
        weight = self.weight
        latest = dict(self.replies)
        counts = dict(losses)
        for reply in replies:
            base = int(reply.values["ticket"]["base"])
            number = int(reply.values["ticket"]["number"])
            if base < 0 and reply.client in latest:
                counts[reply.client] = counts.get(reply.client, 0) + 1
                if counts[reply.client] > MAX_LOSSES:
                    continue
                sums = {}
                weight = 0.0
                latest = {}
            acknowledged, _ = latest.get(reply.client, (-1, {}))
            if base != acknowledged:
                continue  # its base is no longer in the sums; the client's next reply will be whole
            _add_scaled(sums, reply.weight, to_double(_trees(reply.values)))
            if reply.client not in latest:
                weight += reply.weight
            latest[reply.client] = (number, {})
        return LatestReplies(sums, weight, latest), counts


def _trees(values: Mapping[str, Any]) -> dict[str, Tree]:
    """Return the directions of a reply, without the ticket that numbers it."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tree) and name != "ticket"
    }


def to_double(trees: Trees) -> dict[str, Tree]:
    """Return trees in float64."""
    return {name: tree.map(Tensor.double) for name, tree in trees.items()}


def _add_scaled(sums: dict[str, Tree], weight: float, change: Trees) -> None:
    for name, value in change.items():
        if name in sums:
            sums[name] = sums[name] + weight * value
        else:
            sums[name] = weight * value


def collect_within(fed: Federation, max_delay: int | None) -> tuple[list[Reply], list[int]]:
    """Collect the next replies, and wait for those that `max_delay` allows no later.

    Args:
        fed: The federation, with tasks in flight.
        max_delay: A task that was posted in iteration t is answered in iteration
            t + max_delay - 1 at the latest; None waits for nobody.

    Returns:
        The replies, as many as the environment's participation and those waited for, and the
        clients that can be given a new task.
    """
    r = fed.collect()
    replies = list(r)
    idle = list(r.idle)
    while max_delay is not None and _longest_flight(fed) >= max_delay - 1:
        r = fed.collect(1)
        replies += r
        idle += r.idle
    return replies, idle


def _longest_flight(fed: Federation) -> int:
    """Return how many iterations ago the oldest task in flight was posted, -1 if there is none."""
    posted = [task.broadcast.iteration for task in fed.in_flight.values()]
    return fed.iteration - min(posted, default=fed.iteration + 1)
