"""What a stack of clients computes, from what it was sent to its replies or their sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.oracle import Features
from fedbilevel.core.tree import nbytes
from fedbilevel.execution.lift import Lift, lifted
from fedbilevel.execution.stacked._batches import Batches, Take
from fedbilevel.execution.stacked._parts import Known, Parts, StepCall
from fedbilevel.federation.phase import Message, Phase
from fedbilevel.federation.replies import add_up
from fedbilevel.federation.task import Broadcast, TaskCost

Given = dict[str, Any]  # the inputs of a program, by name: nested tensors and plain values


class StackProgram:
    """A function of its inputs alone, so that a GPU can record it.

    Args:
        parts: runs and measures the steps.
        broadcast: of one of the tasks; all have the same phase.
        lift: from one client to the stack.
        take: looks samples up, given the inputs.
        shrink: step k runs on the clients that take more than k steps, the first of the stack. Without it, as on a GPU,
            it runs on all, and those who are done stay where they are: there a stack of one size is worth more than
            the work that is saved.
    """

    def __init__(
        self,
        parts: Parts,
        broadcast: Broadcast,
        lift: Lift,
        take: Callable[[Given], Take],
        shrink: bool,
    ) -> None:
        self.parts = parts
        self.broadcast = broadcast
        self.lift = lift
        self.take = take
        self.shrink = shrink

    def __call__(self, given: Given) -> tuple[Any, tuple[list[TaskCost], int]]:
        """The replies of a stack or their sums; what tasks of 0, 1, 2, ... steps cost, and the bytes of a reply."""
        numbers = given["numbers"].unbind()
        plain = self.broadcast.phase
        phase = plain.with_numbers(dict(zip(plain.numbers, numbers, strict=True)))
        lengths = given["lengths"]
        batches = self._batches(phase, given)
        carry, form, start = self._start(phase, given)
        spent = [start]
        known: Known = {}
        done: list[tuple[list[Tensor], pytree.TreeSpec]] = []
        for k in range(lengths[0]):
            carry = self._active(carry, form, lengths, k, done)
            batch = _marked(batches.at(k, len(carry[0])), bool(given["features"]))
            call = StepCall(
                self.parts.problem, plain, _part(k, lengths[0]), carry, form, batch, self.lift
            )
            stepped, cost = self.parts.step(call, numbers, known)
            form = call.after
            late = not self.shrink and k >= lengths[-1]
            carry = _moved(given["steps"] > k, stepped, carry) if late else stepped
            spent.append(spent[-1].then(cost)._replace(samples=batches.samples))
        if lengths[0] == 1:
            replies = pytree.tree_unflatten(carry, form)
        else:
            replies, last = self._finish(phase, [(carry, form), *reversed(done)])
            spent = [cost.then(last) for cost in spent]
        return self._added_up(replies, given), (spent, self._nbytes(replies, given))

    def _batches(self, phase: Phase, given: Given) -> Batches:
        return Batches(
            given["keys"],
            given["extents"],
            self.take(given),
            self.parts.fused,
            steps=given["lengths"][0],
            draws=phase.draws,
            epochs=phase.epochs is not None,
            paired=self.parts.problem.lower_level == "private",
        )

    def _start(self, phase: Phase, given: Given) -> tuple[list[Tensor], pytree.TreeSpec, TaskCost]:
        """The first carry, flat because it goes through every step."""

        def start(own: Any, memory: Any, steps: Tensor) -> Any:
            remembered = {"memory": memory} if phase.remembers else {}
            return phase.start(Message(**given["shared"], **own, **remembered, steps=steps))

        each = given["own"], given["memory"], given["steps"]
        shared = [
            leaf.unsqueeze(0)
            for leaf in pytree.tree_leaves(given["shared"])
            if isinstance(leaf, Tensor)
        ]
        cost = self.parts.cost(phase, "start", lambda _, *args: start(*args), shared, *each)
        carry, form = pytree.tree_flatten(lifted(self.lift, start)(*each))
        return carry, form, cost

    def _active(
        self,
        carry: list[Tensor],
        form: pytree.TreeSpec,
        lengths: list[int],
        k: int,
        done: list[tuple[list[Tensor], pytree.TreeSpec]],
    ) -> list[Tensor]:
        """The carry of the clients that take step k; those of the others are put aside."""
        if not self.shrink:
            return carry
        still = sum(length > k for length in lengths)
        if still == len(carry[0]):
            return carry
        done.append(([t[still:] for t in carry], form))
        return [t[:still] for t in carry]

    def _finish(
        self, phase: Phase, finals: list[tuple[list[Tensor], pytree.TreeSpec]]
    ) -> tuple[Any, TaskCost]:
        carries = [pytree.tree_unflatten(*final) for final in finals]
        cost = self.parts.cost(phase, "finish", phase.finish, carries[0])
        replies = [lifted(self.lift, phase.finish)(carry) for carry in carries]
        if len(replies) == 1:
            return replies[0], cost
        return pytree.tree_map(lambda *parts: torch.cat(parts), *replies), cost

    def _nbytes(self, replies: Any, given: Given) -> int:
        """Of one reply, without what a client remembers."""
        declared = self.broadcast.phase.reply
        return nbytes({name: value for name, value in replies.items() if name in declared}) // len(
            given["keys"]
        )

    def _added_up(self, replies: Any, given: Given) -> Any:
        if not isinstance(given["weights"], Tensor):
            return replies
        return self.parts.fused("sums", add_up, replies, given["weights"], given["steps"])


def _part(k: int, steps: int) -> str:
    if k:
        return "step"
    return "first" if steps > 1 else "only"


def _marked(batch: Any, embedded: bool) -> Any:
    """A batch, or several, marked as features where the samples were embedded beforehand."""
    if not embedded:
        return batch
    return Features(*batch) if hasattr(batch, "rng") else tuple(Features(*part) for part in batch)


def _moved(which: Tensor, new: Any, old: Any) -> Any:
    """The new values of those clients, the old ones of the others."""
    return pytree.tree_map(
        lambda n, o: torch.where(which.view(-1, *[1] * (n.ndim - 1)), n, o), new, old
    )
