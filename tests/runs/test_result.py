"""A result as people look at it: in a terminal, in a notebook, as a table, as a picture."""

from __future__ import annotations

import pytest
import torch

import fedbilevel as fb


@pytest.fixture(scope="module")
def result() -> fb.Result:
    """The result of a run of a network with many tensors and 40 evaluations."""
    net = torch.nn.Sequential(*[torch.nn.Linear(30, 30) for _ in range(6)])
    apply, x, y = fb.split_module(net, lower="5.")

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return ((apply(x, y, batch[0]) - 1) ** 2).mean()

    def evaluate(x: fb.Tree, y: fb.Tree) -> dict[str, float]:
        return {"<mae>": 0.5, "test_accuracy": 0.9}

    data = (torch.ones(4, 30),)
    problem = fb.Problem(loss, loss, x, y)
    return fb.solve(problem, [fb.ClientData(data, data)], rounds=39, evaluate=evaluate)


def test_its_repr_fits_a_screen(result: fb.Result) -> None:
    shown = repr(result)
    assert len(shown) < 400
    assert shown.startswith("Result(status=completed, rounds=39, test_accuracy=0.9, upper_loss=")
    assert (
        "x={0.weight: (30, 30), 0.bias: (30,), 1.weight: (30, 30), 1.bias: (30,), 6 more}" in shown
    )


def test_it_becomes_a_table_of_pandas(result: fb.Result) -> None:
    table = result.to_pandas()
    assert list(table.index) == list(range(40))
    assert table["upper_loss"].iloc[-1] == result.history[-1]["upper_loss"]
    assert (table["<mae>"] == 0.5).all()


def test_it_draws_the_metrics_asked_for(result: fb.Result) -> None:
    labels = [panel.get_ylabel() for panel in result.plot().axes]
    assert labels == ["test accuracy", "upper loss", "lower loss"]
    (panel,) = result.plot("upper_loss", against="bytes_up").axes
    (line,) = panel.lines
    assert list(line.get_ydata()) == [metrics["upper_loss"] for metrics in result.history]
    assert list(line.get_xdata()) == [metrics["bytes_up"] for metrics in result.history]
    with pytest.raises(ValueError, match="'speed' is not in the history; there are <mae>, bytes_d"):
        result.plot("speed")


def test_a_notebook_shows_a_picture_and_a_table(result: fb.Result) -> None:
    html = result._repr_html_()
    assert html.count("data:image/png;base64,") == 1
    assert "<th" in html
    assert "completed" in html
    assert result.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_notebook_shows_problems_conditions_and_checks_as_tables() -> None:
    task = fb.tasks.load("quadratic", clients=4)
    assert "{x: (5,)}" in task.problem._repr_html_()
    assert repr(task.problem) == "Problem(x: {x: (5,)}; y: {y: (4,)}; lower level: shared)"
    conditions = fb.Environment(participation=2, delay=fb.delays.Constant(1.0))._repr_html_()
    assert "delay" in conditions
    assert "faults" not in conditions
    report = fb.check(task.problem, task.clients)
    html = report._repr_html_()
    assert "recommended" in html
    assert "y*" in html
    assert "<script" not in html
