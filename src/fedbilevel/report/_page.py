"""A self-contained HTML page about runs: page.html filled in, with page.css, page.js and Plotly."""

import base64
import hashlib
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import tomli_w
from plotly.offline import get_plotlyjs

from fedbilevel import __version__
from fedbilevel.report._axes import AXES, Spread, metric_title, spread
from fedbilevel.report._curves import (
    DARK,
    LIGHT,
    Group,
    curve_style,
    drawable,
    group_runs,
    main_metrics,
)
from fedbilevel.report._data import chart_data, packed
from fedbilevel.report._personal import (
    COLUMNS,
    client_values,
    distributions,
    personal_metrics,
    worst,
)
from fedbilevel.report._tables import (
    Row,
    client_costs,
    config_differences,
    phase_costs,
    rank,
    shared_settings,
    table_rows,
    unusual,
)
from fedbilevel.runs.folder import RunFolder, Table

PHASE_COLUMNS = {
    "rounds": ("Rounds", AXES["round"]),
    "bytes_up": ("Bytes up", AXES["bytes"]),
    "bytes_down": ("Bytes down", AXES["bytes"]),
    "samples": ("Samples", AXES["samples"]),
    "gradients": ("Gradients", AXES["gradients"]),
    "flops": ("Operations", AXES["flops"]),
    "peak_bytes": ("Peak memory", AXES["bytes"]),
}
CLIENT_COLUMNS = {
    key: PHASE_COLUMNS[key] for key in ("peak_bytes", "flops", "bytes_up", "bytes_down")
}


MANY = 20  # curves: of more, the page shows the first ones in colour and the others in grey
SHOWN = 10  # curves in colour at first, if there are many
CLIENT_ROWS = 5_000  # in the tables of single clients


def page(runs: Sequence[RunFolder], command: str = "", folder: Path | str = "") -> str:
    """Return the page as HTML; its links to run folders are relative to `folder`."""
    groups = group_runs(runs)
    axes, metrics = drawable(runs)
    rows = table_rows(groups)
    rankings = {axis.key: rank(rows, axis.key) for axis in axes}
    if len(groups) > MANY:  # the best ones get the first colours
        group_of = {id(row): group for row, group in zip(rows, groups, strict=True)}
        groups = [group_of[id(row)] for row in rankings[axes[0].key]]
    judge = rows[0].metric
    shown = [name for name in main_metrics(runs) if name in metrics] or metrics[:1]
    finals = [name for name in rankings[axes[0].key][0].finals if _any_final(rows, name)]
    personal = personal_metrics(groups)
    environment = _templates()
    environment.globals |= {
        "spread": spread,
        "format_plain": Spread.format,
        "title_of": metric_title,
        "finals": finals,
        "judge": judge,
        "personal": personal,
    }
    tables: Any = environment.get_template("tables.html").module
    data = chart_data(groups, axes, metrics, personal)
    data["rankings"] = {
        axis.key: tables.ranking(axis, rankings[axis.key], _lowest_costs(rows, axis.key))
        for axis in axes
    }
    data["clients"], client_counts = _client_tables(groups, personal, tables)
    scripts = [get_plotlyjs(), _read("page.js")]
    return environment.get_template("page.html").render(
        title=_title(groups),
        palettes={"light": LIGHT, "dark": DARK},
        css=_read("page.css"),
        script_hashes=[_base64(hashlib.sha256(text.encode()).digest()) for text in scripts],
        scripts=scripts,
        data=packed(data),
        runs=runs,
        groups=groups,
        is_many=len(groups) > MANY,
        drawn=SHOWN if len(groups) > MANY else len(groups),
        axes=axes,
        metrics={metric: metric_title(metric) for metric in metrics},
        shown=shown,
        best=rankings[axes[0].key][0],
        ranking=data["rankings"][axes[0].key],
        origin=_origin(command),
        phase_columns=PHASE_COLUMNS,
        client_columns=CLIENT_COLUMNS,
        personal_columns=COLUMNS,
        client_counts=client_counts,
        shared=tomli_w.dumps(shared_settings(groups)),
        differences=_differences(groups),
        distributions={name: distributions(groups, name) for name in personal},
        **_lists(groups, Path(folder)),
    )


