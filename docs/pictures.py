"""Draws the pictures of the pages, from real runs: python docs/pictures.py [NAME ...].

Where a page has the code of a run, that code is run, and its results are drawn. Text and axes have
the colour of the text around them: the site puts the drawing into the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

import fedbilevel as fb
from fedbilevel.tasks import quadratic

DOCS = Path(__file__).parent
TEXT = "#010203"  # stands for the colour of the text around the drawing
BLUE, ORANGE, GREEN, GREY = "#3b82c4", "#e07b39", "#3a9d6b", "#8a8f98"
STYLE = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT
    ),
}


@contextmanager
def drawing(name: str, panels: int = 1, height: float = 2.7) -> Iterator[Any]:
    """Yield the axes of a drawing, one or an array, and write the drawing.

    Args:
        name: The file's name, without its ending.
        panels: How many axes there are, side by side.
        height: The height in inches; a panel is 3.4 inches wide.

    Yields:
        The axes.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(3.4 * panels + 0.4 * (panels == 1), height), layout="constrained")
        yield figure.subplots(1, panels)
        path = DOCS / "images" / f"{name}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    svg = path.read_text("utf-8")
    svg = svg[svg.index("<svg") :].replace(TEXT, "currentColor")
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", svg)
    svg = re.sub(r"<(metadata|style).*?</\1>\n?", "", svg, flags=re.DOTALL)
    # Grey where it is not put into a page; the joints were in the style, which would be the page's.
    svg = svg.replace("<svg ", '<svg color="#808080" stroke-linejoin="round" ', 1)
    path.write_text(re.sub(r"[ \t]+\n", "\n", svg), "utf-8")


