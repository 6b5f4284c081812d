"""`advise`: which methods suit a problem and its conditions, with the figures of our results.

What a method can run is what it declares. Among the methods that can, the order is that of their
costs in the results of this project, computed by docs/results/advice.py into figures.json: the
logarithm of a cost is a term of its comparison plus a term of its method, fitted by least squares,
in which a comparison counts half as much for every condition in which it differs from the problem.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from fedbilevel import algorithms
from fedbilevel.algorithms import Algorithm, registry
from fedbilevel.core import checks
from fedbilevel.core.capabilities import find_capabilities
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.problem import Problem
from fedbilevel.diagnostics.advice import ADVISED, Report, Settings
from fedbilevel.diagnostics.check import check
from fedbilevel.federation.delays import Constant
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.task import on_client

GOALS = {
    "rounds": "rounds",
    "bytes": "bytes up and down",
    "gradients": "gradients",
    "seconds": "virtual seconds",
    "error": "final error",
}
CONDITIONS = {
    "apart": "clients differ: an average of local hypergradients solves another problem",
    "unequal steps": "clients take unequal numbers of local steps",
    "delays": "clients are not equally fast: a method with a barrier waits for the slowest",
    "capacity": "clients hold parts of the model",
    "private": "every batch is an episode with a lower level of its own",
    "personal": "variables belong to the clients",
    "no server": "clients send each other values along links",
    "first order": "the lower loss has no second derivatives",
}
# The spread of the clients' lower gradients from which they count as apart. That of 100 samples of
# MNIST per client is .70 if they are iid, from noise alone, and .95 if each has few labels.
APART = 0.8
SHOWN = 3  # comparisons that are cited


class Cost(NamedTuple):
    """What a method needed in a comparison: mean, smallest and largest of its seeds.

    Attributes:
        mean: The mean; of a method that missed the target, twice the longest run.
        low: The smallest value.
        high: The largest value.
        seeds: The number of seeds.
        reached: How many of them reached the target.

    Examples:
        >>> print(Cost(12345, 9000, 14000, 3, 3))
        12.3 k (9000 to 14 k)
        >>> print(Cost(2e9, 2e9, 2e9, 3, 1))
        reached by 1 of 3 seeds
    """

    mean: float
    low: float
    high: float
    seeds: int
    reached: int

    @property
    def is_known(self) -> bool:
        """Whether all seeds reached the target."""
        return self.reached == self.seeds

    def __str__(self) -> str:
        if not self.is_known:
            return f"reached by {self.reached} of {self.seeds} seeds"
        if self.low == self.high:
            return _short(self.mean)
        return f"{_short(self.mean)} ({_short(self.low)} to {_short(self.high)})"


class Comparison(NamedTuple):
    """Methods that were run on one problem, under the same conditions.

    Attributes:
        where: The experiment and its variant.
        problem: The problem that it is about.
        goal: One of `GOALS`.
        target: The test accuracy to reach; None if the error at the end is compared.
        conditions: Those of `CONDITIONS` that hold.
        costs: The cost of each method.

    Examples:
        >>> costs = {"a": Cost(10, 8, 12, 3, 3), "b": Cost(40, 40, 40, 3, 1)}
        >>> comparison = Comparison("here", "problem", "rounds", 0.9, ["apart"], costs)
        >>> comparison.best
        'a'
        >>> comparison.sentence("b")
        'rounds to 90% in here: b reached by 1 of 3 seeds; the best of the others, a, 10 (8 to 12)'
    """

    where: str
    problem: str
    goal: str
    target: float | None
    conditions: Sequence[str]
    costs: Mapping[str, Cost]

    @property
    def best(self) -> str:
        """The method with the lowest cost."""
        return min(self.costs, key=lambda name: self.costs[name].mean)

    def sentence(self, method: str) -> str:
        """Say what a method needed here, and what the best of the others did."""
        unit = GOALS[self.goal]
        if self.target is not None:
            unit = f"{unit} to {self.target:.0%}"
        others = {name: cost for name, cost in self.costs.items() if name != method}
        other = min(others, key=lambda name: others[name].mean)
        text = f"{unit} in {self.where}: {method} {self.costs[method]}"
        return f"{text}; the best of the others, {other}, {others[other]}"


@dataclass(frozen=True)
class Advice:
    """What `fb.advise` returns: methods in the order of their expected costs, and why.

    Args:
        goal: What is to be spared, a key of `GOALS`.
        conditions: What holds, a key of `CONDITIONS` each, with the measurement if there is one.
        order: The methods that suit, the first choice first, with the expected cost in multiples of
            the lowest; None where our results do not tell.
        others: The other methods, with the reason why they do not suit.
        evidence: Comparisons in which the first choice took part, the most similar ones first.
        report: What `fb.check` measured; None where it cannot.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> advice = fb.advise(task.problem, task.clients)
        >>> advice.goal, "apart" in advice.conditions
        ('rounds', True)
        >>> advice.others["fedavg"]
        'a baseline: it learns x and y as one model'
    """

    goal: str
    conditions: Mapping[str, str]
    order: Mapping[str, float | None]
    others: Mapping[str, str]
    evidence: Sequence[Comparison] = ()
    report: Report | None = field(default=None, repr=False)

    @property
    def first(self) -> str:
        """The name of the first choice.

        Raises:
            ValueError: No method can run the problem.
        """
        if not self.order:
            raise ValueError("no method can run this problem; `others` says why")
        return next(iter(self.order))

    def settings(self, name: str | None = None) -> Settings:
        """Return settings to start from; none where they cannot be derived from measurements.

        Args:
            name: The name of the method; None stands for the first choice.

        Returns:
            Settings by name.
        """
        name = name or self.first
        if self.report is None or self.report.measured is None or name not in ADVISED:
            return {}
        return self.report.settings(name)

    def lines(self) -> list[str]:
        """Return the advice as sentences."""
        lines = [f"goal: {GOALS[self.goal]}"]
        lines += [f"condition: {sentence}" for sentence in self.conditions.values()]
        if self.order:
            lines.append(f"first choice: {self.first}")
            lines += [f"figure: {each.sentence(self.first)}" for each in self.evidence]
            if not self.evidence:
                lines.append(f"no figures: our results on {GOALS[self.goal]} are about others")
        else:
            lines.append("first choice: none, no method can run this problem")
        unknown = []
        for name, multiple in list(self.order.items())[1:]:
            if multiple is None:
                unknown.append(name)
            else:
                lines.append(f"then: {name}, {multiple:.2f} times the lowest expected cost")
        if unknown:
            lines.append(f"not compared in our results: {', '.join(unknown)}")
        same_reason: dict[str, list[str]] = {}
        for name, reason in self.others.items():
            same_reason.setdefault(reason, []).append(name)
        lines += [f"not {', '.join(names)}: {reason}" for reason, names in same_reason.items()]
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


def advise(
    problem: Problem,
    clients: Sequence[ClientData],
    environment: Environment | None = None,
    *,
    goal: str | None = None,
    rounds: int = 1000,
    seed: int = 0,
) -> Advice:
    """Say which methods suit a problem and its conditions, with the figures of our results.

    Args:
        problem: The problem.
        clients: The data of all clients.
        environment: The conditions under which clients take part.
        goal: What is dear: "rounds", "bytes", "gradients", "seconds" or "error". None chooses
            seconds where clients are not equally fast, the error where they hold submodels or every
            batch is an episode, and rounds otherwise.
        rounds: The number of rounds of the run, for its settings.
        seed: Determines which clients and samples are measured.

    Returns:
        The advice.

    Raises:
        ValueError: An argument is not allowed, or a loss is not finite at the start.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> environment = fb.Environment(delay=fb.delays.LogNormal())
        >>> fb.advise(task.problem, task.clients, environment).first
        'afbo'
    """
    environment = environment or Environment()
    report = None
    if problem.lower_level == "shared" and not problem.client_names:
        report = check(problem, clients, environment, rounds=rounds, seed=seed)
    no_second = ""
    if problem.lower_level == "shared":
        with on_client(0, "before round 1"):
            no_second = find_capabilities(problem, clients[0]).no_second
    conditions = _conditions(problem, environment, no_second, report)
    goal = checks.one_of("goal", goal or default_goal(conditions), GOALS)
    others = _obstacles(problem, environment, no_second, are_apart="apart" in conditions)
    suitable = [name for name in registry.names() if name not in others]
    multiples = scores(goal, conditions, comparisons())
    known = sorted((name for name in suitable if name in multiples), key=multiples.__getitem__)
    unknown = [name for name in suitable if name not in multiples]
    order: dict[str, float | None] = {name: multiples[name] for name in known}
    order |= dict.fromkeys(unknown)
    evidence = []
    if known:
        evidence = _similar(known[0], goal, conditions)
    return Advice(goal, conditions, order, others, evidence, report)


def _conditions(
    problem: Problem, environment: Environment, no_second: str, report: Report | None
) -> dict[str, str]:
    """Return the conditions that hold, each with its sentence."""
    steps = environment.local_steps
    holds = {
        "unequal steps": not isinstance(steps, int) and len({*steps}) > 1,
        "delays": not isinstance(environment.delay, Constant | None),
        "capacity": environment.uses_submodels,
        "private": problem.lower_level == "private",
        "personal": bool(problem.client_names),
        "no server": environment.topology is not None,
        "first order": bool(no_second),
    }
    conditions = {name: CONDITIONS[name] for name, does_hold in holds.items() if does_hold}
    if report is not None and report.measured is not None:
        spread = report.measured.lower_spread
        if spread > APART:
            measured = f"their lower gradients are {spread:.0%} apart at the start"
            conditions["apart"] = f"{CONDITIONS['apart']} ({measured})"
    return conditions


def default_goal(conditions: Collection[str]) -> str:
    """Return the goal where none is given.

    Args:
        conditions: The conditions of the problem, keys of `CONDITIONS`.

    Returns:
        A key of `GOALS`.

    Examples:
        >>> default_goal(["apart"])
        'rounds'
    """
    if "delays" in conditions:
        return "seconds"
    if "capacity" in conditions or "private" in conditions:
        return "error"
    return "rounds"


def _obstacles(
    problem: Problem, environment: Environment, no_second: str, are_apart: bool
) -> dict[str, str]:
    """Return why methods do not suit, by name."""
    obstacles = {}
    for name in registry.names():
        reason = _obstacle(algorithms.get(name), problem, environment, no_second)
        if reason:
            obstacles[name] = reason
    suitable = [name for name in registry.names() if name not in obstacles]
    local = [name for name in suitable if algorithms.get(name).solves == "local"]
    if are_apart and len(local) < len(suitable):
        obstacles |= dict.fromkeys(local, _why_not_local())
    return obstacles


def _obstacle(
    method: type[Algorithm], problem: Problem, environment: Environment, no_second: str
) -> str:
    """Return why a method does not suit, whatever the clients' data; empty if it does."""
    if method.solves == "single":
        return "a baseline: it learns x and y as one model"
    try:
        method().check(problem, environment)
    except ValueError as error:
        return str(error).replace(method.name, "it", 1)
    if method.second_derivatives and no_second:
        return f"it needs second derivatives of the lower loss ({no_second})"
    return ""


