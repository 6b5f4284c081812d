"""Tables as tensors: frames of pandas, polars and pyarrow, Hugging Face datasets, arrays.

Columns of numbers are standardised, columns of categories become one column per category. What was
learnt from the training rows (means, categories) is kept in a `Columns`, which encodes new rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import narwhals as nw
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbilevel.core import checks

Missing = Literal["refuse", "drop", "impute"]
MISSING: tuple[Missing, ...] = ("refuse", "drop", "impute")
SHOWN_NAMES = 5  # in messages
MOST_CATEGORIES = 50  # of a column in which most rows have a category of their own


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    Args:
        columns: The values of each column, as numbers or as objects; missing values are NaN or
            `None`.
        rows: The number of rows.
    """

    columns: dict[str, NDArray[Any]]
    rows: int


def read_table(data: Any) -> Table:
    """Read a table.

    Args:
        data: A frame of pandas, polars or pyarrow, a dataset of Hugging Face, a dict of columns, or
            an array of two axes, whose columns are named x0, x1 and so on.

    Returns:
        Its columns.

    Raises:
        TypeError: If it is nothing of that.
        ValueError: If it holds no row, or columns of different lengths.
    """
    arrow = getattr(data, "with_format", None)
    if arrow is not None and hasattr(data, "column_names"):  # a dataset of Hugging Face
        data = data.with_format("arrow")[:]
    if isinstance(data, (str, Path)):
        raise TypeError(f"data is {str(data)!r}; read the file first, as by pandas.read_csv")
    if isinstance(data, Mapping):
        columns = {str(name): np.asarray(values) for name, values in data.items()}
    elif isinstance(data, (np.ndarray, Tensor)):
        columns = _array_columns(np.asarray(data))
    else:
        try:
            frame = nw.from_native(data, eager_only=True)
        except nw.exceptions.DuplicateError:
            raise ValueError("two columns of data have the same name; rename one") from None
        except TypeError:
            raise TypeError(
                f"data is {type(data).__name__}; it must be a frame of pandas, polars or pyarrow, "
                "a dataset of Hugging Face or PyTorch, a dict of columns, or an array"
            ) from None
        columns = {str(name): _frame_column(frame[name]) for name in frame.columns}
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise ValueError("the columns of data differ in length")
    if lengths <= {0}:
        raise ValueError("data holds no row")
    return Table(columns, lengths.pop())


def _array_columns(array: NDArray[Any]) -> dict[str, NDArray[Any]]:
    if array.ndim != 2:
        raise ValueError(
            f"data is an array of shape {array.shape}; as a table, it must have two axes"
        )
    return {f"x{number}": array[:, number] for number in range(array.shape[1])}


def _frame_column(series: nw.Series[Any]) -> NDArray[Any]:
    """Return a column as numbers, or as objects with `None` where a value is missing."""
    if series.dtype.is_numeric() or series.dtype == nw.Boolean:
        if not bool(series.is_null().any()):
            return np.asarray(series.to_numpy())
        values = series.cast(nw.Float64).to_numpy()
        return np.asarray(values, dtype=np.float64)
    if series.dtype in (nw.Categorical, nw.Enum):
        series = series.cast(nw.String)  # numbers that are declared as categories, too
    values = np.empty(len(series), dtype=object)
    values[:] = series.to_list()
    values[np.asarray(series.is_null().to_numpy(), dtype=bool)] = None
    return values


