"""The problem of a linear model: its optimum is that of scikit-learn, for classes and numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import fedbilevel as fb


def table(rows: int = 240) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    age, dose = rng.normal(60, 10, rows), rng.normal(size=rows)
    score = (age - 60) / 10 - dose
    return {
        "age": age,
        "dose": dose,
        "site": np.arange(rows) % 3,
        "ill": score + rng.logistic(size=rows) > 0,
        "stay": 5 + 2 * score + rng.normal(size=rows),
        "stage": np.digitize(score + rng.normal(size=rows), [-1, 1]),
    }


def fitted(target: str) -> tuple[fb.Tree, np.ndarray, np.ndarray]:
    """y*(x) at the start, and all training rows."""
    sites = fb.clients(table(), by="site", target=target, features=["age", "dose"])
    problem = fb.linear_model(sites)
    y = fb.solve_lower(problem, sites, problem.start[0], weights="samples")
    inputs = torch.cat([client.train[0] for client in sites]).numpy()  # type: ignore[index]
    targets = torch.cat([client.train[1] for client in sites]).numpy()  # type: ignore[index]
    return y, inputs, targets


@pytest.mark.parametrize("target", ["ill", "stage"])
def test_classes_are_fitted_by_a_logistic_regression(target: str) -> None:
    y, inputs, targets = fitted(target)
    model = LogisticRegression(C=1 / (0.01 * len(targets)), tol=1e-8).fit(inputs, targets)
    odds = y["weight"] - y["weight"].mean(1, keepdim=True)
    expected = model.coef_.T
    if target == "ill":  # one column for the difference of two: its penalty counts half
        odds = y["weight"][:, 1:] - y["weight"][:, :1]
        half = LogisticRegression(C=2 / (0.01 * len(targets)), tol=1e-8).fit(inputs, targets)
        expected = half.coef_.T
    assert odds.numpy() == pytest.approx(expected, abs=2e-3)


def test_numbers_are_fitted_by_a_ridge_regression() -> None:
    y, inputs, targets = fitted("stay")
    model = Ridge(alpha=0.01 * len(targets)).fit(inputs, targets)
    assert y["weight"][:, 0].numpy() == pytest.approx(model.coef_, abs=2e-3)
    assert float(y["intercept"]) == pytest.approx(float(model.intercept_), abs=2e-3)


def test_whole_numbers_that_are_hardly_classes_are_refused() -> None:
    days = {"age": np.arange(120.0), "days": np.arange(120) % 60}
    with pytest.raises(
        ValueError, match="the target has 60 classes, because its numbers are whole"
    ):
        fb.linear_model(fb.clients(days, count=2, target="days"))
    days["days"] = days["days"].astype(float)
    assert fb.linear_model(fb.clients(days, count=2, target="days")).y["weight"].shape == (1, 1)


def test_inputs_that_are_no_table_are_refused() -> None:
    images = fb.clients(torch.zeros(8, 1, 4, 4), target=[0, 1] * 4, count=2)
    with pytest.raises(TypeError, match="clients is list; it must be an object of Clients"):
        fb.linear_model(list(images))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no table; write the losses"):
        fb.linear_model(images)
