"""A self-contained HTML page about runs: page.html filled in, with page.css, page.js and Plotly."""

import base64
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata, resources
from typing import Any

import jinja2
import numpy as np
import tomli_w
from plotly.offline import get_plotlyjs

from fedbilevel import __version__
from fedbilevel.report._axes import AXES, Axis, Spread, metric_title, spread
from fedbilevel.report._curves import (
    DARK,
    LIGHT,
    MAX_POINTS,
    Array,
    Curve,
    Group,
    column,
    curve_style,
    drawable,
    group_runs,
    main_metrics,
    mean_curve,
    needs_log_scale,
)
from fedbilevel.report._personal import (
    COLUMNS,
    LINES,
    client_values,
    distributions,
    final_values,
    personal_metrics,
)
from fedbilevel.report._tables import (
    Row,
    client_costs,
    config_differences,
    phase_costs,
    rank,
    table_rows,
)
from fedbilevel.runs.folder import RunFolder

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


def page(runs: Sequence[RunFolder], command: str = "") -> str:
    """Return the page as HTML."""
    groups = group_runs(runs)
    axes, metrics = drawable(runs)
    rows = table_rows(groups)
    rankings = {axis.key: rank(rows, axis.key) for axis in axes}
    judge = rows[0].metric
    shown = [name for name in main_metrics(runs) if name in metrics] or metrics[:1]
    finals = [name for name, _ in rows[0].finals.items() if any(row.finals[name] for row in rows)]
    scripts = [get_plotlyjs(), _read("page.js")]
    personal = personal_metrics(groups)
    data = json.dumps(
        {**_chart_data(groups, axes, metrics), "personal": _personal_data(groups, personal)},
        separators=(",", ":"),
    )
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_read("page.html")).render(
        title=_title(groups),
        palettes={"light": LIGHT, "dark": DARK},
        css=_read("page.css"),
        script_hashes=[_base64(hashlib.sha256(text.encode()).digest()) for text in scripts],
        scripts=scripts,
        data=data.replace("<", "\\u003c"),  # `<` could end the element around the data
        runs=runs,
        groups=groups,
        styles=[curve_style(index) for index in range(len(groups))],
        axes=axes,
        metrics={metric: metric_title(metric) for metric in metrics},
        shown=shown,
        judge=judge,
        title_of=metric_title,
        finals=finals,
        targets=judge.targets,
        origin=_origin(command),
        rankings=rankings,
        lowest_costs={axis.key: _lowest_costs(rows, axis.key) for axis in axes},
        phase_columns=PHASE_COLUMNS,
        phase_costs=[(group.label, list(phase_costs(group).items())) for group in groups],
        client_columns=CLIENT_COLUMNS,
        client_costs=[(group.label, _client_lines(group)) for group in groups],
        personal=personal,
        personal_columns=COLUMNS,
        distributions={name: distributions(groups, name) for name in personal},
        client_tables=[
            (group.label, group.runs[0].seed, client_values(group, personal)) for group in groups
        ],
        differences=config_differences(groups),
        configs=[_config(group) for group in groups],
        spread=spread,
        format_plain=Spread.format,
    )


def _read(name: str) -> str:
    return resources.files("fedbilevel.report").joinpath(name).read_text("utf-8")


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _chart_data(
    groups: Sequence[Group], axes: Sequence[Axis], metrics: Sequence[str]
) -> dict[str, Any]:
    """Return what page.js draws: for each curve, its values along each axis for each metric."""
    curves: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        colour, dash = curve_style(index)
        curves.append({"label": group.label, "colour": colour, "dash": dash, "values": {}})
    headings: dict[str, str] = {}
    charts: dict[str, dict[str, object]] = {}
    for axis in axes:
        drawn: dict[tuple[int, str], Curve] = {}
        for index, group in enumerate(groups):
            for metric in metrics:
                curve = mean_curve(group.runs, axis.key, metric)
                if curve is not None:
                    drawn[index, metric] = curve
        largest = max((float(curve.x[-1]) for curve in drawn.values()), default=0.0)
        divisor, _ = axis.unit(largest)
        headings[axis.key] = axis.heading(largest)
        for metric in metrics:
            if metric not in charts:
                of_metric = [curve for (_, name), curve in drawn.items() if name == metric]
                title = metric_title(metric)
                charts[metric] = {"title": title, "log": needs_log_scale(of_metric)}
        for (index, metric), curve in drawn.items():
            values = {"x": _floats(curve.x / divisor), "mean": _floats(curve.mean)}
            if len(groups[index].runs) > 1:
                values |= {"low": _floats(curve.low), "high": _floats(curve.high)}
            curves[index]["values"].setdefault(axis.key, {})[metric] = values
        for entry in curves:
            entry.setdefault("divisors", {})[axis.key] = divisor
    for index, group in enumerate(groups):
        if len(group.runs) > 1:
            curves[index]["seeds"] = [_seed_data(run, axes, metrics) for run in group.runs]
    return {"axes": headings, "charts": charts, "curves": curves}


def _personal_data(groups: Sequence[Group], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what page.js draws of single clients: for each metric a chart of rounds and one of
    clients, with the values of each curve.
    """
    charts = []
    for name in names:
        curves = []
        for index, group in enumerate(groups):
            lines = {}
            for suffix, title in LINES.items():
                curve = mean_curve(group.runs, "round", f"{name}_{suffix}")
                if curve is not None:
                    lines[title] = {"x": _floats(curve.x), "y": _floats(curve.mean)}
            values = np.sort(final_values(group, name))
            curves.append({"curve": index, "lines": lines, "values": _floats(values)})
        charts.append({"metric": name, "title": metric_title(name), "curves": curves})
    return charts


def _seed_data(run: RunFolder, axes: Sequence[Axis], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of one run, thinned to what a screen can show."""
    count = len(run.history)
    kept = np.arange(count)
    if count > MAX_POINTS:
        kept = np.linspace(0, count - 1, MAX_POINTS).round().astype(int)
    numbers = {}
    for key in (*(axis.key for axis in axes), *metrics):
        numbers[key] = _floats(column(run, key)[kept])
    return {"seed": run.seed, "numbers": numbers}


def _floats(values: Array) -> str:
    """Return little-endian 32-bit floats in base64; what does not fit is infinite."""
    with np.errstate(over="ignore"):
        return _base64(values.astype("<f4").tobytes())


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
        names = set()
        for group in groups:
            entry = group.runs[0].config.get(key)
            if isinstance(entry, dict):
                entry = entry["name"]
            if entry is not None:
                names.add(entry)
        if names:
            parts.append(", ".join(sorted(names)))
    return " on ".join(parts) or "Runs"


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


def _config(group: Group) -> str:
    config = dict(group.runs[0].config)
    del config["seed"]
    return tomli_w.dumps(config)