def _why_not_local() -> str:
    """Return why methods that average local hypergradients do not suit clients that differ."""
    missed = 0
    seeds = 0
    for comparison in comparisons():
        if comparison.target is None or "apart" not in comparison.conditions:
            continue
        for name, cost in comparison.costs.items():
            if comparison.goal == "rounds" and algorithms.get(name).solves == "local":
                missed += cost.seeds - cost.reached
                seeds += cost.seeds
    return (
        "it averages local hypergradients, and clients differ: such methods missed the target with "
        f"{missed} of {seeds} seeds of our results on such clients"
    )


def _similar(method: str, goal: str, conditions: Collection[str]) -> list[Comparison]:
    """Return the comparisons with a method that are most similar to a problem."""
    found = [each for each in comparisons() if each.goal == goal and method in each.costs]
    return sorted(found, key=lambda each: _differences(each, conditions))[:SHOWN]


def _differences(comparison: Comparison, conditions: Collection[str]) -> int:
    """Return in how many conditions a comparison differs."""
    return len({*conditions} ^ {*comparison.conditions})


@cache
def comparisons() -> tuple[Comparison, ...]:
    """Return the comparisons of our results."""
    text = resources.files("fedbilevel.diagnostics").joinpath("figures.json").read_text("utf-8")
    return tuple(_comparison(row) for row in json.loads(text))


