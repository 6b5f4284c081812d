"""Survival: the partial likelihood against statsmodels, and what the task promises."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from statsmodels.duration.hazard_regression import PHReg

import fedbilevel as fb
from fedbilevel.core.hypergradient import phi
from fedbilevel.core.rng import normal, root, uniform
from fedbilevel.data import people
from fedbilevel.data.people import read_lung
from fedbilevel.tasks.survival import concordance, log_partial_likelihood, survival
from tests.support.refusals import refusal

needs_lifelines = pytest.mark.skipif(
    find_spec("lifelines") is None, reason="lifelines, which ships the data, is not installed"
)
KEY = root(0, "survival")


def patients(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, whole days with ties, and whether the patient died."""
    features = normal(KEY, (count, 3), torch.float64)
    time = (uniform(KEY, (count,), torch.float64) * 12).ceil()
    died = (uniform(root(1, "survival"), (count,), torch.float64) < 0.7).double()
    return features, time, died


def test_the_partial_likelihood_is_that_of_statsmodels() -> None:
    """Two strata and ties: the sum over strata, its gradient and its Hessian."""
    features, time, died = patients(60)
    strata = torch.arange(60) % 2
    theirs = PHReg(
        time.numpy(), features.numpy(), status=died.numpy(), strata=strata.numpy(), ties="breslow"
    )
    y = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64)

    def ours(y: torch.Tensor) -> torch.Tensor:
        parts = [strata == number for number in (0, 1)]
        risk = features @ y
        return torch.stack([log_partial_likelihood(risk[p], time[p], died[p]) for p in parts]).sum()

    checks: list[tuple[Callable[..., torch.Tensor], Callable[..., object]]] = [
        (ours, theirs.loglike),
        (torch.func.grad(ours), theirs.score),
        (torch.func.jacrev(torch.func.grad(ours)), theirs.hessian),
    ]
    for mine, other in checks:
        np.testing.assert_allclose(mine(y).numpy(), other(y.numpy()), rtol=1e-9, atol=1e-9)


def test_concordance_counts_comparable_pairs() -> None:
    features, time, died = patients(25)
    risk = features[:, 0].round()
    agree = 0.0
    pairs = 0
    for i in range(25):
        for j in range(25):
            if died[i] and time[i] < time[j]:
                pairs += 1
                agree += float(risk[i] > risk[j]) + 0.5 * float(risk[i] == risk[j])
    assert concordance(risk, time, died) == pytest.approx(agree / pairs)
    assert "nobody died" in refusal(concordance, risk, time, torch.zeros(25))


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(people, "find_spec", lambda name: None)
    assert "pip install 'fedbilevel[survival]'" in refusal(read_lung)


@needs_lifelines
def test_the_data_are_whole_and_each_patient_is_on_one_side() -> None:
    table = read_lung()
    assert table.features.shape == (227, 7)
    assert int(table.outcome["died"].sum()) == 164
    task = survival(irrelevant=2)
    assert len(task.clients) == len(task.names) == 18
    sizes = [client.size("train") + client.size("val") for client in task.clients]
    tested = [round(0.2 * count) for count in np.bincount(table.site)]
    assert sizes == [n - t for n, t in zip(np.bincount(table.site), tested, strict=True)]
    assert task.features[-2:] == ("noise 1", "noise 2")


@needs_lifelines
def test_the_lower_level_is_the_penalised_cox_model_of_statsmodels() -> None:
    task = survival()
    x = fb.Tree(log_penalty=torch.linspace(-3, 0, 7, dtype=torch.float64))
    y = fb.solve_lower(task.problem, task.clients, x, weights="samples")["coefficients"]
    sides = [client.train for client in task.clients]
    features, time, died = (
        torch.cat([side[name] for side in sides]).numpy()  # type: ignore[call-overload]
        for name in ("features", "time", "died")
    )
    strata = np.repeat(np.arange(18), [client.size("train") for client in task.clients])
    cox = PHReg(time, features, status=died, strata=strata, ties="breslow")
    slope = cox.score(y.numpy()) / len(time)
    np.testing.assert_allclose(slope, (x["log_penalty"].exp() * y).numpy(), atol=1e-6)


@needs_lifelines
def test_the_hypergradient_is_the_slope_of_the_objective() -> None:
    task = survival()
    x, _ = task.problem.start
    slope = fb.hypergradient(task.problem, task.clients, x, weights="samples")
    by_differences = fb.finite_difference(task.problem, task.clients, x, slope, weights="samples")
    assert float(slope["log_penalty"] @ slope["log_penalty"]) == pytest.approx(
        by_differences, rel=1e-5
    )


@needs_lifelines
def test_steps_along_the_hypergradient_lower_the_validation_loss() -> None:
    task = survival(irrelevant=8)
    x, _ = task.problem.start
    losses = []
    for _ in range(3):
        losses.append(float(phi(task.problem, task.clients, x, weights="samples")))
        x = x - 20.0 * fb.hypergradient(task.problem, task.clients, x, weights="samples")
    assert losses[0] > losses[1] + 1e-3
    assert losses[1] > losses[2]
    y = fb.solve_lower(task.problem, task.clients, x, weights="samples")
    assert task.evaluate(x, y)["test_concordance"] > 0.5


def test_wrong_options_are_refused() -> None:
    assert "irrelevant" in refusal(survival, irrelevant=-1)
    assert "together they must be at most 0.8" in refusal(survival, validation=0.5, test=0.4)
    assert "test is 0" in refusal(survival, test=0.0)
