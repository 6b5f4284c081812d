"""The figures behind `fedbilevel advise`, from the curves, and how good its first choices are.

    python docs/results/advice.py

prints, for every comparison of these results, which method `advise` would have chosen without the
comparisons of the same problem, and whether the choice is within the spread of the best. tables.py
writes the figures to the package, as `diagnostics/figures.json`, and the tables of
docs/howto/choose.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from curve_files import HERE, Run, costs_to, load

from fedbilevel import algorithms
from fedbilevel.diagnostics.methods import GOALS, Comparison, Cost, default_goal, scores

PAGE = HERE.parent / "howto" / "choose.md"
FIGURES = HERE.parents[1] / "src" / "fedbilevel" / "diagnostics" / "figures.json"
TARGETS = (0.97, 0.95, 0.93, 0.9, 0.88, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
COSTS = {"rounds": "round", "bytes": "bytes", "gradients": "gradients", "seconds": "virtual_s"}
BARRIER = ("afbo", "simfbo", "fednest", "sdbo", "adbo")
DOUBLE_LOOP = ("aggitd", "fednest", "lfednest")
SINGLE_LOOP = ("la-asfbo", "asfbo", "shrofbo", "simfbo", "fednest", "lfednest")
BOTH = ("unequal steps", "apart")
SUBMODELS = ("rabo", "rafbo", "static", "oap", "fedrolex", "fiarse")


GOALS_OF_CURVES = ("rounds", "bytes", "gradients")


class Field(NamedTuple):
    """Curves of several methods on one problem under the same conditions, tuned alike.

    Args:
        problem: The problem; when `advise` is judged, all fields with the same one are left out.
        curves: "ID/label" with the method as {}.
        methods: The methods.
        conditions: Those of `fedbilevel.diagnostics.methods.CONDITIONS` that hold.
        goals: The goals in which the methods are compared.
    """

    problem: str
    curves: str
    methods: Sequence[str]
    conditions: Sequence[str]
    goals: Sequence[str] = GOALS_OF_CURVES


DELAYED = (*GOALS_OF_CURVES, "seconds")
FIELDS = [
    Field("hyper-cleaning", "afbo-fig1/{} iid", BARRIER, ["delays"], DELAYED),
    Field("hyper-cleaning", "afbo-fig1/{} shards", BARRIER, ["delays", "apart"], DELAYED),
    Field("hyper-cleaning", "afbo-pareto/{} iid", BARRIER, ["delays"], DELAYED),
    Field("hyper-cleaning", "afbo-pareto/{} shards", BARRIER, ["delays", "apart"], DELAYED),
    Field("regularization", "afbo-fig3/{} plain", BARRIER, ["delays"], DELAYED),
    Field("regularization", "afbo-fig3/{} slow", BARRIER, ["delays"], DELAYED),
    Field("regularization", "afbo-pareto-covertype/{} pareto", BARRIER, ["delays"], DELAYED),
    Field("asfbo-fig1", "asfbo-fig1/{} iid tuned", SINGLE_LOOP, ["unequal steps"]),
    Field("asfbo-fig1", "asfbo-fig1/{} shards tuned", SINGLE_LOOP, BOTH),
    Field("simfbo-fig2", "simfbo-fig2/{} iid tuned", ("unifbo", "simfbo", *DOUBLE_LOOP), []),
    Field(
        "simfbo-fig2", "simfbo-fig2/{} shards tuned", ("unifbo", "simfbo", *DOUBLE_LOOP), ["apart"]
    ),
    Field("shrofbo-fig4", "shrofbo-fig4/{}", ("shrofbo", "simfbo", *DOUBLE_LOOP), BOTH),
    Field("shrofbo-fig4", "shrofbo-fig4/{} tuned", ("shrofbo", "simfbo", "unifbo"), BOTH),
    Field("aggitd-table2", "aggitd-table2/{} iid tau=1", ("aggitd", "fednest"), []),
    Field("aggitd-table2", "aggitd-table2/{} iid tau=5", ("aggitd", "fednest"), []),
    Field("aggitd-table2", "aggitd-table2/{} shards tau=1", ("aggitd", "fednest"), ["apart"]),
    Field("aggitd-table2", "aggitd-table2/{} shards tau=5", ("aggitd", "fednest"), ["apart"]),
    Field("aggitd-fig3", "aggitd-fig3/{} C=0.2", DOUBLE_LOOP, ["apart"]),
    Field("aggitd-fig3", "aggitd-fig3/{} C=0.5", DOUBLE_LOOP, ["apart"]),
    Field("rabo-fig5", "rabo-fig5/{}", SUBMODELS, ["capacity"], ("error",)),
    Field("few-shot", "rabo-table2/{} conv4 1", SUBMODELS, ["capacity", "private"], ("error",)),
    Field("few-shot", "rabo-table2/{} conv4 5", SUBMODELS, ["capacity", "private"], ("error",)),
    Field("few-shot", "rabo-table2/{} resnet12 1", SUBMODELS, ["capacity", "private"], ("error",)),
    Field("few-shot", "rabo-table2/{} resnet12 5", SUBMODELS, ["capacity", "private"], ("error",)),
]


def comparisons() -> list[Comparison]:
    """Return what the fields say about each goal, without those that no two methods reach."""
    found = []
    for field in FIELDS:
        name, _, label = field.curves.partition("/")
        runs = {method: load(name, label.format(method)) for method in field.methods}
        runs = {method: seeds for method, seeds in runs.items() if seeds}
        for goal in field.goals:
            target, costs = _costs(runs, goal)
            if len(costs) > 1:
                where = " ".join([name, *label.replace("{}", "").split()])
                conditions = tuple(sorted(field.conditions))
                found.append(Comparison(where, field.problem, goal, target, conditions, costs))
    return found


def _costs(runs: Mapping[str, list[Run]], goal: str) -> tuple[float | None, dict[str, Cost]]:
    """Return a target that at least two methods reach with every seed, and what it costs.

    A method that misses it with some seed is counted with twice the longest run of all methods.
    """
    if goal == "error":
        costs = {}
        for method, seeds in runs.items():
            errors = [1 - float(run["test_accuracy"][-1]) for run in seeds]
            cost = _cost(errors, len(errors))
            width = float(seeds[0]["ci95"][-1])
            if len(seeds) == 1 and width > 0:  # over episodes, in place of a spread over seeds
                cost = cost._replace(
                    low=_rounded(errors[0] - width), high=_rounded(errors[0] + width)
                )
            costs[method] = cost
        return None, costs
    column = COSTS[goal]
    longest = max(float(run[column][-1]) for seeds in runs.values() for run in seeds)
    for target in TARGETS:
        reached = {method: costs_to(seeds, target, column) for method, seeds in runs.items()}
        full = [method for method, seeds in runs.items() if len(reached[method]) == len(seeds)]
        if len(full) < 2:
            continue
        costs = {}
        for method, seeds in runs.items():
            values = reached[method]
            if method not in full:
                values = [2 * longest] * len(seeds)
            costs[method] = _cost(values, len(reached[method]))
        return target, costs
    return None, {}


def _cost(values: Sequence[float], reached: int) -> Cost:
    mean = _rounded(float(np.mean(values)))
    low = _rounded(min(values))
    return Cost(mean, low, _rounded(max(values)), seeds=len(values), reached=reached)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def figures() -> str:
    """Return the file with the figures, as it should be."""
    rows = []
    for comparison in comparisons():
        costs = {method: list(cost) for method, cost in comparison.costs.items()}
        rows.append(json.dumps({**comparison._asdict(), "costs": costs}))
    return "[\n" + ",\n".join(rows) + "\n]\n"


class Judged(NamedTuple):
    """The first choice of `advise` in a comparison, made without those of the same problem."""

    comparison: Comparison
    choice: str
    is_within: bool


def judged() -> list[Judged]:
    """Judge `advise` on every comparison."""
    found = comparisons()
    results = []
    for comparison in found:
        others = [other for other in found if other.problem != comparison.problem]
        multiples = scores(comparison.goal, comparison.conditions, others)
        costs = comparison.costs
        allowed = [name for name in costs if name in multiples and _suits(name, comparison)]
        if not allowed:
            continue  # the results without this problem know none of its methods
        choice = min(allowed, key=multiples.__getitem__)
        highest = costs[comparison.best].high
        is_within = costs[choice].is_known and costs[choice].low <= highest
        results.append(Judged(comparison, choice, is_within))
    return results


def _suits(name: str, comparison: Comparison) -> bool:
    """Whether `advise` lets a method take part under the conditions of a comparison."""
    method = algorithms.get(name)
    return method.solves == "global" or (
        method.solves == "local" and "apart" not in comparison.conditions
    )


def is_primary(comparison: Comparison) -> bool:
    """Whether a comparison is about the goal that `advise` chooses under its conditions."""
    return comparison.goal == default_goal(comparison.conditions)


def judged_table() -> str:
    """Return the table of all comparisons about the goal that `advise` chooses by itself."""
    rows = []
    for each in judged():
        comparison = each.comparison
        if not is_primary(comparison):
            continue
        target = f" to {comparison.target:.0%}" if comparison.target else ""
        verdict = "yes" if each.is_within else "**no**"
        cells = (
            comparison.where,
            GOALS[comparison.goal] + target,
            f"{each.choice}: {comparison.costs[each.choice]}",
            f"{comparison.best}: {comparison.costs[comparison.best]}",
            verdict,
        )
        rows.append(cells)
    return _lines(("comparison", "goal", "first choice", "best", "within its spread"), rows)


def summary() -> str:
    """Return how many first choices are within the spread of the best."""
    results = judged()
    primary = [each for each in results if is_primary(each.comparison)]
    others = [each for each in results if not is_primary(each.comparison)]
    texts = []
    for found in (primary, others):
        texts.append(f"{sum(each.is_within for each in found)} of {len(found)}")
    return (
        f"For the goal that `advise` chooses by itself, {texts[0]} first choices are within the "
        f"spread of the best; for the other goals on the same curves, {texts[1]}."
    )


def choices() -> str:
    """Return the table of the methods in order, for every goal and conditions that were run."""
    found = comparisons()
    situations = dict.fromkeys((each.goal, tuple(each.conditions)) for each in found)
    rows = []
    for goal, conditions in situations:
        names = {
            name
            for each in found
            if each.goal == goal and {*each.conditions} == {*conditions}
            for name in each.costs
            if _suits(name, each)
        }
        multiples = scores(goal, conditions, found)
        order = sorted(names, key=lambda name: (multiples[name], name))[:4]
        lowest = multiples[order[0]]
        listed = [f"{name} ({multiples[name] / lowest:.2f})" for name in order]
        rows.append((", ".join(conditions) or "none", GOALS[goal], ", ".join(listed)))
    rows.sort()
    return _lines(("conditions", "what is dear", "methods, with expected cost"), rows)


def _lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def blocks() -> dict[str, str]:
    """Return the generated parts of the page, by name."""
    return {
        "advice-choices": choices(),
        "advice-judged": judged_table(),
        "advice-summary": summary(),
    }


if __name__ == "__main__":
    print(judged_table())
    print(summary())