def _comparison(row: Mapping[str, Any]) -> Comparison:
    costs = {method: Cost(*cost) for method, cost in row["costs"].items()}
    return Comparison(**{**row, "costs": costs})


def scores(goal: str, conditions: Collection[str], among: Iterable[Comparison]) -> dict[str, float]:
    """Return the expected costs of methods, in multiples of the lowest.

    Args:
        goal: What is compared, a key of `GOALS`.
        conditions: The conditions of the problem, keys of `CONDITIONS`.
        among: The comparisons to use.

    Returns:
        By method the factor that the least-squares fit gives it.

    Examples:
        >>> both = {"a": Cost(10, 10, 10, 1, 1), "b": Cost(20, 20, 20, 1, 1)}
        >>> scores("rounds", [], [Comparison("here", "p", "rounds", 0.9, (), both)])
        {'a': 1.0, 'b': 2.0}
    """
    used = [each for each in among if each.goal == goal]
    methods = sorted({name for each in used for name in each.costs})
    rows = []
    values = []
    for index, comparison in enumerate(used):
        root_weight = 2.0 ** (-_differences(comparison, conditions) / 2)
        for name, cost in comparison.costs.items():
            row = np.zeros(len(used) + len(methods))
            row[index] = root_weight
            row[len(used) + methods.index(name)] = root_weight
            rows.append(row)
            values.append(root_weight * np.log(cost.mean))
    if not rows:
        return {}
    terms = np.linalg.lstsq(np.stack(rows), np.array(values), rcond=None)[0][len(used) :]
    factors = np.exp(terms - terms.min())
    return {name: round(float(factors[i]), 4) for i, name in enumerate(methods)}


def _short(value: float) -> str:
    """Return a number with three digits, in thousands, millions or more if it is large."""
    for least, unit, name in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / unit:.3g} {name}"
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"
