"""One HTML file about many runs, complete in itself: it asks nothing of the network."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

import tomli_w
from plotly.offline import get_plotlyjs

from fedbilevel.report._curves import (
    AXES,
    DARK,
    LIGHT,
    METRICS,
    TARGETS,
    Array,
    Axis,
    Group,
    Row,
    Spread,
    clients,
    curve,
    differences,
    drawable,
    group,
    ledger,
    logarithmic,
    look,
    ranked,
    rows,
    spread,
)
from fedbilevel.runs.folder import RunFolder

Line = tuple[str, Mapping[str, float]]

LEDGER = {
    "rounds": ("Rounds", AXES["round"]),
    "bytes_up": ("Bytes up", AXES["bytes"]),
    "bytes_down": ("Bytes down", AXES["bytes"]),
    "samples": ("Samples", AXES["samples"]),
    "gradients": ("Gradients", AXES["gradients"]),
    "flops": ("Operations", AXES["flops"]),
    "peak_bytes": ("Peak memory", AXES["bytes"]),
}
CLIENTS = {key: LEDGER[key] for key in ("peak_bytes", "flops", "bytes_up", "bytes_down")}


def page(runs: Sequence[RunFolder]) -> str:
    """The page as HTML text."""
    groups = group(runs)
    along, measured = drawable(runs)
    files = resources.files("fedbilevel.report")
    style = _palette() + files.joinpath("page.css").read_text("utf-8")
    scripts = [get_plotlyjs(), files.joinpath("page.js").read_text("utf-8")]
    # Only these two scripts may run, and nothing may be fetched, whatever a configuration holds.
    hashes = " ".join(
        f"'sha256-{_base64(hashlib.sha256(script.encode()).digest())}'" for script in scripts
    )
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    # `<` could end the element that the data travels in.
    data = json.dumps(_data(groups, along, measured), separators=(",", ":")).replace("<", "\\u003c")
    table = rows(groups)
    targets = TARGETS if "test_accuracy" in measured else ()
    title = _title(groups)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(_gist(ranked(table, along[0].key), along[0], len(runs)))}</p>
</header>
<main>
<section aria-labelledby="curves">
<h2 id="curves">Curves</h2>
<div class="controls">
<fieldset><legend>Horizontal axis</legend><div>{_radios(along)}</div></fieldset>
<fieldset><legend>Show</legend><div>{_checkboxes(groups)}</div></fieldset>
</div>
<noscript><p>The charts need JavaScript; the tables below do not.</p></noscript>
<div class="charts">{_charts(measured)}</div>
<p class="note">Lines are means over seeds; bands reach from the smallest to the largest seed.
A curve ends where its shortest seed ends.</p>
</section>
<section aria-labelledby="ranking">
<h2 id="ranking">Ranking</h2>
{"".join(_ranking(ranked(table, axis.key), axis, targets, axis is along[0]) for axis in along)}
<p class="note">Ranked by the highest accuracy that every seed reached, then by the cost to it, then by the final
values. Mean ± standard deviation over seeds; (3/5): over the 3 of 5 seeds that have the value.</p>
{_unfinished(groups)}
</section>
<section aria-labelledby="cost">
<h2 id="cost">Cost by phase</h2>
{_costs("Phase", LEDGER, [(g.label, list(ledger(g).items())) for g in groups])}
</section>
<section aria-labelledby="clients">
<h2 id="clients">Cost by client</h2>
{_costs("Clients", CLIENTS, [(g.label, [(_number(c["clients"]), c) for c in clients(g)]) for g in groups])}
<p class="note">What one client paid in the whole run, on average over those of equal peak memory.
Operations are the multiplications and additions of matrix products and convolutions.</p>
</section>
<section aria-labelledby="configuration">
<h2 id="configuration">Configuration</h2>
{_differences(groups)}
{"".join(_config(g) for g in groups)}
</section>
</main>
<script type="application/json" id="data">{data}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def _palette() -> str:
    light, dark = (
        "".join(f"--curve-{i}:{c};" for i, c in enumerate(colours)) for colours in (LIGHT, DARK)
    )
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _floats(values: Array) -> str:
    return _base64(values.astype("<f4").tobytes())


def _data(
    groups: Sequence[Group], along: Sequence[Axis], measured: Sequence[str]
) -> dict[str, Any]:
    """What page.js draws: for each axis and metric, each curve as base64 of little-endian 32-bit floats."""
    curves: list[dict[str, Any]] = [
        {"label": g.label, "colour": look(i)[0], "dash": look(i)[1], "values": {}}
        for i, g in enumerate(groups)
    ]
    headings: dict[str, str] = {}
    logs: dict[str, bool] = {}
    for axis in along:
        drawn = {
            (i, m): c
            for i, g in enumerate(groups)
            for m in measured
            if (c := curve(g.runs, axis.key, m))
        }
        largest = max((float(c.x[-1]) for c in drawn.values()), default=0.0)
        headings[axis.key] = axis.heading(largest)
        for metric in measured:
            logs.setdefault(metric, logarithmic(c for (_, m), c in drawn.items() if m == metric))
        for (i, metric), c in drawn.items():
            arrays = {"x": c.x / axis.unit(largest)[0], "mean": c.mean}
            if len(groups[i].runs) > 1:
                arrays |= {"low": c.low, "high": c.high}
            values = {name: _floats(array) for name, array in arrays.items()}
            curves[i]["values"].setdefault(axis.key, {})[metric] = values
    charts = {metric: {"title": METRICS[metric], "log": logs[metric]} for metric in measured}
    return {"axes": headings, "charts": charts, "curves": curves}


def _title(groups: Sequence[Group]) -> str:
    entries = [[g.runs[0].config.get(key) for g in groups] for key in ("task", "data")]
    names = [
        {e["name"] if isinstance(e, dict) else e for e in found if e is not None}
        for found in entries
    ]
    return " on ".join(", ".join(sorted(found)) for found in names if found) or "Runs"


def _gist(best_first: Sequence[Row], axis: Axis, runs: int) -> str:
    gist = f"{_count(len(best_first), 'curve')} from {_count(runs, 'run')}."
    best = best_first[0]
    if len(best_first) > 1 and (reached := best.reached(axis.key)):
        target, cost = max(reached.items())
        gist += f" First is {best.label}: test accuracy {target} after {axis.show(cost)} {axis.title.lower()}."
    return gist


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _radios(along: Sequence[Axis]) -> str:
    return "".join(
        f'<label><input type="radio" name="axis" value="{axis.key}" autocomplete="off"'
        f"{' checked' if axis is along[0] else ''}><span>{escape(axis.title)}</span></label>"
        for axis in along
    )


def _checkboxes(groups: Sequence[Group]) -> str:
    return "".join(
        f'<label><input type="checkbox" name="curve" value="{i}" autocomplete="off" checked>'
        f'<span class="swatch {look(i)[1]}" style="--curve:var(--curve-{look(i)[0]})"></span>{escape(g.label)}</label>'
        for i, g in enumerate(groups)
    )


def _charts(measured: Sequence[str]) -> str:
    return "".join(
        f'<div class="chart" id="{metric}" role="group" aria-label="Chart: {escape(METRICS[metric])}"></div>'
        for metric in measured
    )


def _ranking(best_first: Sequence[Row], axis: Axis, targets: Sequence[float], shown: bool) -> str:
    """The ranked table of one axis; page.js shows the one of the axis chosen.

    Runs that measure no accuracy have no targets, and their table has no columns about accuracy.
    """
    reached = [row.reached(axis.key) for row in best_first]
    least = {}
    for target in targets:
        costs = [cost[target].mean for cost in reached if target in cost]
        least[target] = min(costs, default=None)
    body = ""
    for place, row in enumerate(best_first, start=1):
        body += f"<tr>{_td(str(place))}{_ranked(row, axis, least)}</tr>"
    table = _table(f"Ranking by {axis.title}", _ranking_head(axis, targets), body)
    hidden = "" if shown else " hidden"
    return f'<div data-axis="{axis.key}"{hidden}>{table}</div>'


def _ranking_head(axis: Axis, targets: Sequence[float]) -> str:
    """The headings, with a second line for the targets if there are any."""
    down = "rowspan=2" if targets else ""
    head = _th("#", span=down) + _th("Algorithm", "name", span=down) + _th("Seeds", span=down)
    if targets:
        head += _th("Final accuracy", span=down)
    head += _th("Final upper loss", span=down)
    if targets:
        title = f"{axis.title} to test accuracy"
        head += _th(title, scope="colgroup", span=f"colspan={len(targets)}")
    head += _th("Status", "text", span=down)
    if targets:
        head += "</tr><tr>" + "".join(_th(str(target)) for target in targets)
    return head


def _ranked(row: Row, axis: Axis, least: Mapping[float, float | None]) -> str:
    """The cells of a row after its place; `least` has the lowest cost of any row to each target."""
    cells = _th(row.label, "name", "row") + _td(str(row.seeds))
    if least:
        cells += _spread(row.accuracy, row.seeds, Spread.show)
    cells += _spread(row.loss, row.seeds, Spread.show)
    reached = row.reached(axis.key)
    for target, lowest in least.items():
        best = target in reached and reached[target].mean == lowest
        cells += _spread(row.cost[axis.key][target], row.seeds, axis.show, "best" if best else "")
    return cells + _td(_statuses(row), "text")


def _statuses(row: Row) -> str:
    """The status that all seeds share, or how many seeds have each."""
    if len(row.statuses) == 1:
        return next(iter(row.statuses))
    return ", ".join(f"{count} {status}" for status, count in row.statuses.items())


def _spread(
    spread: Spread | None, seeds: int, show: Callable[[Spread], str], kind: str = ""
) -> str:
    if spread is None:
        return _td("–", "none")
    return _td(show(spread) + (f" ({spread.count}/{seeds})" if spread.count < seeds else ""), kind)


def _td(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>'


def _th(text: str, kind: str = "", scope: str = "col", span: str = "") -> str:
    return f'<th class="{kind}" scope="{scope}" {span}>{escape(text)}</th>'


def _table(label: str, head: str, body: str) -> str:
    # A wide table scrolls inside its own box, which the keyboard must then be able to reach.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _unfinished(groups: Sequence[Group]) -> str:
    """The runs that did not complete, and why."""
    items = ""
    for g in groups:
        for run in g.runs:
            if run.status != "completed":
                reason = (run.summary or {}).get("reason")
                text = f"{g.label}, seed {run.seed}: {run.status}" + (
                    f", {reason}" if reason else ""
                )
                items += f"<li>{escape(text)}</li>"
    return f"<ul>{items}</ul>" if items else ""


def _costs(
    by: str, columns: Mapping[str, tuple[str, Axis]], costs: Sequence[tuple[str, Sequence[Line]]]
) -> str:
    """What each group cost, in lines of its own."""
    body = ""
    for group_label, lines in costs:
        label = _th(group_label, "name", "rowgroup", f"rowspan={len(lines)}")
        for name, cost in lines:
            cells = "".join(
                _spread(spread([cost[key]]), 1, axis.show) for key, (_, axis) in columns.items()
            )
            body += f"<tr>{label}{_th(name, scope='row')}{cells}</tr>"
            label = ""
    if not body:
        return "<p>No run is finished yet.</p>"
    head = (
        _th("Algorithm", "name")
        + _th(by, "text")
        + "".join(_th(name) for name, _ in columns.values())
    )
    return _table(f"Cost by {by.lower()}", head, body)


def _number(count: float) -> str:
    return f"{count:,.{0 if count % 1 == 0 else 1}f}"


def _differences(groups: Sequence[Group]) -> str:
    found = differences(groups)
    if not found:
        return ""
    head = _th("Key", "name") + "".join(_th(g.label) for g in groups)
    body = ""
    for key, values in found.items():
        cells = "".join(_td("–", "none") if value is None else _td(str(value)) for value in values)
        body += f"<tr>{_th(key, 'name key', 'row')}{cells}</tr>"
    return _table("Configuration differences", head, body)


def _config(group: Group) -> str:
    seeds = ", ".join(str(run.seed) for run in group.runs)
    text = tomli_w.dumps(
        {key: value for key, value in group.runs[0].config.items() if key != "seed"}
    )
    noun = "seed" if len(group.runs) == 1 else "seeds"
    return (
        f"<details><summary>{escape(group.label)}, {noun} {seeds}</summary>"
        f'<pre tabindex="0">{escape(text)}</pre></details>'
    )