def _lists(groups: Sequence[Group], folder: Path) -> dict[str, list[Any]]:
    """Return what the page has of every group: its style, costs, and links to its runs."""
    return {
        "styles": [curve_style(index) for index in range(len(groups))],
        "phase_costs": [(group.label, list(phase_costs(group).items())) for group in groups],
        "client_costs": [(group.label, _client_lines(group)) for group in groups],
        "links": [[_link(run, folder) for run in group.runs] for group in groups],
    }


def _templates() -> jinja2.Environment:
    """Return what reads the templates of this folder."""
    return jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read),
    )


def _client_tables(
    groups: Sequence[Group], personal: Sequence[str], tables: Any
) -> tuple[dict[int, str], dict[int, dict[str, int]]]:
    """Return the table of single clients of each group, and how many of them it shows."""
    shown = {}
    counts = {}
    for index, group in enumerate(groups):
        clients = client_values(group, personal)
        if clients:
            kept = worst(clients, personal[0], CLIENT_ROWS // len(groups))
            shown[index] = tables.clients(group.label, kept)
            counts[index] = {"shown": len(kept), "all": len(clients)}
    return shown, counts


def _any_final(rows: Iterable[Row], name: str) -> bool:
    return any(row.finals[name] for row in rows)


def _differences(groups: Sequence[Group]) -> dict[str, list[tuple[str, bool]]]:
    """Return by key the value of each group, as text, and whether it is unusual."""
    differences = {}
    for key, values in config_differences(groups).items():
        texts = ["–" if value is None else str(value) for value in values]
        differences[key] = list(zip(texts, unusual(values), strict=True))
    return differences


def _link(run: RunFolder, folder: Path) -> str:
    """Return the place of a run as an address relative to a folder."""
    return quote(Path(os.path.relpath(run.path, folder.resolve())).as_posix())


def _read(name: str) -> str:
    return resources.files("fedbilevel.report").joinpath(name).read_text("utf-8")


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _origin(command: str) -> str:
    """Return a line that says when and where the page was written, and by what."""
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    line = f"Written {written} by fedbilevel {__version__} (Python {platform.python_version()}"
    line += f", PyTorch {metadata.version('torch')}) on {machine}"
    if command:
        line += f": {command}"
    return line


def _title(groups: Sequence[Group]) -> str:
    """Return the names of the tasks and data sets, as "TASK on DATA"."""
    parts = []
    for key in ("task", "data"):
        names = {_name_of(key, group.runs[0].config) for group in groups} - {None}
        if names:
            parts.append(", ".join(sorted(map(str, names))))
    return " on ".join(parts) or "Runs"


def _name_of(key: str, config: Table) -> str | None:
    """Return the name of a run's task or data set; data may be a file that the task reads."""
    entry = config.get(key)
    task = config.get("task")
    if entry is None and isinstance(task, dict) and "path" in task:
        return Path(task["path"]).name
    if isinstance(entry, dict):
        entry = entry["name"]
    return entry


def _lowest_costs(rows: Iterable[Row], axis: str) -> dict[float, float]:
    """Return the lowest cost to each target, of the rows whose seeds all reached it."""
    lowest: dict[float, float] = {}
    for row in rows:
        for target, cost in row.reached(axis).items():
            lowest[target] = min(cost.mean, lowest.get(target, cost.mean))
    return lowest


def _client_lines(group: Group) -> list[tuple[str, dict[str, float]]]:
    """Return the number of clients, as text, and their costs, for each size of peak memory."""
    lines = []
    for costs in client_costs(group):
        text = f"{costs['clients']:,.1f}".removesuffix(".0")
        lines.append((text, costs))
    return lines
