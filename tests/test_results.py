"""The results page: its tables are those of the curves, and members are declared for all."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

RESULTS = Path(__file__).parent.parent / "docs" / "results"
sys.path.insert(0, str(RESULTS))  # scripts beside the page, which import each other

import advice  # noqa: E402
import cells  # noqa: E402
import curve_files  # noqa: E402
import figures  # noqa: E402
import members  # noqa: E402
import papers  # noqa: E402
import tables  # noqa: E402
import verdicts  # noqa: E402


def test_every_generated_number_of_the_pages_is_that_of_the_curves() -> None:
    for path, text in tables.pages().items():
        assert path.read_text("utf-8") == text, f"{path.name}: run python docs/results/tables.py"


def test_the_table_of_personal_heads_is_that_of_the_measured_runs() -> None:
    script = runpy.run_path(str(RESULTS / "personal-heads.py"))
    runs = script["read"](RESULTS / "personal-heads.csv")
    assert script["table"](runs) in (RESULTS.parent / "personal.md").read_text("utf-8")
    gained = script["gains"](runs, "simfbo")
    points = f"{min(gained):+.1f} to {max(gained):+.1f} points for the worst tenth"
    assert points in (RESULTS.parent / "howto" / "choose.md").read_text("utf-8")


def test_what_choosing_a_method_says_in_sentences_is_in_the_curves() -> None:
    def of(cell: cells.Cell, *curves: str) -> str:
        return cell(cells.Row((), curves))

    rounds = [of(cells.to(0.9), f"simfbo-fig2/{m} shards tuned") for m in ("unifbo", "simfbo")]
    growth = cells.growth(0.67, "virtual_s")
    slower = [of(growth, f"afbo-fig3/{m} plain", f"afbo-fig3/{m} slow") for m in ("afbo", "simfbo")]
    full = "rabo-fig4/rabo-full shots=5"
    share = of(cells.share("iteration", "flops", full), "rabo-fig4/rabo shots=5")
    text = (RESULTS.parent / "howto" / "choose.md").read_text("utf-8")
    for sentence in (
        f"after {rounds[0]} rounds with one local step (tuned simfbo: {rounds[1]})",
        f"afbo's time to a target grows by {slower[0]}, simfbo's by {slower[1]}",
        f"{share} of the operations",
    ):
        assert sentence in text


def test_a_number_that_was_changed_by_hand_is_computed_again() -> None:
    text = (RESULTS / "README.md").read_text("utf-8")
    start = text.index("<!-- table aggitd-cnn -->")
    changed = text[:start] + text[start:].replace("aggitd | 97.6% | 9", "aggitd | 97.6% | 8", 1)
    assert changed != text
    assert tables.rendered(changed, tables.blocks()) == text


def test_every_figure_is_on_the_page_and_every_verdict_with_runs_has_one() -> None:
    shown = set(re.findall(r"\]\(([\w-]+)\.png\)", (RESULTS / "README.md").read_text("utf-8")))
    assert figures.FIGURES.keys() <= shown
    assert {verdict.id for verdict in papers.VERDICTS} <= figures.FIGURES.keys()
    for name in shown:
        assert (RESULTS / f"{name}.png").exists()


def test_no_two_curves_of_a_figure_look_the_same() -> None:
    for name, panels in figures.FIGURES.items():
        names = [n for p in panels if isinstance(p, figures.Panel) for n in p.curves]
        places = figures.positions(dict.fromkeys(names))
        assert len({*places.values()}) == len(places), name
    assert figures.positions(["new", "simfbo", "aggitd"]) == {"new": 2, "simfbo": 1, "aggitd": 0}


def test_an_axis_has_the_largest_unit_that_its_values_reach() -> None:
    assert figures.unit_of("flops", 3e9) == (1e9, "operations, GFLOP")
    assert figures.unit_of("flops", 1e12) == (1e12, "operations, TFLOP")
    assert figures.unit_of("bytes", 10) == (1e6, "bytes sent, MB")
    assert figures.unit_of("round", 10) == (1.0, "communication rounds")


def test_a_figure_ends_where_the_first_of_its_seeds_ends() -> None:
    rounds = np.arange(0.0, 50.0, 10.0)
    runs = [
        curve_files.Run(0, {"round": rounds, "test_accuracy": rounds / 100}, False),
        curve_files.Run(1, {"round": rounds[:3], "test_accuracy": rounds[:3] / 50}, True),
    ]
    points = figures.mean_and_range(runs, figures.Panel("", {}))
    assert points is not None
    np.testing.assert_allclose(points[0], [0, 10, 20])
    np.testing.assert_allclose(points[1:], [[0, 0.15, 0.3], [0, 0.1, 0.2], [0, 0.2, 0.4]])


def test_readers_do_not_meet_runs_that_are_missing_inside_sentences() -> None:
    for page in (RESULTS / "README.md", RESULTS / "verdicts.md"):
        text = page.read_text("utf-8")
        assert not re.search(r"not run yet|was not run|were not run", text, re.IGNORECASE), page


def test_the_page_has_every_table_once() -> None:
    text = (RESULTS / "README.md").read_text("utf-8")
    assert sorted(re.findall(r"<!-- table (\S+) -->", text)) == sorted(tables.blocks())


def test_the_curves_take_at_most_20_megabytes() -> None:
    files = [*RESULTS.glob("*.csv"), *(RESULTS / "curves").glob("*")]
    assert sum(file.stat().st_size for file in files) <= 20e6


NEVER_RUN = {f"rabo-table2/{method} resnet12 5" for method in ("fedmbo", "protonet")}


def used_curves() -> set[str]:
    rows = [row for table in papers.TABLES.values() for row in table.rows]
    curves = {curve for row in rows for curve in row.curves if curve}
    for verdict in papers.VERDICTS:
        curves |= {curve for _, labels in verdict.values for curve in labels}
    return curves


def test_the_battery_runs_all_curves_that_the_tables_need_and_no_others() -> None:
    declared = {f"{name}/{m.label}" for name, group in members.BATTERY.items() for m in group}
    used = used_curves()
    assert declared - used == set()
    for curve in used - declared:  # of older runs, whose files are still there
        name, label = curve.split("/", 1)
        assert curve_files.load(name, label) or curve in NEVER_RUN


def run_of(accuracies: list[float], seed: int = 0, diverged: bool = False) -> curve_files.Run:
    rounds = 10.0 * np.arange(len(accuracies))
    columns = {"round": rounds, "test_accuracy": np.array(accuracies)}
    return curve_files.Run(seed, columns, diverged)


def shown(cell: cells.Cell, runs: list[curve_files.Run], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cells, "load", lambda name, label: runs)
    return cell(cells.Row((), ["experiment/method"], reported=20))


def test_the_first_evaluation_at_or_above_an_accuracy_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = run_of([0.1, 0.8999, 9_000 / 10_000, 0.95])
    late = run_of([0.1, 0.2, 0.3, 0.2, 0.91])
    never = run_of([0.1, 0.2])
    assert shown(cells.to(0.9), [exact], monkeypatch) == "20"
    assert shown(cells.to(0.9), [exact, late], monkeypatch) == "30 ± 14"
    assert shown(cells.to(0.9), [exact, never], monkeypatch) == "20 (1/2)"
    assert shown(cells.to(0.9), [never], monkeypatch) == "never"
    assert shown(cells.to_of_seeds(0.9), [exact, never], monkeypatch) == "20, never"
    assert shown(cells.against_reported(0.9), [exact, late], monkeypatch) == "1.50"
    assert shown(cells.to(0.9), [], monkeypatch) == cells.MISSING


def test_diverged_seeds_are_left_out_of_means_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    good = run_of([0.1, 0.9])
    bad = run_of([0.1, 0.95, 0.1], diverged=True)
    assert shown(cells.final(), [good, bad], monkeypatch) == "90.00% (1/2 diverged)"
    assert shown(cells.final(), [bad, bad], monkeypatch) == "diverged at 20 to 20 (2/2)"
    assert shown(cells.best(), [good, bad], monkeypatch) == "92.50 ± 3.54%"


def test_a_table_leaves_out_what_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"a": [run_of([0.1, 0.95])], "b": [run_of([0.1, 0.2])]}
    monkeypatch.setattr(cells, "load", lambda name, label: runs.get(label, []))
    monkeypatch.setattr(cells, "file_of", lambda name, label: None)
    rows = [cells.Row((label,), [f"none/{label}", "none/c"]) for label in ("a", "b", "d")]
    columns = {"rounds": cells.to(0.9), "of c": cells.final(curve=1), "end": cells.final()}
    table = cells.Table(["method"], rows, columns, "Three methods:")
    head = "Three methods:\n\n| method | rounds | end |\n| --- | --- | --- |\n"
    assert str(table) == f"{head}| a | 10 | 95.00% |\n| b | never | 20.00% |"
    assert str(cells.Table(["method"], rows[2:], columns, "Three methods:")) == ""
    both = cells.Table(["method"], rows, {"end": cells.final(), "of c": cells.growth(0.9, "round")})
    assert "of c" not in str(both)


def test_a_verdict_without_its_runs_is_not_judged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdicts.Verdict(
        "a", "Fig. 1", "A is first", "reproduced", "{}", verdicts.pairs(cells.final(), "a/b")
    )
    monkeypatch.setattr(cells, "load", lambda name, label: [run_of([0.1, 0.9])])
    assert (verdict.shown(), verdict.measured()) == ("reproduced", "90.00%")
    monkeypatch.setitem(members.BATTERY, "a", [members.Member("b", "digits", "simfbo")])
    assert verdict.measured() == "90.00% (fewer seeds so far: b (1 of 3))"
    monkeypatch.setattr(cells, "load", lambda name, label: [])
    assert verdict.shown() == "not judged yet"
    found = verdicts.blocks([verdict], "### a: of a test\n")
    assert found["not-judged"] == "- Fig. 1: A is first (a)."
    assert "A is first" not in found["verdicts"]


def test_first_choices_of_advise_are_within_the_spread_of_the_best_in_four_of_five() -> None:
    primary = [each for each in advice.judged() if advice.is_primary(each.comparison)]
    assert len(primary) >= 10
    assert sum(each.is_within for each in primary) >= 0.8 * len(primary)


def test_a_choice_is_judged_without_the_results_of_its_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(where: str, problem: str, **costs: float) -> advice.Comparison:
        exact = {name: advice.Cost(cost, cost, cost, 1, 1) for name, cost in costs.items()}
        return advice.Comparison(where, problem, "rounds", 0.9, (), exact)

    results = [
        found("first", "p", simfbo=10, fednest=20),
        found("second", "p", simfbo=10, fednest=20),
        found("third", "q", simfbo=30, fednest=20),
    ]
    monkeypatch.setattr(advice, "comparisons", lambda: results)
    choices = {each.comparison.where: (each.choice, each.is_within) for each in advice.judged()}
    assert choices == {
        "first": ("fednest", False),
        "second": ("fednest", False),
        "third": ("simfbo", False),
    }
