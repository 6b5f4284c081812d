"""The loop of a run: iterate the algorithm, evaluate it now and then, and decide when to stop.

`Recorder` (recorder.py) writes a run to a folder, and resumes it after it was killed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fedbilevel.algorithms import Algorithm
from fedbilevel.core import checks, ranks
from fedbilevel.core.linear import UnsolvedError
from fedbilevel.core.process import relaxed_garbage_collection
from fedbilevel.core.tree import Tree, is_finite
from fedbilevel.federation import Federation, QuorumError
from fedbilevel.federation.ledger import TimeElapsed
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.clients import ClientMetrics, EvaluateClient, as_numbers
from fedbilevel.runs.metric import TEST_ACCURACY, Metric, Metrics, default_metric
from fedbilevel.runs.result import Result

Evaluate = Callable[[Tree, Tree], Mapping[str, float]]
Amounts = Mapping[str, float]

UNITS = ("rounds", "bytes", "samples", "gradients", "flops", "virtual_s", "wall_s")
DIVERGENCE_FACTOR = 1e6  # a run has diverged if its upper loss is this multiple of its start

_DERIVATIVES = {
    "unfused": "taken through unfused kernels",
    "differences": "replaced by differences of gradients",
}

log = logging.getLogger("fedbilevel")


class Run:
    """An algorithm on a federation, between two iterations: for loops of one's own.

    Iterating over a run advances it and yields the metrics of each evaluation: before the first
    iteration, whenever another multiple of `every` is reached, and at the end. A run that was left
    early continues where it stopped.

    Costs are measured in "rounds", "bytes" (up and down together), "samples", "gradients", "flops",
    "virtual_s" and "wall_s" (seconds of simulated and of real time).

    Args:
        algorithm: The algorithm.
        fed: The federation on which it runs, with the problem and its clients.
        limits: The budget, as an amount for one or several units of cost. No iteration starts once
            one of them is reached; without any, the run does not end by itself.
        evaluate: A function of x and y that returns numbers, which are added to the metrics.
        every: The distance between two evaluations, in units of cost; by default one round.
        evaluate_client: A function of one client's own x and y and of its number; see `fb.solve`.
        target: A value of the metric at which the run stops.
        metric: The metric that the run is judged by; see `Metric` for what it is without one.
        callbacks: What is called after each iteration and each evaluation.

    Attributes:
        state: The state of the algorithm.
        history: The metrics of each evaluation so far.
        status: "completed", also while the run is under way, "diverged" or "interrupted".
        reason: Why the run diverged, was interrupted, or was ended before its budget.
        after_iteration: A function that is called after each iteration; by default nothing happens.

    Raises:
        ValueError: If an amount is negative or in an unknown unit, if the algorithm does not solve
            such a problem or needs second derivatives that its losses do not have, or, at the first
            evaluation, if the metric is not measured.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> run = fb.Run(fb.algorithms.SimFBO(), fed, {"rounds": 5}, every={"rounds": 2})
        >>> [metrics["round"] for metrics in run]
        [0, 2, 4, 5]

        A loop of one's own decides when to stop, and may go on later:

        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> run = fb.Run(fb.algorithms.SimFBO(), fed, limits={}, evaluate=task.evaluate)
        >>> for metrics in run:
        ...     if metrics["hypergradient_norm"] < 0.1:
        ...         break
        >>> run.result.x is run.state.x
        True
        >>> rounds = run.spent()["rounds"]
        >>> run.advance()
        >>> run.spent()["rounds"] - rounds
        1
    """

    def __init__(
        self,
        algorithm: Algorithm,
        fed: Federation,
        limits: Amounts,
        evaluate: Evaluate | None = None,
        every: Amounts | None = None,
        target: float | None = None,
        evaluate_client: EvaluateClient | None = None,
        metric: Metric | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.limits = dict(limits)
        self.every = dict(every or {"rounds": 1})
        for unit, amount in [*self.limits.items(), *self.every.items()]:
            checks.one_of("unit", unit, UNITS)
            checks.non_negative(unit, amount)
        if not (algorithm.has_server or fed.transport.has_links):
            raise ValueError(
                f"{algorithm.name} has no server: its clients send each other values, and "
                f"{type(fed.transport).__name__} carries messages between a server and its clients "
                "only; such methods run in simulations"
            )
        for name, function in (("evaluate", evaluate), ("evaluate_client", evaluate_client)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} is {function!r}; it must be a function")
        if metric is not None:
            checks.instance("metric", metric, Metric)
        if isinstance(callbacks, Callback):
            raise TypeError(f"callbacks is {type(callbacks).__name__}; it must be a list of them")
        algorithm.check(fed.problem, fed.environment)
        _check_derivatives(algorithm, fed)
        self.algorithm = algorithm
        self.fed = fed
        self.evaluate = evaluate
        self.target = target
        self.client_metrics: ClientMetrics | None = None
        if evaluate_client:
            self.client_metrics = ClientMetrics(evaluate_client, fed)
        if metric is None and target is not None:
            metric = TEST_ACCURACY
        self.given_metric = metric
        self.callbacks = list(callbacks)
        self.state = algorithm.init(fed.problem)
        self.good_state = self.state  # at the last evaluation that did not show a divergence
        self.history: list[Metrics] = []
        self.evaluated: list[str] = []  # the names that `evaluate` returned last
        self.status = "completed"
        self.reason = ""
        self.after_iteration: Callable[[], None] = lambda: None
        self._stopping = False
        self._finished_because = ""

    @property
    def metric(self) -> Metric:
        """The metric that the run is judged by."""
        if self.given_metric is not None:
            return self.given_metric
        return default_metric(self.history[0] if self.history else {})

    @property
    def result(self) -> Result:
        """The outcome so far, with the last x and y that had not diverged."""
        state = self.good_state
        if self.status != "diverged" and is_finite(self.state):
            state = self.state
        return Result(
            state.x, state.y, self.history, self.status, self.reason, self.fed, self.metric
        )

    def spent(self) -> dict[str, float]:
        """Return what the run has cost so far, in every unit of `UNITS`."""
        totals = self.fed.ledger.totals()
        return {
            "rounds": totals["rounds"],
            "bytes": totals["bytes_up"] + totals["bytes_down"],
            "samples": totals["samples"],
            "gradients": totals["gradients"],
            "flops": totals["flops"],
            "virtual_s": self.fed.now,
            "wall_s": self.fed.ledger.wall_s,
        }

    def __iter__(self) -> Iterator[Metrics]:
        with relaxed_garbage_collection():
            yield from self._evaluations()

    def _evaluations(self) -> Iterator[Metrics]:
        try:
            self._call_back(lambda callback: callback.on_start(self))
            yield from self._iterations()
        finally:
            for callback in self.callbacks:
                callback.on_end(self)

    def _iterations(self) -> Iterator[Metrics]:
        if not self.history:
            yield self._measure()
            self._after_evaluation()
        self._end_if_asked()
        while self.status == "completed" and not self._is_finished():
            mark = self.fed.mark()
            state = self.state
            good_state = self.good_state
            evaluations = len(self.history)
            try:
                self._iterate()
            except KeyboardInterrupt:
                # The unfinished iteration is undone, so that a resumed run repeats it as a whole.
                self.fed.rollback(mark)
                self.state = state
                self.good_state = good_state
                del self.history[evaluations:]
                rounds = self.fed.ledger.rounds
                self._interrupt(f"in round {rounds + 1}", f"after round {rounds}")
                return
            if len(self.history) > evaluations:
                yield self.history[-1]
                self._after_evaluation()
            try:
                self.after_iteration()
            except KeyboardInterrupt:
                self._stopping = True
            self._call_back(lambda callback: callback.on_iteration(self))
            self._end_if_asked()
        if self.status == "completed" and self.history[-1]["iteration"] < self.fed.iteration:
            yield self._measure()  # a callback has ended the run between two evaluations
            self._after_evaluation()

    def _after_evaluation(self) -> None:
        self._call_back(lambda callback: callback.on_evaluation(self, self.history[-1]))

    def _call_back(self, call: Callable[[Callback], None]) -> None:
        """Call all callbacks; Ctrl-C meanwhile ends the run after the current iteration."""
        try:
            for callback in self.callbacks:
                call(callback)
        except KeyboardInterrupt:
            self._stopping = True

    def _end_if_asked(self) -> None:
        """End the run if `stop` or `finish` was called, on any rank."""
        stopping = any(ranks.all_gather(self._stopping))
        reasons = [reason for reason in ranks.all_gather(self._finished_because) if reason]
        if self.status != "completed":
            return
        if stopping:
            self._interrupt(f"after round {self.fed.ledger.rounds}")
        elif reasons:
            self._finished_because = self.reason = reasons[0]

    def _iterate(self) -> None:
        """Run one iteration, and evaluate it if that is due."""
        spent = self.spent()
        try:
            self.advance()
            due = self._is_finished() or self._is_due(spent)
            if due:
                with self._timed():
                    self.fed.check_pending()
        except QuorumError as error:
            self._end("diverged", str(error))
            due = True
        if due:
            self._measure()

    def advance(self) -> None:
        """Run one iteration of the algorithm, without an evaluation."""
        with self._timed():
            settings = self.algorithm.at(self.fed.iteration)
            self.state = settings.iterate(self.state, self.fed)
            self.fed.iteration += 1

    def stop(self) -> None:
        """End the run after the current iteration; a signal handler may call this."""
        self._stopping = True

    def finish(self, reason: str) -> None:
        """End the run as completed after the current iteration; a callback may call this.

        Args:
            reason: A sentence that says why.
        """
        self._finished_because = reason

    def _end(self, status: str, reason: str) -> None:
        self.status = status
        self.reason = reason

    def _interrupt(self, when: str, reached: str = "") -> None:
        """End the run as interrupted, and say which x and y its result holds."""
        if not is_finite(self.state):
            evaluated = self.history[-1]["round"]
            reached = f"after round {evaluated}, because the last ones are not finite"
        reason = f"interrupted {when}"
        if reached:
            reason += f"; x and y are those {reached}"
        self._end("interrupted", reason)

    def _is_finished(self) -> bool:
        """Whether a limit or the target is reached, or a callback has ended the run."""
        spent = self.spent()
        if any(spent[unit] >= limit for unit, limit in self.limits.items()):
            return True
        if self._finished_because:
            return True
        if self.target is None:
            return False
        value = self.history[-1].get(self.metric.name, math.nan)
        return self.metric.is_reached(value, self.target)

    def _is_due(self, before: Amounts) -> bool:
        """Whether another multiple of `every` was reached since this much was spent."""
        spent = self.spent()
        return any(spent[unit] // step > before[unit] // step for unit, step in self.every.items())

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time of a block to the run's wall time; of several ranks, the longest one."""
        started = time.perf_counter()
        yield
        elapsed = ranks.all_gather(time.perf_counter() - started)
        self.fed.ledger.book(TimeElapsed(max(elapsed)))

    def _measure(self) -> Metrics:
        """Evaluate the state, and decide whether the run has diverged."""
        x = self.state.x
        y = self.state.y
        costs = self.fed.ledger.totals()
        metrics: Metrics = {"round": costs.pop("rounds"), "iteration": self.fed.iteration, **costs}
        metrics["virtual_s"] = self.fed.now
        metrics["wall_s"] = self.fed.ledger.wall_s
        metrics |= ranks.on_first_rank(lambda: self.fed.transport.losses(x, y))
        metrics |= self.fed.records()
        reason = self._divergence(metrics)
        if not reason:
            try:
                metrics |= self._evaluate(x, y)
            except UnsolvedError as error:
                if not self.history:
                    raise
                reason = str(error)
        if not self.history and not reason and self.metric.name not in metrics:
            measured = ", ".join(sorted(metrics))
            raise ValueError(
                f"metric is {self.metric.name!r}, which is not measured; there are {measured}"
            )
        self.history.append(metrics)
        if self.status == "completed" and reason:
            self._end("diverged", f"round {metrics['round']}: {reason}")
        if self.status == "completed":
            self.good_state = self.state
        return metrics

    def _evaluate(self, x: Tree, y: Tree) -> Metrics:
        """Return what `evaluate` and `evaluate_client` measure."""
        metrics: Metrics = {}
        evaluate = self.evaluate
        if evaluate:
            metrics |= ranks.on_first_rank(lambda: as_numbers("evaluate", evaluate(x, y)))
            self.evaluated = list(metrics)
        client_metrics = self.client_metrics
        if client_metrics:
            metrics |= ranks.on_first_rank(lambda: client_metrics(x, y))
        return metrics

    def _divergence(self, metrics: Metrics) -> str:
        """Return what shows that the run has diverged, or an empty string."""
        for name, value in self.state._asdict().items():
            if not is_finite(value):
                return f"{name} is not finite"
        for name in ("upper_loss", "lower_loss"):
            if not is_finite(metrics[name]):
                return f"{name} is not finite"
        loss = metrics["upper_loss"]
        start = abs((self.history or [metrics])[0]["upper_loss"])
        if start > 0 and loss > DIVERGENCE_FACTOR * start:
            return f"upper_loss is {loss:.3g}, more than {DIVERGENCE_FACTOR:.0e} times its start"
        return ""


def _check_derivatives(algorithm: Algorithm, fed: Federation) -> None:
    """Refuse a method that needs what the losses do not have; say what replaces it."""
    if not algorithm.second_derivatives:
        return
    if fed.no_second_derivatives:
        raise ValueError(
            f"{algorithm.name} needs second derivatives of the lower loss, which has none with "
            f"derivatives={fed.problem.derivatives!r} ({fed.no_second_derivatives}); choose "
            "derivatives='auto', or a first-order method such as 'memfbo'"
        )
    derivatives = fed.runtime.get("derivatives", "exact")
    if derivatives != "exact":
        log.warning(
            "second derivatives are %s, because the lower loss has no others "
            "(a first-order method such as 'memfbo' needs none)",
            _DERIVATIVES[derivatives],
        )
