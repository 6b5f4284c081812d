"""Tables of people at several institutions, read from packages in which they are shipped.

Only the files are read: the packages that contain them are not imported.
"""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedbilevel.core.extras import MissingPackageError
from fedbilevel.core.rng import fold_in, rows

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

# What is known of a person of the RAND experiment before the year of the record: plan, person,
# family and health at enrolment. The columns of spending and of visits are outcomes.
RAND_FEATURES = (
    "logc",
    "idp",
    "lpi",
    "fmde",
    "year",
    "tookphys",
    "black",
    "linc",
    "lnum",
    "xage",
    "female",
    "child",
    "fchild",
    "educdec",
    "mhi",
    "disea",
    "physlm",
    "hlthg",
    "hlthf",
    "hlthp",
    "xghindx",
)

LUNG_FEATURES = ("age", "sex", "ph.ecog", "ph.karno", "pat.karno", "meal.cal", "wt.loss")


class People(NamedTuple):
    """Records of people at several sites.

    Attributes:
        features: A row per record; missing values are NaN.
        names: The name of each column of `features`.
        site: The site of each record, from 0.
        person: The person of each record; one person may have several.
        outcome: What is predicted, by name: a number per record.
    """

    features: Array
    names: tuple[str, ...]
    site: NDArray[np.int64]
    person: NDArray[np.int64]
    outcome: dict[str, Array]


def read_rand() -> People:
    """Read the RAND Health Insurance Experiment, which statsmodels ships.

    20,190 person-years of 5,912 people at 6 sites in the United States, 1974 to 1982; the data are
    in the public domain. The outcome `visited` is 1 where the person saw a physician in that year.

    Returns:
        The records.

    Raises:
        MissingPackageError: statsmodels is not installed.
    """
    path = _file_of("statsmodels", "sites", "datasets/randhie/src/randhie.csv")
    columns = _read(path, (*RAND_FEATURES, "site", "zper", "mdvis"))
    features = np.stack([columns[name] for name in RAND_FEATURES], axis=1)
    outcome = {"visited": (columns["mdvis"] > 0).astype(float)}
    site = columns["site"].astype(np.int64) - 1
    return People(features, RAND_FEATURES, site, columns["zper"].astype(np.int64), outcome)


def read_lung() -> People:
    """Read the lung cancer data of the North Central Cancer Treatment Group from lifelines.

    228 patients with advanced lung cancer; the one whose institution is unknown is left out, which
    leaves 227 at 18 institutions, 2 to 36 at each. The outcomes are `time`, the days until death or
    until the end of the observation, and `died`, which is 1 where it was death.

    Returns:
        The records, one per patient.

    Raises:
        MissingPackageError: lifelines is not installed.
    """
    path = _file_of("lifelines", "survival", "datasets/lung.csv")
    columns = _read(path, (*LUNG_FEATURES, "inst", "time", "status"))
    known = ~np.isnan(columns["inst"])
    features = np.stack([columns[name][known] for name in LUNG_FEATURES], axis=1)
    _, site = np.unique(columns["inst"][known], return_inverse=True)
    outcome = {"time": columns["time"][known], "died": columns["status"][known]}
    return People(features, LUNG_FEATURES, site, np.arange(len(site)), outcome)


def _file_of(package: str, extra: str, name: str) -> Path:
    """Return the path of a file that an installed package ships."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingPackageError(
            f"{package} is not installed, which ships the data; pip install 'fedbilevel[{extra}]'"
        )
    path = Path(spec.origin).parent / name
    if not path.is_file():
        raise ValueError(f"the installed {package} has no {name}; another release of it does")
    return path


def _read(path: Path, names: tuple[str, ...]) -> dict[str, Array]:
    """Read columns of a CSV file of numbers; an empty cell is NaN."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        header = next(lines)
        indices = [header.index(name) for name in names]
        table = [[float(line[index] or "nan") for index in indices] for line in lines]
    return dict(zip(names, np.array(table).T, strict=True))


def impute_and_standardise(features: Array, train: NDArray[np.bool_]) -> Array:
    """Fill missing values with the mean of a column, and scale every column.

    Args:
        features: A row per record; missing values are NaN.
        train: The records from which means and standard deviations are taken.

    Returns:
        Features of mean 0 and standard deviation 1 on those records.
    """
    mean = np.nanmean(features[train], axis=0)
    filled = np.where(np.isnan(features), mean, features)
    deviation = filled[train].std(axis=0)
    scaled: Array = (filled - mean) / np.where(deviation > 0, deviation, 1.0)
    return scaled


def split_people(
    people: People, validation: float, test: float, key: Tensor
) -> tuple[Mask, Mask, Mask]:
    """Split the records of each site by person.

    Args:
        people: The records.
        validation: The fraction of the people of each site who are for validation, at least one.
        test: The fraction of the people of each site who are for the test.
        key: The key of the draws.

    Returns:
        Which records are for training, which for validation, and which for the test.
    """
    roles = np.zeros(len(people.site), dtype=np.int64)
    for site in range(people.site.max() + 1):
        here = people.site == site
        persons = np.unique(people.person[here])
        order = rows(fold_in(fold_in(key, 0), site), len(persons), len(persons)).numpy()
        tested = round(test * len(persons))
        held_out = max(1, round(validation * len(persons)))
        roles[here & np.isin(people.person, persons[order[:tested]])] = 2
        roles[here & np.isin(people.person, persons[order[tested : tested + held_out]])] = 1
    return roles == 0, roles == 1, roles == 2
