"""`fb.value` against closed forms, brute force and itself on other runtimes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.diagnostics import value_phases
from fedbilevel.federation.phase import Phase
from fedbilevel.tasks.quadratic import Quadratic
from tests.support.flower import (
    FakeGrid,
    change_reply,
    poll_without_pauses,
    real_federation,
    resolve_config,
)
from tests.support.refusals import refusal

F64 = torch.float64


def task(**options: Any) -> Quadratic:
    return fb.tasks.load("quadratic", **{"clients": 4, "samples": 5, "noise": 0.5} | options)  # type: ignore[return-value]


def test_values_are_the_slopes_of_the_objective_in_the_logarithms_of_the_weights() -> None:
    known = task()
    weights = [0.4, 0.3, 0.2, 0.1]
    result = fb.value(known.problem, known.clients, weights=weights)
    y = known.y_star(known.problem.x, weights)
    for client, v in enumerate(result.values):
        upper = []
        for step in (1e-5, -1e-5):
            moved = list(weights)
            moved[client] *= math.exp(step)
            y_moved = known.y_star(known.problem.x, moved)
            # The weights of the upper level stay.
            shift = y_moved["y"] - y["y"]
            upper.append(upper_loss(known, y["y"] + shift, weights))
        assert v == pytest.approx(-(upper[0] - upper[1]) / 2e-5, rel=1e-5, abs=1e-9)
    assert sum(result.values) == pytest.approx(0, abs=1e-10)
    torch.testing.assert_close(result.y["y"], y["y"])


def upper_loss(known: Quadratic, y: torch.Tensor, weights: list[float]) -> float:
    x = fb.Tree(known.problem.x)
    losses = [known.problem.upper(x, fb.Tree(y=y), c.val, ()) for c in known.clients]
    return float(sum(p * loss for p, loss in zip(weights, losses, strict=True)))


def test_leave_one_out_is_solving_again_without_the_client() -> None:
    known = task()
    result = fb.value(known.problem, known.clients, leave_one_out=True)
    assert result.leave_one_out is not None
    for client, rise in enumerate(result.leave_one_out):
        weights = [1.0] * 4
        weights[client] = 0.0
        y = known.y_star(known.problem.x, weights)["y"]
        expected = upper_loss(known, y, [0.25] * 4) - result.upper_loss
        assert rise == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_rows_of_a_person_in_a_table_are_resampled_together() -> None:
    """Every row three times, as rows of one person: nothing is known that was not known before."""
    rng = torch.Generator().manual_seed(0)
    age = torch.randn(60, generator=rng)
    table = {
        "age": age.numpy(),
        "person": torch.arange(60).numpy(),
        "site": (torch.arange(60) % 3).numpy(),
        "trusted": (torch.arange(60) % 2 == 0).numpy(),
        "ill": (age + torch.randn(60, generator=rng) > 0).numpy(),
    }
    options: dict[str, Any] = {"by": "site", "target": "ill", "validation": "trusted"}
    once = fb.clients(table, **options, features=["age"])
    thrice = {name: column.repeat(3) for name, column in table.items()}
    people = fb.clients(thrice, **options, group="person")
    rows = fb.clients(thrice, **options, features=["age"])
    problem = fb.linear_model(once)
    expected = fb.value(problem, once)
    grouped = fb.value(problem, people)
    assert grouped.names == ("0", "1", "2")
    assert grouped.errors == pytest.approx(expected.errors, rel=1e-4)
    assert fb.value(problem, rows).errors < tuple(0.8 * error for error in expected.errors)


def test_the_chance_that_a_client_helps_is_that_of_the_normal_distribution() -> None:
    result = fb.value(task().problem, task().clients)
    shares = []
    for v, e in zip(result.values, result.errors, strict=True):
        draws = v + e * torch.randn(200_000, generator=torch.Generator().manual_seed(0))
        shares.append(float((draws > 0).double().mean()))
    assert result.chances == pytest.approx(shares, abs=0.005)
    certain = dataclasses.replace(result, values=(1.0, -1.0, 0.0, 2.0), errors=(0.0,) * 4)
    assert certain.chances == [1.0, 0.0, 0.0, 1.0]


def test_groups_given_as_tensors_are_those_of_the_data() -> None:
    task = fb.tasks.load("sites")
    people = [client.val["person"] for client in task.clients]  # type: ignore[call-overload]
    named = fb.value(task.problem, task.clients, groups="person")
    assert fb.value(task.problem, task.clients, groups=people).errors == named.errors


def means(trusted: list[torch.Tensor], people: list[torch.Tensor] | None = None) -> Any:
    """Clients who report means of 0, 1, ..., and trusted numbers: gradients are the residuals."""
    problem = fb.Problem(
        lambda x, y, batch: 0.5 * ((y["m"] - batch["a"]) ** 2).mean() + 0 * x["unused"],
        lambda x, y, batch: 0.5 * ((y["m"] - batch["a"]) ** 2).mean() + 0 * x["unused"],
        x={"unused": torch.zeros((), dtype=F64)},
        y={"m": torch.zeros((), dtype=F64)},
    )
    clients = []
    for client, numbers in enumerate(trusted):
        val = {"a": numbers}
        if people is not None:
            val["person"] = people[client]
        clients.append(
            fb.ClientData(train={"a": torch.full((1,), float(client), dtype=F64)}, val=val)
        )
    return problem, clients


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_errors_are_those_of_the_mean_of_the_trusted_people() -> None:
    """The variance of a Bayesian bootstrap of a mean: that of the people over m + 1."""
    trusted = [numbers(40, 0), 3 * numbers(30, 1)]
    problem, clients = means(trusted)
    result = fb.value(problem, clients, resamples=4000)
    variance = sum(0.25 * float(t.var(correction=0)) / (len(t) + 1) for t in trusted)
    for client, error in enumerate(result.errors):
        slope = 0.5 * abs(0.5 - client)  # p_i <grad g_i, 1>
        assert error == pytest.approx(slope * variance**0.5, rel=0.05)
    quantile = 2.2414  # of the normal distribution at 1 - 0.05 / 4
    assert result.high[0] - result.values[0] == pytest.approx(quantile * result.errors[0], rel=1e-4)


def test_records_of_a_person_are_resampled_together() -> None:
    """Every record twice, of one person each, tells no more than once."""
    trusted = [numbers(8, 0), numbers(9, 1)]
    people = [torch.arange(len(t)) for t in trusted]
    once = fb.value(*means(trusted, people), groups="person")
    twice = fb.value(
        *means([t.repeat(2) for t in trusted], [p.repeat(2) for p in people]), groups="person"
    )
    apart = fb.value(*means([t.repeat(2) for t in trusted]))
    assert twice.errors == pytest.approx(once.errors, rel=1e-10)
    assert apart.errors[0] < 0.8 * once.errors[0]
    problem, clients = means([t.repeat(2) for t in trusted], [p.repeat(2) for p in people])
    stack = fb.simulated_federation(problem, clients)
    stacked = fb.value(problem, clients, groups="person", federation=stack)
    assert stacked.errors == pytest.approx(twice.errors, rel=1e-10)


def test_values_of_samples_sum_to_those_of_their_clients() -> None:
    known = fb.tasks.load("regularization", clients=3)
    result = fb.value(known.problem, known.clients, samples=True, resamples=20)
    assert result.samples is not None
    for v, each, client in zip(result.values, result.samples, known.clients, strict=True):
        assert len(each) == client.size("train")
        assert float(each.sum()) == pytest.approx(v, rel=1e-3, abs=1e-6)


def test_a_stack_and_nodes_give_the_numbers_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_without_pauses(monkeypatch)
    table = {
        "task": {"name": "quadratic", "clients": 4, "samples": 5, "noise": 0.5},
        "algorithm": {"name": "simfbo"},
    }
    known = task()
    truth = fb.value(known.problem, known.clients)
    stack = fb.simulated_federation(known.problem, known.clients)
    nodes, _ = real_federation(FakeGrid(4), resolve_config(table))
    for federation in (stack, nodes):
        other = fb.value(known.problem, known.clients, federation=federation)
        assert other.values == pytest.approx(truth.values, rel=1e-8)
        assert other.errors == pytest.approx(truth.errors, rel=1e-8)
        assert other.rounds == truth.rounds


def test_the_server_needs_only_sums() -> None:
    phases = [each for each in vars(value_phases).values() if isinstance(each, type)]
    ours = [p for p in phases if issubclass(p, Phase) and p is not Phase]
    assert len(ours) == 4
    assert all(phase.summed for phase in ours)


def test_a_missing_reply_ends_it() -> None:
    known = task()
    faults = fb.delays.Faults(drop=0.9)
    environment = fb.Environment(faults=faults, min_replies=1)
    federation = fb.simulated_federation(known.problem, known.clients, environment)
    with pytest.raises((RuntimeError, ValueError), match=r"clients replied|replies were accepted"):
        fb.value(known.problem, known.clients, federation=federation)


def test_a_client_cannot_change_the_worth_of_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def praise_client_2(reply: dict[str, Any]) -> dict[str, Any]:
        values = reply["values"]
        if "worth" in values:
            rows = values["worth"]["rows"].clone()
            rows[2] += 1.0
            values = {"worth": fb.Tree(rows=rows)}
        return {**reply, "values": values}

    poll_without_pauses(monkeypatch)
    grid = FakeGrid(4)
    grid.behaviours[101] = change_reply(praise_client_2)
    known = task()
    table = {"task": {"name": "quadratic", "clients": 4, "samples": 5, "noise": 0.5}}
    nodes, _ = real_federation(grid, resolve_config({**table, "algorithm": {"name": "simfbo"}}))
    with pytest.raises(RuntimeError, match="3 of 4 clients replied"):
        fb.value(known.problem, known.clients, federation=nodes)
    assert "refused, client 1: it holds the worth of other clients" in caplog.text


def test_a_lower_level_without_a_minimum_is_refused() -> None:
    known = task()
    flat = dataclasses.replace(known.problem, lower=lambda x, y, batch: -(y["y"] ** 2).sum())
    assert "not positive definite" in refusal(fb.value, flat, known.clients)


def test_wrong_arguments_are_refused_in_one_sentence() -> None:
    known = task()
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"resamples": 1}, "resamples"),
        ({"level": 1.5}, "level is 1.5"),
        ({"names": ["a"]}, "names has 1 entries; there are 4 clients"),
        ({"groups": "person"}, "groups is 'person'"),
    ]
    for options, sentence in arguments:
        assert sentence in refusal(fb.value, known.problem, known.clients, **options)
    private = dataclasses.replace(known.problem, lower_level="private")
    assert "lower_level='shared'" in refusal(fb.value, private, known.clients)
    large = dataclasses.replace(known.problem, y={"y": torch.zeros(3000, dtype=F64)})
    assert "y has 3000 numbers" in refusal(fb.value, large, known.clients)
    with pytest.raises(TypeError, match=r"problem is list; .* fb.linear_model\(clients\)"):
        fb.value(known.clients)  # type: ignore[arg-type]
    federation = fb.simulated_federation(known.problem, known.clients)
    sentence = refusal(fb.value, known.problem, known.clients, samples=True, federation=federation)
    assert "stay with their clients" in sentence


def test_the_table_begins_with_the_most_harmful() -> None:
    problem, clients = means([numbers(50, 0), numbers(50, 1), numbers(50, 2)])
    result = fb.value(problem, clients, names=["A", "B", "C"], leave_one_out=True)
    lines = str(result).splitlines()
    assert [line.split()[0] for line in lines] == ["client", "C", "B", "A", "loss"]
    assert float(lines[-1].split()[-1]) == pytest.approx(result.upper_loss, rel=1e-3)
    assert "harms" in lines[1]
    assert "helps" in lines[3]
    html = result.to_html()
    assert html.index("harms") < html.index("helps")
    assert html.count("<th ") == 5 + 3  # headings, with that of leave-one-out, and names
    assert (result.harmful, result.helpful) == ([2], [0])


def test_a_notebook_shows_a_picture_and_a_table_with_the_most_harmful_client_first() -> None:
    known = task()
    names = ["a < b", "second", "third", "fourth"]
    result = fb.value(known.problem, known.clients, names=names)
    html = result._repr_html_()
    assert "data:image/png" in html
    order = sorted(range(4), key=result.values.__getitem__)
    places = [html.index(names[client].replace("<", "&lt;")) for client in order]
    assert places == sorted(places)
