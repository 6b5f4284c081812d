"""The classifier with the interface of scikit-learn: its checks, sites, units, learnt weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedbilevel as fb


@pytest.mark.filterwarnings("ignore")  # the checks provoke warnings
@parametrize_with_checks([fb.FederatedLogistic(rounds=20)])  # none is expected to fail
def test_it_passes_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


def hospitals(rows: int = 600, seed: int = 0) -> pd.DataFrame:
    """Six hospitals; the labels of the last one are drawn at random."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(60, 12, rows),
            "dose": rng.exponential(0.01, rows),
            "sex": rng.choice(["f", "m"], rows),
            "noise": rng.normal(size=rows),
            "hospital": np.arange(rows) % 6,
        }
    )
    logit = (frame["age"] - 60) / 6 - 150 * (frame["dose"] - 0.01) + (frame["sex"] == "m")
    frame["ill"] = np.where(logit + rng.logistic(size=rows) > 0, "yes", "no")
    bad = frame["hospital"] == 5
    frame.loc[bad, "ill"] = rng.choice(["yes", "no"], bad.sum())
    return frame


@pytest.fixture(scope="module")
def fitted() -> fb.FederatedLogistic:
    return fb.FederatedLogistic(by="hospital", target="ill", rounds=150).fit(hospitals())


def test_a_site_with_random_labels_gets_the_least_weight(fitted: fb.FederatedLogistic) -> None:
    assert fitted.sites_ == ["0", "1", "2", "3", "4", "5"]
    assert fitted.site_weights_.sum() == pytest.approx(1, abs=1e-5)
    assert fitted.site_weights_.argmin() == 5
    assert fitted.site_weights_[5] < 0.8 / 6  # its validation rows count, too
    same = fb.FederatedLogistic(by="hospital", target="ill", weigh_sites=False, rounds=5)
    assert same.fit(hospitals()).site_weights_.tolist() == pytest.approx([1 / 6] * 6)


def test_trusted_rows_are_marked_by_a_column() -> None:
    frame = hospitals()
    checked = np.arange(600) // 6 % 3 == 0
    model = fb.FederatedLogistic(by="hospital", target="ill", validation="checked", rounds=5)
    model.fit(frame.assign(checked=checked))
    assert model.feature_names_ == ["age", "dose", "sex=f", "sex=m", "noise"]
    assert len(model.predict(frame)) == 600
    with pytest.raises(ValueError, match="client '5' has 0 trusted samples"):
        model.fit(frame.assign(checked=checked & (frame["hospital"] < 5)))


def test_the_model_is_judged_on_held_out_trusted_rows() -> None:
    frame = hospitals()
    frame["checked"] = np.arange(600) // 6 % 3 == 0
    model = fb.FederatedLogistic(
        by="hospital", target="ill", validation="checked", test=0.4, rounds=20
    ).fit(frame)
    sites = fb.clients(frame, by="hospital", target="ill", validation="checked", test=0.4)
    assert sites.test is not None
    rows, target = (side.double().numpy() for side in sites.test)
    assert len(target) == 6 * 14  # of 34 trusted rows per hospital
    centres, scales = sites.columns.scales()  # type: ignore[union-attr]
    odds = (rows * scales + centres) @ model.coef_[0] + model.intercept_[0]
    last = model.history_[-1]
    assert last["test_accuracy"] == pytest.approx(((odds > 0) == target).mean())
    assert last["test_loss"] == pytest.approx(np.log1p(np.exp((1 - 2 * target) * odds)).mean())
    assert "test_loss" not in fb.FederatedLogistic(rounds=1).fit(rows, target > 0).history_[0]


def test_coefficients_are_in_the_units_of_the_columns(fitted: fb.FederatedLogistic) -> None:
    assert fitted.feature_names_ == ["age", "dose", "sex=f", "sex=m", "noise"]
    age, dose, woman, man, noise = fitted.coef_[0]
    assert 0.05 < age < 0.25  # 1/6 per year
    assert -250 < dose < -40
    assert man > woman
    assert abs(noise) < 0.3
    frame = hospitals(seed=1)
    rows = np.stack(
        [
            frame["age"],
            frame["dose"],
            frame["sex"] == "f",
            frame["sex"] == "m",
            frame["noise"],
        ],
        axis=1,
    ).astype(float)
    odds = rows @ fitted.coef_[0] + fitted.intercept_[0]
    assert fitted.decision_function(frame) == pytest.approx(odds)
    assert fitted.predict_proba(frame)[:, 1] == pytest.approx(1 / (1 + np.exp(-odds)))


def test_it_predicts_rows_of_any_table(fitted: fb.FederatedLogistic) -> None:
    frame = hospitals(seed=1)
    good = frame[frame["hospital"] < 5]
    assert fitted.score(good, good["ill"]) > 0.75
    assert fitted.predict(pl.from_pandas(frame)).tolist() == fitted.predict(frame).tolist()
    with pytest.raises(ValueError, match="column 'dose' is missing"):
        fitted.predict(frame.drop(columns="dose"))


def test_it_is_as_accurate_as_a_logistic_regression_of_pooled_rows() -> None:
    features, labels = load_breast_cancer(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(features, labels, random_state=0)
    ours = fb.FederatedLogistic(rounds=100).fit(train, train_labels)
    pooled = make_pipeline(StandardScaler(), LogisticRegression()).fit(train, train_labels)
    assert ours.score(test, test_labels) >= pooled.score(test, test_labels) - 0.02


def test_it_can_be_cross_validated() -> None:
    features, labels = load_breast_cancer(return_X_y=True)
    scores = cross_val_score(fb.FederatedLogistic(rounds=30), features[:200], labels[:200], cv=2)
    assert scores.min() > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "hospitl", "target": "ill"}, "did you mean 'hospital'"),
        ({"by": "hospital", "target": "age"}, "the target 'age' holds floats"),
        (
            {"by": "hospital"},
            "requires y to be passed, but the target y is None, .* or target=",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.FederatedLogistic(**options).fit(hospitals(60))  # type: ignore[arg-type]
