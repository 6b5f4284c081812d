"""A table of one's own: learn how much each site counts, and a penalty per column.

lower: sum_i w_i (loss on the training samples of site i) + 1/2 sum_j exp(x_j) ||y_j||^2,
upper: loss on the validation samples of all sites.

The model is that of `fb.linear_model`: a logistic regression of classes, or a linear regression of
numbers. The upper variables are one weight w_i per site (`fb.weighted`) and the logarithm x_j of
one penalty per feature. The table is a file of one's own, CSV or Parquet, which `fb.clients`
divides by site.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbilevel.core.extras import import_extra
from fedbilevel.core.tree import Tree
from fedbilevel.core.weighting import WEIGHTS, weighted
from fedbilevel.data.clients import DEFAULT_VALIDATION, clients
from fedbilevel.data.frames import Missing
from fedbilevel.runs.metric import Metric
from fedbilevel.tasks.linear_model import held_out_metrics, linear_model
from fedbilevel.tasks.task import Task

READERS = {".csv": "read_csv", ".parquet": "read_parquet"}  # of pandas


@dataclass(frozen=True, kw_only=True)
class TableTask(Task):
    """A task from a table, which knows the names of its sites.

    Attributes:
        names: The name of each client.
        groups: For each client the group of each validation sample; see `fb.clients`.
    """

    names: Sequence[str]
    groups: Sequence[Tensor] | None


def table(
    *,
    path: str | Path,
    by: str,
    target: str,
    validation: float | str = DEFAULT_VALIDATION,
    test: float = 0.0,
    features: list[str] | None = None,
    group: str | None = None,
    missing: Missing = "refuse",
    digest: str | None = None,
    seed: int = 0,
) -> TableTask:
    """Build the task of weighing the sites of a table, and of fitting a linear model to it.

    Args:
        path: The table, a file that ends in .csv or .parquet; relative to the working folder.
        by: The column that says at which site a row is.
        target: The column that is predicted. Texts, truth values and whole numbers are classes;
            numbers with a decimal point are numbers.
        validation: The rows that the upper level uses: the fraction of each site's rows, or, where
            certain rows are trusted, the column of truth values that says which.
        test: The fraction of each site's rows (of its trusted samples, if there are) to judge on.
        features: The columns that become features; by default all others.
        group: The column of what rows belong together, such as the person.
        missing: What happens to missing values: "refuse", "drop" or "impute"; see `fb.clients`.
        digest: What the file must hash to. The config of a run has it, so that the run is neither
            repeated nor resumed on another table.
        seed: The seed of the split.

    Returns:
        The task, with the metrics `test_loss` and, of classes, `test_accuracy` on the held-out
        rows, and `weight NAME` of each site.

    Raises:
        ValueError: The file cannot be read or has another digest, it has no such column, or
            `fb.clients` refuses it.

    Examples:
        >>> import pathlib, tempfile
        >>> import fedbilevel as fb
        >>> file = pathlib.Path(tempfile.mkdtemp(), "patients.csv")
        >>> rows = [f"{30 + i},{'ab'[i % 2]},{i > 9}" for i in range(20)]
        >>> _ = file.write_text("\\n".join(["age,hospital,ill", *rows]))
        >>> task = fb.tasks.load("table", path=file, by="hospital", target="ill")
        >>> task.names, task.problem.x["client_weights"].tolist()
        (['a', 'b'], [0.5, 0.5])
    """
    frame, found = _read(Path(path))
    if digest is not None and digest != found:
        raise ValueError(f"digest is {digest!r}, but {path} has {found!r}: another table")
    sites = clients(
        frame,
        by=by,
        target=target,
        validation=validation,
        test=test,
        features=features,
        group=group,
        missing=missing,
        seed=seed,
    )
    problem, numbered = weighted(linear_model(sites), sites)

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        pairs = zip(sites.names, x[WEIGHTS].tolist(), strict=True)
        weights = {f"weight {name}": weight for name, weight in pairs}
        return {**held_out_metrics(sites, y), **weights}

    metric = None
    if sites.classes is None and test:
        metric = Metric("test_loss")
    return TableTask(
        problem,
        numbered,
        evaluate,
        metric=metric,
        options={"path": str(Path(path).resolve()), "digest": found},
        names=sites.names,
        groups=sites.groups,
    )


def _read(path: Path) -> tuple[Any, str]:
    """Return the table in a file, and the digest of the file."""
    if path.suffix not in READERS:
        raise ValueError(f"path is {str(path)!r}; it must end in .csv or .parquet")
    read = getattr(import_extra("pandas", "frames"), READERS[path.suffix])
    if path.suffix == ".parquet":
        import_extra("pyarrow", "data")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.resolve()} cannot be read: {error.strerror}") from None
    try:
        frame = read(io.BytesIO(content))
    except Exception as error:  # of the parsers of pandas and pyarrow
        raise ValueError(f"{path.resolve()} is not a {path.suffix} file: {error}") from None
    return frame, hashlib.sha256(content).hexdigest()[:16]
