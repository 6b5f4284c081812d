"""`fb.clients`: the data of clients from a table or a data set, by site or by a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.markup import html_table
from fedbilevel.data import partition as partitions
from fedbilevel.data._split import split_rows
from fedbilevel.data.frames import (
    Columns,
    Missing,
    Table,
    column_of,
    encode_target,
    is_missing,
    read_table,
    refusal,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = 10  # of a target that is a number, in a picture
INCHES_PER_CLIENT = 0.28
DEFAULT_VALIDATION = 0.25  # the fraction of each client's rows


class Clients(Sequence[ClientData]):
    """The clients that `fb.clients` returns: a sequence of `ClientData` that knows its names.

    Each side of a client is a tuple (inputs, target). `print` shows how many samples each client
    has, and `plot` how the targets are distributed.

    Args:
        data: The data of each client.
        names: The name of each client.
        features: The name of each feature, empty where inputs are no table.
        classes: The classes, in the order of their indices; `None` if the target is a number.
        test: Inputs and targets that no client has, if `test` was given.
        columns: How new rows are encoded; `None` where inputs are no table.
        groups: For each client the group of each validation sample, as a number; `None` if
            `group` was not given. `fb.value` resamples groups.

    Examples:
        >>> import fedbilevel as fb
        >>> table = {"age": [50.0, 61, 44, 39], "sick": [1, 0, 1, 0], "site": ["a", "b", "b", "a"]}
        >>> clients = fb.clients(table, by="site", target="sick", validation=0.5)
        >>> clients.names, clients.features, clients.classes
        (['a', 'b'], ['age'], [0, 1])
        >>> clients[0].size("train"), clients[0].size("val")
        (1, 1)
    """

    def __init__(
        self,
        data: Sequence[ClientData],
        names: Sequence[str],
        features: Sequence[str],
        classes: Sequence[Any] | None,
        test: tuple[Tensor, Tensor] | None,
        columns: Columns | None,
        groups: Sequence[Tensor] | None = None,
    ) -> None:
        self._data = list(data)
        self.names = list(names)
        self.features = list(features)
        self.classes = classes
        self.test = test
        self.columns = columns
        self.groups = groups

    def __len__(self) -> int:
        return len(self._data)

    @overload
    def __getitem__(self, index: int) -> ClientData: ...

    @overload
    def __getitem__(self, index: slice) -> list[ClientData]: ...

    def __getitem__(self, index: int | slice) -> ClientData | list[ClientData]:
        return self._data[index]

    def encode(self, data: Any) -> Tensor:
        """Encode new rows as the training rows were.

        Args:
            data: A table with the columns of the features; others are ignored.

        Returns:
            The inputs.

        Raises:
            ValueError: If a column is missing, or the inputs of these clients are no table.

        Examples:
            >>> import fedbilevel as fb
            >>> table = {"age": [50.0, 60, 40, 50], "sick": [1, 0, 1, 0], "site": [1, 2, 2, 1]}
            >>> clients = fb.clients(table, by="site", target="sick", standardise=False)
            >>> clients.encode({"age": [47.0]})
            tensor([[47.]])
        """
        if self.columns is None:
            raise ValueError(
                "the inputs of these clients are tensors as they are; encode them yourself"
            )
        return self.columns.encode(read_table(data).columns)

    def rows(self) -> list[tuple[str, int, int]]:
        """Return the name of each client and its numbers of training and validation samples.

        Returns:
            A tuple per client.
        """
        sizes = [(client.size("train"), client.size("val")) for client in self._data]
        return [(name, train, val) for name, (train, val) in zip(self.names, sizes, strict=True)]

    def __repr__(self) -> str:
        shown = [f"{name}: {train} + {val}" for name, train, val in self.rows()[:6]]
        if len(self) > len(shown):
            shown.append("...")
        return f"Clients({len(self)}; training + validation samples: {', '.join(shown)})"

    def _repr_html_(self) -> str:
        from fedbilevel.runs.display import html_image

        table = html_table(self.rows(), ("client", "training samples", "validation samples"))
        return html_image(self.plot()) + table

    def plot(self) -> Figure:
        """Draw how many samples each client has, by class, or by quantiles of a number.

        Returns:
            A figure of matplotlib, which a notebook shows.

        Examples:
            >>> import fedbilevel as fb
            >>> table = {"age": [50.0, 61, 44, 39], "sick": [1, 0, 1, 0], "site": [1, 2, 2, 1]}
            >>> figure = fb.clients(table, by="site", target="sick").plot()
            >>> [text.get_text() for text in figure.axes[0].get_legend().texts]
            ['0', '1']
        """
        from matplotlib import colormaps

        from fedbilevel.runs.display import Picture

        targets = [torch.cat([client.train[1], client.val[1]]) for client in self._data]  # type: ignore[index]
        labels = [str(label) for label in self.classes or []]
        if self.classes is None:
            edges = torch.cat(targets).quantile(torch.linspace(0, 1, QUANTILES + 1))[1:-1]
            targets = [torch.bucketize(target, edges) for target in targets]
            labels = [f"quantile {number + 1} of {QUANTILES}" for number in range(QUANTILES)]
        counts = np.stack([np.bincount(target, minlength=len(labels)) for target in targets])
        height = 1.2 + INCHES_PER_CLIENT * len(self)
        picture = Picture(figsize=(6.5, min(height, 12.0)), layout="constrained")
        panel = picture.add_subplot()
        colours = colormaps["viridis"](np.linspace(0.05, 0.95, len(labels)))
        left = np.zeros(len(self))
        for number, label in enumerate(labels):
            panel.barh(
                range(len(self)), counts[:, number], left=left, label=label, color=colours[number]
            )
            left += counts[:, number]
        if len(self) <= 40:
            panel.set_yticks(range(len(self)), self.names)
        panel.invert_yaxis()
        panel.set(xlabel="samples", ylabel="client")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
        return picture


def clients(
    data: Any,
    *,
    target: Any = None,
    by: Any = None,
    features: Sequence[str] | None = None,
    group: Any = None,
    partition: str = "iid",
    count: int | None = None,
    alpha: float | None = None,
    per_client: int | None = None,
    validation: Any = DEFAULT_VALIDATION,
    test: float = 0.0,
    missing: Missing = "refuse",
    standardise: bool = True,
    seed: int = 0,
) -> Clients:
    """Divide a table or a data set among clients, by site or by a partition.

    A table's columns of numbers are standardised, with the means and deviations of all training
    rows; columns of texts and of categories become one feature per category, in the order of the
    columns. Other inputs stay as they are.

    Args:
        data: A table (a frame of pandas, polars or pyarrow, a dataset of Hugging Face, a dict of
            columns, an array of two axes), an array or tensor of inputs with more axes, or a
            dataset of PyTorch, whose items are (input, target).
        target: What is predicted: the name of a column, or one value per row. Texts, truth values
            and whole numbers are classes; floats are numbers.
        by: The client of each row: the name of a column, or one value per row. Without it, rows are
            partitioned among `count` clients.
        features: The columns that become features; by default all others.
        group: Rows that belong together, such as those of one person: the name of a column, or one
            value per row. All rows of a group of a client are on one side.
        partition: "iid", "shards" (by label), "dirichlet" (of labels), "quantity" (unequal sizes)
            or "feature-shift" (slices of the first principal component).
        count: The number of clients of a partition.
        alpha: The concentration of "dirichlet" and "quantity".
        per_client: The shards per client of "shards".
        validation: The rows that the upper level uses: the fraction of each client's rows (or
            groups), or, where certain rows are trusted, the name of a column of truth values, or
            one truth value per row.
        test: The fraction of each client's rows (or groups) that no client gets, to judge on; where
            rows are trusted, the fraction of these, because other targets may be wrong.
        missing: What happens to missing values in features: "refuse" them, "drop" the rows, or
            "impute" the mean, for categories one of their own. In `target`, `by` and `group` they
            are refused, or their rows dropped.
        standardise: Whether columns of numbers are standardised.
        seed: The seed of the partition and of the split.

    Returns:
        The clients, with their names, features and classes.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a column does not exist or holds missing values, a client has too few rows,
            or the arguments contradict each other.

    Examples:
        >>> import fedbilevel as fb
        >>> table = {"age": [50.0, 61, 44, 39, 70, 55], "sex": list("fmmfmf"), "sick": [1, 0] * 3}
        >>> fb.clients(table, by=["a", "b", "b", "a", "a", "b"], target="sick")
        Clients(2; training + validation samples: a: 2 + 1, b: 2 + 1)
        >>> fb.clients(table, count=3, target="sick").features
        ['age', 'sex=f', 'sex=m']
    """
    if isinstance(features, str):
        raise TypeError(f"features is {features!r}; it must be a list of columns: [{features!r}]")
    trusted, fraction = _trusted_or_fraction(validation)
    every_option: dict[str, Any] = {"alpha": alpha, "per_client": per_client}
    options = {name: value for name, value in every_option.items() if value is not None}
    _check_dealing(by, count, partition, options)
    _check_fractions(test, fraction, is_drawn=trusted is None)
    arguments = {"target": target, "by": by, "group": group, "validation": trusted}
    rows = _read_rows(data, features, missing, arguments)
    targets, classes = encode_target(rows.special["target"])
    if by is not None:
        parts, names = _natural_parts(rows.special["by"])
    else:
        shifted = rows.inputs
        if shifted is None:
            everyone = np.ones(len(targets), dtype=np.bool_)
            shifted = _fitted(Columns("impute", standardise), rows, everyone)
        parts = partitions.by_name(partition, targets, count or 1, seed, inputs=shifted, **options)
        names = [f"client {number}" for number in range(len(parts))]
    is_trusted = _truth_values(rows.special.get("validation"), validation)
    named_parts = list(zip(names, parts, strict=True))
    sides = _split_parts(rows, named_parts, fraction, is_trusted, test, seed)
    names_of_features: list[str] = []
    columns = None
    inputs = rows.inputs
    if inputs is None:
        columns = Columns(missing, standardise)
        is_train = np.zeros(len(targets), dtype=np.bool_)
        is_train[np.concatenate([train for train, _, _ in sides])] = True
        inputs = _fitted(columns, rows, is_train)
        names_of_features = columns.names

    def side(part: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return inputs[torch.from_numpy(part)], targets[torch.from_numpy(part)]

    held_out = None
    if test:
        held_out = side(np.concatenate([tested for _, _, tested in sides]))
    groups = None
    if group is not None:
        groups = [_numbers(rows.special["group"][val]) for _, val, _ in sides]
    result = [ClientData(train=side(train), val=side(val)) for train, val, _ in sides]
    return Clients(result, names, names_of_features, classes, held_out, columns, groups)


class _Rows(NamedTuple):
    """The rows that are divided.

    Attributes:
        inputs: The inputs, where they are no table.
        chosen: The columns that become features, where they are one.
        special: The values of the other columns, by the argument that names them.
    """

    inputs: Tensor | None
    chosen: dict[str, NDArray[Any]]
    special: dict[str, NDArray[Any]]

    def groups_of(self, part: NDArray[np.int64]) -> NDArray[Any]:
        """Return what belongs together among some rows; every row for itself without groups."""
        if "group" in self.special:
            return self.special["group"][part]
        return part


def _read_rows(
    data: Any, features: Sequence[str] | None, missing: Missing, arguments: dict[str, Any]
) -> _Rows:
    """Read the rows that are used; `arguments` has the names of other columns, or their values."""
    inputs, table, target = _read(data, arguments["target"])
    arguments = {**arguments, "target": target}
    given = {name: value for name, value in arguments.items() if value is not None}
    special = {name: column_of(table, name, value, name) for name, value in given.items()}
    columns_of = {name: value for name, value in given.items() if isinstance(value, str)}
    chosen = _chosen_columns(table, features, columns_of, inputs)
    rows = _complete_rows(table.rows, chosen, special, columns_of, missing)
    if inputs is not None:
        inputs = inputs[torch.from_numpy(rows)]
    return _Rows(
        inputs,
        {name: values[rows] for name, values in chosen.items()},
        {name: _whole_if_complete(values, rows) for name, values in special.items()},
    )


def _whole_if_complete(values: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Return the values of some rows: frames hold whole numbers as floats if one is missing."""
    kept = values[rows]
    if values.dtype.kind == "f" and np.isnan(values).any() and (kept == np.floor(kept)).all():
        return kept.astype(np.int64)
    return kept