def run_page(page: str) -> dict[str, Any]:
    """Run the snippets of a page in a temporary folder.

    Args:
        page: The page, relative to this folder.

    Returns:
        All names that the snippets define.
    """
    text = (DOCS / page).read_text("utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for snippet in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
                exec(compile(snippet, page, "exec", dont_inherit=True), names)
        finally:
            os.chdir(before)
    return names


def start() -> None:
    """The first run of the site."""
    history = run_page("start.md")["result"].history
    with drawing("start") as axes:
        rounds = [row["round"] for row in history]
        axes.plot(rounds, [row["test_accuracy"] for row in history], "o-", color=BLUE, markersize=4)
        axes.set(xlabel="communication rounds", ylabel="test accuracy", ylim=(0, 1))


def bilevel() -> None:
    """Levels of F, the line of fits, and iterates of SimFBO."""
    task = run_page("concepts/bilevel.md")["task"]
    fed = fb.simulated_federation(task.problem, task.clients)
    method = fb.algorithms.SimFBO(server_lr_x=0.1, server_lr_y=0.4, server_lr_z=0.4)
    x_star = float(task.x_star()["x"])
    far = fb.Tree(x=torch.tensor([x_star + 2.2], dtype=torch.float64))
    state = method.init(task.problem)
    state = state._replace(x=far, y=fb.Tree(y=task.y_star(far)["y"] + 1.6))
    points = []
    for _ in range(60):
        points.append((float(state.x["x"]), float(state.y["y"])))
        state = method.iterate(state, fed)
    x = np.linspace(x_star - 1.2, x_star + 2.6, 60)
    fits = [float(task.y_star({"x": torch.tensor([v])})["y"]) for v in x]
    low, high = min(fits) - 1.0, max(fits) + 1.8
    y = np.linspace(low, high, 60)

    def upper(v: float, w: float) -> float:
        at = fb.Tree(x=torch.tensor([v])), fb.Tree(y=torch.tensor([w]))
        return float(np.mean([float(quadratic.upper(*at, c.val)) for c in task.clients]))

    levels = [[upper(v, w) for v in x] for w in y]
    with drawing("bilevel", panels=2) as (plane, line):
        plane.contour(x, y, levels, levels=10, colors=GREY, linewidths=0.7, alpha=0.7)
        plane.plot(x, fits, color=ORANGE, label="fits, y = y*(x)")
        plane.plot(*zip(*points, strict=True), "o-", color=BLUE, markersize=3, linewidth=0.8)
        plane.plot([], [], "o", color=BLUE, markersize=3, label="iterates of simfbo")
        best = float(task.y_star(task.x_star())["y"])
        plane.plot(x_star, best, "*", color=GREEN, markersize=13, zorder=3, label="solution")
        plane.set(xlabel="x", ylabel="y", title="Levels of F(x, y)")
        plane.legend(fontsize=8, loc="lower left", borderaxespad=0.1)
        phi = [float(task.phi({"x": torch.tensor([v])})) for v in x]
        line.plot(x, phi, color=ORANGE)
        line.plot(x_star, float(task.phi(task.x_star())), "*", color=GREEN, markersize=13)
        line.set(xlabel="x", title="Along the line: F(x, y*(x))")


def local_hypergradients() -> None:
    """A method with local hypergradients against one with the global one."""
    page = run_page("concepts/local-hypergradients.md")
    simfbo = fb.algorithms.SimFBO(server_lr_x=0.06, server_lr_y=0.4, server_lr_z=0.4)
    local = page["method"]

    def curve(task: Any, method: Any, rounds: int) -> tuple[list[float], list[float]]:
        def evaluate(x: Any, y: Any) -> dict[str, float]:
            return {"distance": float((x["x"] - task.x_star()["x"]).norm())}

        result = fb.solve(
            task.problem, task.clients, method, rounds=rounds, evaluate=evaluate, every=2
        )
        rows = result.history
        return [row["round"] for row in rows], [row["distance"] for row in rows]

    with drawing("local-hypergradients", panels=2) as (curves, ends):
        for method, color in ((simfbo, BLUE), (local, ORANGE)):
            curves.plot(*curve(page["task"], method, 300), color=color, label=method.name)
        curves.set(yscale="log", xlabel="communication rounds", title="Distance to the solution")
        curves.legend()
        shares = np.linspace(0, 1, 9)
        for method, color in ((simfbo, BLUE), (local, ORANGE)):
            last = []
            for share in shares:
                task = fb.tasks.load(
                    "quadratic", clients=6, condition=3.0, heterogeneity=float(share)
                )
                last.append(curve(task, method, 300)[1][-1])
            ends.plot(shares, last, "o-", color=color, markersize=3.5)
        ends.set(xlabel="heterogeneity of clients (0: alike)", title="Distance after 300 rounds")


def staleness() -> None:
    """Who works when, and what is reached when."""
    page = run_page("concepts/staleness.md")
    with drawing("staleness", panels=2, height=3.0) as (times, curves):
        barrier = _spans(page["task"], fb.algorithms.SimFBO(), page["barrier"], 12.0)
        free = _spans(page["task"], fb.algorithms.AFBO(), page["free"], 12.0)
        for offset, spans, color in ((7, barrier, BLUE), (0, free, ORANGE)):
            for client, begin, end in spans:
                times.barh(
                    offset + client, 0.97 * (end - begin), left=begin, height=0.7, color=color
                )
        times.text(0, 13.0, "simfbo: with a barrier", va="bottom", fontsize=9)
        times.text(0, 5.6, "afbo: without", va="bottom", fontsize=9)
        times.set(xlim=(0, 12), ylim=(-0.7, 14.2), xlabel="virtual seconds", yticks=[])
        times.spines["left"].set_visible(False)
        times.set_title("Six clients at work")
        for result, name, color in (
            (page["waiting"], "simfbo", BLUE),
            (page["asynchronous"], "afbo", ORANGE),
        ):
            rows = [row for row in result.history if row["virtual_s"] <= 100]
            seconds = [row["virtual_s"] for row in rows]
            norms = [row["hypergradient_norm"] for row in rows]
            curves.plot(seconds, norms, color=color, label=name)
        curves.set(yscale="log", xlabel="virtual seconds", title="Norm of the hypergradient")
        curves.legend()


def _spans(
    task: Any, method: Any, environment: Any, until: float
) -> list[tuple[int, float, float]]:
    """Return who worked from when to when."""
    fed = fb.simulated_federation(task.problem, task.clients, environment)
    spans = []
    send = fed.transport.send

    def watched(tasks: Sequence[Any], barrier: bool) -> Any:
        began = fed.now
        yield from send(tasks, barrier)
        sent.extend((task, began) for task in tasks)

    sent: list[tuple[Any, float]] = []
    fed.transport.send = watched  # type: ignore[method-assign]
    run = fb.Run(method, fed, {})
    while fed.now < 3 * until:
        run.advance()
    for item, began in sent:
        if began < until:
            spans.append((item.client, began, min(item.ended_at, until)))
    return spans


def submodels() -> None:
    """Which units clients hold, by policy."""
    page = run_page("concepts/submodels.md")
    methods = ("static", "fedrolex", "rabo")
    with drawing("submodels", height=2.4) as axes:
        for block, name in enumerate(methods):
            for client, units in enumerate(_held_units(page, name)):
                for unit in range(16):
                    color, alpha = (BLUE, 1.0) if unit in units else (GREY, 0.2)
                    left = 18 * block + unit
                    axes.bar(left, 0.8, bottom=client, width=0.8, color=color, alpha=alpha)
        axes.set_yticks(np.arange(6) + 0.4, [f"capacity {c}" for c in ("1", "1/2", "1/4") * 2])
        axes.set_xticks([7.5, 25.5, 43.5], methods)
        axes.tick_params(length=0)
        axes.invert_yaxis()
        for spine in axes.spines.values():
            spine.set_visible(False)


def _held_units(page: dict[str, Any], name: str) -> list[set[int]]:
    """Return the hidden units that each client holds in the fifth iteration of a method."""
    fed = fb.simulated_federation(page["problem"], page["clients"], page["small"])
    sent: list[Any] = []
    ask = fed.ask

    def watched(phase: Any, clients: Sequence[int], **values: Any) -> Any:
        sent.append(values["submodels"])
        return ask(phase, clients, **values)

    fed.ask = watched  # type: ignore[method-assign]
    run = fb.Run(fb.algorithms.get(name)(), fed, {})
    for _ in range(5):
        run.advance()
    held = []
    for part in sent[-1]:
        units = range(16)
        if part is not None:
            (units,) = (kept.tolist() for kept in part.kept.values())
        held.append(set(units))
    return held


def owners() -> None:
    """Accuracies of single clients."""
    curves = run_page("concepts/owners.md")["accuracies"]
    with drawing("owners") as axes:
        for owner, label, color in (
            ("server", "shared head", ORANGE),
            ("client", "a head per client", BLUE),
        ):
            axes.plot(sorted(curves[owner]), "o", color=color, label=label, markersize=5)
        axes.set(xlabel="clients, from the worst to the best", ylabel="test accuracy")
        axes.set(xticks=[])
        axes.legend(loc="lower right")


def tutorial_problem() -> None:
    """Fits with equal and with learnt penalties."""
    page = run_page("tutorial/1-problem.md")
    problem, clients, waves = page["problem"], page["clients"], page["waves"]
    t = torch.linspace(0, 1, 200)
    with drawing("tutorial-problem", panels=2) as (curve, bars):
        for client in clients:
            curve.plot(*client.train, ".", color=GREY, markersize=4)
        truth = waves(t)[:, 1] - 0.5 * waves(t)[:, 3]
        curve.plot(t, truth, color=TEXT, linewidth=1, linestyle="--", label="truth")
        learnt = page["result"].x
        for x, label, color in ((problem.x, "equal penalties", ORANGE), (learnt, "learnt", BLUE)):
            y = fb.solve_lower(problem, clients, fb.Tree(x))
            curve.plot(t, waves(t) @ y["height"], color=color, label=label)
        curve.set(title="Measurements and fits", xticks=[0, 0.5, 1])
        curve.legend(fontsize=8)
        bars.bar(range(12), learnt["penalty"].sigmoid(), color=BLUE)
        bars.axhline(float(problem.x["penalty"][0].sigmoid()), color=ORANGE, linewidth=1)
        bars.set(title="Penalty of each wave", xticks=range(12), ylim=(0, 1))


def tutorial_clients() -> None:
    """What clients hold under three partitions."""
    classes: Callable[[str], list[list[int]]] = run_page("tutorial/2-clients.md")["classes"]
    with drawing("tutorial-clients", panels=3, height=2.4) as panels:
        for axes, partition in zip(panels, ("iid", "dirichlet", "shards"), strict=True):
            counts = np.array(classes(partition))
            axes.scatter(
                *np.meshgrid(range(12), range(10)), s=counts.T.clip(0, 60) * 1.7, color=BLUE
            )
            axes.set(title=partition, xlabel="client", xticks=[0, 5, 11], yticks=[0, 5, 9])
        panels[0].set_ylabel("class")


def tutorial_compare() -> None:
    """Two methods on long-tailed data."""
    curves = run_page("tutorial/3-compare.md")["curves"]
    with drawing("tutorial-compare") as axes:
        for (name, points), color in zip(curves.items(), (BLUE, ORANGE), strict=True):
            axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label=name)
        axes.set(xlabel="communication rounds", ylabel="balanced accuracy", ylim=(0, 1))
        axes.legend(loc="lower right")


