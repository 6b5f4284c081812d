"""`solve`: run an algorithm on a problem and its clients, and evaluate it on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fedbilevel.algorithms import Algorithm
from fedbilevel.core import checks, ranks
from fedbilevel.core.process import relaxed_garbage_collection
from fedbilevel.core.tree import Tree, is_finite
from fedbilevel.federation import Federation, QuorumError
from fedbilevel.federation.ledger import Elapsed

Evaluate = Callable[[Tree, Tree], Mapping[str, float]]
DIVERGED = 1e6  # times the upper loss at the start


@dataclass
class Result:
    """Where a run ended, how (`status`: "completed", "diverged" or "interrupted", with `reason`), and its metrics."""

    x: Tree
    y: Tree
    history: list[dict[str, Any]] = field(default_factory=list)
    status: str = "completed"
    reason: str = ""


Amounts = Mapping[str, float]
UNITS = ("rounds", "bytes", "samples", "gradients", "flops", "virtual_s", "wall_s")


class Run:
    """A run under way: a state between iterations and what is needed to go on; iterating over it yields the metrics.

    limits: no iteration starts once one of them is reached. every: evaluate when so much of something was spent since
    the last multiple. Both are in `UNITS`. target: a test accuracy at which to stop. `after` is called between
    iterations; `stop()` ends the run at the next such moment.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        fed: Federation,
        limits: Amounts,
        evaluate: Evaluate | None = None,
        every: Amounts | None = None,
        target: float | None = None,
    ) -> None:
        self.limits, self.every = dict(limits), dict(every or {"rounds": 1})
        for unit, amount in [*self.limits.items(), *self.every.items()]:
            checks.one_of("unit", unit, UNITS)
            checks.non_negative(unit, amount)
        algorithm.check(fed.problem, fed.environment)
        self.algorithm = algorithm
        self.fed, self.evaluate, self.target = fed, evaluate, target
        self.state = algorithm.init(fed.problem)
        self.good = self.state
        self.history: list[dict[str, Any]] = []
        self.status, self.reason = "completed", ""
        self.after: Callable[[], None] = lambda: None
        self._stopping = False

    @property
    def result(self) -> Result:
        return Result(self.good.x, self.good.y, self.history, self.status, self.reason)

    def spent(self) -> dict[str, float]:
        """What the run has cost so far, in every unit."""
        totals = self.fed.ledger.totals()
        return {
            "rounds": totals["rounds"],
            "bytes": totals["bytes_up"] + totals["bytes_down"],
            **{unit: totals[unit] for unit in ("samples", "gradients", "flops")},
            "virtual_s": self.fed.now,
            "wall_s": self.fed.ledger.wall_s,
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with relaxed_garbage_collection():
            yield from self._iterations()

    def _iterations(self) -> Iterator[dict[str, Any]]:
        if not self.history:
            yield self._measure()
        while self.status == "completed" and not self._finished():
            before, spent, state = self.fed.mark(), self.spent(), self.state
            try:
                self.advance()
                if self._finished() or self._due(spent):
                    with self._clocked():
                        self.fed.settle()
            except QuorumError as error:
                self.status, self.reason = "diverged", str(error)
            except KeyboardInterrupt:
                self.fed.back(
                    before
                )  # the iteration under way leaves no trace, so that going on repeats it
                self.state = state
                self.status, self.reason = (
                    "interrupted",
                    f"interrupted in round {self.fed.ledger.rounds + 1}",
                )
                return
            if self.status == "diverged" or self._finished() or self._due(spent):
                yield self._measure()
            self.after()
            if any(ranks.gather(self._stopping)):
                self.status, self.reason = (
                    "interrupted",
                    f"interrupted after round {self.fed.ledger.rounds}",
                )

    def stop(self) -> None:
        self._stopping = True

    def _finished(self) -> bool:
        spent = self.spent()
        reached = [unit for unit, limit in self.limits.items() if spent[unit] >= limit]
        accuracy = self.history[-1].get("test_accuracy", 0.0)
        return bool(reached) or (self.target is not None and accuracy >= self.target)

    def _due(self, before: Amounts) -> bool:
        spent = self.spent()
        return any(spent[unit] // step > before[unit] // step for unit, step in self.every.items())

    def advance(self) -> None:
        """One iteration."""
        with self._clocked():
            settings = self.algorithm.at(self.fed.iteration)
            self.state = settings.iterate(self.state, self.fed)
            self.fed.iteration += 1

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.fed.ledger.book(Elapsed(max(ranks.gather(time.perf_counter() - started))))

    def _measure(self) -> dict[str, Any]:
        """Evaluate, and judge whether the run has diverged."""
        x, y = self.state.x, self.state.y
        costs = self.fed.ledger.totals()
        metrics: dict[str, Any] = {
            "round": costs.pop("rounds"),
            "iteration": self.fed.iteration,
            **costs,
        }
        metrics |= {"virtual_s": self.fed.now, "wall_s": self.fed.ledger.wall_s}
        metrics |= {**ranks.first(lambda: self.fed.transport.losses(x, y)), **self.fed.records()}
        if self.evaluate and is_finite((x, y)):
            evaluate = self.evaluate
            metrics |= ranks.first(lambda: evaluate(x, y))
        self.history.append(metrics)
        if self.status == "completed" and (reason := self._diverged(metrics)):
            self.status, self.reason = "diverged", f"round {metrics['round']}: {reason}"
        if self.status == "completed":
            self.good = self.state
        return metrics

    def _diverged(self, metrics: Mapping[str, Any]) -> str:
        for name, value in self.state._asdict().items():
            if not is_finite(value):
                return f"{name} is not finite"
        for name in ("upper_loss", "lower_loss"):
            if not is_finite(metrics[name]):
                return f"{name} is not finite"
        start = abs(self.history[0]["upper_loss"])
        if start > 0 and metrics["upper_loss"] > DIVERGED * start:
            return f"upper_loss is {metrics['upper_loss']:.3g}, more than {DIVERGED:.0e} times its start"
        return ""