def _split_parts(
    rows: _Rows,
    parts: Sequence[tuple[str, NDArray[np.int64]]],
    fraction: float,
    is_trusted: NDArray[np.bool_] | None,
    test: float,
    seed: int,
) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Return the training, validation and test rows of each client, by `split_rows`."""
    sides = []
    for number, (name, part) in enumerate(parts):
        trusted = None if is_trusted is None else is_trusted[part]
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
        sides.append(split_rows(part, rows.groups_of(part), fraction, trusted, test, rng, name))
    return sides


def _fitted(columns: Columns, rows: _Rows, is_train: NDArray[np.bool_]) -> Tensor:
    """Fit columns to the training rows, and return all rows as they encode them."""
    columns.fit(rows.chosen, is_train)
    return columns.encode(rows.chosen)


def _numbers(values: NDArray[Any]) -> Tensor:
    """Number the different values of a column from 0."""
    _, numbers = np.unique(values, return_inverse=True)
    return torch.from_numpy(numbers)


def _trusted_or_fraction(validation: Any) -> tuple[Any, float]:
    """Return what says which rows are trusted, or None and the fraction of rows to draw."""
    if isinstance(validation, (int, float)):
        return None, validation
    return validation, 0.0


def _check_dealing(
    by: object, count: int | None, partition: str, options: Mapping[str, object]
) -> None:
    if (by is None) == (count is None):
        both = "neither of them is given" if by is None else "both are given"
        raise ValueError(f"by or count must say who the clients are; {both}")
    if by is not None and (partition != "iid" or options):
        raise ValueError("by says who the clients are; partition and its options must not be given")


def _check_fractions(test: float, validation: float, is_drawn: bool) -> None:
    """Check the fractions of rows for the test and, where these are drawn, for validation."""
    if is_drawn and not 0 < checks.number("validation", validation) < 1:
        raise ValueError(f"validation is {validation}; it must be above 0 and below 1")
    if not 0 <= checks.number("test", test) < 1:
        raise ValueError(f"test is {test}; it must be at least 0 and below 1")
    if test + validation >= 1:
        raise ValueError(
            f"test is {test} and validation {validation}; together they must be below 1"
        )


def _read(data: Any, target: Any) -> tuple[Tensor | None, Table, Any]:
    """Return inputs that are no table, else `None`; the table; and what names the target."""
    if isinstance(data, (np.ndarray, Tensor)) and data.ndim > 2:
        return torch.as_tensor(data), Table({}, len(data)), target
    if isinstance(data, torch.utils.data.Dataset) or (
        isinstance(data, (list, tuple)) and data and isinstance(data[0], tuple)
    ):
        items = [data[index] for index in range(len(data))]  # type: ignore[arg-type]
        if target is not None or not all(len(item) == 2 for item in items):
            raise ValueError(
                "items of the data set must be (input, target), and target not be given"
            )
        inputs = torch.stack([torch.as_tensor(item[0]) for item in items])
        return inputs, Table({}, len(items)), np.asarray([_plain(item[1]) for item in items])
    if target is None:
        raise ValueError("target is missing; it must name a column or hold one value per row")
    return None, read_table(data), target


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _chosen_columns(
    table: Table,
    features: Sequence[str] | None,
    columns_of: Mapping[str, str],
    inputs: Tensor | None,
) -> dict[str, NDArray[Any]]:
    """Return the columns that become features; `columns_of` says what others are for."""
    if inputs is not None:
        return {}
    if features is None:
        chosen = [name for name in table.columns if name not in columns_of.values()]
    else:
        chosen = list(features)
        if columns_of.get("target") in chosen:
            raise ValueError(f"features holds {columns_of['target']!r}, which is the target")
    for name in chosen:
        column_of(table, "feature", name, "features")
    if not chosen:
        raise ValueError("there is no feature; data must have columns beside target, by and group")
    return {name: table.columns[name] for name in chosen}


def _complete_rows(
    count: int,
    chosen: dict[str, NDArray[Any]],
    special: dict[str, NDArray[Any]],
    columns_of: Mapping[str, str],
    missing: Missing,
) -> NDArray[np.int64]:
    """Return the rows that are used; refuse missing values, or drop their rows."""
    checks.one_of("missing", missing, ("refuse", "drop", "impute"))
    complete = np.ones(count, dtype=np.bool_)
    for argument, values in special.items():
        absent = is_missing(values)
        complete &= ~absent
        if absent.any() and missing != "drop":
            raise ValueError(
                f"column {columns_of.get(argument, argument)!r} holds {absent.sum()} missing "
                f"values, and is the {argument} of its rows; fill them in, or give missing='drop'"
            )
    for name, values in chosen.items():
        absent = is_missing(values)
        if absent.any() and missing == "refuse":
            raise ValueError(refusal(name, int(absent.sum())))
        if missing == "drop":
            complete &= ~absent
    if not complete.any():
        raise ValueError("every row holds a missing value; data has no complete row")
    return np.flatnonzero(complete)


def _natural_parts(sites: NDArray[Any]) -> tuple[list[NDArray[np.int64]], list[str]]:
    """Return the rows and the name of each site, in the order of the names."""
    if sites.dtype.kind == "O":
        sites = sites.astype(str)
    found, inverse = np.unique(sites, return_inverse=True)
    parts = [np.flatnonzero(inverse == number) for number in range(len(found))]
    return parts, [str(name) for name in found]


def _truth_values(values: NDArray[Any] | None, validation: object) -> NDArray[np.bool_] | None:
    """Return which rows are trusted, if that was said."""
    if values is None:
        return None
    found = {*values.tolist()}
    if not found <= {0, 1}:  # False and True are equal to them
        name = repr(validation) if isinstance(validation, str) else "given for each row"
        shown = ", ".join(sorted(map(repr, found))[:3])
        raise ValueError(
            f"validation is {name} and holds {shown}; it must hold truth values, or 0 and 1"
        )
    return values.astype(np.bool_)