def is_missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which entries of a column are missing.

    Args:
        values: The column.
    """
    if values.dtype.kind == "f":
        return np.asarray(np.isnan(values), dtype=np.bool_)
    if values.dtype.kind == "O":
        absent = [value is None or bool(value != value) for value in values]
        return np.array(absent, dtype=np.bool_)
    return np.zeros(len(values), dtype=np.bool_)


def is_category(values: NDArray[Any]) -> bool:
    """Whether a column holds categories: anything but numbers.

    Args:
        values: The column.
    """
    if values.dtype.kind in "iufb":
        return False
    if values.dtype.kind != "O":
        return True
    known = [value for value in values if value is not None]
    return not all(isinstance(value, (int, float, np.number)) for value in known)


@dataclass
class Columns:
    """How rows become features; it is fitted to training rows, and encodes all others the same way.

    Args:
        missing: What happens to missing values: "refuse" them, "drop" the rows, or "impute" the
            mean of a column of numbers, and a category of its own.
        standardise: Whether columns of numbers get mean 0 and standard deviation 1.

    Attributes:
        names: The name of each feature, once fitted; that of a category is "column=category".
    """

    missing: Missing = "refuse"
    standardise: bool = True
    names: list[str] = field(default_factory=list)
    _order: list[str] = field(default_factory=list)
    _numbers: dict[str, tuple[float, float]] = field(default_factory=dict)
    _categories: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.one_of("missing", self.missing, MISSING)

    def fit(self, columns: Mapping[str, NDArray[Any]], rows: NDArray[np.bool_]) -> None:
        """Learn means and deviations from some rows, and categories from all of them.

        Args:
            columns: The columns, all of which become features.
            rows: Which rows to learn from.
        """
        self._order = list(columns)
        for name, values in columns.items():
            absent = is_missing(values)
            if is_category(values):
                known = ~absent
                _check_categories(name, values[known])
                self._categories[name] = _sorted({*values[known].tolist()})
                if absent.any() and self.missing == "impute":
                    self._categories[name].append(None)
                self.names += [f"{name}={category}" for category in self._categories[name]]
                continue
            numbers = values[~absent & rows].astype(np.float64)
            if not np.isfinite(numbers).all():
                raise ValueError(f"column {name!r} holds infinity; it must be finite")
            mean = float(numbers.mean()) if numbers.size else 0.0
            deviation = float(numbers.std()) if numbers.size else 0.0
            self._numbers[name] = (mean, deviation if deviation > 0 else 1.0)
            self.names.append(name)

    def encode(self, columns: Mapping[str, NDArray[Any]]) -> Tensor:
        """Return the features of rows.

        Args:
            columns: The columns, with the names of those that were fitted.

        Returns:
            A row of float32 per row; a category that is not known has no feature.

        Raises:
            ValueError: If a column is missing, or holds a missing value that is refused.

        Warns:
            UserWarning: If a category is not known.
        """
        return torch.from_numpy(self._encode(columns, self.standardise).astype(np.float32))

    def _encode(
        self, columns: Mapping[str, NDArray[Any]], standardise: bool
    ) -> NDArray[np.float64]:
        parts: list[NDArray[Any]] = []
        for name in self._order:
            if name not in columns:
                raise ValueError(f"column {name!r} is missing")
            values = columns[name]
            if name in self._numbers:
                parts.append(self._encode_numbers(name, values, standardise))
                continue
            absent = is_missing(values)
            if absent.any() and self.missing != "impute":
                raise ValueError(refusal(name, int(absent.sum())))
            own = [
                absent if category is None else values == category
                for category in self._categories[name]
            ]
            _warn_of_unknown(name, values[~np.any(own, axis=0)])
            parts += own
        return np.stack(parts, axis=1).astype(np.float64)

    def encode_table(self, data: Any, standardise: bool) -> NDArray[np.float64]:
        """Return the features of rows of a table, in double precision.

        Args:
            data: The table; see `read_table`.
            standardise: Whether columns of numbers are standardised.
        """
        return self._encode(read_table(data).columns, standardise)

    def scales(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what was subtracted from each feature, and what it was then divided by."""
        centres = np.zeros(len(self.names))
        divisors = np.ones(len(self.names))
        if self.standardise:
            for name, (mean, deviation) in self._numbers.items():
                place = self.names.index(name)
                centres[place], divisors[place] = mean, deviation
        return centres, divisors

    def _encode_numbers(
        self, name: str, values: NDArray[Any], standardise: bool
    ) -> NDArray[np.float64]:
        mean, deviation = self._numbers[name]
        absent = is_missing(values)
        if absent.any() and self.missing != "impute":
            raise ValueError(refusal(name, int(absent.sum())))
        numbers = np.where(absent, mean, values).astype(np.float64)
        if not np.isfinite(numbers).all():
            raise ValueError(f"column {name!r} holds infinity; it must be finite")
        if standardise:
            numbers = (numbers - mean) / deviation
        return numbers


