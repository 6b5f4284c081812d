"""`fedbilevel value` and `fedbilevel demo`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel.diagnostics.value import Value
from tests.support.tool import invoke


def output(*arguments: object) -> str:
    """What the tool prints; it must succeed."""
    outcome = invoke(*arguments)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


def error(*arguments: object) -> str:
    """The sentence with which the tool refuses; it must."""
    outcome = invoke(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    return outcome.err


def test_the_table_is_that_of_python(tmp_path: Path) -> None:
    printed = output("value", "sites", "--set", "task.trusted=0.15", "--figure", tmp_path / "v.svg")
    task = fb.tasks.load("sites", trusted=0.15)
    expected = fb.value(
        task.problem,
        task.clients,
        weights="samples",
        groups="person",
        names=[f"site {i + 1}" for i in range(6)],
    )
    assert printed == f"{expected}\n"
    assert "<svg" in (tmp_path / "v.svg").read_text()


def test_json_reads_back(tmp_path: Path) -> None:
    page = tmp_path / "v.html"
    printed = output(
        "value", "digits", "--task", "quadratic", "--json", "--leave-one-out", "--out", page
    )
    result = Value.from_dict(json.loads(printed))
    assert result.names[0] == "client 0"
    assert result.leave_one_out is not None
    assert len(result.values) == len(result.high) == len(result.leave_one_out)
    assert page.read_text().count("client 0") >= 1


def test_wrong_options_are_refused_before_anything_runs(tmp_path: Path) -> None:
    assert "expected .pdf, .png or .svg" in error("value", "sites", "--figure", tmp_path / "v.gif")
    assert "federation is 'ray'" in error("value", "sites", "--federation", "ray")
    assert "groups is 'nobody'" in error("value", "sites", "--groups", "nobody")
    table = tmp_path / "clinics.csv"
    table.write_text("clinic,age\nBonn,60\n")
    assert 'an experiment is a TOML file that names it: task = { name = "table"' in error(
        "value", table
    )


def test_nodes_give_the_values_of_the_simulation() -> None:
    """Real processes: a SuperLink, a server and three nodes."""
    settings = ["--set", "task.clients=3", "--set", "environment.participation=1.0"]
    options = ["value", "digits", "--task", "quadratic", *settings, "--json"]
    simulated = Value.from_dict(json.loads(output(*options)))
    real = Value.from_dict(json.loads(output(*options, "--federation", "flower")))
    assert real.values == pytest.approx(simulated.values, rel=1e-5)
    assert real.errors == pytest.approx(simulated.errors, rel=1e-5)


def test_nodes_are_not_sent_the_path_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "clinics.csv"
    table.write_text("age,clinic,ill\n" + "".join(f"{i},{i % 2},{i > 9}\n" for i in range(20)))
    toml = tmp_path / "clinics.toml"
    toml.write_text(f'task = {{ name = "table", path = "{table}", by = "clinic", target = "ill" }}')
    for command in ("value", "run"):
        refusal = error(command, toml, "--federation", "flower")
        assert "task.path is a path, which nodes do not open" in refusal


def test_the_demo_tells_the_truth_at_the_end(tmp_path: Path) -> None:
    printed = output("demo", "--out", tmp_path)
    task = fb.tasks.load("sites")
    for site in task.bad:
        assert f"site {site + 1}" in printed.split("The truth:")[1].split("\n")[0]
    assert (tmp_path / "sites.png").stat().st_size > 10_000
    page = (tmp_path / "sites.html").read_text()
    assert page.count("<svg ") == page.count("<figure>") == 2  # which a phone stacks
    assert page.count("harms</td>") == 2
    for name in ("FedAvg, all sites", "trusted samples alone", "learnt weights", "FedAvg, clean"):
        assert name in printed
