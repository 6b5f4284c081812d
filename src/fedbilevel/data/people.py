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

from fedbilevel.core.extras import MissingPackageError

Array = NDArray[np.float64]

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
        rows = csv.reader(file)
        header = next(rows)
        indices = [header.index(name) for name in names]
        table = [[float(row[index] or "nan") for index in indices] for row in rows]
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