def _warn_of_unknown(name: str, values: NDArray[Any]) -> None:
    """Warn of rows whose category was in no row of the fitted table."""
    if len(values):
        warnings.warn(
            f"column {name!r} holds {values[0]!r}, which no row of the fitted table held; "
            f"rows encoded without a category: {len(values)}",
            UserWarning,
            stacklevel=2,
        )


def _check_categories(name: str, known: NDArray[Any]) -> None:
    """Refuse a column of dates, lists or free text, which would become useless features."""
    example = next(iter(known.tolist()), "")
    if known.dtype.kind in "mM" or not isinstance(example, (str, bytes, bool, int, float)):
        raise ValueError(
            f"column {name!r} holds {type(example).__name__}; "
            "turn it into numbers or texts, or leave it out with features=[...]"
        )
    count = len({*known.tolist()})
    if count > MOST_CATEGORIES and 2 * count > len(known):
        raise ValueError(
            f"column {name!r} holds {count} different texts in {len(known)} rows, which are hardly "
            "categories; leave it out with features=[...]"
        )


def refusal(name: str, count: int) -> str:
    """Return the sentence that refuses missing values.

    Args:
        name: The column.
        count: How many values are missing.
    """
    return (
        f"column {name!r} holds {count} missing values; fill them in, "
        "or give missing='drop' or missing='impute'"
    )


def encode_target(values: NDArray[Any]) -> tuple[Tensor, list[Any] | None]:
    """Return targets as tensors: floats as they are, anything else as classes.

    Args:
        values: The column of targets.

    Returns:
        float32 numbers and `None`, or int64 indices of classes and the sorted classes.
    """
    if values.dtype.kind == "f" or (values.dtype.kind == "O" and not is_category(values)):
        numbers = values.astype(np.float64)
        if not np.isfinite(numbers).all():
            raise ValueError("the target holds values that are not finite; they must be finite")
        return torch.from_numpy(numbers.astype(np.float32)), None
    classes = _sorted({*values.tolist()})
    index = {label: number for number, label in enumerate(classes)}
    return torch.tensor([index[label] for label in values.tolist()]), classes


def _sorted(values: set[Any]) -> list[Any]:
    """Sort values, by their text if they cannot be compared."""
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=str)


def column_of(table: Table, name: str, given: object, argument: str) -> NDArray[Any]:
    """Return a column by its name, or the values that were given instead of a name.

    Args:
        table: The table.
        name: What the column is for, for messages.
        given: The name of a column, or one value per row.
        argument: The argument that gave it, for messages.
    """
    if isinstance(given, str):
        if given not in table.columns:
            known = list(table.columns)
            hint = checks.suggestion(given, known)
            shown = ", ".join(known[:SHOWN_NAMES])
            if len(known) > SHOWN_NAMES:
                shown += ", ..."
            raise ValueError(f"{argument} is {given!r}{hint}; it must be a column: {shown}")
        return table.columns[given]
    if isinstance(given, Sequence) or hasattr(given, "__array__"):
        values = np.asarray(given)
        if values.shape != (table.rows,):
            raise ValueError(
                f"{argument} has shape {values.shape}; "
                f"it must hold one {name} for each of the {table.rows} rows"
            )
        return values
    raise TypeError(
        f"{argument} is {given!r}; it must be the name of a column or one {name} per row"
    )
