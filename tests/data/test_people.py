"""Tables of people, read from installed packages."""

from __future__ import annotations

import numpy as np
import pytest

from fedbilevel.data import people
from fedbilevel.data.people import impute_and_standardise, read_rand


def test_the_rand_experiment_is_whole() -> None:
    table = read_rand()
    assert table.features.shape == (20190, len(table.names))
    assert np.bincount(table.site).tolist() == [4462, 4036, 2436, 3090, 2595, 3571]
    assert len(np.unique(table.person)) == 5912
    assert 0.5 < table.outcome["visited"].mean() < 0.8


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(people, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"statsmodels .*pip install 'fedbilevel\[sites\]"):
        read_rand()


def test_missing_values_become_the_mean_of_training_records() -> None:
    features = np.array([[1.0, 5.0], [3.0, 5.0], [np.nan, 7.0]])
    scaled = impute_and_standardise(features, np.array([True, True, False]))
    np.testing.assert_allclose(scaled, [[-1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