def tutorial_own_data() -> None:
    """What the data of each hospital are worth."""
    value = run_page("tutorial/4-own-data.md")["value"]
    with drawing("tutorial-own-data", height=1.9) as axes:
        for row in range(len(value.names)):
            worth, low, high = (float(v[row]) for v in (value.values, value.low, value.high))
            axes.barh(row, worth, color=ORANGE if high < 0 else BLUE, height=0.6)
            axes.plot([low, high], [row, row], color=TEXT, linewidth=1.2)
        axes.axvline(0, color=TEXT, linewidth=0.8)
        axes.set_yticks(range(len(value.names)), [f"hospital {name}" for name in value.names])
        axes.invert_yaxis()
        axes.set_xlabel("rise of the validation loss without it")


def tutorial_federation() -> None:
    """A simulation and a federation of real processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedbilevel.cli", "run", "digits", "--clients", "4"]
        rows = {}
        for name, options in (("simulated", []), ("real", ["--federation", "flower"])):
            out = Path(folder) / name
            subprocess.run(
                [*command, "--rounds", "20", "--quiet", "--out", str(out), *options], check=True
            )
            rows[name] = fb.load_run(out).history
    with drawing("tutorial-federation") as axes:
        for name, style, color, label in (
            ("simulated", "-", BLUE, "simulated, one process"),
            ("real", "o", ORANGE, "server and four nodes"),
        ):
            rounds = [row["round"] for row in rows[name]]
            losses = [row["upper_loss"] for row in rows[name]]
            axes.plot(rounds, losses, style, color=color, markersize=5, label=label)
        axes.set(xlabel="communication rounds", ylabel="upper loss")
        axes.legend()


PICTURES: dict[str, Callable[[], None]] = {
    "start": start,
    "bilevel": bilevel,
    "local-hypergradients": local_hypergradients,
    "staleness": staleness,
    "submodels": submodels,
    "owners": owners,
    "tutorial-problem": tutorial_problem,
    "tutorial-clients": tutorial_clients,
    "tutorial-compare": tutorial_compare,
    "tutorial-own-data": tutorial_own_data,
    "tutorial-federation": tutorial_federation,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
        print(name)
